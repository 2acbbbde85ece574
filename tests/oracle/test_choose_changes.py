"""What `choose` does to a row before it picks: entries and masks, in every implementation, CUDA C++ in the emulator."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.kernels import use
from slipstream.kernels.choose import cpu, cuda, reference
from slipstream.kernels.choose.op import Choice, Edits, Masks, RowParams, choose
from tests.emulator import COMPILER, emulated, same
from tests.oracle.test_kernels_choose import params, random_rows
from tests.recording import record

Run = Callable[..., Choice]


def in_emulator(*given: Any, **wishes: Any) -> Choice:
    with emulated(order=7):
        return cuda.choose(*given, **wishes)


RUNS: dict[str, Run] = {"reference": reference.choose, "cpu": cpu.choose}
if COMPILER is not None:
    RUNS["cuda"] = in_emulator
each_run = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)


def assert_same(got: Choice, meant: Choice) -> None:
    assert got.token_ids.tolist() == meant.token_ids.tolist()
    assert got.probability is not None
    assert meant.probability is not None
    assert same(got.probability, meant.probability)


def edits_of(*rows: list[tuple[int, float, float, float]]) -> Edits:
    """Entries (token, bias, repeat, penalty) of each row."""
    entries = list(itertools.chain.from_iterable(rows))
    starts = torch.tensor([0, *itertools.accumulate(map(len, rows))], dtype=torch.int32)
    values = torch.tensor([one[1:] for one in entries], dtype=torch.float32).reshape(-1, 3)
    token_ids = torch.tensor([one[0] for one in entries], dtype=torch.int32)
    return Edits(starts, token_ids, *(column.contiguous() for column in values.T))


def masks_of(index: list[int], allowed: np.ndarray[Any, Any]) -> Masks:
    return Masks(torch.tensor(index, dtype=torch.int32), torch.from_numpy(allowed.astype(np.int32)))


def random_changes(trial: int, n_rows: int, vocab: int) -> tuple[Edits, Masks]:
    """Rows with none, few and many entries, all that is awkward among them; rows without a mask, or that share one."""
    random = np.random.default_rng(trial)
    rows = []
    for _ in range(n_rows):
        n = min(int(random.choice([0, 1, 5, 400])), vocab + 2)
        bias = random.choice([0.0, 0.0, -np.inf, 1.5, -0.3], n) * random.random(n)
        repeat, penalty = random.choice([1.0, 1.3, 0.7], n), random.choice([0.0, 0.6, -2.5], n)
        token_ids = random.permutation(vocab + 2)[:n].tolist()  # two that there are not
        rows.append(list(zip(token_ids, np.nan_to_num(bias, nan=-np.inf), repeat, penalty, strict=True)))
    n_lines, n_words = int(random.integers(1, n_rows + 1)), -(-vocab // 32) + int(random.integers(2))
    allowed = random.integers(-(2**31), 2**31, (n_lines, n_words))
    return edits_of(*rows), masks_of(random.integers(-1, n_lines, n_rows).tolist(), allowed)


def changed(row: Tensor, edits: Edits, masks: Masks, i: int) -> Tensor:
    """Row i by words of the definition, each step rounded to float32. row: [vocab] float32."""
    found = row.numpy().copy()
    for entry in range(int(edits.starts[i]), int(edits.starts[i + 1])):
        token = int(edits.token_ids[entry])
        if not 0 <= token < len(found):
            continue
        logit = np.float32(found[token] + np.float32(edits.bias[entry]))
        repeat = np.float32(edits.repeat[entry])
        logit = np.float32(logit / repeat) if logit > 0 else np.float32(logit * repeat)
        found[token] = np.float32(logit - np.float32(edits.penalty[entry]))
    line = int(masks.index[i])
    if line >= 0:
        for token in range(len(found)):
            if not int(masks.allowed[line, token // 32]) >> (token % 32) & 1:
                found[token] = -np.inf
    return torch.from_numpy(found)


@pytest.mark.sampled
@each_run
@pytest.mark.parametrize("trial", range(24))
def test_a_row_is_picked_from_as_it_is_after_its_entries_and_its_mask(run: Run, trial: int) -> None:
    """Ties, zeros of both signs, NaN, infinities, narrow floats; the logits stay as they were."""
    logits, rows = random_rows(trial)
    edits, masks = random_changes(trial, *logits.shape)
    before = logits.clone()
    got = run(logits, rows, edits, masks, want_probability=True)
    assert same(logits, before)
    wide = torch.stack([changed(row, edits, masks, i) for i, row in enumerate(logits.float())])
    assert_same(got, reference.choose(wide, rows, want_probability=True))
    assert got.token_ids.tolist() != reference.choose(logits, rows).token_ids.tolist() or len(wide[0]) < 3


@each_run
def test_entries_go_in_order(run: Run) -> None:
    """Bias, then the repeat penalty by the sign that is then there, then what is taken off."""
    edits = edits_of(
        [(1, 0.0, 2.0, 0.0), (3, 0.5, 2.0, 0.5), (4, -9.0, 2.0, 0.375)],
        [],
        [(0, 0.0, 1.0, 2.5), (1, 0.0, 4.0, 0.0)],
    )
    logits = torch.arange(15, dtype=torch.float32).view(3, 5) - 2
    meant = logits.clone()
    meant[0, 1] = -1 * 2  # negative: multiplied
    meant[0, 3] = (1 + 0.5) / 2 - 0.5
    meant[0, 4] = (2 - 9) * 2 - 0.375
    meant[2, 0] = 8 - 2.5
    meant[2, 1] = 9 / 4
    assert torch.equal(reference.edited(logits, edits), meant)
    rows = params(3, temperature=0.8, top_p=0.9)
    got = run(logits, rows, edits, want_probability=True)
    assert_same(got, reference.choose(meant, rows, want_probability=True))


@each_run
def test_every_step_of_an_entry_is_rounded(run: Run) -> None:
    """One entry a row, beside one other token: its probability shows the last bit of the logit."""
    random, n = np.random.default_rng(0), 300
    logits = torch.from_numpy(random.normal(0, 0.7, (n, 2)).astype(np.float32))
    entries = random.normal(0, 0.7, (n, 3))
    entries[:, 1] = np.abs(entries[:, 1]) + 0.2
    edits, masks = edits_of(*([(0, *one)] for one in entries.tolist())), masks_of([-1] * n, np.zeros((1, 1)))
    meant = torch.stack([changed(row, edits, masks, i) for i, row in enumerate(logits)])
    rows = params(n, temperature=0.0)
    got = run(logits, rows, edits, want_probability=True)
    assert_same(got, reference.choose(meant, rows, want_probability=True))
    once = logits.double()
    biased, repeat = once[:, 0] + edits.bias, edits.repeat.double()
    once[:, 0] = torch.where(biased > 0, biased / repeat, biased * repeat) - edits.penalty
    other = reference.choose(once.float(), rows, want_probability=True).probability
    assert other is not None
    assert got.probability is not None
    assert int((other != got.probability).sum()) > 10, "a single rounding at the end would show"


@pytest.mark.sampled(keep=6)
@each_run
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 4096, 5003])
@pytest.mark.parametrize("n_spare", [0, 1])
def test_forbidden_tokens_are_never_picked_and_others_as_before(run: Run, vocab: int, n_spare: int) -> None:
    random = np.random.default_rng(vocab)
    allowed = random.integers(-(2**31), 2**31, (3, -(-vocab // 32) + n_spare))
    allowed[1], allowed[2] = 0, -1
    index = [1, -1, 2, 0, 2, 0, 0, 0]
    logits = torch.randn(len(index), vocab, generator=torch.Generator().manual_seed(0))
    meant = logits.clone()
    for row, line in enumerate(index):
        for token_id in range(vocab):
            if line >= 0 and not int(allowed[line, token_id // 32]) >> (token_id % 32) & 1:
                meant[row, token_id] = -torch.inf
    for temperature in (0.0, 1.0, 60.0):
        rows = params(len(index), temperature=temperature)
        got = run(logits, rows, None, masks_of(index, allowed), want_probability=True)
        assert_same(got, reference.choose(meant, rows, want_probability=True))
        assert int(got.token_ids[0]) == -1, "its mask allows nothing"


@each_run
def test_what_is_forbidden_may_be_no_number(run: Run) -> None:
    """And what is banned by its bias may not: -inf added to NaN is NaN."""
    logits = torch.zeros(4, 64)
    logits[:, 40] = float("nan")
    logits[3, 40] = float("inf")
    allowed = np.array([[-1, ~(1 << 8)], [-1, -1]])
    masks = masks_of([0, 1, -1, 0], allowed)
    edits = edits_of([], [], [(40, -np.inf, 1.0, 0.0)], [(40, -np.inf, 1.0, 0.0)])
    tokens = run(logits, params(4, temperature=0.0), edits, masks).token_ids
    assert tokens.tolist() == [0, -1, -1, 0]


@each_run
def test_entries_of_other_rows_and_other_chunks_are_left_alone(run: Run) -> None:
    """Rows of several blocks, with entries in the first, the last and none of them; each row as if it were alone."""
    n, vocab = 6, 9001
    logits = torch.randn(n, vocab, generator=torch.Generator().manual_seed(1)) * 3
    best = logits.argmax(1).tolist()
    lists = [
        [(4095, 30.0, 1.0, 0.0), (4096, 50.0, 1.0, 0.0)],
        [],
        [(9000, 50.0, 1.0, 0.0), (9001, 90.0, 1.0, 0.0), (0, 30.0, 1.0, 0.0)],
        [(-1, 90.0, 1.0, 0.0), (2**31 - 1, 90.0, 1.0, 0.0)],
        [(best[4], -np.inf, 1.0, 0.0)],
        [],
    ]
    rows = params(n, temperature=[0.0, 1.0, 0.0, 0.0, 1.0, 0.7], top_p=[1.0, 1.0, 1.0, 1.0, 1.0, 0.8])
    got = run(logits, rows, edits_of(*lists), want_probability=True)
    assert [int(got.token_ids[i]) for i in (0, 2, 3)] == [4096, 9000, best[3]]
    assert got.probability is not None
    for i, one in enumerate(lists):
        alone = RowParams(*(getattr(rows, name)[i : i + 1] for name in RowParams.__slots__))
        found = run(logits[i : i + 1], alone, edits_of(one), want_probability=True)
        assert found.token_ids.tolist() == got.token_ids[i : i + 1].tolist()
        assert found.probability is not None
        assert same(found.probability, got.probability[i : i + 1])


@each_run
def test_what_would_be_read_as_something_else_is_refused(run: Run) -> None:
    logits, rows, edits = torch.zeros(2, 40), params(2), edits_of([(1, 1.0, 1.0, 0.0)], [])
    masks = masks_of([0, -1], np.array([[-1, -1]]))
    assert run(logits, rows, edits, masks).token_ids.shape == (2,)
    for wrong in (
        replace(edits, starts=edits.starts[:2].clone()),
        replace(edits, starts=edits.starts.long()),
        replace(edits, token_ids=edits.token_ids.long()),
        replace(edits, penalty=torch.zeros(2)),
        replace(edits, repeat=edits.repeat.double()),
        replace(edits, bias=torch.zeros(1, 1)),
    ):
        with pytest.raises(ValueError, match="of the types it names"):
            run(logits, rows, wrong)
    for other in (
        replace(masks, index=masks.index[:1]),
        replace(masks, index=masks.index.long()),
        replace(masks, allowed=masks.allowed[:, :1]),
        replace(masks, allowed=masks.allowed.long()),
        replace(masks, allowed=torch.zeros(2, 2, dtype=torch.int32).T),
    ):
        with pytest.raises(ValueError, match=r"contiguous int32|a bit for every token"):
            run(logits, rows, None, replace(other))


@pytest.mark.parametrize("implementation", ["reference", "cpu"])
def test_a_replay_takes_entries_and_masks_as_they_are_then(implementation: str) -> None:
    logits, rows = torch.randn(3, 100, generator=torch.Generator().manual_seed(2)), params(3)
    edits = edits_of([(5, 0.0, 1.0, 0.0)], [(6, 0.0, 1.0, 0.0)], [])
    masks, picked = masks_of([-1, -1, 0], np.full((1, 4), -1)), torch.zeros(3, dtype=torch.int64)
    with use(implementation, "choose"):
        plain = choose(logits, rows).token_ids

        def work() -> None:
            picked.copy_(choose(logits, rows, edits, masks).token_ids)

        replay = record(work)
        replay()
        assert torch.equal(picked, plain)
        edits.bias.fill_(99.0)
        masks.allowed.zero_()[0, 2] = 1  # token 64
        replay()
    assert picked.tolist() == [5, 6, 64]
