"""Triton kernels that take each row by itself, in Triton's interpreter: against the definitions, and at any width."""

from __future__ import annotations

import random as randoms
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from slipstream.kernels.gated import reference as plain_gated
from slipstream.kernels.gated_norm import reference as plain_gated_norm
from slipstream.kernels.norm import reference as plain_norm
from slipstream.kernels.norm_rope_write import reference as plain_rope
from slipstream.kernels.norm_rope_write.rows import HeadNorms, Rope
from tests.oracle.interpreted import assert_near

# isort: split
from slipstream.kernels.gated import triton as gated
from slipstream.kernels.gated.activation import GELU, SILU, Activation
from slipstream.kernels.gated_norm import triton as gated_norm
from slipstream.kernels.norm import triton as norm
from slipstream.kernels.norm_rope_write import triton as rope

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
WIDTHS = (1, 2, 3, 5, 8, 16)
each_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: str(dtype)[6:])
each_draw = pytest.mark.parametrize("seed", range(20))
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore::RuntimeWarning"
    ),  # the interpreter's exp may overflow, as a GPU's does
    pytest.mark.sampled(keep=4, together=True),
]
ABOUT = ("kernels/triton_launch.py",)


class Draw:
    """Random sizes and tensors from a seed."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.choose, self.dtype = randoms.Random(f"{seed} {dtype}"), dtype
        self.generator = torch.Generator().manual_seed(self.choose.getrandbits(32))

    def size(self, largest: int) -> int:
        return self.choose.randint(1, largest)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return (2 * torch.randn(shape, generator=self.generator)).to(dtype or self.dtype)

    def scale(self, *shape: int) -> Tensor:
        """Weights of a norm: in the rows' dtype or in float32."""
        return self.normal(*shape, dtype=self.choose.choice([self.dtype, torch.float32]))


def assert_rows_alone(run: Callable[[slice], Tensor], n_rows: int) -> None:
    """Rows computed at any width and place have the bits they have among all."""
    whole = run(slice(0, n_rows))
    for width in WIDTHS:
        for first in (0, n_rows - width):
            part = slice(first, first + width)
            assert torch.equal(run(part), whole[part]), (width, first)


@each_dtype
@each_draw
def test_norm(seed: int, dtype: torch.dtype) -> None:
    draw = Draw(seed, dtype)
    shape = draw.size(5) - 1, draw.size(1500)
    x, residual, weight = draw.normal(*shape), draw.normal(*shape), draw.scale(shape[1])
    assert_near(norm.rms_norm(x, weight, 1e-5), plain_norm.rms_norm(x, weight, 1e-5))
    got, meant = (each.add_rms_norm(x, residual, weight, 1e-5) for each in (norm, plain_norm))
    assert torch.equal(got[1], meant[1])
    assert_near(got[0], meant[0])


@each_dtype
@each_draw
def test_gates(seed: int, dtype: torch.dtype) -> None:
    draw = Draw(seed, dtype)
    n_rows, d = draw.size(4) - 1, draw.choose.choice([draw.size(40), draw.size(1500)])
    gate_up, x = draw.normal(n_rows, 2 * d), draw.normal(n_rows, d)
    gate_up[:1, :3] = torch.tensor([-300.0, 300.0, 0.0])[: gate_up[:1, :3].shape[1]]
    clamped, limited = Activation("clamped", 1.5, 1.7), Activation("limited", 0.5)
    for activation in (SILU, GELU, clamped, limited):
        assert_near(gated.gated_mul(gate_up, activation), plain_gated.gated_mul(gate_up, activation))
    broken = torch.full_like(gate_up, torch.nan)  # clamping does not hide it
    assert bool(gated.gated_mul(broken, limited).isnan().all())
    assert bool(gated.gated_mul(broken, clamped).isnan().all())
    for gate in (draw.normal(n_rows, d), draw.normal(n_rows, 1)):
        assert_near(gated.sigmoid_mul(x, gate), plain_gated.sigmoid_mul(x, gate))
    assert_near(gated.soft_cap(3 * x, 4.0), plain_gated.soft_cap(3 * x, 4.0))


@each_dtype
@each_draw
def test_gated_norm(seed: int, dtype: torch.dtype) -> None:
    draw = Draw(seed, dtype)
    n_rows, n_heads, d = draw.size(4) - 1, draw.size(9), draw.size(70)
    x, gate = draw.normal(n_rows, n_heads, d), draw.normal(n_rows, n_heads * d + 3)[:, : n_heads * d]
    weight, activation = draw.scale(d), draw.choose.choice(["silu", "sigmoid"])
    got, meant = (
        each.gated_norm(x, gate, weight, 1e-6, activation) for each in (gated_norm, plain_gated_norm)
    )
    assert_near(got, meant)


@dataclass(frozen=True)
class Places:
    """Rows in cells of their own, in no order."""

    positions: Tensor  # [n_rows] int64
    row_pages: Tensor  # [n_rows] int64
    row_offsets: Tensor  # [n_rows] int64


@dataclass(frozen=True)
class Heads:
    """Arguments of `norm_rope_write` but the rows."""

    n_kv: int
    d_head: int
    page_size: int
    norms: HeadNorms | None
    rope: Rope
    d_value: int

    @classmethod
    def drawn(cls, draw: Draw) -> Heads:
        d_head, half = 2 * draw.size(20), 0
        half = draw.size(d_head // 2)
        angles = draw.normal(50, half, dtype=torch.float32)
        weights = draw.scale(2, d_head)
        norms = None
        if draw.size(3) > 1:
            norms = HeadNorms(weights[0].clone(), weights[1].clone(), 1e-6, values=draw.size(2) > 1)
        rope, d_value = Rope(angles.cos(), angles.sin()), d_head
        if draw.size(2) > 1:
            d_value = draw.size(d_head)
        return cls(draw.size(3), d_head, draw.size(8), norms, rope, d_value)

    def rows(self, n_query_heads: int) -> int:
        """Width of rows with so many query heads."""
        return (n_query_heads + self.n_kv) * self.d_head + self.n_kv * self.d_value

    def run(
        self,
        each: Callable[..., Tensor],
        qkv: Tensor,
        places: Places,
        part: slice,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, ...]:
        """q and the stores, which were NaN before. dtype: of the stores, by default that of the rows."""
        shape, widths = (30, self.n_kv, self.page_size), (self.d_head, self.d_value)
        stores = [torch.full((*shape, width), torch.nan, dtype=dtype or qkv.dtype) for width in widths]
        rows = Places(places.positions[part], places.row_pages[part], places.row_offsets[part])
        return each(qkv[part], self.norms, self.rope, rows, *stores), *stores


def drawn_places(draw: Draw, n_rows: int, page_size: int) -> Places:
    cells = torch.tensor(draw.choose.sample(range(30 * page_size), n_rows), dtype=torch.int64)
    positions = torch.randint(50, (n_rows,), generator=draw.generator)
    return Places(positions, cells // page_size, cells % page_size)


@each_dtype
@each_draw
def test_norm_rope_write(seed: int, dtype: torch.dtype) -> None:
    draw = Draw(seed, dtype)
    heads, n_rows = Heads.drawn(draw), draw.size(5)
    places = drawn_places(draw, n_rows, heads.page_size)
    qkv = draw.normal(n_rows, heads.rows(draw.size(6)))
    got, meant = (
        heads.run(each.norm_rope_write, qkv, places, slice(0, n_rows)) for each in (rope, plain_rope)
    )
    for one, other in zip(got, meant, strict=True):
        assert_near(one, other, steps=2)  # a norm rounds, too
    queries = qkv[:, : meant[0].shape[1] * heads.d_head]
    alone = heads.d_head, heads.norms, heads.rope, places
    assert torch.equal(rope.norm_rope(queries.contiguous(), *alone), got[0])
    assert_near(plain_rope.norm_rope(queries, *alone), meant[0])
    q, *stores = heads.run(rope.norm_rope_write, qkv, places, slice(0, 0))
    assert q.shape == (0, *meant[0].shape[1:])
    assert all(store.isnan().all() for store in stores)


def as_float8(x: Tensor) -> Tensor:
    """What a store of float8 holds of x, as numbers."""
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


@each_dtype
@pytest.mark.parametrize("seed", range(5))
def test_norm_rope_write_to_float8(seed: int, dtype: torch.dtype) -> None:
    draw = Draw(seed, dtype)
    heads, n_rows = Heads.drawn(draw), draw.size(5)
    places = drawn_places(draw, n_rows, heads.page_size)
    qkv = draw.normal(n_rows, heads.rows(draw.size(6))) * draw.choose.choice([0.01, 1, 100])
    q, *stores = heads.run(rope.norm_rope_write, qkv, places, slice(0, n_rows), torch.float8_e4m3fn)
    meant_q, *meant = heads.run(rope.norm_rope_write, qkv, places, slice(0, n_rows))
    assert torch.equal(q, meant_q)
    for one, other in zip(stores, meant, strict=True):
        torch.testing.assert_close(one.float(), as_float8(other), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_value_is_rounded_to_float8_as_torch_does(dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    qkv = torch.zeros(16, 3, 4096, dtype=dtype)  # a query head, a key head, a value head
    qkv[:, 2] = every.view(16, 4096)
    heads = Heads(1, 4096, 16, None, Rope(torch.ones(1, 8), torch.zeros(1, 8)), 4096)
    row = torch.arange(16)
    places = Places(torch.zeros_like(row), torch.zeros_like(row), row)
    _, _, values = heads.run(rope.norm_rope_write, qkv.flatten(1), places, slice(0, 16), torch.float8_e4m3fn)
    found = values[0].flatten().float()
    torch.testing.assert_close(found, as_float8(every), rtol=0, atol=0, equal_nan=True)
    assert found[every == 0].signbit().tolist() == every[every == 0].signbit().tolist()


@each_dtype
def test_width_is_not_seen(dtype: torch.dtype) -> None:
    draw, n_rows = Draw(0, dtype), 17
    x, residual, weight = draw.normal(n_rows, 203), draw.normal(n_rows, 203), draw.normal(203)
    assert_rows_alone(lambda part: norm.rms_norm(x[part], weight, 1e-6), n_rows)
    assert_rows_alone(lambda part: norm.add_rms_norm(x[part], residual[part], weight, 1e-6)[0], n_rows)
    gates, heads = draw.normal(n_rows, 5 * 37 + 1), draw.normal(n_rows, 5, 37)
    assert_rows_alone(
        lambda part: gated_norm.gated_norm(heads[part], gates[part, 1:], weight[:37], 1e-6, "silu"), n_rows
    )
    pairs = draw.normal(n_rows, 2 * 45)
    assert_rows_alone(lambda part: gated.gated_mul(pairs[part], SILU), n_rows)
    assert_rows_alone(lambda part: gated.gated_mul(pairs[part], Activation("limited", 0.5)), n_rows)
    assert_rows_alone(lambda part: gated.sigmoid_mul(x[part], residual[part, :1]), n_rows)


@each_dtype
@pytest.mark.parametrize("d_value", [None, 10])
def test_width_is_not_seen_by_heads(dtype: torch.dtype, d_value: int | None) -> None:
    draw, n_rows = Draw(1, dtype), 17
    heads = Heads.drawn(draw)
    heads = replace(heads, d_value=d_value or heads.d_head)
    places = drawn_places(draw, n_rows, heads.page_size)
    qkv = draw.normal(n_rows, heads.rows(3))

    def run(part: slice) -> Tensor:
        q, keys, values = heads.run(rope.norm_rope_write, qkv, places, part)
        cells = places.row_pages[part], slice(None), places.row_offsets[part]
        return torch.cat([one.flatten(1) for one in (q, keys[cells], values[cells])], 1)

    assert_rows_alone(run, n_rows)


def test_what_does_not_fit_is_refused() -> None:
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="weight"):
        norm.rms_norm(x, torch.zeros(7), 1e-6)
    with pytest.raises(ValueError, match="weight"):
        norm.rms_norm(x, torch.zeros(8, dtype=torch.bfloat16), 1e-6)
    with pytest.raises(ValueError, match="activation"):
        gated_norm.gated_norm(x.view(2, 2, 4), x, torch.zeros(4), 1e-6, "gelu")
    heads, place = (
        Heads(1, 4, 2, None, Rope(torch.ones(1, 2), torch.zeros(1, 2)), 4),
        torch.zeros(2, dtype=torch.int64),
    )
    with pytest.raises(ValueError, match="float8_e4m3fn, not"):
        heads.run(
            rope.norm_rope_write,
            torch.zeros(2, 12),
            Places(place, place, place),
            slice(0, 2),
            torch.float8_e5m2,
        )
    assert norm.refuses(torch.device("cpu"), torch.float64) is not None
    assert norm.refuses(torch.device("cpu"), torch.bfloat16) is None
