"""On the demo pair: what replies say of their steps is what the drafters proposed, and adds up to the replies' figures.

Streamed and whole, read at once and late, cut by stop strings and limits, under a grammar, in choices.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from slipstream.engine.api import Done
from slipstream.engine.service.run import event_stream
from slipstream.engine.service.run.event_stream import Stream
from slipstream.engine.service.start.launch import launch
from slipstream.engine.settings import Settings
from slipstream.engine.speculate.chain import Chain
from slipstream.engine.speculate.decide.value import Pass
from slipstream.engine.speculate.drafter import Drafts, Want
from slipstream.engine.speculate.tails import Tails
from slipstream.engine.text.tokenizer import Tokenizer
from tests.http.serving import Served, served

DEMO = Path(__file__).parents[2] / "demo"
TOKENIZER = Tokenizer(DEMO / "target")
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
DRAFTERS = "forced,prediction,suffix,ngram-simple,draft-model"
N_MAX = 6
# What was proposed, by the request and its tokens: the prompt's and the reply's so far.
Proposed = dict[tuple[str, *tuple[int, ...]], tuple[int, ...]]


@pytest.fixture(scope="module")
def proposed() -> Iterator[Proposed]:
    """The drafts of every pass of the module's server, as its chain of drafters has made them."""
    seen: Proposed = {}
    draft = Chain.draft

    def watched(
        self: Chain, wants: Sequence[Want], coming: Pass, tails: Tails | None = None
    ) -> Drafts | None:
        made = draft(self, wants, coming, tails)
        assert made is not None
        for want in wants:
            seen[want.slot.request.id, *want.slot.tokens] = made.by_slot[want.slot.id].token_ids
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Chain, "draft", watched)
        yield seen


@pytest.fixture(scope="module")
def server(proposed: Proposed) -> Iterator[Served]:
    settings = Settings(
        model=str(DEMO / "target"),
        model_draft=str(DEMO / "draft"),
        ctx_size=512,
        parallel=2,
        threads=1,
        draft_max=N_MAX,
        spec_type=DRAFTERS,
        spec_adaptive=False,
    )
    engine = launch(settings)
    with served(engine) as one:  # type: ignore[arg-type]
        yield one
    asyncio.run(engine.close())


def body_of(path: str, case: random.Random, **fields: Any) -> dict[str, Any]:
    prompt = "def area(w, h):\n    return w * h\n\n\ndef area(w, h):\n"
    asked = {
        "temperature": case.choice([0.0, 0.7, 1.2]),
        "seed": case.randrange(1 << 30),
        "max_tokens": case.randrange(1, 48),
        "logit_bias": {"2": case.choice([-100, 4])},
        "spec_detail": True,
        "return_token_ids": True,
        **fields,
    }
    messages = [{"role": "user", "content": prompt}]
    return {**asked, **({"prompt": prompt} if path == TEXT else {"messages": messages})}


def streamed(server: Served, path: str, body: dict[str, Any]) -> tuple[str, list[Any], dict[str, Any]]:
    """(text, the details of its chunks, the last chunk)"""
    chunks = server.events(path, **body)
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    text = "".join(one["text"] if path == TEXT else one["delta"].get("content") or "" for one in choices)
    return text, [chunk["spec"] for chunk in chunks if "spec" in chunk], chunks[-1]


def steps_of(details: list[Any]) -> list[dict[str, Any]]:
    return [step for one in details for step in one["steps"]]


def add_up(steps: list[dict[str, Any]], body: dict[str, Any]) -> int:
    """Hold the steps of all choices against the reply's figures; returns how many tokens were drafted."""
    timings, run = body["timings"], body["metrics"]["speculative_decoding"]
    n_drafted = sum(len(step["drafted"]) for step in steps)
    n_accepted = sum(step["n_accepted"] for step in steps)
    assert (run["num_draft_tokens"], run["num_accepted_draft_tokens"]) == (n_drafted, n_accepted)
    assert timings.get("draft_n", 0) == n_drafted
    assert timings.get("draft_n_accepted", 0) == n_accepted
    assert run["num_spec_steps"] == len(steps)
    drafters = timings["drafters"].values()
    assert sum(one["draft_n"] for one in drafters) == n_drafted
    assert sum(one["draft_n_accepted"] for one in drafters) == n_accepted
    deepest = max((len(step["drafted"]) for step in steps), default=0)
    drafted_at = [sum(len(step["drafted"]) > i for step in steps) for i in range(deepest)]
    accepted_at = [sum(step["n_accepted"] > i for step in steps) for i in range(deepest)]
    assert (run["num_draft_tokens_per_pos"], run["num_accepted_tokens_per_pos"]) == (drafted_at, accepted_at)
    parts = timings["predicted_parts_ms"]
    assert all(value >= 0.0 for value in parts.values())
    assert sum(parts.values()) == pytest.approx(timings["predicted_ms"], abs=0.01)
    return n_drafted


def follow(reply_id: str, details: list[Any], prompt: list[int], proposed: Proposed) -> None:
    """Walk along a reply's first choice: each step drafted what was proposed at its place, and kept what is there."""
    ids, sources = ([i for one in details for i in one[name]] for name in ("token_ids", "sources"))
    steps, at = steps_of(details), 0
    assert [step["index"] for step in steps] == list(range(len(steps)))
    for step in steps:
        drafted, n_accepted = step["drafted"], step["n_accepted"]
        tokens = (*prompt, *ids[:at])
        assert tuple(drafted) == proposed.get((f"{reply_id}-0-0", *tokens), ())
        assert drafted[:n_accepted] == ids[at : at + n_accepted]
        assert all(sources[at : at + n_accepted])
        assert (step["drafter"] in DRAFTERS.split(",")) == bool(drafted)
        before, whole = (TOKENIZER.decode(one, skip_special=False) for one in (tokens, (*tokens, *drafted)))
        assert "".join(step["drafted_pieces"]) == whole[len(before) :]
        assert len(step["drafted_pieces"]) == len(drafted) <= N_MAX
        at += n_accepted
        if at < len(ids):  # the model's own token, unless the reply ends before
            assert sources[at] is None
            at += 1
    assert at == len(ids)


def checked(server: Served, proposed: Proposed, path: str, body: dict[str, Any]) -> tuple[str, list[Any]]:
    """A reply streamed and whole, each with steps that are true and add up: its text and its steps."""
    text, details, last = streamed(server, path, body)
    whole = server.post(path, body).json()
    choice = whole["choices"][0]
    prompt = (choice if path == TEXT else whole)["prompt_token_ids"]
    assert text == (choice["text"] if path == TEXT else choice["message"]["content"] or "")
    for told, figures in ((details, last), (whole["spec"][0], whole)):
        follow(figures["id"], told, prompt, proposed)
        add_up(steps_of(told), figures)
    return text, steps_of(details)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_steps_are_true_and_add_up(server: Served, proposed: Proposed, path: str) -> None:
    seen: set[str] = set()
    for number in range(8):
        case = random.Random(number)
        body = body_of(path, case)
        text, steps = checked(server, proposed, path, body)
        seen.update("rejected" for step in steps if step["n_accepted"] < len(step["drafted"]))
        seen.update(step["why_not"] for step in steps)
        seen.update(step["drafter"] for step in steps)
        at = case.randrange(len(text) + 1)
        stop = text[at : at + case.randrange(1, 5)] or "\n\n\n"
        cut, steps = checked(server, proposed, path, {**body, "stop": stop})
        seen.add("cut" if cut != text else "whole")
        seen.update("cut draft" for step in steps[-1:] if step["drafted"] and cut != text)
    assert {"rejected", "cut", "cut draft", "suffix", "draft-model", None} <= seen, "the cases are as meant"


def test_a_late_reader_gets_all_steps(
    server: Served, proposed: Proposed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deltas are joined while nobody reads them."""
    read = Stream.__anext__

    async def late(self: Stream) -> Any:
        while not (self._over or isinstance(self._events[-1] if self._events else None, Done)):
            await asyncio.sleep(0.005)
        return await read(self)

    # Of one drafter: which of several guesses a token hangs on what the planner has learnt by then.
    body = body_of(
        TEXT, random.Random(3), max_tokens=40, logit_bias={"2": -100}, speculative={"types": "suffix"}
    )
    text, details, _ = streamed(server, TEXT, body)
    monkeypatch.setattr(event_stream, "_MOST_WAITING", 2)
    monkeypatch.setattr(Stream, "__anext__", late)
    joined = streamed(server, TEXT, body)
    assert joined[0] == text
    assert [len(one["steps"]) for one in joined[1]] == [1, len(details) - 1]
    assert steps_of(joined[1]) == steps_of(details)
    assert add_up(steps_of(joined[1]), joined[2]) > 0
    whole = server.post(TEXT, body).json()
    told = [[one["token_ids"] for one in details] for details in (whole["spec"][0], joined[1])]
    assert told[0] == told[1]
    checked(server, proposed, TEXT, body)


def test_forced_text_is_drafted(server: Served, proposed: Proposed) -> None:
    schema = {
        "type": "object",
        "properties": {"measurement": {"type": "boolean"}},
        "required": ["measurement"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    body = body_of(CHAT, random.Random(1), max_tokens=40, logit_bias={}, response_format=form)
    text, steps = checked(server, proposed, CHAT, body)
    assert text.startswith('{"measurement": ')
    forced = [step for step in steps if step["drafter"] == "forced"]
    assert any(step["n_accepted"] == len(step["drafted"]) > 1 for step in forced)


def test_choices_add_up_together(server: Served) -> None:
    body = body_of(TEXT, random.Random(2), n=2, max_tokens=24, logit_bias={"2": -100})
    whole = server.post(TEXT, body).json()
    assert [len(steps_of(one)) > 0 for one in whole["spec"]] == [True, True]
    assert add_up([step for one in whole["spec"] for step in steps_of(one)], whole) > 0
    chunks = server.events(TEXT, **body)
    told: list[list[Any]] = [[], []]
    for chunk in chunks:
        if "spec" in chunk:
            told[chunk["choices"][0]["index"]].append(chunk["spec"])
    assert all([step["index"] for step in steps_of(one)] == list(range(len(steps_of(one)))) for one in told)
    assert add_up([step for one in told for step in steps_of(one)], chunks[-1]) > 0


def test_undrafted_replies_say_why(server: Served) -> None:
    body = body_of(TEXT, random.Random(0), max_tokens=12, logit_bias={"2": -100})
    plain = {**body, "speculative": {"n_max": 0}}
    text, details, last = streamed(server, TEXT, plain)
    assert text == streamed(server, TEXT, body)[0]
    assert [step["why_not"] for step in steps_of(details)] == ["not_asked_for"] * 12
    assert "speculative_decoding" not in last["metrics"]
    alone = {**body, "speculative": {"types": ["ngram-simple"]}, "prompt": [5, 6]}
    _, details, _ = streamed(server, TEXT, alone)
    first, *others, at_limit = steps_of(details)
    assert (first["why_not"], at_limit["why_not"]) == (None, None), "neither could carry a draft"
    assert {step["why_not"] for step in others} == {"no_guess"}
