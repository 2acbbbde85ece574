"""What HTTP costs: the server's CPU time by part at several streams, and tokens/s against the bare engine.

    make bench-http ARGS="--pairs 7 --streams 8"

Two processes hold the same engine, one behind HTTP and one without. The same requests go to each in turn, streamed
over raw sockets to the one and submitted straight to the other; medians of the pairs count. CPU time is read from each
thread's own clock inside the server: the event loop (HTTP, SSE, JSON), the workers (templates, tokenising, grammars)
and the engine's thread with whatever compute threads it has. Run it with nothing beside it; the sockets' end is this
process and takes CPU of its own, so the engine is given one core less than there are by default.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench.playing import ROOT, demo_asks
from tests.process import DEMO, running

SETTINGS = ("--ctx-size", "2048", "--log-level", "warning")
COMPLETION = re.compile(rb'"completion_tokens":(\d+)')
LAST_CHUNK = b"\r\n0\r\n\r\n"
SHARE_BAR, RATE_BAR = 0.20, 0.80
METER = "meter"


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


# --- the two processes that are measured: each does one thing for every line it reads ---


def thread_seconds() -> dict[str, float]:
    """CPU seconds so far of each Python thread by name, and of the whole process."""
    told: dict[str, float] = {"process": time.process_time()}
    for thread in threading.enumerate():
        if thread.ident is not None and thread.name != METER:
            seconds = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
            told[thread.name] = told.get(thread.name, 0.0) + seconds
    return told


def served(arguments: Sequence[str]) -> None:
    """A server that also answers every line on its standard input with its threads' CPU time, in a file."""
    from slipstream.server.command.starting import load
    from tests.commanded import start

    out = Path(os.environ["BENCH_METER"])

    def meter() -> None:
        for number, _ in enumerate(sys.stdin):
            fresh = out.with_suffix(".new")
            fresh.write_text(json.dumps({"number": number, **thread_seconds()}))
            fresh.replace(out)

    threading.Thread(target=meter, name=METER, daemon=True).start()
    start(arguments, load)


def bare(arguments: Sequence[str]) -> None:
    """The engine of the same settings; plays all requests for every line it reads, and tells tokens and seconds."""
    from slipstream.engine.api import Speculate
    from slipstream.server.command.starting import load
    from tests.bench.playing import play_all
    from tests.commanded import read_settings

    options = json.loads(sys.stdin.readline())
    asks = demo_asks(n_each=options["tasks"], max_tokens=options["max_tokens"])

    async def work() -> None:
        engine = load(read_settings(arguments, os.environ))
        say("ready")
        while await asyncio.to_thread(sys.stdin.readline):
            replies, seconds = await play_all(engine, asks, Speculate(), options["streams"])
            say(json.dumps({"tokens": sum(len(one.token_ids) for one in replies), "seconds": seconds}))
        await engine.close()

    asyncio.run(work())


# --- this process: a client that does as little as it can ---


class Sockets:
    """Streams requests over raw sockets, a fixed number at a time, and counts what the replies say they have."""

    def __init__(self, port: int, bodies: Sequence[bytes], n_streams: int) -> None:
        self._port = port
        self._waiting = list(reversed(bodies))
        self._n_streams = min(n_streams, len(bodies))
        self._selector = selectors.DefaultSelector()
        self._n_open = 0
        self.n_tokens = 0

    def run(self) -> float:
        """Seconds until the last reply has ended. Raises AssertionError for a reply without its figures."""
        started = time.perf_counter()
        for _ in range(self._n_streams):
            self._ask()
        while self._n_open:
            for key, _ in self._selector.select():
                self._read(key)
        return time.perf_counter() - started

    def _ask(self) -> None:
        body = self._waiting.pop()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n"
        one = socket.create_connection(("127.0.0.1", self._port))
        one.sendall(head.encode() + b"content-type: application/json\r\nconnection: close\r\n\r\n" + body)
        self._selector.register(one, selectors.EVENT_READ, bytearray())
        self._n_open += 1

    def _read(self, key: selectors.SelectorKey) -> None:
        one: Any = key.fileobj
        data = one.recv(65536)
        key.data.extend(data)
        if data and not key.data.endswith(LAST_CHUNK):
            return
        self._selector.unregister(one)
        one.close()
        self._n_open -= 1
        found = COMPLETION.findall(bytes(key.data[-8192:]))
        assert found, bytes(key.data[:500])
        self.n_tokens += int(found[-1])
        if self._waiting:
            self._ask()


class Server:
    """The server's process seen from here: its port, and its threads' CPU time on demand."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, meter: Path) -> None:
        self.port = port
        self._process = process
        self._meter = meter
        self._n_asked = 0

    def seconds(self) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        number, self._n_asked = self._n_asked, self._n_asked + 1
        while True:
            if self._meter.exists() and (told := json.loads(self._meter.read_text())).pop("number") == number:
                return dict(told)
            time.sleep(0.01)


def split(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """CPU seconds of the parts between two readings. What no Python thread used is the engine's compute threads'."""
    used = {name: seconds - before.get(name, 0.0) for name, seconds in after.items()}
    whole = used.pop("process")
    loop, engine = used.pop("MainThread"), used.pop("engine")
    workers = sum(used.values())
    return {
        "loop": loop,
        "workers": workers,
        "engine": engine,
        "compute": max(0.0, whole - loop - workers - engine),
    }


def bodies(options: argparse.Namespace) -> list[bytes]:
    """The requests that the bare engine plays, as HTTP bodies."""
    shared = {"temperature": 0, "top_k": 0, "top_p": 1, "seed": 1, "max_tokens": options.max_tokens}
    shared |= {"stream": True, "stream_options": {"include_usage": True}, "cache_prompt": False}
    asks: list[Any] = demo_asks(n_each=options.tasks, max_tokens=options.max_tokens)
    return [json.dumps({"messages": ask.prompt.messages, **shared}).encode() for ask in asks]


def measure(server: Server, engine: subprocess.Popen[str], options: argparse.Namespace) -> None:
    """Alternate the two and print each pair and the medians."""
    assert engine.stdin is not None
    assert engine.stdout is not None
    asked = bodies(options)
    shares, ratios = [], []
    for i in range(options.pairs + 1):
        before = server.seconds()
        sockets = Sockets(server.port, asked, options.streams)
        seconds = sockets.run()
        rate = sockets.n_tokens / seconds
        parts = split(before, server.seconds())
        engine.stdin.write("go\n")
        engine.stdin.flush()
        told = json.loads(engine.stdout.readline())
        assert told["tokens"] == sockets.n_tokens, "the two did not write the same"
        bare_rate = told["tokens"] / told["seconds"]
        whole = sum(parts.values())
        share = (parts["loop"] + parts["workers"]) / whole
        line = " ".join(f"{name} {part / whole:5.1%}" for name, part in parts.items())
        note = "  (to warm up)" if i == 0 else ""
        say(
            f"http {rate:7.0f} tokens/s  bare {bare_rate:7.0f}  ratio {rate / bare_rate:.3f}  CPU: {line}{note}"
        )
        if i:
            shares.append(share)
            ratios.append(rate / bare_rate)
    share, ratio = statistics.median(shares), statistics.median(ratios)
    say(
        f"share of HTTP, templates, tokenising, SSE: {share:.1%} of the server's CPU time (bar {SHARE_BAR:.0%})"
    )
    say(f"tokens/s through HTTP: {ratio:.3f} of the bare engine (bar {RATE_BAR})")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tasks", type=int, default=8, help="requests per kind of task")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument(
        "--threads", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="of the engine"
    )
    options = parser.parse_args(arguments)
    flags = [*DEMO, *SETTINGS, "--parallel", str(options.streams), "--threads", str(options.threads)]
    with tempfile.TemporaryDirectory() as folder:
        meter = Path(folder) / "meter.json"
        program = [sys.executable, "-m", "tests.bench.http"]
        environ = {"BENCH_METER": str(meter)}
        with (
            running(Path(folder) / "server.log", ("serve", *flags), "tests.bench.http", environ) as one,
            subprocess.Popen(
                [*program, "bare", *flags], cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            ) as engine,
        ):
            assert engine.stdin is not None
            assert engine.stdout is not None
            engine.stdin.write(json.dumps(vars(options)) + "\n")
            engine.stdin.flush()
            assert engine.stdout.readline() == "ready\n"
            measure(Server(one.process, int(one.url.rpartition(":")[2]), meter), engine, options)
            engine.stdin.close()
            engine.wait(30)


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        served(sys.argv[2:])
    elif sys.argv[1:2] == ["bare"]:
        bare(sys.argv[2:])
    else:
        main(sys.argv[1:])
