"""Recording on the CPU: what a replay does again, what it refuses, and whose memory it uses."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.kernels import dispatch
from slipstream.kernels.compiled import float_pointer, kernel, long_pointer
from slipstream.kernels.kernel import recorder
from slipstream.kernels.lent_memory import LentMemory
from slipstream.kernels.program import Program
from slipstream.kernels.tape import recorder_of


@kernel
def _scaled(addresses: Any, n: int, factor: float, offset: Any, negative: Any) -> None:
    """addresses: of a source and a target, [n] float32. offset: a number or None."""
    source, target = float_pointer(addresses[0]), float_pointer(addresses[1])
    for i in range(n):
        value = source[i] * np.float32(factor)
        if offset is not None:
            value += np.float32(offset)
        target[i] = -value if negative else value


@kernel
def _first(address: int) -> float:
    """The first of the values there."""
    return float_pointer(address)[0]


@kernel
def _divided(address: int, divisor: int) -> None:
    """Divide an int64 by another."""
    by = long_pointer(divisor)[0]
    if by == 0:
        raise ZeroDivisionError
    long_pointer(address)[0] //= by


def scaled(x: Tensor, factor: float, offset: float | None = None, *, negative: bool = False) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    _scaled((x.data_ptr(), out.data_ptr()), x.numel(), factor, offset, negative)
    return out


class Work:
    """f of an input that stays where it is, into an output that does, too."""

    def __init__(self, f: Callable[[Tensor], Tensor], x: Tensor) -> None:
        self.f, self.x, self.out = f, x, torch.zeros_like(f(x))
        self.n_runs = 0

    def __call__(self) -> None:
        self.n_runs += 1
        self.out.copy_(self.f(self.x))


def replays(f: Callable[[Tensor], Tensor], x: Tensor, memory: LentMemory | None = None) -> Work:
    """Record f, then replay it for other values and compare with f itself; the work has then run once."""
    work = Work(f, x)
    replay = recorder_of(memory or LentMemory())(work)
    assert torch.equal(work.out, f(work.x))
    for seed in range(3):
        work.x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        replay()
        assert torch.equal(work.out, f(work.x))
    return work


@pytest.mark.parametrize(
    "f",
    [
        lambda x: scaled(x, 2.5),
        lambda x: scaled(scaled(x, 0.5, -1.0), 3.0, negative=True),
        lambda x: scaled(x.T, 2.0).T + 1,
        lambda x: scaled(x[1:, ::2], 2.0).flatten() * scaled(x, -1.0, 7.0).view(-1)[:4],
        lambda x: torch.cat((x, scaled(x, 2.0)), 1).sum(0),
        lambda x: x.new_zeros(3).index_add_(0, torch.arange(3), x.sum(1)),
        lambda x: torch.topk(scaled(x, 2.0), 2).values,
        lambda x: x.masked_fill(x > 0, 0.0).to(torch.bfloat16).float(),
        lambda x: torch.stack([one.clone() for one in x.unbind(0)]) + torch.empty((3, 0)).sum(),
    ],
)
def test_a_replay_does_for_other_values_what_the_work_does(f: Callable[[Tensor], Tensor]) -> None:
    work = replays(f, torch.arange(12.0).view(3, 4))
    assert work.n_runs == 1


@pytest.mark.parametrize(
    ("f", "why"),
    [
        (lambda x: x * x.sum().item(), "_local_scalar_dense"),
        (lambda x: x[x > 0].sum(), "index"),
        (lambda x: x.masked_select(x > 0).sum(), "masked_select"),
        (lambda x: x * len((x > 0).nonzero()), "nonzero"),
        (lambda x: x + float(torch.equal(x, x)), "equal"),
        (lambda x: x + torch.tensor([1.0]), "lift_fresh"),
        (lambda x: x + _first(x.data_ptr()), "_first returns a value"),
    ],
)
def test_work_that_looks_at_a_value_runs_as_it_is(
    f: Callable[[Tensor], Tensor], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert replays(f, torch.ones(3, 4)).n_runs == 4
    assert why in caplog.text
    assert len(caplog.records) == 1


def test_a_reason_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    record = recorder_of(LentMemory())
    for _ in range(3):
        record(lambda: print(torch.ones(1).item()))
    assert len(caplog.records) == 1


def test_a_call_that_fails_ends_the_replay_and_those_behind_it_are_not_made() -> None:
    counts, divisors = torch.tensor([64, 64, 64]), torch.tensor([2, 2, 2])

    def work() -> None:
        for i in range(0, 24, 8):
            _divided(counts.data_ptr() + i, divisors.data_ptr() + i)

    replay = recorder_of(LentMemory())(work)
    replay()
    assert counts.tolist() == [16, 16, 16]
    divisors[1] = 0
    with pytest.raises(RuntimeError, match="call 1 of 3 of a recorded pass failed"):
        replay()
    assert counts.tolist() == [8, 16, 16]
    divisors[1] = 4
    replay()
    assert counts.tolist() == [4, 4, 8]


def test_an_argument_that_has_no_words_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    array = np.zeros(1)
    x = torch.ones(3, 4)
    assert replays(lambda x: x + _filled(array), x).n_runs == 4
    assert "an argument is a ndarray" in caplog.text


@kernel
def _fill(array: Any) -> None:
    array[0] = 2.0


def _filled(array: Any) -> float:
    _fill(array)
    return float(array[0])


def _looks(x: Tensor, factor: float) -> Tensor:
    """An implementation of an operator that looks at values, which recorded work must not."""
    return x * (factor if x.sum().item() > 0 else -factor)


def _pair(x: Tensor, factor: float) -> tuple[Tensor, float]:
    return x * factor, factor


def _recordable(x: Tensor, factor: float) -> Tensor:
    return scaled(scaled(x, factor), factor)


def operator(function: Callable[..., Any]) -> Callable[..., Any]:
    """An operator of which this is the implementation."""
    made: dispatch.Op[Any, Any, Any] = dispatch.Op(function, ("reference",), any_dtype=True)
    made.swap_forced(function)
    return made


def test_an_operator_that_may_look_at_values_is_one_call() -> None:
    op = operator(_looks)
    assert replays(lambda x: scaled(op(scaled(x, 1.0), 3.0), 2.0), torch.ones(3, 4)).n_runs == 1


def test_a_recordable_operator_is_recorded_call_by_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    add = Program.add
    monkeypatch.setattr(Program, "add", lambda *args: (calls.append(1), add(*args))[1])
    op = operator(_recordable)
    replays(lambda x: op(x, 3.0), torch.ones(3, 4))
    assert not calls  # its module does not say so
    monkeypatch.setitem(globals(), "RECORDABLE", True)
    replays(lambda x: op(x, 3.0), torch.ones(3, 4))
    assert len(calls) == 2


def test_an_operator_with_other_results_than_tensors_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    op = operator(_pair)
    assert replays(lambda x: op(x, 3.0)[0], torch.ones(3, 4)).n_runs == 4
    assert "_pair gives more than tensors" in caplog.text


def test_memory_is_used_again_by_the_next_tensor_and_the_next_recording() -> None:
    memory = LentMemory()
    like = torch.zeros(5, 7)
    first = memory.like(like)
    address, other = first.data_ptr(), memory.like(like)
    assert other.data_ptr() != address
    view = first[1:, ::2]
    alias = memory.alias(view)
    assert (alias.data_ptr(), alias.stride(), alias.shape) == (view.data_ptr(), view.stride(), view.shape)
    first.fill_(3.0)
    assert torch.equal(alias, view)
    del first
    assert memory.like(like).data_ptr() != address  # the view still has a claim
    del view
    again, more = memory.like(like), memory.like(like)
    assert again.data_ptr() == address  # the alias has none
    assert more.data_ptr() != address
    assert memory.alias(like) is like


def test_a_replay_keeps_its_memory() -> None:
    """Nothing else of a recording may be left when it is replayed."""
    x = torch.randn(64, 64)
    work = Work(lambda x: scaled(scaled(x, 2.0), 3.0), x)
    memory = LentMemory()
    replay, gone = recorder_of(memory)(work), weakref.ref(memory)
    del memory
    assert gone() is not None
    replay()
    assert torch.equal(work.out, x * 6)
    del replay
    gc.collect()
    assert gone() is None


def test_shapes_strides_and_dtypes_of_lent_memory() -> None:
    memory = LentMemory()
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8):
        for shape in ((), (0,), (3,), (2, 0, 4), (4, 5, 6)):
            meant = torch.zeros(shape, dtype=dtype)
            for one in (meant, meant.transpose(0, -1) if shape else meant):
                found = memory.like(one)
                assert (found.shape, found.stride(), found.dtype) == (one.shape, one.stride(), one.dtype)
                found.copy_(one)
                assert found.data_ptr() % 64 == 0


def test_what_is_computed_on_the_way_is_forgotten() -> None:
    """A long chain of large tensors needs memory for two."""
    memory = LentMemory()

    def f(x: Tensor) -> Tensor:
        for _ in range(20):
            x = scaled(x, 1.5)
        return x

    for _ in range(3):
        replays(f, torch.randn(64, 64), memory)
    assert sum(len(blocks) for blocks in memory._free.values()) <= 2


def test_all_widths_need_four_times_the_memory_of_the_widest_at_most() -> None:
    memory, n_columns = LentMemory(), 1000
    for n_rows in range(1, 65):
        memory.like(torch.zeros(n_rows, n_columns))
    lent = [one for blocks in memory._free.values() for one in blocks]
    assert 64 * n_columns * 4 <= sum(one.nbytes for one in lent) <= 4 * 64 * n_columns * 4


def test_other_threads_are_not_recorded() -> None:
    x = torch.ones(4)
    seen: list[object] = []

    def beside() -> None:
        seen.append(recorder())
        scaled(x, 2.0)

    def f(x: Tensor) -> Tensor:
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()
        assert recorder() is not None
        return scaled(x, 3.0)

    assert recorder() is None
    work = Work(lambda x: x * 1, x)
    work.f = f
    recorder_of(LentMemory())(work)
    assert seen == [None]
    assert recorder() is None
