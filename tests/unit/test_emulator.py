"""The emulator runs correct kernels as a GPU would, and reports what a GPU would not forgive."""

from __future__ import annotations

import pytest
import torch

from slipstream.kernels.cuda.launcher import launch
from slipstream.kernels.cuda.source import Source
from tests.emulator import EmulatedError, emulated, needs_compiler

pytestmark = needs_compiler
ORDERS = (0, 1, 2, 7)
GOOD = (
    "shuffles",
    "block_sums<float>",
    "block_sums<bfloat16>",
    "block_sums<float16>",
    "product<bfloat16>",
    "product<float16>",
    "product_turned<bfloat16>",
    "product_turned<float16>",
    "group_product<bfloat16>",
    "group_product<float16>",
    "turned_matrix",
    "unwritten",
    "scaled",
)
BAD = (
    *("barrier", "deadlock", "mask", "lane", "end", "alignment", "index", "wait", "race", "warp_race"),
    *("arrival", "group", "left", "forever", "begin"),
)
PROBES = Source(__file__, "../emulator/probes.cu", (*GOOD, *(f"bad_{name}" for name in BAD)))
NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float": torch.float32}


def run(
    instance: str, block: int, *arguments: object, grid: int = 1, shared: int = 0, order: int = 0
) -> None:
    with emulated(order=order):
        launch(PROBES, instance, (grid, 1, 1), block, *arguments, shared=shared)  # type: ignore[arg-type]


@pytest.mark.parametrize("order", ORDERS)
def test_lanes_exchange_values(order: int) -> None:
    x = torch.randn(64)
    out = torch.empty(7, 64)
    run("shuffles", 64, x, out, order=order)
    warps = x.view(2, 32)
    lanes = torch.arange(32)
    torch.testing.assert_close(out[0].view(2, 32), warps.sum(1, keepdim=True).expand(2, 32))
    assert torch.equal(out[1].view(2, 32), warps[:, (lanes - 1).clamp(min=0)])
    assert torch.equal(out[2].view(2, 32), warps[:, torch.where(lanes % 16 + 3 < 16, lanes + 3, lanes)])
    assert torch.equal(out[3].view(2, 32), warps[:, lanes ^ 5])
    assert torch.equal(out[4].view(2, 32), warps[:, lanes // 8 * 8 + 2])
    assert torch.equal(out[5].view(2, 32), (warps > 0).sum(1, keepdim=True).float().expand(2, 32))
    assert torch.equal(out[6].view(2, 32)[:, 0::2], warps[:, 30:31].expand(2, 16))
    sums = torch.arange(64).view(2, 32)[:, 1::2].sum(1, keepdim=True).float()
    assert torch.equal(out[6].view(2, 32)[:, 1::2], sums.expand(2, 16))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", NARROW)
def test_blocks_share_memory_and_meet_at_barriers(name: str, order: int) -> None:
    x = torch.randint(-8, 9, (5, 96)).to(NARROW[name])
    sums, n_done = torch.empty(5), torch.zeros(1, dtype=torch.int32)
    run(f"block_sums<{name}>", 96, x, sums, n_done, grid=5, shared=96 * 4, order=order)
    assert torch.equal(sums, x.float().sum(1))
    assert n_done.item() == 5


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_tensor_core_products_are_matrix_products(name: str) -> None:
    a, b = torch.randn(16, 16).to(NARROW[name]), torch.randn(8, 16).to(NARROW[name])
    straight, turned = torch.empty(16, 8), torch.empty(16, 8)
    run(f"product<{name}>", 32, a, b, straight)
    run(f"product_turned<{name}>", 32, a, b.t().contiguous(), turned)
    meant = (a.double() @ b.double().t()).float()
    torch.testing.assert_close(straight, meant, rtol=1e-6, atol=1e-6)
    assert torch.equal(straight, turned)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_products_of_warpgroups_are_matrix_products(name: str, order: int) -> None:
    a, b = torch.randn(64, 16).to(NARROW[name]), torch.randn(128, 16).to(NARROW[name])
    columns = b.view(16, 8, 2, 8).transpose(1, 2).contiguous()  # [eight columns][half][column][input]
    out = torch.empty(64, 128)
    run(f"group_product<{name}>", 128, a, columns, out, order=order)
    torch.testing.assert_close(out, (a.double() @ b.double().t()).float(), rtol=1e-6, atol=1e-6)


def test_a_matrix_of_a_warp_is_turned() -> None:
    x = torch.randint(-(2**15), 2**15, (8, 8), dtype=torch.int16)
    out = torch.empty(8, 8, dtype=torch.int16)
    run("turned_matrix", 32, x.view(torch.int32), out.view(torch.int32))
    assert torch.equal(out, x.t())


def test_shared_memory_is_poisoned() -> None:
    out = torch.zeros(32)
    run("unwritten", 32, out, shared=128)
    assert out.isnan().all()


def test_arguments_arrive_and_only_the_right_kinds() -> None:
    x, out = torch.randn(101), torch.zeros(100)
    run("scaled", 32, x, out, 99, 0.5, 1, grid=4)
    assert torch.equal(out[:99], x[1:100] * 0.5)
    assert out[99] == 0
    with pytest.raises(EmulatedError, match="argument 3 of scaled"):
        run("scaled", 32, x, out, 100, 2, 1)
    with pytest.raises(EmulatedError, match="takes 5 arguments"):
        run("scaled", 32, x, out, 100)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("barrier", (), "after 5 of them have ended"),
        ("deadlock", (), "wait for each other for ever"),
        ("mask", (), "leaves it out"),
        ("lane", (), "not in mask"),
        ("end", (63,), "outside every tensor"),
        ("alignment", (), "compiler's check"),
        ("index", (8,), "compiler's check"),
        ("left", (), "products under way"),
        ("forever", (), "32 at barriers in memory"),
        ("begin", (), "not begun"),
    ],
)
def test_what_a_gpu_does_not_forgive_is_reported(name: str, arguments: tuple[int, ...], words: str) -> None:
    with pytest.raises(EmulatedError, match=words):
        run(f"bad_{name}", 32, torch.zeros(64), *arguments)


def test_memory_before_a_tensor_is_outside_too() -> None:
    with pytest.raises(EmulatedError, match="outside every tensor"):
        run("bad_end", 32, torch.zeros(64), -2, order=1)


def test_a_fault_names_its_line() -> None:
    with pytest.raises(EmulatedError, match=r"probes\.cu:\d+"):
        run("bad_end", 1, torch.zeros(64), 63)


def test_copies_arrive_no_earlier_than_they_must() -> None:
    out = torch.zeros(1)
    run("bad_wait", 1, torch.ones(4), out)
    assert out.isnan().all()


def test_bulk_copies_and_products_of_warpgroups_are_as_late() -> None:
    out = torch.zeros(2)
    run("bad_arrival", 1, torch.ones(4), out)
    assert out[0].isnan()
    assert out[1] == 1
    sums = torch.zeros(128)
    run("bad_group", 128, sums)
    assert (sums == 16).all()  # of 32


def test_another_order_of_threads_shows_a_missing_barrier() -> None:
    out = torch.zeros(32)
    run("bad_race", 32, out)
    assert (out == 2).all()
    run("bad_race", 32, out, order=1)
    assert out[1:].isnan().all()


def test_warp_after_warp_shows_a_missing_barrier_between_them() -> None:
    out = torch.zeros(64)
    run("bad_warp_race", 64, out, order=1)
    assert (out == 2).all()
    run("bad_warp_race", 64, out, order=2)
    assert out[:32].isnan().all()
