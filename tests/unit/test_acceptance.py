"""Accepted by the target's picks, or at random for benchmarks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slipstream.engine.api import Delta, Done
from slipstream.engine.errors import SettingError
from slipstream.engine.settings import Settings
from slipstream.engine.speculate.acceptance import SyntheticAcceptance, coupled, synthetic_rates
from slipstream.engine.speculate.bench.synthetic import Synthetic
from tests.unit.toy import VOCAB, toy_engine, toy_slot


@pytest.mark.parametrize(
    ("drafts", "picks", "n"), [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2], [1, 3, 2], 1), ([2], [1, 2], 0)]
)
def test_a_draft_survives_while_it_equals_the_pick(drafts: list[int], picks: list[int], n: int) -> None:
    assert coupled(toy_slot("r", [1]), drafts, picks) == n


def play(rates: tuple[float, ...] | None) -> tuple[list[int], Done]:
    """A toy request with four drafts a pass; None is the target's own judgement."""
    acceptance = coupled if rates is None else SyntheticAcceptance(rates, frozenset({VOCAB}))
    toy = toy_engine(lambda cache: [Synthetic(VOCAB, frozenset())], n_slots=1, acceptance=acceptance)
    toy.engine.add(toy_slot("a", [1, 2, 3], types=("synthetic",), max_tokens=200))
    tokens: list[int] = []
    while True:
        for _, event in toy.engine.step():
            if isinstance(event, Delta):
                tokens += event.token_ids
            elif isinstance(event, Done):
                return tokens, event


def test_synthetic_acceptance_yields_the_tokens_it_was_asked_for() -> None:
    for length in (1.5, 3.0, 5.0):
        rates = synthetic_rates(Settings(spec_synth_len=length, draft_max=4), ("synthetic",))
        assert rates is not None
        _, done = play(rates)
        n_tokens = sum((1 + i) * n for i, n in enumerate(done.speculation.histogram))
        assert n_tokens / done.speculation.n_steps == pytest.approx(length, rel=0.05)
        assert done.speculation.synthetic


def test_without_accepted_drafts_the_text_is_that_of_plain_decoding() -> None:
    tokens, done = play((0.0, 0.0, 0.0, 0.0))
    expected, real = play(None)
    assert tokens == expected
    assert done.speculation.n_accepted == 0 < done.speculation.n_drafted
    assert not real.speculation.synthetic


def test_a_drafted_end_token_is_never_accepted() -> None:
    slot = toy_slot("r", [1])
    assert SyntheticAcceptance((1.0, 1.0, 1.0), frozenset({9}))(slot, [3, 9, 3], [0, 0, 0, 0]) == 1


@pytest.mark.parametrize(
    ("changes", "types", "says"),
    [
        ({"spec_synth_len": 3.0, "spec_synth_rates": "0.5"}, ("suffix",), "together"),
        ({"spec_synth_len": 3.0}, (), "without a drafter"),
        ({"spec_synth_len": 3.0, "draft_max": 0}, ("suffix",), "without a drafter"),
        ({"spec_synth_len": 18.0}, ("suffix",), "draft-max"),
        ({"spec_synth_rates": "0.5,x"}, ("suffix",), "numbers"),
        ({"spec_synth_rates": "0.5,0.6"}, ("suffix",), "fall"),
        ({"spec_synth_rates": "1.5"}, ("suffix",), "fall"),
        ({"spec_synth_rates": "nan"}, ("suffix",), "fall"),
        ({"spec_synth_rates": ",".join(["0"] * 17)}, ("suffix",), "more rates"),
    ],
)
def test_rates_that_cannot_be_are_refused(
    changes: dict[str, object], types: tuple[str, ...], says: str
) -> None:
    with pytest.raises(SettingError, match=says):
        synthetic_rates(replace(Settings(), **changes), types)  # type: ignore[arg-type]


def test_rates_may_be_listed() -> None:
    assert synthetic_rates(Settings(spec_synth_rates="0.9, 0.5,0"), ("suffix",)) == (0.9, 0.5, 0.0)
    assert synthetic_rates(Settings(), ("suffix",)) is None
