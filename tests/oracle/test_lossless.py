"""A sample of the losslessness suite, and planted faults that must turn it red."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.engine.api import Sampling, Speculate
from slipstream.engine.batch import Span
from slipstream.engine.core.plan import Work
from slipstream.engine.sample import pick as picking
from slipstream.engine.sample.pick import Row
from slipstream.engine.slot import Slot
from slipstream.engine.speculate.verify import Picks, Verdict
from tests.oracle.lab import DEMO, Bench, Lab, Trouble, play
from tests.oracle.lossless import (
    KINDS,
    SAMPLINGS,
    TEXT_DRAFTERS,
    benches,
    chains,
    demo_cases,
    disturbed,
    drafters,
    folders_of,
)

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def lab(request: pytest.FixtureRequest) -> Lab:
    return Lab(DEMO, request.param)


@pytest.mark.sampled(keep=4)
@pytest.mark.parametrize("n", range(len(SAMPLINGS)), ids=list(SAMPLINGS))
def test_text_is_that_of_plain_decoding(lab: Lab, n: int, *, is_whole: bool) -> None:
    """A third of the chains with each sampling in each dtype, or a sixth; on other benches every time.

    `make lossless` runs them all.
    """
    share = 3 if is_whole else 6
    cases = demo_cases(lab, list(SAMPLINGS)[n], 6 if is_whole else 4)
    expected = play(lab, Bench(), cases)
    first = n + 4 * DTYPES.index(lab.target.dtype)
    for i, chain in [*enumerate(chains(lab.folders))][first % share :: share]:
        bench = [*benches(chain)][(i // 3 + first) % 6]
        found = disturbed(lab, bench, cases, expected, seed=i)
        assert found.n_tokens > 0
        assert found.n_wrong == 0, bench


@pytest.mark.sampled(keep=1)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "full"])
def test_text_is_that_of_plain_decoding_with_other_caches(
    kind: str, tmp_path: Path, *, is_whole: bool
) -> None:
    lab = Lab(folders_of(kind, tmp_path), torch.bfloat16)
    cases = demo_cases(lab, "all", 4 if is_whole else 2)
    expected = play(lab, Bench(snapshot_bytes=0), cases)
    tried = [one for one in chains(lab.folders) if not one or one[0] not in TEXT_DRAFTERS]
    for i, chain in [*enumerate(tried)][:: 1 if is_whole else 2]:
        bench = list(benches(chain))[i % 5]
        assert disturbed(lab, bench, cases, expected, seed=i).n_wrong == 0, bench


@pytest.mark.parametrize("lab", [torch.float32], ids=str, indirect=True)
def test_preemption_and_prefix_hits_happen(lab: Lab) -> None:
    """The suite's disturbances are real: otherwise it would prove less than it says."""
    cases = demo_cases(lab, "warm", 10)
    expected = play(lab, Bench(), cases)
    # Not adaptive: otherwise the number of steps, and so how often disturbances come, hangs on the machine's speed.
    bench = Bench(drafters(DEMO), n_slots=4, n_pages=26, adaptive=False)
    played = play(lab, bench, cases, known=expected.tokens, trouble=Trouble(0.5, 0.3))
    assert played.stats is not None
    assert played.stats.n_preempted > 0
    assert played.n_cached > 0
    assert played.n_restored > 0
    assert played.partial
    assert any(one.speculation.n_accepted > 0 for one in played.done.values())


@pytest.mark.sampled(keep=2)
@pytest.mark.parametrize("lab", [torch.bfloat16], ids=str, indirect=True)
@pytest.mark.parametrize("name", [name for name in drafters(DEMO) if name != "garbage"])
def test_every_drafter_has_drafts_accepted(lab: Lab, name: str) -> None:
    """Otherwise its losslessness would be that of plain decoding."""
    cases = demo_cases(lab, "ruled" if name == "forced" else "greedy", 8)
    expected = play(lab, Bench(), cases)
    found = disturbed(lab, Bench((name,), n_slots=2, adaptive=False), cases, expected, seed=0)
    assert found.n_accepted > 0
    assert found.n_wrong == 0


# Sampling in which every part that can be planted wrong matters in nearly every row.
HARSH = Sampling(temperature=0.4, seed=5, ignore_eos=True, repeat_penalty=1.5, presence_penalty=2.0)


def _blind(row: Row) -> Row:
    """The row as if no drafts came before it."""
    return Row(row.params, row.tokens, row.n_prompt, row.counts)


def _plant_blind_penalties(patch: pytest.MonkeyPatch) -> None:
    entries = picking._entries
    patch.setattr(picking, "_entries", lambda rows: entries([_blind(row) for row in rows]))


def _plant_wrong_position(patch: pytest.MonkeyPatch) -> None:
    columns = picking._columns
    patch.setattr(picking, "_columns", lambda rows: columns([_blind(row) for row in rows]))


def _plant_commit_too_far(patch: pytest.MonkeyPatch) -> None:
    """A prompt chunk commits one token more than it computed."""
    honest = Work.span.fget  # type: ignore[attr-defined]

    def span(self: Work) -> Span:
        one: Span = honest(self)
        return one if one.n_logits else replace(one, token_ids=one.token_ids[:-1])

    patch.setattr(Work, "span", property(span))


def _plant_accept_too_many(patch: pytest.MonkeyPatch) -> None:
    """The first rejected draft is kept as well."""

    honest = Picks.verdict

    def too_many(self: Picks, i: int, slot: Slot, draft: Sequence[int], *more: Any) -> Verdict:
        one = honest(self, i, slot, draft, *more)
        kept = [*draft[: one.n_accepted + 1], *one.token_ids[one.n_accepted :]]
        return Verdict(kept[: len(draft) + 1], min(one.n_accepted + 1, len(draft)))

    patch.setattr(Picks, "verdict", too_many)


@pytest.mark.sampled(keep=1)
@pytest.mark.parametrize("lab", [torch.float32], ids=str, indirect=True)
@pytest.mark.parametrize(
    "plant", [_plant_blind_penalties, _plant_wrong_position, _plant_commit_too_far, _plant_accept_too_many]
)
def test_a_planted_fault_is_seen(
    lab: Lab, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, *, is_whole: bool
) -> None:
    speculate = Speculate(n_max=16)
    cases = [
        replace(one, speculate=speculate, sampling=HARSH)
        for one in demo_cases(lab, "all", 9 if is_whole else 5)
    ]
    expected = play(lab, Bench(batch_size=512), cases)
    bench = Bench(("scripted",), n_slots=4, adaptive=False)
    assert disturbed(lab, bench, cases, expected, seed=0).n_wrong == 0
    plant(monkeypatch)
    assert disturbed(lab, bench, cases, expected, seed=0).n_wrong > 0


@pytest.mark.sampled(keep=1)
@pytest.mark.parametrize("kind", ["latent", "shared"])
def test_a_row_committed_too_far_is_seen_in_other_caches(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(folders_of(kind, tmp_path), torch.float32)
    cases = [replace(one, sampling=HARSH) for one in demo_cases(lab, "all", 6)]
    expected = play(lab, Bench(batch_size=512), cases)
    bench = Bench(("scripted",), n_slots=4, adaptive=False)
    assert disturbed(lab, bench, cases, expected, seed=0).n_wrong == 0
    _plant_commit_too_far(monkeypatch)
    assert disturbed(lab, bench, cases, expected, seed=0).n_wrong > 0
