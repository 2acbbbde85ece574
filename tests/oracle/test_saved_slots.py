"""Slots through files: a fresh engine that restores one writes what the old engine would have written next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.engine.api import Delta, Done, Sampling
from slipstream.engine.cache.cache import Cache
from slipstream.engine.core.engine import Engine
from slipstream.engine.errors import InvalidRequest
from slipstream.engine.service.run.slot_files import SlotFiles
from tests.checkpoints import noised_copy, tiny_checkpoint
from tests.oracle.lab import ASKS, DEMO, Bench, Case, Folders, Lab

ABOUT = ("engine/cache/*.py",)

FAMILIES = ("qwen3", "gemma3", "qwen3_5")  # full attention; with windows; with recurrent state
DRAFTS = Bench(("draft-model",), n_slots=2, adaptive=False)
TURN = Sampling(temperature=0.7, seed=11, ignore_eos=True)
PROMPT = tuple((7 * i * i + 3 * i) % 380 + 3 for i in range(150))


@pytest.fixture(scope="module")
def lab_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Lab]:
    """A target of a family, and itself with some noise as its draft model."""
    labs: dict[str, Lab] = {}

    def get(family: str) -> Lab:
        if family not in labs:
            target, draft = (tmp_path_factory.mktemp(name) for name in ("target", "draft"))
            tiny_checkpoint(family, target, changes={"max_position_embeddings": 2048})
            noised_copy(target, draft, 0.02)
            labs[family] = Lab(Folders(target, draft), torch.float32)
        return labs[family]

    return get


@pytest.fixture(params=FAMILIES)
def lab(request: pytest.FixtureRequest, lab_of: Callable[[str], Lab]) -> Lab:
    return lab_of(request.param)


@pytest.fixture
def files(tmp_path: Path) -> SlotFiles:
    return SlotFiles(tmp_path, "one model", DRAFTS.page_size)


def say(
    lab: Lab, engine: Engine, prompt: tuple[int, ...], *, bench: Bench = DRAFTS, tenant: str = ""
) -> tuple[list[int], Done]:
    """One request, alone."""
    engine.add(lab.slot("one", Case(prompt, TURN, max_tokens=44, asks=replace(ASKS, tenant=tenant)), bench))
    tokens: list[int] = []
    end = None
    while engine.busy:
        for _, event in engine.step():
            if isinstance(event, Delta):
                tokens += event.token_ids
            else:
                end = event
    assert isinstance(end, Done)
    return tokens, end


def carry(files: SlotFiles, old: Engine, new: Engine, tenant: str = "", *, slot_id: int = 0) -> int:
    """A slot of one engine into slot 1 of another, through a file; returns the tokens restored."""
    path = files.path("a slot", tenant)
    files.write(path, old.seats.remembered.save(slot_id, tenant))
    return new.seats.remembered.restore(1, files.read(path)[0], tenant)


def next_turn(tokens: list[int]) -> tuple[int, ...]:
    return (*PROMPT, *tokens, 5, 6, 7)


@pytest.mark.sampled(keep=4)
def test_text_goes_on_as_without(lab: Lab, files: SlotFiles) -> None:
    plain = Bench(snapshot_bytes=0)
    first, _ = say(lab, lab.engine(plain), PROMPT, bench=plain)
    expected, _ = say(lab, lab.engine(plain), next_turn(first), bench=plain)

    old, new = lab.engine(DRAFTS), lab.engine(DRAFTS)
    assert say(lab, old, PROMPT)[0] == first
    n_restored = carry(files, old, new)
    assert n_restored >= 144  # whole pages of the prompt at least
    tokens, end = say(lab, new, next_turn(first))
    assert tokens == expected
    assert end.usage.n_cached == n_restored
    assert say(lab, old, next_turn(first))[1].usage.n_cached == n_restored, "as much as where it was"


@pytest.mark.sampled(keep=4)
def test_drafts_come_as_without(lab: Lab, files: SlotFiles) -> None:
    """The draft model's state is restored too: nothing is fed to it again, and it guesses the same."""
    old, new = lab.engine(DRAFTS), lab.engine(DRAFTS)
    first, _ = say(lab, old, PROMPT)
    carry(files, old, new)
    _, there = say(lab, old, next_turn(first))
    _, here = say(lab, new, next_turn(first))
    assert here.speculation.n_accepted == there.speculation.n_accepted > 10
    assert here.speculation.n_drafted == there.speculation.n_drafted


@pytest.mark.sampled(keep=4)
def test_a_head_goes_on_from_its_own_rows(files: SlotFiles) -> None:
    """Rows that can only be made while the target computes: without them nothing could be adopted at all."""
    lab, bench = Lab(DEMO, torch.float32), replace(DRAFTS, types=("draft-eagle3",))
    prompt = tuple(lab.tokenizer.encode("def add(left, right):\n    return left + right\n" * 5))
    old, new = lab.engine(bench), lab.engine(bench)
    say(lab, old, prompt, bench=bench)
    n_restored = carry(files, old, new)
    assert n_restored >= 48
    there, told = say(lab, old, prompt, bench=bench)
    here, same = say(lab, new, prompt, bench=bench)
    assert here == there
    assert same.usage.n_cached == told.usage.n_cached >= 48
    assert same.speculation.n_accepted == told.speculation.n_accepted > 0


@pytest.mark.sampled(keep=4)
def test_the_same_prompt_hits_its_own_prefix(lab: Lab, files: SlotFiles) -> None:
    old, new = lab.engine(DRAFTS), lab.engine(DRAFTS)
    first, _ = say(lab, old, PROMPT)
    carry(files, old, new)
    again, end = say(lab, new, PROMPT)
    assert again == first
    assert end.usage.n_cached == 144


@pytest.mark.sampled(keep=4)
def test_wrong_rows_would_be_seen(lab: Lab, files: SlotFiles) -> None:
    """The tests above can fail: restored state is read, that of every kind of layer."""
    old = lab.engine(DRAFTS)
    first, _ = say(lab, old, PROMPT)
    expected, _ = say(lab, old, next_turn(first))
    honest = old.seats.remembered.save(0, "")
    wrong_rows = {**honest.rows, "target": [one + 0.5 for one in honest.rows["target"]]}
    wrong_states = {place: [one + 0.5 for one in states] for place, states in honest.states.items()}
    wrong_windows = {
        name: replace(window, rows=[one + 0.5 for one in window.rows])
        for name, window in honest.windows.items()
    }
    planted = [replace(honest, rows=wrong_rows)]
    planted += [replace(honest, states=wrong_states)] if wrong_states else []
    planted += [replace(honest, windows=wrong_windows)] if wrong_windows else []
    for found in planted:
        new = lab.engine(DRAFTS)
        assert new.seats.remembered.restore(0, found, "") > 0
        assert say(lab, new, next_turn(first))[0] != expected


def test_a_hybrid_resumes_from_its_snapshots_alone(lab_of: Callable[[str], Lab], files: SlotFiles) -> None:
    lab = lab_of("qwen3_5")
    old = lab.engine(DRAFTS)
    say(lab, old, PROMPT)
    found = old.seats.remembered.save(0, "")
    assert {store for store, _ in found.states} == {"target", "draft"}
    assert max(n for store, n in found.states if store == "target") == len(found.tokens)
    bench = replace(DRAFTS, snapshot_bytes=0)
    new = lab.engine(bench)
    assert new.seats.remembered.restore(0, found, "") == 0, "there is no room for states"
    assert say(lab, new, PROMPT, bench=bench)[1].usage.n_cached == 0


@pytest.mark.sampled(keep=4)
def test_a_running_slot_is_saved_as_far_as_it_is_published(lab: Lab, files: SlotFiles) -> None:
    old, new = lab.engine(DRAFTS), lab.engine(DRAFTS)
    expected, _ = say(lab, lab.engine(DRAFTS), PROMPT)
    old.add(lab.slot("one", Case(PROMPT, TURN, max_tokens=44), DRAFTS))
    while old.stats().slots[0].n_decoded < 10:
        old.step()
    assert carry(files, old, new) >= 144
    assert old.busy
    tokens, end = say(lab, new, PROMPT)
    assert (tokens, end.usage.n_cached) == (expected, 144)


@pytest.mark.sampled(keep=4)
def test_erase_lets_the_next_request_start_from_nothing(lab: Lab) -> None:
    engine = lab.engine(DRAFTS)
    first, _ = say(lab, engine, PROMPT)
    assert engine.seats.remembered.erase(0, "") >= 144
    stats = engine.stats()
    assert (stats.n_pages_cached, stats.n_pages_free) == (0, DRAFTS.n_pages)
    assert len(cache_of(engine).snapshots) == 0
    tokens, end = say(lab, engine, PROMPT)
    assert (tokens, end.usage.n_cached) == (first, 0)


@pytest.mark.sampled(keep=4)
def test_tenants_never_meet(lab: Lab, files: SlotFiles) -> None:
    old, new = lab.engine(DRAFTS), lab.engine(DRAFTS)
    say(lab, old, PROMPT, tenant="bob")
    hers = say(lab, old, PROMPT, tenant="alice")[1].slot
    with pytest.raises(InvalidRequest):
        # Although the same tokens are cached for him: he would learn that they are hers too.
        old.seats.remembered.save(hers, "bob")
    assert old.seats.remembered.erase(hers, "bob") == 0
    assert carry(files, old, new, "alice", slot_id=hers) >= 144
    assert say(lab, new, PROMPT, tenant="bob")[1].usage.n_cached == 0
    new = lab.engine(DRAFTS)
    carry(files, old, new, "alice", slot_id=hers)
    assert say(lab, new, PROMPT, tenant="alice")[1].usage.n_cached == 144


def cache_of(engine: Engine) -> Cache:
    return engine._cache
