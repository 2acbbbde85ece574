"""`choose`: what survives truncation, the pick, and the compiled version against the definition, bit for bit."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numba
import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream import kernels
from slipstream.kernels.choose import noise
from slipstream.kernels.choose import truncate as compiled
from slipstream.kernels.choose.cpu import SERIAL_BELOW
from slipstream.kernels.choose.mass import weights
from slipstream.kernels.choose.op import Choice, RowParams, choose
from slipstream.kernels.choose.reference import survivors
from slipstream.kernels.choose.truncate import LEAST, SEGMENT, find_cut, new_work, scan, survives
from slipstream.kernels.compiled import SOURCES, F, float_pointer
from slipstream.kernels.disk_cache import cache_on_disk
from slipstream.kernels.vector import WIDTH, load, store


def compiled_once(dispatcher: F) -> F:
    """Kept on disk as kernels are, until their sources change or this file."""
    cache_on_disk(dispatcher, SOURCES)
    return dispatcher


IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["reference", "cpu"])


def params(n_rows: int, **values: Any) -> RowParams:
    """Row parameters, each one value for all rows or a list of one per row."""
    defaults = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": list(range(n_rows)),
        "position": 9,
    }
    types = {
        "temperature": torch.float32,
        "top_k": torch.int32,
        "top_p": torch.float32,
        "min_p": torch.float32,
        "seed": torch.int64,
        "position": torch.int64,
    }
    merged = {**defaults, **values}
    return RowParams(
        **{
            name: torch.tensor(value if isinstance(value, list) else [value] * n_rows, dtype=types[name])
            for name, value in merged.items()
        }
    )


def run(implementation: str, logits: Tensor, rows: RowParams) -> Choice:
    with kernels.use(implementation, "choose"):
        return choose(logits, rows, want_probability=True)


def random_rows(trial: int) -> tuple[Tensor, RowParams]:
    """Logits with all that is awkward somewhere: ties, masks, zeros of both signs, NaN, coarse types."""
    g = torch.Generator().manual_seed(trial)
    n, vocab = 12, int(torch.randint(1, 2500, (), generator=g))
    logits = torch.randn(n, vocab, generator=g) * float(torch.rand((), generator=g) * 6)
    if trial % 3 == 0:
        logits = (logits * 2).round() / 2
    if trial % 4 == 0:
        logits[1] = 0.0
        logits[1, ::2] = -0.0
    if trial % 7 == 0:
        logits[:, torch.randperm(vocab, generator=g)[: vocab // 2]] = float("-inf")
    if trial % 11 == 0:
        logits[3, 0], logits[4], logits[5, vocab // 2] = float("nan"), float("-inf"), float("inf")
    if trial % 5 == 0:
        logits = logits.to((torch.bfloat16, torch.float16, torch.float64)[trial % 15 // 5])

    def some(values: Tensor, otherwise: float, share: float) -> Tensor:
        return torch.where(torch.rand(n, generator=g) < share, values, otherwise)

    return logits, RowParams(
        temperature=some(torch.rand(n, generator=g) ** 3 * 6, 0.0, 0.9),
        top_k=some(torch.randint(1, 60, (n,), generator=g), 0, 0.5).int(),
        top_p=some(torch.rand(n, generator=g), 1.0, 0.5),
        min_p=some(torch.rand(n, generator=g) * 0.3, 0.0, 0.5),
        seed=torch.randint(-(2**62), 2**62, (n,), generator=g),
        position=torch.randint(0, 9999, (n,), generator=g),
    )


@pytest.mark.parametrize("trial", range(40))
def test_compiled_and_defined_picks_agree_bit_for_bit(trial: int) -> None:
    logits, rows = random_rows(trial)
    got, meant = run("cpu", logits, rows), run("reference", logits, rows)
    assert torch.equal(got.token_ids, meant.token_ids)
    assert got.probability is not None
    assert meant.probability is not None
    assert torch.equal(got.probability, meant.probability)


@pytest.mark.slow
def test_picks_agree_on_many_rows_and_on_a_large_vocabulary() -> None:
    for trial in range(40, 1500):
        logits, rows = random_rows(trial)
        assert torch.equal(run("cpu", logits, rows).token_ids, run("reference", logits, rows).token_ids), (
            trial
        )
    for scale in (0.01, 3.0, 8.0):
        logits = torch.randn(8, 151_936, generator=torch.Generator().manual_seed(5)) * scale
        for rows in (params(8), params(8, top_p=0.95, temperature=0.7), params(8, top_k=40_000, top_p=0.9)):
            assert torch.equal(run("cpu", logits, rows).token_ids, run("reference", logits, rows).token_ids)


@compiled_once
@numba.njit
def compiled_weights(source: int, target: int, n: int) -> None:
    for i in range(0, n, WIDTH):
        store(float_pointer(target), i, compiled.weights(load(float_pointer(source), i)))


def test_compiled_weights_have_the_bits_of_the_definition() -> None:
    distance = -(torch.rand(1 << 20, generator=torch.Generator().manual_seed(0)) ** 2) * 60
    distance[:2] = torch.tensor([0.0, float("-inf")])
    got = torch.empty_like(distance)
    compiled_weights(distance.data_ptr(), got.data_ptr(), len(distance))
    assert torch.equal(got, weights(distance))


@IMPLEMENTATIONS
def test_equal_values_give_the_lowest_id(implementation: str) -> None:
    """Logits so large that the noise is rounded to whole numbers: many tokens tie, also of unequal logits."""
    logits = torch.full((200, 700), 1e7)
    logits[:, :512] -= 3
    rows = params(200)
    words = noise.words(rows.seed, rows.position, 700)
    value = logits + noise.gumbel(words)
    assert int((value == value.max(1, keepdim=True).values).sum()) > 250
    assert torch.equal(run(implementation, logits, rows).token_ids, value.argmax(1))


@compiled_once
@numba.njit
def compiled_cut(address: int, n: int, top_k: int, top_p: float) -> Any:
    row, peaks, work = float_pointer(address), np.empty((n + SEGMENT - 1) // SEGMENT, np.float32), new_work(n)
    largest, _ = scan(row, n, peaks)
    cut = LEAST, np.int64(n)
    if 0 < top_k < n:
        cut = find_cut((row, n, peaks, largest), top_k, 1.0, cut, work)
    if top_p < 1:
        cut = find_cut((row, n, peaks, largest), 0, top_p, cut, work)
    kept = np.zeros(n, np.bool_)
    for token in range(n):
        kept[token] = survives(row[token], token, cut) and row[token] > LEAST
    return kept


@pytest.mark.sampled(keep=10)
@pytest.mark.parametrize("trial", range(1, 41))
def test_the_compiled_cut_keeps_the_same_tokens(trial: int) -> None:
    logits, rows = random_rows(trial)
    for i, row in enumerate(logits.float()):
        if bool(row.max().isfinite()):
            kept = survivors(row, int(rows.top_k[i]), float(rows.top_p[i]), 0.0)
            got = compiled_cut(
                row.contiguous().data_ptr(), len(row), int(rows.top_k[i]), float(rows.top_p[i])
            )
            assert sorted(kept.tolist()) == np.flatnonzero(got).tolist(), i


def brute_survivors(row: Tensor, top_k: int, top_p: float, min_p: float) -> list[int]:
    """By words of the definition, in float64; right unless a sum comes within rounding of top_p."""
    order = sorted(range(len(row)), key=lambda token: (-float(row[token]), token))
    if top_k:
        order = order[:top_k]
    odds = torch.softmax(row[order].double(), 0).tolist()
    kept = []
    for token, share in zip(order, odds, strict=True):
        if top_p < 1 and kept and sum(odds[: len(kept)]) >= top_p:
            break
        kept.append((token, share))
    return [token for token, share in kept if share >= min_p * odds[0]]


@pytest.mark.parametrize("seed", range(10))
def test_survivors_are_those_of_the_definition(seed: int) -> None:
    row = torch.randn(300, generator=torch.Generator().manual_seed(seed)) * 2
    for top_k, top_p, min_p in ((0, 1.0, 0.0), (7, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.05), (40, 0.63, 0.1)):
        assert survivors(row, top_k, top_p, min_p).tolist() == brute_survivors(row, top_k, top_p, min_p)


def test_ties_at_the_cut_keep_lower_ids() -> None:
    row = torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0, -0.0, 0.0, 2.0])
    assert survivors(row, 3, 1.0, 0.0).tolist() == [1, 3, 2]
    assert survivors(row, 4, 1.0, 0.0).tolist() == [1, 3, 2, 4]
    assert survivors(row, 7, 1.0, 0.0).tolist() == [1, 3, 2, 4, 7, 0, 5]
    assert survivors(torch.zeros(8), 0, 0.5, 0.0).tolist() == [0, 1, 2, 3]  # reaches one half exactly
    assert survivors(row, 0, 0.0, 0.0).tolist() == [1]
    assert survivors(row, 0, 1.0, 1.0).tolist() == [1, 3]


@IMPLEMENTATIONS
def test_temperature_0_takes_the_lowest_id_of_the_largest(implementation: str) -> None:
    logits = torch.zeros(4, 1000)
    logits[1, [5, 700]], logits[2, 999] = 2.0, 1e-30
    logits[3] = float("-inf")
    logits[3, [998, 999]] = -5.0
    rows = params(4, temperature=0.0, top_k=[0, 1, 3, 0], top_p=[1.0, 0.5, 0.1, 1.0])
    assert run(implementation, logits, rows).token_ids.tolist() == [0, 5, 999, 998]
    tiny = params(4, temperature=[1e-6, 1e-38, 1e-30, 0.0])  # would overflow; counts as 0
    assert run(implementation, logits, tiny).token_ids.tolist() == [0, 5, 999, 998]


@IMPLEMENTATIONS
def test_a_row_without_numbers_is_marked(implementation: str) -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(0))
    logits[1, 299], logits[2], logits[3, 4] = float("nan"), float("-inf"), float("inf")
    logits[4, :] = float("nan")
    got = run(implementation, logits, params(6, temperature=[0.0, 0.0, 0.0, 1.0, 1.0, 1.0]))
    assert [token >= 0 for token in got.token_ids.tolist()] == [True, False, False, False, False, True]
    assert got.probability is not None
    assert got.probability[1:5].tolist() == [0.0] * 4


@IMPLEMENTATIONS
def test_probability_is_softmax_of_the_row_as_given(implementation: str) -> None:
    logits = torch.randn(5, 999, generator=torch.Generator().manual_seed(0)) * 3
    got = run(implementation, logits, params(5, temperature=0.3, top_k=5))
    meant = logits.double().softmax(-1).gather(1, got.token_ids[:, None])[:, 0]
    assert got.probability is not None
    assert torch.allclose(got.probability.double(), meant, rtol=1e-5)
    with kernels.use(implementation, "choose"):
        assert choose(logits, params(5)).probability is None


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (2.0, 0.8)])
def test_frequencies_are_those_of_softmax(temperature: float, top_p: float) -> None:
    """Chi-square over 40,000 positions of one seed, once more for neighbouring seeds at one position."""
    row, n = torch.tensor([2.0, -1.0, 0.5, 0.0, 1.0, -3.0, 2.0, 1.5]), 40_000
    kept = survivors(row, 0, top_p, 0.0)
    odds = torch.zeros(len(row), dtype=torch.float64)
    odds[kept] = (row[kept].double() / temperature).softmax(0)
    counts = {"position": list(range(n)), "seed": list(range(n))}
    for name, values in counts.items():
        other = {"seed": 42} if name == "position" else {"position": 7}
        rows = params(n, temperature=temperature, top_p=top_p, **{name: values}, **other)
        found = run("cpu", row.expand(n, -1), rows).token_ids.bincount(minlength=len(row))
        assert int(found[odds == 0].sum()) == 0
        used = odds > 0
        chi2 = float(((found[used] - n * odds[used]) ** 2 / (n * odds[used])).sum())
        assert chi2 < 35, (name, found.tolist())  # 7 degrees of freedom: one in 100,000


@IMPLEMENTATIONS
def test_a_pick_moves_with_its_noise_alone(implementation: str) -> None:
    """The same seed and position pick alike from logits that differ elsewhere; another seed does not."""
    logits = torch.randn(1, 800, generator=torch.Generator().manual_seed(3)).expand(64, -1)
    same = run(implementation, logits, params(64, seed=5)).token_ids
    assert len(set(same.tolist())) == 1
    assert (
        len(set(run(implementation, logits, params(64, seed=5, position=list(range(64)))).token_ids.tolist()))
        > 30
    )
    assert len(set(run(implementation, logits, params(64)).token_ids.tolist())) > 30
    raised = logits.clone()
    raised[:, int(same[0])] += 1
    assert torch.equal(run(implementation, raised, params(64, seed=5)).token_ids, same)


def test_rows_do_not_depend_on_company_or_threads() -> None:
    logits, rows = random_rows(2)
    logits = logits.float().repeat(1, 16)
    whole = run("cpu", logits, rows).token_ids
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    assert logits.numel() > SERIAL_BELOW
    assert torch.equal(run("cpu", logits, rows).token_ids, whole)
    torch.set_num_threads(before)
    for i in range(len(logits)):
        alone = RowParams(**{field.name: getattr(rows, field.name)[i : i + 1] for field in fields(rows)})
        assert torch.equal(run("cpu", logits[i : i + 1], alone).token_ids, whole[i : i + 1])


def test_parameters_of_the_wrong_shape_are_refused() -> None:
    rows = params(3)
    with pytest.raises(ValueError, match="one per row"):
        run("cpu", torch.zeros(4, 8), rows)
