"""Attention by products of warpgroups, in the emulator: every row has the bits of the kernel for few queries."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slipstream.kernels.attention import cuda, warpgroups
from slipstream.kernels.cuda.launcher import launched_by
from slipstream.kernels.cuda.source import Grid
from tests.emulator import emulated, needs_compiler, same
from tests.oracle.pictured import Pictured, stores_of
from tests.oracle.test_cuda_attention import Prompt, cancelling, make_sinks, make_stores, poison_unseen
from tests.oracle.test_kernels import make_spans, random

pytestmark = [needs_compiler, pytest.mark.sampled(keep=2, together=True)]


class Hopper:
    """A device with warpgroups, while it is one."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch
        self.n_groups: list[int] = []  # of the launches
        named = warpgroups.kernel

        def noted(q: Tensor, n_groups: int) -> str:
            self.n_groups.append(n_groups)
            return named(q, n_groups)

        patch.setattr(warpgroups, "kernel", noted)

    def on(self, n_groups: int, n_blocks: int) -> None:
        """Blocks of so many warpgroups from here on, and so many for an item at most."""
        self.patch.setattr(warpgroups, "has_warpgroups", lambda _: True)
        self.patch.setattr(cuda, "ENOUGH_BLOCKS", 0 if n_groups == 2 else 10**9)
        self.patch.setattr(warpgroups, "n_blocks", lambda *_: n_blocks)

    def off(self) -> None:
        self.patch.setattr(warpgroups, "has_warpgroups", lambda _: False)
        self.patch.setattr(cuda, "ENOUGH_BLOCKS", 128)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Hopper:
    return Hopper(monkeypatch)


# lengths, past; n_heads, n_kv, page_size, d_head, d_value; window; warpgroups
CASES = {
    "tiles": ([40], [70], (4, 1, 16, 128, 128), None, 2),
    "chunks": ([20, 1], [1020, 600], (4, 2, 64, 64, 64), None, 1),
    "spans": ([80, 0, 1, 17], [70, 9, 130, 3], (8, 2, 48, 128, 96), None, 2),
    "window": ([70], [140], (4, 1, 16, 128, 128), 50, 2),
    "one row": ([1, 1], [700, 0], (6, 2, 16, 128, 128), 530, 1),
    "odd widths": ([33], [31], (3, 1, 7, 80, 24), None, 1),
    "small heads": ([90], [100], (2, 1, 16, 40, 8), 64, 2),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("n_blocks", [1, 2, 100])
@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_every_row_has_the_bits_of_the_kernel_for_few(
    case: tuple[list[int], list[int], tuple[int, ...], int | None, int],
    dtype: torch.dtype,
    n_blocks: int,
    order: int,
    hopper: Hopper,
) -> None:
    lengths, past, (n_heads, n_kv, page_size, d_head, d_value), window, n_groups = case
    spans = make_spans(lengths, past, page_size)
    stores, known = poison_unseen(
        make_stores(spans, (n_kv, page_size, d_head), dtype, d_value), spans, window
    )
    q = random(sum(lengths), n_heads, d_head, dtype=dtype)
    sinks = make_sinks(n_heads) if window else None
    with emulated():
        meant = cuda.attention(q, *stores, known, 0.3, window, sinks)
    hopper.on(n_groups, n_blocks)
    with emulated(order=order):
        found = cuda.attention(q, *stores, known, 0.3, window, sinks)
    assert hopper.n_groups == [n_groups]
    assert not found.isnan().any()
    assert same(found, meant)


@pytest.mark.parametrize("n_blocks", [1, 100])
def test_rows_of_an_image_see_all_of_it(n_blocks: int, hopper: Hopper) -> None:
    case = Pictured([30, 90], [500, 440], [[(495, 520), (521, 529)], [(450, 530)]])
    spans = case.spans(16)
    stores = stores_of(spans, (1, 16, 64, 64), torch.bfloat16)
    q = random(120, 2, 64, dtype=torch.bfloat16)
    for window in (None, 9):
        poisoned, known = case.poisoned(stores, spans, window)
        hopper.off()
        with emulated():
            meant = cuda.attention(q, *poisoned, known, 0.3, window)
        hopper.on(2, n_blocks)
        with emulated(order=2):
            found = cuda.attention(q, *poisoned, known, 0.3, window)
        assert same(found, meant)


@pytest.mark.parametrize("window", [None, 1000])
def test_chunks_joined_by_their_block_and_by_a_second_launch_agree(
    window: int | None, hopper: Hopper
) -> None:
    prompt = cancelling(2200, (4, 2, 64))
    prompt.sinks = torch.tensor([7.0, 1.0, 8.0, 6.5])
    pieces = [(2195, 5), (0, 1), (1014, 10), (2044, 9)]
    meant = prompt.rows(pieces, window)
    for n_blocks in (1, 2, 100):
        hopper.on(1, n_blocks)
        assert same(prompt.rows(pieces, window), meant), n_blocks


def test_scores_that_keep_rising_scale_all_sums(hopper: Hopper) -> None:
    """Of some queries alone, and far more than weights may be above 1."""
    prompt = Prompt(300, (4, 1, 64), torch.bfloat16)
    for position in range(300):
        page = prompt.spans.page_table[0, position // 16]
        prompt.stores[0][page, :, position % 16] *= 1 + position // 3
    prompt.q[::3] *= 0.01
    meant = prompt.rows([(260, 40)])
    assert not meant.isnan().any()
    hopper.on(2, 1)
    assert same(prompt.rows([(260, 40)]), meant)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("window", [None, 20])
def test_what_is_not_finite_reaches_the_rows_that_see_it(
    value: float, window: int | None, hopper: Hopper
) -> None:
    prompt = Prompt(60, (4, 1, 64), torch.bfloat16, page_size=64)
    values = prompt.stores[1][prompt.spans.page_table[0, 0]]  # [n_kv, page_size, d_head]
    hopper.on(1, 1)
    meant = prompt.rows([(10, 50)], window).view(50, 4, 64)
    sees = torch.tensor([p >= 25 and p < 25 + (window or 60) for p in range(10, 60)])
    values[0, 25, 7] = value
    found = prompt.rows([(10, 50)], window).view(50, 4, 64)
    assert not found[sees][..., 7].isfinite().any()
    assert same(found[~sees], meant[~sees])
    columns = [c for c in range(64) if c != 7]
    assert same(found[..., columns], meant[..., columns])


def test_a_row_of_padding_is_not_touched_nor_a_table_read_behind_the_text(hopper: Hopper) -> None:
    prompt = Prompt(64, (4, 2, 64), torch.bfloat16)
    hopper.on(1, 100)
    meant = prompt.rows([(54, 10)])
    wide = torch.full((1, 400), -(10**6), dtype=torch.int32)
    wide[:, :4] = prompt.spans.page_table[:, :4]
    spans = replace(
        prompt.spans,
        span_starts=torch.tensor([0, 10], dtype=torch.int32),
        n_past=torch.tensor([54], dtype=torch.int32),
        page_table=wide,
    )
    with emulated():
        found = cuda.attention(torch.cat((prompt.q[54:64], prompt.q[:3])), *prompt.stores, spans, 0.2)
    assert same(found[:10], meant)
    assert found[10:].isnan().all()  # torch.empty is NaN in tests


@pytest.mark.parametrize("d_head", [8, 64, 72, 128])
@pytest.mark.parametrize("n_rows", [1, 16, 17, 600])
@pytest.mark.parametrize("n_spans", [1, 20])
def test_blocks_fit_a_hopper(d_head: int, n_rows: int, n_spans: int, hopper: Hopper) -> None:
    """Registers are checked where kernels are compiled."""
    launches: list[tuple[str, Grid, int, int]] = []

    def note(_: object, instance: str, grid: Grid, block: int, __: object, shared: int) -> None:
        launches.append((instance, grid, block, shared))

    hopper.patch.setattr(warpgroups, "has_warpgroups", lambda _: True)
    prompt = Prompt(n_rows, (32, 8, d_head), torch.bfloat16)
    with launched_by(note):
        spans = make_spans([n_rows] * n_spans, [0] * n_spans, 16)
        cuda.attention(prompt.q.repeat(n_spans, 1, 1), *prompt.stores, spans, 0.2)
    (instance, grid, block, shared), *_ = launches
    n_groups = 2 if n_rows == 600 or (n_rows == 17 and n_spans == 20) else 1
    assert instance == f"attention_groups<bfloat16, {64 if d_head <= 64 else 128}, {n_groups}>"
    assert block == (n_groups + 1) * warpgroups.TEAM
    n_at_a_time = 2 if n_groups == 1 and grid[0] * grid[1] * grid[2] > 132 else 1
    static, kept = 64, 1024  # barriers; what a block has besides
    assert (shared + static + kept) * n_at_a_time <= 228 * 1024


@pytest.mark.parametrize("n_spans", [3, 140])
def test_sums_over_chunks_in_either_memory(n_spans: int, hopper: Hopper) -> None:
    prompt = Prompt(300, (2, 1, 128), torch.bfloat16)
    pieces = [(140 + 100 * (i % 2), 1) for i in range(n_spans)]
    meant = prompt.rows(pieces)
    hopper.on(1, 1)
    assert same(prompt.rows(pieces, order=3), meant)


def test_few_float8_and_wide_heads_have_the_other_kernel(hopper: Hopper) -> None:
    hopper.patch.setattr(warpgroups, "has_warpgroups", lambda _: True)
    prompt, wide = Prompt(20, (4, 1, 64), torch.bfloat16), Prompt(20, (4, 1, 136), torch.bfloat16)
    coded = [store.to(torch.float8_e4m3fn) for store in prompt.stores]
    with launched_by(lambda *_: None):
        cuda.attention(prompt.q, *coded, prompt.spans, 0.2)
        cuda.attention(wide.q, *wide.stores, wide.spans, 0.2)
    assert hopper.n_groups == []


def test_blocks_share_an_item_where_that_pays() -> None:
    """As measured (notes.md): a few rows behind a long text, not a prompt whose sums would be many."""
    few, many = 32 * 20 * 128, 256 * 32 * 9 * 128  # sums of a row after 4,096, and of 256 after 1,024
    assert warpgroups.n_blocks(1, 8, 4097, few) == 33
    assert warpgroups.n_blocks(1, 128, 1280, many) == 1
    assert warpgroups.n_blocks(2, 512, 8192, few) == 1  # there are blocks enough
    assert warpgroups.n_blocks(1, 8, 64, few) == 1  # nor would one be saved
