"""`ngram`: the reference against a search written out, the CUDA kernel in the emulator against the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from slipstream.kernels.ngram import cuda, reference
from tests.emulator import emulated, needs_compiler, same

Ngram = Callable[[Tensor, Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]


def searched(text: list[int], n: int, m: int) -> list[int]:
    """The definition in words: the newest earlier place where the last n tokens stand, and what follows."""
    if not 1 <= n <= 16:
        return []
    for start in range(len(text) - n - 1, -1, -1):
        if text[start : start + n] == text[-n:]:
            return text[start + n : start + n + m]
    return []


def case(seed: int, capacity: int, n_words: int, n_slots: int = 7) -> tuple[Tensor, ...]:
    """Random texts, lengths from 0 to capacity, 9 rows in any order, one of them padding. Behind a text lies a repeat
    of its end, which must not be found."""
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(n_words, (n_slots, capacity), generator=random, dtype=torch.int32)
    lengths = torch.randint(capacity + 1, (n_slots,), generator=random, dtype=torch.int32)
    lengths[:2] = torch.tensor([capacity, min(capacity, 3)])
    slots = torch.randint(n_slots, (9,), generator=random)
    slots[4] = -1
    n_match = torch.randint(0, 18, (9,), generator=random, dtype=torch.int32)
    n_match[:4] = torch.tensor([1, 2, 3, 16])
    return tokens, lengths, slots, n_match


def check(ngram: Ngram, arguments: tuple[Tensor, ...], m: int) -> int:
    """Compare every row with the search; returns how many rows drafted."""
    tokens, lengths, slots, n_match = arguments
    drafts, n_drafts = ngram(tokens, lengths, slots, n_match, m)
    assert drafts.dtype == n_drafts.dtype == torch.int32
    assert drafts.shape == (len(slots), m)
    for row, slot in enumerate(slots.tolist()):
        text = tokens[slot, : lengths[slot]].tolist() if slot >= 0 else []
        meant = searched(text, int(n_match[row]), m)
        assert n_drafts[row] == len(meant), row
        assert drafts[row].tolist() == meant + [0] * (m - len(meant)), row
    return int((n_drafts > 0).sum())


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("capacity", "n_words"), [(1, 2), (17, 2), (200, 2), (300, 40)])
def test_the_reference_is_the_search(seed: int, capacity: int, n_words: int) -> None:
    check(reference.ngram, case(seed, capacity, n_words), 5)


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
def test_a_match_is_found_at_every_border(start: int) -> None:
    capacity, n = 6016, 16
    tokens = torch.arange(capacity, dtype=torch.int32)[None].contiguous()
    tokens[0, -n:] = tokens[0, start : start + n] if start + n <= capacity - n else 7
    arguments = (tokens, torch.tensor([capacity]).int(), torch.tensor([0]), torch.tensor([n]).int())
    with emulated():
        check(cuda.ngram, arguments, 8)
    n_rows = check(reference.ngram, arguments, 8)
    assert n_rows == (start + n <= capacity - n)


def test_wrong_types_are_refused() -> None:
    tokens, lengths, slots, n_match = case(0, 20, 2)
    with emulated(), pytest.raises(ValueError, match="int32"):
        cuda.ngram(tokens.long(), lengths, slots, n_match, 4)
    with emulated(), pytest.raises(ValueError, match="int64"):
        cuda.ngram(tokens, lengths, slots.int(), n_match, 4)


def test_the_registered_op_and_its_fake_agree_with_the_reference() -> None:
    arguments = case(3, 50, 2)
    meant = reference.ngram(*arguments, 6)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        faked = torch.ops.slipstream.ngram_ngram(*(mode.from_tensor(one) for one in arguments), 6)
    for fake, real in zip(faked, meant, strict=True):
        assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


@needs_compiler
def test_a_traced_graph_calls_the_registered_op() -> None:
    arguments = case(3, 50, 2)
    seen: list[object] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    compiled = torch.compile(lambda *inputs: cuda.ngram(*inputs, 6), backend=backend, fullgraph=True)
    with emulated():
        found = compiled(*arguments)
    assert torch.ops.slipstream.ngram_ngram.default in seen
    for one, meant in zip(found, reference.ngram(*arguments, 6), strict=True):
        assert same(one, meant)
