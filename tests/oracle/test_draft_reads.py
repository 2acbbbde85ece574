"""Every drafting network drafts without waiting for its device between two tokens, real networks and ops included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from slipstream.engine.api import Delta
from slipstream.engine.cache.cache import Cache
from slipstream.engine.cache.need import Sizes
from slipstream.engine.cache.store import Store
from slipstream.engine.core.engine import Engine
from slipstream.engine.core.plan import Capacity
from slipstream.engine.models.heads.dspark import load_dspark
from slipstream.engine.models.heads.eagle3 import load_eagle3
from slipstream.engine.models.heads.mtp import load_mtp
from slipstream.engine.models.network import Network
from slipstream.engine.models.registry import load_network
from slipstream.engine.speculate.chain import Chain
from slipstream.engine.speculate.decide.value import Lengths
from slipstream.engine.speculate.drafter import DeviceDrafter, Guesses, Want
from slipstream.engine.speculate.network.draft_block import DraftBlock
from slipstream.engine.speculate.network.draft_hidden import DraftHidden
from slipstream.engine.speculate.network.draft_model import STORE, DraftModel
from tests import head_checkpoints as made
from tests.oracle.head_rounds import CPU, N_CTX, PAGE, VOCAB, text
from tests.unit.doubles import Ready
from tests.unit.test_unroll import reads
from tests.unit.toy import toy_slot
from tests.wound_clock import WoundClock

pytestmark = pytest.mark.usefixtures("_selected")
Folders = Callable[[str], Path]

SIZES = Sizes(n_slots=2, n_pages=64, page_size=PAGE)


def eagle3(folder: Path, target: Network, cache: Cache) -> DeviceDrafter:
    case = made.EAGLE3["SpecForge"]
    head = load_eagle3(made.write(folder, made.eagle3_tensors(case), case["config"]), target, N_CTX)
    return DraftHidden(STORE, head, cache, 64)


def mtp(n_layers: int) -> Callable[[Path, Network, Cache], DeviceDrafter]:
    def make(folder: Path, target: Network, cache: Cache) -> DeviceDrafter:
        tensors: made.Tensors = {}
        for i in range(n_layers):
            tensors |= made.mtp_deepseek(f"model.layers.{6 + i}.", 4 + i)
        return DraftHidden(STORE, load_mtp(made.write(folder, tensors, None), target, N_CTX), cache, 64)

    return make


def dspark(folder: Path, target: Network, cache: Cache) -> DeviceDrafter:
    config = {**made.DSPARK_CONFIG, "block_size": 16}
    head = load_dspark(
        made.write(folder, made.dspark(31, n_layers=2, n_taps=2, rank=12), config), target, N_CTX
    )
    return DraftBlock(STORE, head, cache, 64)


def draft_model(folder: Path, target: Network, cache: Cache) -> DeviceDrafter:
    return DraftModel(target, cache, 64, 64)


@pytest.mark.parametrize(
    "make",
    [draft_model, eagle3, mtp(1), mtp(3), dspark],
    ids=["draft-model", "eagle3", "mtp", "mtp of three", "dspark"],
)
def test_reads_of_a_draft_do_not_grow_with_it(
    make: Callable[[Path, Network, Cache], DeviceDrafter],
    folder_of: Folders,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = load_network(folder_of("llama"), torch.float32, CPU, N_CTX, VOCAB)
    stores = {name: Store(target.needs, SIZES, torch.float32, CPU) for name in ("target", STORE)}
    cache = Cache(stores, 2, 64, PAGE)
    drafter = make(tmp_path, target, cache)
    if not isinstance(drafter, DraftModel):
        cache.stores[STORE] = Store(drafter._head.needs, SIZES, torch.float32, CPU)
    capacity = Capacity(n_slots=2, n_ctx=N_CTX, batch_size=64, eos_ids=frozenset())
    engine = Engine(target, cache, Chain([drafter], Lengths(adaptive=False), now=WoundClock()), capacity)
    counts: dict[int, list[int]] = {2: [], 16: []}

    def draft(wants: list[Want], tails: object = None) -> Guesses:
        with reads(monkeypatch) as found:
            made = original(wants)
            guesses = made.read()
        (n,) = {want.n_max for want in wants}
        assert [len(one) for one in guesses] == [n] * len(wants)
        counts[n].append(len(found))
        return Ready(guesses)

    original = drafter.draft
    drafter.draft = draft  # type: ignore[method-assign, assignment]
    for n_max in counts:
        for i in range(2):
            engine.add(toy_slot(f"{i}", text(i, 9), types=(drafter.name,), n_max=n_max, max_tokens=90))
        for _ in range(4):
            assert all(isinstance(event, Delta) for _, event in engine.step())
        for i in range(2):
            engine.cancel(f"{i}")
    assert engine.stats().disabled_drafters == ()
    assert all(n == counts[2][0] <= 4 for n in counts[2] + counts[16])
    assert len(counts[2]) == len(counts[16]) == 3
