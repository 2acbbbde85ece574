"""Mutates valid requests, in their JSON and in their bytes, and looks at what comes back.

    python -m tests.fuzz.mutate URL [--seconds 30] [--seed N]

A finding is a status from 500 on, one that the document does not have, an error that is not in OpenAI's shape, a
stream that does not end as its dialect says or ends in a failure of ours, or no answer at all.
"""

from __future__ import annotations

import argparse
import copy
import http.client
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from slipstream.server.describe.openapi import STATUSES
from slipstream.server.openai.refuse import REFUSED
from slipstream.server.openai.wire import ChatRequest, CompletionRequest
from tests.fuzz import grammars
from tests.fuzz.requests import REQUESTS

SILENCE_S = 60.0
N_THREADS = 4
NAMES = sorted(
    {*ChatRequest.model_fields, *CompletionRequest.model_fields, *REFUSED, "unknown", "speculative.n_max"}
)
DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]
# JSON values that have broken servers.
HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**64 - 1, 2**64, 10**40, -(2**63)),
    *(0.0, -0.0, 0.5, 1.5, -1e308, 1e308, 5e-324, float("nan"), float("inf")),
    *("", " ", "\0", "a" * 5000, "\ud800", "🙂" * 50, "<|im_end|>", "<s>", "{{ 7 * 7 }}", "{% for i in x %}"),
    *("none", "auto", "required", "user", "tool", "(a+)+$", "http://127.0.0.1/x", "../../etc/passwd"),
    *([], {}, [None], [[]], {"": None}, [{}] * 50, {"type": "text"}, {"type": "json_schema"}, DEEP),
    *({"type": "function"}, {"$ref": "#"}, {"type": "object", "properties": {"a": {"$ref": "#"}}}),
    *({"type": "string", "pattern": "(a|a)*b"}, {"type": "array", "minItems": 10**9}, {"enum": []}),
)
# What is put between bytes; None: three at random.
PIECES = (None, "\t", "\\", '"', "{", "}", "[", "]", ",", ":", "1e999", "NaN", "\\ud800", "\x00", "\xff")


@dataclass(slots=True)
class Findings:
    """What a run has seen."""

    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class Mutator:
    """An endless source of requests, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._grammars = grammars.Source(self._random)

    def next(self) -> tuple[str, bytes]:
        """A path and a body."""
        if self._random.random() < 0.1:
            field, value = self._grammars.next()
            asked = {"prompt": "x", "max_tokens": 8, field: value}
            return "/v1/completions", json.dumps(asked).encode()
        path, body = self._random.choice(REQUESTS)
        changed: Any = copy.deepcopy(dict(body))
        for _ in range(self._random.choice((0, 1, 1, 1, 1, 2, 2, 6))):
            changed = self._tree(changed)
        data = json.dumps(changed, ensure_ascii=self._random.random() < 0.5).encode("utf-8", "surrogatepass")
        if self._random.random() < 0.25:
            data = self._bytes(data)
        return path, data

    def _tree(self, root: Any) -> Any:
        """`root` with one node replaced, removed, added, wrapped or put in another's place."""
        places = list(_places(root))
        kind = self._random.randrange(6)
        if kind == 0 or not places:
            if isinstance(root, dict):
                root[self._random.choice(NAMES)] = self._value(root)
            return root
        owner, key = self._random.choice(places)
        if kind == 1:
            del owner[key]
        elif kind == 2:
            owner[key] = [owner[key]]
        elif kind == 3:
            other, where = self._random.choice(places)
            owner[key] = copy.deepcopy(other[where]) if _size(other[where]) < 2000 else None
        elif kind == 4 and isinstance(owner, dict):
            owner[self._random.choice(NAMES)] = owner.pop(key)
        else:
            owner[key] = self._value(root)
        return root

    def _value(self, root: Any) -> Any:
        places = list(_places(root))
        if places and self._random.random() < 0.2:
            owner, key = self._random.choice(places)
            if _size(owner[key]) < 2000:
                return copy.deepcopy(owner[key])
        return copy.deepcopy(self._random.choice(HOSTILE))

    def _bytes(self, data: bytes) -> bytes:
        """`data` with bits flipped, and pieces cut, doubled or put in."""
        changed = bytearray(data)
        for _ in range(self._random.choice((1, 1, 2, 5, 20))):
            at = self._random.randrange(len(changed) + 1)
            until = min(len(changed), at + self._random.choice((1, 2, 8, 64)))
            kind = self._random.randrange(4)
            if kind == 0 and at < len(changed):
                changed[at] ^= 1 << self._random.randrange(8)
            elif kind == 1:
                del changed[at:until]
            elif kind == 2:
                changed[at:at] = changed[at:until]
            else:
                piece = self._random.choice(PIECES)
                changed[at:at] = self._random.randbytes(3) if piece is None else piece.encode("latin-1")
        return bytes(changed)


def _places(node: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) below a node."""
    found: list[tuple[Any, Any]] = []
    waiting = [node]
    while waiting:
        one = waiting.pop()
        keys: Any = one.keys() if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ()
        for key in keys:
            found.append((one, key))
            waiting.append(one[key])
    return found


def _size(node: Any) -> int:
    return len(_places(node)) + (len(node) if isinstance(node, str) else 0)


def ask(
    connection: http.client.HTTPConnection, method: str, path: str, data: bytes | None, key: str
) -> tuple[int, str, bytes]:
    """(status, content type, body). Raises OSError or HTTPException where there is no whole answer."""
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    connection.request(method, path, data, headers)
    answer = connection.getresponse()
    return answer.status, answer.headers.get("content-type", ""), answer.read()


# What the last event of a stream begins with, by dialect; and what only failures of the server have in an event.
ENDS = (
    b"data: [DONE]",
    b"event: response.completed",
    b"event: response.incomplete",
    b"event: response.failed",
    b"event: message_stop",
    b"event: error",
)
FAILURES = (b'"type":"server_error"', b'"code":"server_error"', b'"type":"api_error"')
# Which fields an error has: in Anthropic's shape, and in OpenAI's.
OF_MESSAGES, OF_OTHERS = {"message", "type"}, {"message", "type", "param", "code"}


def fault(status: int, kind: str, body: bytes) -> str | None:
    """What is wrong with an answer."""
    if status == 200:
        if not kind.startswith("text/event-stream"):
            return None if isinstance(json.loads(body), dict | list) else "not an object"
        last = body.rstrip().rpartition(b"\n\n")[2]
        if not (last.startswith(ENDS) or b'"stop":true' in last or b'"error":' in last):
            return "the stream has no end"
        return "a failure in the stream" if any(one in body for one in FAILURES) else None
    if status >= 500:
        return "the server failed"
    if status not in STATUSES:
        return "a status that the document does not have"
    told = json.loads(body)
    error, names = told["error"], OF_MESSAGES if told.get("type") == "error" else OF_OTHERS
    if set(error) < names or not error["message"]:
        return "an error without its fields"
    return "a traceback" if "Traceback" in error["message"] or 'File "' in error["message"] else None


def run(url: str, *, seed: int, seconds: float = 1e9, n_requests: int = 10**9, key: str = "none") -> Findings:
    """Send mutants over several connections until the time or the number is up."""
    findings = Findings()
    address = urlsplit(url)
    end = time.monotonic() + seconds
    mutator, lock = Mutator(seed), threading.Lock()
    left = n_requests

    def worker() -> None:
        nonlocal left
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=SILENCE_S)
        while time.monotonic() < end and len(findings.wrong) < 10:
            with lock:
                left -= 1
                if left < 0:
                    break
                path, data = mutator.next()
            try:
                status, kind, body = ask(connection, "POST", path, data, key)
                told = fault(status, kind, body)
            except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
                status, body, told = 0, b"", f"{type(error).__name__}: {error}"
                connection.close()
            with lock:
                findings.statuses[status] += 1
                if told:
                    findings.wrong.append(f"{told}: {status} to {path} {data[:2000]!r}: {body[:500]!r}")
        connection.close()

    threads = [threading.Thread(target=worker) for _ in range(N_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return findings


def aftermath(url: str, key: str = "none", within_s: float = 10.0) -> str | None:
    """What the server still holds of the requests that are over."""
    address = urlsplit(url)
    end = time.monotonic() + within_s
    held: Mapping[str, Any] = {}
    while time.monotonic() < end:
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=SILENCE_S)
        slots = json.loads(ask(connection, "GET", "/slots", None, key)[2])
        held = json.loads(ask(connection, "GET", "/props", None, key)[2])["engine"]
        connection.close()
        busy = [slot["id"] for slot in slots if slot["is_processing"]]
        if not busy and not held["n_waiting"]:
            return None
        time.sleep(0.2)
    return f"slots are still busy: {held}"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--key", default="none")
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args(arguments)
    seed = random.randrange(2**32) if options.seed is None else options.seed
    findings = run(options.url, seed=seed, seconds=options.seconds, key=options.key)
    told = ", ".join(f"{status}: {n}" for status, n in sorted(findings.statuses.items()))
    sys.stdout.write(f"{findings.statuses.total()} mutants (seed {seed}); answers {told}\n")
    wrong = [*findings.wrong, *filter(None, [aftermath(options.url, options.key)])]
    sys.stdout.writelines(f"FOUND {one}\n" for one in wrong)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
