"""Log-probabilities are those of the delivered text's tokens: whatever ends a reply, streamed or whole, drafted or not.

On the demo model: stop strings that cut tokens in two, end tokens, bytes that are no characters.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slipstream.engine.service.start.launch import launch
from slipstream.engine.settings import Settings
from slipstream.engine.text.tokenizer import Tokenizer
from tests.http.serving import Served, served

ABOUT = ("engine/core/*.py", "engine/sample/*.py")

TARGET = str(Path(__file__).parents[2] / "demo" / "target")
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
END = 2  # <|im_end|>
TOKENIZER = Tokenizer(TARGET)
# Bytes of characters of several; some fit together, some do not.
PARTS = [
    i for i in range(TOKENIZER.vocab_size) if TOKENIZER.token_bytes(i) in (b"\xc3", b"\xa9", b"\xe2", b"\x82")
]
N_CASES, N_SAMPLE = 12, 7


@dataclass(frozen=True)
class Reply:
    """A choice as the client reads it."""

    text: str
    tokens: list[tuple[bytes, float]]
    offsets: list[int]  # of a plain completion's tokens
    reason: str


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Served]]:
    """One that drafts, one that does not."""
    engines = [
        launch(
            Settings(model=TARGET, ctx_size=512, parallel=2, threads=1, spec_adaptive=False, spec_type=types)
        )
        for types in ("suffix", "none")
    ]
    with served(engines[0]) as drafting, served(engines[1]) as plain:  # type: ignore[arg-type]
        yield [drafting, plain]
    for engine in engines:
        asyncio.run(engine.close())


def body_of(path: str, case: random.Random, **fields: Any) -> dict[str, Any]:
    bias = {END: case.choice([-100, -100, 0 if path == TEXT else 4])}
    bias |= dict.fromkeys(PARTS, case.choice([0, 0, 13]))
    prompt = "def area(w, h):\n    return w * h\n\n\ndef area(w, h):\n"
    asked = {
        "temperature": case.choice([0.0, 0.7, 1.5]),
        "seed": case.randrange(1 << 30),
        "max_tokens": case.randrange(8, 24),
        "logit_bias": {str(token_id): value for token_id, value in bias.items()},
        **fields,
    }
    if path == TEXT:
        return {"prompt": prompt, "logprobs": 1, **asked}
    return {"messages": [{"role": "user", "content": prompt}], "logprobs": True, **asked}


def read(path: str, choices: list[dict[str, Any]]) -> Reply:
    """The reply that chunks, or a whole choice alone, add up to; each brings the tokens that begin in its own text."""
    text, tokens, offsets = "", [], []
    for one in choices:
        piece = one["text"] if path == TEXT else (one.get("delta") or one.get("message", {})).get("content")
        table = one["logprobs"]
        if table is not None and path == TEXT:
            names = [_bytes(name) for name in table["tokens"]]
            tokens += list(zip(names, table["token_logprobs"], strict=True))
            offsets += table["text_offset"]
            assert all(len(text) <= at < len(text) + len(piece) for at in table["text_offset"])
        elif table is not None:
            entries = table["content"]
            assert piece, "entries come with text"
            tokens += [(bytes(entry["bytes"]), entry["logprob"]) for entry in entries]
        text += piece or ""
    return Reply(text, tokens, offsets, choices[-1]["finish_reason"])


def _bytes(name: str) -> bytes:
    """What a token of a plain completion writes."""
    if not name.startswith("bytes:"):
        return name.encode()
    return bytes.fromhex(name.removeprefix("bytes:").replace("\\x", ""))


def replies(servers: list[Served], path: str, body: dict[str, Any]) -> Reply:
    """The reply, which must be the same streamed and whole, drafted and not."""
    found = []
    for server in servers:
        found.append(read(path, server.post(path, body).json()["choices"]))
        chunks = [chunk["choices"][0] for chunk in server.events(path, **body) if chunk["choices"]]
        found.append(read(path, chunks))
    assert all(one == found[0] for one in found), found
    return found[0]


def check(path: str, reply: Reply) -> bool:
    """Hold the tokens against the text; returns whether the last one goes on behind the end of the text."""
    written = b"".join(data for data, _ in reply.tokens).decode(errors="replace")
    assert written.startswith(reply.text)
    if reply.tokens:
        before = b"".join(data for data, _ in reply.tokens[:-1]).decode(errors="ignore")
        assert len(before) < len(reply.text), "the last token begins in the text"
    if path == TEXT:
        assert len(reply.offsets) == len(reply.tokens)
        assert reply.offsets == sorted(reply.offsets)
        for i, at in enumerate(reply.offsets):
            before = b"".join(data for data, _ in reply.tokens[:i]).decode(errors="ignore")
            assert "\ufffd" in reply.text or at == len(before)
    return written != reply.text


@pytest.mark.sampled
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_tokens_are_those_of_the_text(servers: list[Served], path: str, *, is_whole: bool) -> None:
    seen: set[str] = set()
    for number in range(N_CASES if is_whole else N_SAMPLE):
        case = random.Random(number)
        body = body_of(path, case)
        free = replies(servers, path, body)
        assert not check(path, free), "only a stop string leaves a token's text out"
        seen.add(free.reason)
        seen.update(["broken"] * ("\ufffd" in free.text))
        stops = []
        for _ in range(case.randrange(1, 3)):
            at = case.randrange(len(free.text) + 1)
            stops.append(free.text[at : at + case.randrange(1, 6)] or "\n\n\n")
        # Besides, one that begins again and again and is never complete, so that text is held back.
        cut = replies(servers, path, {**body, "stop": [*stops, free.text[:1] + "\ufffe"]})
        assert free.text.startswith(cut.text)
        assert cut.tokens == free.tokens[: len(cut.tokens)]
        seen.add("straddling" if check(path, cut) else "clean")
    assert {"stop", "length", "straddling", "clean", "broken"} <= seen, "the cases are what they should be"


def test_an_echo_counts_every_token(servers: list[Served]) -> None:
    """Evaluation harnesses count entries: the prompt's tokens, then the reply's, of which they drop the last."""
    prompt = [5, 2, 5, 1, 6, 7]  # control tokens are no text of it
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 1, "logit_bias": {str(END): 100}}
    for server in servers:
        choice = server.post(TEXT, body).json()["choices"][0]
        assert choice["finish_reason"] == "stop"
        table = choice["logprobs"]
        assert [len(one) for one in table.values()] == [len(prompt) + 1] * 4
        assert table["tokens"][-1] == "<|im_end|>"
        assert table["text_offset"][-1] == len(choice["text"])
        streamed = [chunk["choices"][0]["logprobs"] for chunk in server.events(TEXT, **body)]
        assert [name for one in streamed if one for name in one["tokens"]] == table["tokens"]
