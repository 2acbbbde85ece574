"""Several MTP modules against the published formula: drafts over rounds of partial acceptance, slots side by side.

The formula knows no deferred rows and no caches: a module's rows are those of the whole text, guesses for tokens that
are not there yet, each row read with the state of the module before at the same position, or with the target's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slipstream.engine.models.heads.head_choices import HeadChoices
from slipstream.engine.models.heads.mtp import load_mtp
from slipstream.engine.models.registry import load_network
from slipstream.engine.speculate.drafter import Want
from tests import head_checkpoints as made
from tests.oracle import head_formulas as formulas
from tests.oracle.head_formulas import Formula, MtpNames
from tests.oracle.head_rounds import CPU, N_CTX, PAGE, TOLERANCE, VOCAB, text
from tests.oracle.mtp_stage import NAME, Stage

ABOUT = ("engine/speculate/network/*.py",)
pytestmark = pytest.mark.usefixtures("_selected")


def names_of(i: int) -> MtpNames:
    layer = f"model.layers.{6 + i}"
    return MtpNames(
        f"{layer}.enorm", f"{layer}.hnorm", f"{layer}.eh_proj", layer, f"{layer}.shared_head.norm"
    )


@dataclass
class Published:
    """The formula over a whole text."""

    formula: Formula
    n_modules: int
    matrix: Tensor  # [vocab, d_model]: embedding and head of the target
    is_chained: bool

    def logits(self, ids: Sequence[int], guesses: Sequence[int], hidden: Tensor) -> list[Tensor]:
        """Of each guess, [vocab]. ids: x_0 … x_n; hidden: the target's states at 0 … n - 1, [n, d_model]."""
        whole, n, last = [*ids, *guesses], len(hidden), self.n_modules - 1
        states, found = hidden, []
        for k in range(self.n_modules):
            reads = states if self.is_chained else hidden
            states = self.module(k, whole, reads)
            found.append(self.matrix @ states[n - 1])
        while len(found) < len(guesses):  # the last module, with its own states in place of the one before
            reads = torch.cat((reads, states[-1:]))
            states = self.module(last, whole, reads)
            found.append(self.matrix @ states[-1])
        return found[: len(guesses)]

    def module(self, k: int, whole: Sequence[int], hidden: Tensor) -> Tensor:
        shifted = torch.tensor(whole[1 + k : 1 + k + len(hidden)])
        padding = torch.zeros(
            len(hidden) - len(shifted), dtype=torch.int64
        )  # read by modules without a guess
        return formulas.mtp(self.formula, names_of(k), self.matrix[torch.cat((shifted, padding))], hidden)


@pytest.fixture(scope="module")
def stage_of(
    folder_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Stage]:
    target = load_network(folder_of("qwen3"), torch.float32, CPU, N_CTX, VOCAB)

    def make(n_modules: int, recycled: str = "auto") -> Stage:
        tensors: made.Tensors = {}
        for i in range(n_modules):
            tensors |= made.mtp_deepseek(f"model.layers.{6 + i}.", 4 + i, head_norms=True, d_head=32)
        folder = made.write(tmp_path_factory.mktemp("mtp"), tensors, None)
        head = load_mtp(folder, target, N_CTX, HeadChoices(recycled=recycled))
        assert len(head.modules) == n_modules
        oracle = Published(
            Formula(tensors, 1e6, 1e-6, 32), n_modules, target.decoder.embedding.weight, recycled == "auto"
        )
        return Stage(head, target, oracle)

    return make


CASES = [(1, "auto"), (2, "auto"), (3, "auto"), (2, "target"), (3, "target")]


@pytest.mark.sampled(keep=3)
@pytest.mark.parametrize(("n_modules", "recycled"), CASES)
def test_guesses_are_those_of_the_published_formula(
    stage_of: Callable[..., Stage], n_modules: int, recycled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks, one of a single token; drafts of other depths, of which any number is kept."""
    stage, rng = stage_of(n_modules, recycled), random.Random(n_modules)
    long, one, short = stage.add(text(1, 24)), stage.add(text(2, 2)), stage.add(text(3, 9))
    stage.accept({long.id: 1, short.id: 3})
    stage.accept({one.id: 1, long.id: 15, short.id: 2})
    stage.accept({long.id: 7, short.id: 3})
    stage.go_on(rng, monkeypatch)
    assert stage.n_compared > 40
    assert stage.worst < TOLERANCE


@pytest.mark.sampled(keep=3)
@pytest.mark.parametrize(("n_modules", "recycled"), CASES)
def test_after_an_adopted_prefix_guesses_are_those_of_a_cold_run(
    stage_of: Callable[..., Stage], n_modules: int, recycled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the text goes on as its maker's did, and all modules have their rows up to where the prefix ends."""
    stage, ids = stage_of(n_modules, recycled), text(5, 40)
    maker, reader = stage.add(ids[: 2 * PAGE + 1]), stage.add(ids[:2])
    for n in (2 * PAGE, 2):
        stage.accept({maker.id: n})
        stage.draft({maker.id: 1}, monkeypatch)
        assert stage.cache.length(maker.id, NAME) == maker.n_past - (n_modules - 1)
        maker.tokens[:] = ids[: maker.n_past + 3]
    stage.accept({maker.id: 1})  # published
    reader.tokens[:] = ids[: 2 * PAGE + 2]
    stage.begin(reader)
    assert reader.n_past == 2 * PAGE
    for n in (2, 1, 3):  # at 1, a row of module 2 that was adopted would have read a guess
        reader.tokens[:] = ids[: reader.n_past + n + 1]
        stage.accept({reader.id: n})
        stage.draft({reader.id: 5}, monkeypatch)
        assert stage.cache.start(reader.id, NAME) == 0
        length = stage.cache.length(reader.id, NAME)
        assert length == max(2 * PAGE, reader.n_past - (n_modules - 1)), "adopted rows stay complete"
    assert stage.worst < TOLERANCE


@pytest.mark.parametrize(("n_modules", "recycled"), [(1, "auto"), (3, "auto"), (3, "target")])
def test_after_a_missed_row_guesses_are_those_of_the_text_from_the_next_border(
    stage_of: Callable[..., Stage], n_modules: int, recycled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, ids = stage_of(n_modules, recycled), text(6, 40)
    slot = stage.add(ids[:12])
    slot.n_past = 1  # of a pass whose states were lost
    stage.accept({slot.id: 10})
    assert not stage.guesses([Want(slot, 3)])[0].token_ids
    assert stage.cache.length(slot.id, NAME) == 0, "nothing was taken in behind the gap"
    slot.tokens[:] = ids[:26]
    stage.accept({slot.id: 14})
    for _ in range(3):
        drafts = stage.draft({slot.id: 5}, monkeypatch)
        assert stage.cache.start(slot.id, NAME) == PAGE
        slot.tokens += [*drafts[slot.id][:2], 7]
        stage.accept({slot.id: 3})
    assert stage.worst < TOLERANCE
