"""Every schema of `tests.schemas` on the demo model: what comes out parses and validates, drafted or not."""

from __future__ import annotations

import json
from dataclasses import replace

import jsonschema
import pytest
import torch

from slipstream.engine.api import Sampling, Speculate
from slipstream.engine.constraints import Grammar
from tests.oracle.lab import ASKS, DEMO, Bench, Case, Lab, differences, play
from tests.schemas import ENDLESS, SCHEMAS

ABOUT = ("engine/text/grammar/*.py", "engine/speculate/text/forced.py")

PROMPT = "def area(width):\n"
LONGEST = 300  # tokens; more than the longest instance has
FORMATS = jsonschema.FormatChecker(["uuid", "ipv4"])


@pytest.fixture(scope="module")
def lab() -> Lab:
    return Lab(DEMO, torch.bfloat16)


@pytest.mark.sampled
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_reply_validates_and_is_the_same_with_drafts(
    lab: Lab, temperature: float, *, is_whole: bool
) -> None:
    assert len(SCHEMAS) >= 60
    schemas = [*SCHEMAS.items()][:: 1 if is_whole else 2]
    prompt = tuple(lab.tokenizer.encode(PROMPT))
    cases = [
        Case(
            prompt,
            # Greedy decoding never leaves a recursion by itself.
            Sampling(
                temperature=temperature, seed=i, top_p=1.0, top_k=0, frequency_penalty=1.0 * (name in ENDLESS)
            ),
            Speculate(n_max=16),
            LONGEST,
            asks=replace(ASKS, grammar=Grammar("json_schema", json.dumps(schema))),
        )
        for i, (name, schema) in enumerate(schemas)
    ]
    plain = play(lab, Bench(n_slots=8, n_pages=1024), cases)
    for i, (name, schema) in enumerate(schemas):
        assert plain.done[i].reason == "stop", name
        reply = json.loads(lab.tokenizer.decode(plain.tokens[i]))
        jsonschema.validate(reply, schema, format_checker=FORMATS)
    bench = Bench(("forced", "suffix", "draft-model"), n_slots=8, n_pages=1024, adaptive=False)
    drafted = play(lab, bench, cases)
    assert differences(drafted, plain)[1] == 0
    forced = [one.speculation.drafters["forced"] for one in drafted.done.values()]
    # As costs count for nothing, a network that promises longer drafts than what is forced has its way.
    assert sum(one.n_accepted for one in forced) > 0.1 * sum(len(one) for one in plain.tokens.values())
