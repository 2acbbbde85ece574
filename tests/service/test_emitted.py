"""A reply that is cut between any two of its deltas, and gone on with by another engine, is the undisturbed reply.

On the demo model; one engine makes each token by itself, the other drafts.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.engine.api import Delta, Done, Echo, Event, Progress, Request, Sampling
from slipstream.engine.constraints import Grammar
from slipstream.engine.errors import InvalidRequest
from slipstream.engine.service.run.thread import ThreadEngine
from slipstream.engine.service.start.launch import launch
from slipstream.engine.settings import Settings
from slipstream.engine.text.tokenizer import Tokenizer
from tests.service.told import Told, emitted, events_of, told

ABOUT = ("engine/core/*.py",)

TARGET = str(Path(__file__).parents[2] / "demo" / "target")
TOKENIZER = Tokenizer(TARGET)
END = 2  # <|im_end|>
CODE = "def area(w, h):\n    return w * h\n\n\ndef area(w, h):\n"
# Bytes of characters of several; some fit together, some do not.
PARTS = [
    i for i in range(TOKENIZER.vocab_size) if TOKENIZER.token_bytes(i) in (b"\xc3", b"\xa9", b"\xe2", b"\x82")
]
BROKEN = [(token_id, 13.0) for token_id in PARTS]
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "kind": {"enum": ["circle", "square"]},
            "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        },
        "required": ["name", "kind", "sizes"],
        "additionalProperties": False,
    }
)
THINKING = Grammar("regex", r"[0-9]{3}-[a-z]{5}", reasoning=("# ", "\n"))


def sampled(seed: int = 5, **more: object) -> Sampling:
    return replace(Sampling(temperature=0.9, seed=seed), **more)  # type: ignore[arg-type]


def ask(**fields: object) -> Request:
    base = Request(id="cut", prompt=CODE, sampling=sampled(ignore_eos=True), max_tokens=16)
    return replace(base, **fields)  # type: ignore[arg-type]


CASES = {
    "plain": ask(),
    "greedy": ask(sampling=Sampling(temperature=0.0, seed=0, ignore_eos=True)),
    # Crosses pages, so that what is stored of the first run is adopted by the second.
    "pages": ask(prompt=CODE * 5, max_tokens=40, progress=True),
    "schema": ask(sampling=sampled(), grammar=Grammar("json_schema", SCHEMA), max_tokens=60),
    "schema and logprobs": ask(
        sampling=sampled(7), grammar=Grammar("json_schema", SCHEMA), max_tokens=60, logprobs=1
    ),
    "thinking": ask(prompt=CODE + "# ", sampling=sampled(4), grammar=THINKING, max_tokens=40),
    "penalties": ask(
        sampling=sampled(
            ignore_eos=True,
            repeat_penalty=1.5,
            repeat_last_n=8,
            presence_penalty=0.7,
            frequency_penalty=0.9,
            temperature=0.5,
        ),
        max_tokens=24,
    ),
    "broken characters": ask(sampling=sampled(5, ignore_eos=True, logit_bias=BROKEN)),
    "broken characters and logprobs": ask(
        sampling=sampled(7, ignore_eos=True, logit_bias=BROKEN), logprobs=2, stop=("\ufffe",)
    ),
    "min_tokens": ask(sampling=sampled(logit_bias=[(END, 9.0)]), min_tokens=10, stop=(" ",)),
    "end token": ask(
        sampling=sampled(11, logit_bias=[(END, 3.0)]), logprobs=0, skip_special=False, min_tokens=6
    ),
    "stop token": ask(
        sampling=sampled(1, ignore_eos=True),
        stop_token_ids=tuple(TOKENIZER.encode("w * h")[-1:]),
        max_tokens=32,
    ),
    "logprobs": ask(logprobs=3, progress=True),
    "echo": ask(echo=True, logprobs=1, prompt_logprobs=1, sampling=sampled(4)),
    "echo of controls": ask(
        prompt=(5, 2, 5, 1, 6, 7), echo=True, logprobs=1, sampling=sampled(7), min_tokens=5
    ),
    "steps": ask(steps=True),
}


@pytest.fixture(scope="module")
def engines() -> Iterator[list[ThreadEngine]]:
    """One that makes a token a step, one that drafts."""
    made = [
        launch(
            Settings(model=TARGET, ctx_size=512, parallel=2, threads=1, spec_adaptive=False, spec_type=types)
        )
        for types in ("none", "suffix")
    ]
    yield made
    for one in made:
        asyncio.run(one.close())


def stops(text: str) -> tuple[str, ...]:
    """A stop string that is there, across tokens, and one that begins again and again and is never complete."""
    return (text[9:13], text[:1] + "\ufffe", text[4:6] + "\ufffe")


def going_on(request: Request, before: list[Event]) -> Request:
    return replace(request, emitted=emitted(before))


async def every_cut(engines: list[ThreadEngine], request: Request) -> tuple[Told, list[Told]]:
    """The undisturbed reply, and the replies cut behind each delta, which end on the one engine or the other."""
    whole = await events_of(engines[0], request)
    cuts = [i + 1 for i, event in enumerate(whole) if isinstance(event, Delta)]
    found = []
    for number, at in enumerate(cuts):
        rest = await events_of(engines[number % 2], going_on(request, whole[:at]))
        assert not [one for one in rest if isinstance(one, Echo | Progress)]
        found.append(told([*whole[:at], *rest]))
    return told(whole), found


@pytest.mark.sampled(keep=6)
@pytest.mark.parametrize("name", CASES)
async def test_a_cut_reply_goes_on_as_if_nothing_had_been(engines: list[ThreadEngine], name: str) -> None:
    whole, found = await every_cut(engines, CASES[name])
    assert len(found) >= 4, "there is something to cut"
    assert found == [whole] * len(found)


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("seed", [0, 2, 5, 7])
async def test_text_that_was_held_back_comes_once(
    engines: list[ThreadEngine], seed: int, logprobs: int | None
) -> None:
    bias = BROKEN if seed % 2 else ()
    request = ask(sampling=sampled(seed, ignore_eos=True, logit_bias=bias), max_tokens=20)
    free = told(await events_of(engines[0], request))
    whole, found = await every_cut(engines, replace(request, stop=stops(free.text), logprobs=logprobs))
    assert whole.end[0] == "stop"
    assert found == [whole] * len(found)


async def test_drafted_deltas_can_be_cut_too(engines: list[ThreadEngine]) -> None:
    """A delta of several tokens is had or not had as a whole."""
    request = ask(sampling=Sampling(temperature=0.0, seed=0, ignore_eos=True), max_tokens=40, logprobs=0)
    plain = told(await events_of(engines[0], request))
    whole, found = await every_cut(engines[::-1], request)
    assert len(found) < 30, "several tokens a delta"
    assert whole == plain
    assert found == [whole] * len(found)


async def test_a_reply_that_was_over_ends_at_once(engines: list[ThreadEngine]) -> None:
    """Its last delta had been sent, its end had not."""
    *before, end = await events_of(engines[0], ask(stop=("w * h",), max_tokens=60))
    assert isinstance(end, Done)
    (last,) = await events_of(engines[1], going_on(ask(stop=("w * h",), max_tokens=60), before))
    assert isinstance(last, Done)
    assert told([*before, last]) == told([*before, end])
    assert last.timings.prompt_s == last.timings.generation_s == 0.0


async def test_times_and_counts_are_of_this_run(engines: list[ThreadEngine]) -> None:
    """All tokens of an earlier run count as completion tokens, none of them as cached."""
    request = ask(prompt=CODE * 5, max_tokens=70)
    for _ in range(2):
        whole = await events_of(engines[0], request)
        end = (await events_of(engines[0], going_on(request, whole[:66])))[-1]
        assert isinstance(end, Done)
        assert end.usage.n_completion == 70
        assert end.usage.n_cached <= end.usage.n_prompt
        times = end.timings
        assert min(times.queue_s, times.prompt_s, times.generation_s, times.draft_s, times.verify_s) >= 0.0


async def test_what_cannot_be_an_earlier_run_is_refused(engines: list[ThreadEngine]) -> None:
    refused = {
        "seed": ask(emitted=(5,), sampling=Sampling(temperature=0.0)),
        "emitted: token 99999": ask(emitted=(99999,)),
        "emitted: the reply is over after 2 of 3": ask(emitted=(40, END, 40), sampling=sampled()),
        "emitted: the reply is over after 16 of 17": ask(emitted=(40,) * 17),
        "emitted: the grammar has no place for token 0": ask(
            emitted=tuple(TOKENIZER.encode("x", add_special=False)), grammar=Grammar("regex", "[0-9]+")
        ),
    }
    for words, request in refused.items():
        with pytest.raises(InvalidRequest, match=words):
            await engines[0].submit(request)
    (*_, end) = await events_of(engines[0], ask())
    assert isinstance(end, Done)
