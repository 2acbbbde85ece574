"""GGUF files here and on llama-server, side by side: the same files, requests in turn, medians of ratios.

    python -m tests.bench.files --llama-server PATH [--draft FILE] [--rounds 5] [--rounded] FILE...

For each file all servers run at once and are asked one after the other, in an order that turns with every round: greedy
replies to the demo's tasks with one stream and with four, and prompts of 512 and 2,048 tokens. Ratios are those to
llama-server without speculation in the same round. What memory gives to a plain sum is measured before and after.

A stream's rate counts from its first token. Of four streams that begin together a second figure counts from the
requests to the last token of all, prompts included: a server that reads all prompts before it writes keeps those of
the others out of every stream's rate, one that writes as soon as it can does not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch

from tests.bench.peers import chunks
from tests.process import ROOT, SERVER, running

TIMEOUT_S = 300.0
N_REPLY = 96
LENGTHS = (512, 2048)  # of prompts
N_STREAMS = 4
CONTEXT = 4096
KINDS = ("rename", "continue")
BASE = "llama-server"
ROUNDED = ", rounded activations"
# llama-server's ways to speculate that were found fastest on these tasks.
SPECULATION = {
    "ngram-simple": "--spec-type ngram-simple --spec-ngram-simple-size-n 4 --spec-ngram-simple-size-m 16",
    "ngram-mod": "--spec-type ngram-mod --spec-ngram-mod-n-match 8 --spec-ngram-mod-n-min 4 --spec-ngram-mod-n-max 32",
}
WITH_DRAFT = "--spec-type draft-simple,ngram-simple --spec-draft-n-max 8"


@dataclass(frozen=True, slots=True)
class Side:
    """A server, and how it is asked."""

    url: str
    body: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Took:
    """One reply, or several at once."""

    first_s: float  # until the first text
    rate: float  # tokens a second after it, in sum
    whole: float  # tokens a second from the requests to the last of all tokens


def played(side: Side, prompts: Sequence[Any], n_tokens: int) -> Took:
    """The prompts at once, messages or token ids."""
    found: list[tuple[float, float, int]] = []

    def one(prompt: Any) -> None:
        found.append(streamed(side, prompt, n_tokens))

    threads = [threading.Thread(target=one, args=(prompt,)) for prompt in prompts]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    whole_s = time.perf_counter() - start
    if len(found) < len(prompts):
        raise RuntimeError(f"{side.url}: {len(prompts) - len(found)} of {len(prompts)} replies failed")
    rate, n_said = sum(n / max(s, 1e-9) for _, s, n in found), sum(n + 1 for _, _, n in found)
    return Took(statistics.median(first for first, _, _ in found), rate, n_said / whole_s)


def streamed(side: Side, prompt: Any, n_tokens: int) -> tuple[float, float, int]:
    """(seconds to the first text, from there to the last, tokens after the first)."""
    body = {"max_tokens": n_tokens, "temperature": 0, "ignore_eos": True, "stream": True, **side.body}
    body |= {"stream_options": {"include_usage": True}, "cache_prompt": False}
    is_chat = isinstance(prompt[0], dict)
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    body["messages" if is_chat else "prompt"] = prompt
    start, times, n = time.perf_counter(), [], 0
    with (
        httpx.Client(base_url=side.url, timeout=TIMEOUT_S) as client,
        client.stream("POST", path, json={"model": "x", **body}) as answer,
    ):
        if answer.status_code != 200:
            raise RuntimeError(f"{side.url}: {answer.read().decode(errors='replace')[:200]}")
        for chunk in chunks(answer.iter_lines()):
            if any(
                one.get("text") or (one.get("delta") or {}).get("content") for one in chunk.get("choices", ())
            ):
                times.append(time.perf_counter())
            n = (chunk.get("usage") or {}).get("completion_tokens", n)
    return times[0] - start, times[-1] - times[0], n - 1


def read_rate() -> float:
    """Bytes a second that a sum over a gigabyte reads."""
    x = torch.ones(2**28, dtype=torch.float32)  # [2**28]
    took = []
    for _ in range(7):
        start = time.perf_counter()
        x.sum()
        took.append(time.perf_counter() - start)
    return x.nbytes / statistics.median(took)


@contextlib.contextmanager
def all_sides(given: argparse.Namespace, file: Path, logs: Path) -> Iterator[dict[str, Side]]:
    """The servers of one file, ours and llama-server's, ready to be asked."""
    draft = given.draft
    threads = str(torch.get_num_threads())
    ours = ["-m", str(file), "-c", str(CONTEXT), "-np", str(N_STREAMS), "--log-level", "warning"]
    theirs = ["-m", str(file), "-c", str(CONTEXT * N_STREAMS), "-np", str(N_STREAMS), "-t", threads]
    ways: dict[str, Sequence[str]] = {
        "": (),
        **{f", {name}": flags.split() for name, flags in SPECULATION.items()},
    }
    if draft is not None:
        ours += ["-md", str(draft)]
        ways[", draft and ngram-simple"] = ("-md", str(draft), *WITH_DRAFT.split())
    with contextlib.ExitStack() as stack:

        def server(name: str, arguments: Sequence[str], program: str | Path) -> str:
            log = logs / f"{name or 'plain'}.log"
            return stack.enter_context(running(log, arguments, program)).url

        sides = {}
        for mark, flags in (("", []), (ROUNDED, ["--round-activations"]))[: 1 + given.rounded]:
            url = server(f"ours{mark}", [*ours, *flags], SERVER)
            sides[f"plain{mark}"] = Side(url, {"speculative": {"n_max": 0}})
            sides[f"speculating{mark}"] = Side(url)
        for name, more in ways.items():
            sides[BASE + name] = Side(server(f"llama{name}", [*theirs, *more], given.llama_server))
        yield sides


def workloads() -> dict[str, tuple[list[list[Any]], int]]:
    """Name -> (prompts of each round, tokens of a reply)."""
    lines = [json.loads(line) for line in (ROOT / "demo" / "tasks.jsonl").read_text().splitlines()]
    found: dict[str, tuple[list[list[Any]], int]] = {}
    for kind in KINDS:
        tasks = [one["messages"] for one in lines if one["kind"] == kind]
        found[kind] = ([[task] for task in tasks], N_REPLY)
        fours = [tasks[i : i + N_STREAMS] for i in range(0, len(tasks) - N_STREAMS + 1, N_STREAMS)]
        found[f"{kind}, {N_STREAMS} streams"] = (fours, N_REPLY)
    generator = torch.Generator().manual_seed(0)
    for n in LENGTHS:
        ids = torch.randint(300, 4000, (64, n), generator=generator).tolist()
        found[f"prompt of {n}"] = ([[one] for one in ids], 2)
    return found


def compared(
    sides: Mapping[str, Side], rounds: int, wanted: Sequence[str]
) -> dict[str, dict[str, dict[str, float]]]:
    """Workload -> side -> its median figure, and the median of its ratios to llama-server's. Higher is better."""
    report: dict[str, dict[str, dict[str, float]]] = {}
    names = list(sides)
    for workload, (prompts, n_tokens) in workloads().items():
        if wanted and workload not in wanted:
            continue
        by_prompt = workload.startswith("prompt")
        asked = [name for name in names if not by_prompt or name in ("plain", f"plain{ROUNDED}", BASE)]
        figures = [workload] if len(prompts[0]) == 1 else [workload, f"{workload}, with prompts"]
        rates: dict[str, dict[str, list[float]]] = {one: {name: [] for name in asked} for one in figures}
        for i in range(rounds + 1):
            for name in asked[i % len(asked) :] + asked[: i % len(asked)]:
                took = played(sides[name], prompts[i % len(prompts)], n_tokens)
                if i:  # the first round compiles and warms
                    of = 1 / took.first_s if by_prompt else took.rate
                    for figure, value in zip(figures, (of, took.whole), strict=False):
                        rates[figure][name].append(value)
        report |= {figure: medians(found) for figure, found in rates.items()}
    return report


def medians(rates: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Side -> its median rate, and the median of its ratios to llama-server's in the same round."""
    return {
        name: {
            "rate": statistics.median(found),
            "ratio": statistics.median(a / b for a, b in zip(found, rates[BASE], strict=True)),
        }
        for name, found in rates.items()
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.files", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--llama-server", type=Path, required=True)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rounded", action="store_true", help="ask a server with --round-activations, too")
    parser.add_argument(
        "--workloads", nargs="+", default=(), help=f"of {', '.join(workloads())}; all by default"
    )
    parser.add_argument("--out", type=Path, help="write the report here as JSON")
    given = parser.parse_args(arguments)
    whole: dict[str, Any] = {"threads": torch.get_num_threads(), "rounds": given.rounds, "files": {}}
    for file in given.files:
        before = read_rate()
        with (
            tempfile.TemporaryDirectory() as logs,
            all_sides(given, file.resolve(), Path(logs)) as sides,
        ):
            report = compared(sides, given.rounds, given.workloads)
        rates = [round(one / 1e9, 1) for one in (before, read_rate())]
        whole["files"][file.name] = {"bytes": file.stat().st_size, "read_GB_s": rates, "workloads": report}
        sys.stdout.write(
            f"\n{file.name}, {file.stat().st_size / 1e6:.0f} MB; a plain sum reads {rates} GB/s\n"
        )
        for workload, found in report.items():
            line = "; ".join(f"{name} {one['rate']:.3g} ({one['ratio']:.2f})" for name, one in found.items())
            sys.stdout.write(f"  {workload}: {line}\n")
        sys.stdout.flush()
    if given.out is not None:
        given.out.write_text(json.dumps(whole, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
