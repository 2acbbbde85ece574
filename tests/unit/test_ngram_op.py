"""`ngram`: the reference against a search written out, the CUDA kernel in the emulator against the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from slipstream.kernels.ngram import cuda, reference
from slipstream.kernels.ngram.op import N_MAX
from tests.emulator import emulated, needs_compiler, same

Ngram = Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]


def searched(text: list[int], m: int) -> tuple[list[int], int]:
    """The definition in words: the longest earlier run of the last tokens, the newest of equals, and what follows."""
    for n in range(min(N_MAX, len(text) - 1), 0, -1):
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == text[-n:]:
                followed = list(text)
                while len(followed) < start + n + m:
                    followed.append(followed[len(followed) - len(text) + start + n])
                return followed[start + n : start + n + m], n
    return [0] * m, 0


def case(seed: int, capacity: int, n_words: int, n_slots: int = 7) -> tuple[Tensor, ...]:
    """Random texts, lengths from 0 to capacity, 9 rows in any order, one of them padding. Behind a text lies a repeat
    of its end, which must not be found."""
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(n_words, (n_slots, capacity), generator=random, dtype=torch.int32)
    lengths = torch.randint(capacity + 1, (n_slots,), generator=random, dtype=torch.int32)
    lengths[:2] = torch.tensor([capacity, min(capacity, 3)])
    slots = torch.randint(n_slots, (9,), generator=random)
    slots[4] = -1
    return tokens, lengths, slots


def check(ngram: Ngram, arguments: tuple[Tensor, ...], m: int) -> list[int]:
    """Compare every row with the search; returns how many tokens matched."""
    tokens, lengths, slots = arguments
    drafts, n_matched = ngram(tokens, lengths, slots, m)
    assert drafts.dtype == n_matched.dtype == torch.int32
    assert drafts.shape == (len(slots), m)
    for row, slot in enumerate(slots.tolist()):
        text = tokens[slot, : lengths[slot]].tolist() if slot >= 0 else []
        assert (drafts[row].tolist(), int(n_matched[row])) == searched(text, m), row
    return [int(n) for n in n_matched]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("capacity", "n_words"), [(1, 2), (17, 2), (200, 2), (300, 40)])
def test_the_reference_is_the_search(seed: int, capacity: int, n_words: int) -> None:
    check(reference.ngram, case(seed, capacity, n_words), 5)


@pytest.mark.sampled(keep=12)
@needs_compiler
@pytest.mark.parametrize("order", [0, 1, 7])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("capacity", "n_words"), [(1, 2), (17, 2), (2049, 3), (5000, 60)])
def test_the_kernel_is_the_search(seed: int, capacity: int, n_words: int, order: int) -> None:
    arguments = case(seed, capacity, n_words)
    with emulated(order=order):
        check(cuda.ngram, arguments, 1 + 11 * seed)
        found = cuda.ngram(*arguments, 40)
    for one, meant in zip(found, reference.ngram(*arguments, 40), strict=True):
        assert same(one, meant)


@needs_compiler
@pytest.mark.parametrize("start", [0, 1, 2047, 2048, 4095, 4096, 6000])
def test_a_run_is_found_at_every_border(start: int) -> None:
    capacity, n = 6016, 12
    tokens = torch.arange(capacity, dtype=torch.int32)[None].contiguous()
    is_there = start + n <= capacity - n
    tokens[0, -n:] = tokens[0, start : start + n] if is_there else 7
    arguments = (tokens, torch.tensor([capacity]).int(), torch.tensor([0]))
    with emulated():
        found = check(cuda.ngram, arguments, 8)
    assert found == check(reference.ngram, arguments, 8)
    assert found == ([n] if is_there else [11])  # else a token that repeats


def test_the_newest_of_equal_runs_serves_and_a_loop_goes_on() -> None:
    text = torch.tensor([[5, 1, 2, 9, 5, 1, 2, 8, 5, 1, 2]], dtype=torch.int32)
    arguments = (text, torch.tensor([11]).int(), torch.tensor([0]))
    drafts, n_matched = reference.ngram(*arguments, 10)
    assert drafts.tolist() == [[8, 5, 1, 2, 8, 5, 1, 2, 8, 5]]
    assert n_matched.tolist() == [3]


def test_wrong_types_are_refused() -> None:
    tokens, lengths, slots = case(0, 20, 2)
    with emulated(), pytest.raises(ValueError, match="int32"):
        cuda.ngram(tokens.long(), lengths, slots, 4)
    with emulated(), pytest.raises(ValueError, match="int64"):
        cuda.ngram(tokens, lengths, slots.int(), 4)


def test_a_text_longer_than_can_be_counted_is_refused() -> None:
    tokens = torch.empty(1, cuda.MOST + 1, dtype=torch.int32, device="meta")
    lengths, slots = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    with emulated(), pytest.raises(ValueError, match="67108864"):
        cuda.ngram(tokens, lengths, slots, 4)
