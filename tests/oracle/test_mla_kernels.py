"""Multi-head latent attention: compiled code and Triton's interpreter against the definition, rows against others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor

from slipstream.kernels.mla import cpu, reference
from slipstream.kernels.mla.latent_types import LatentNorm, LatentRope
from slipstream.kernels.norm_rope_write.rows import Rope
from slipstream.kernels.proof.inputs import PagedRows, Sequences
from tests.oracle.interpreted import assert_near

# isort: split
from slipstream.kernels.mla import triton

CPU, FP8 = torch.device("cpu"), torch.float8_e4m3fn
PAGE = 16
# Heads, a latent, what is rotated, the rest of a head's key, a value.
SHAPES = {"small": (4, 32, 16, 32, 24), "odd": (5, 98, 6, 20, 41), "real": (16, 512, 64, 128, 128)}
WIDTHS = (1, 2, 3, 5, 8, 16)
LENGTHS, PAST = [5, 40, 7], [200, 100, 0]
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's exp may overflow


def random(seed: int, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def as_stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.clamp(-448, 448).to(dtype)


class Attended:
    """A ragged pass of three sequences; what none of its rows may see is NaN."""

    def __init__(
        self,
        shape: str,
        dtype: torch.dtype,
        stored: torch.dtype,
        past: list[int] = PAST,
        lengths: list[int] = LENGTHS,
    ) -> None:
        self.n_heads, self.d_latent, self.d_rope, *_ = SHAPES[shape]
        every = Sequences([n + p for n, p in zip(lengths, past, strict=True)], CPU)
        self.spans = every.spans(lengths, past, [1, 0, 2] if past is PAST else [*range(len(past))])
        latents = random(1, torch.float32, every.n_pages, PAGE, self.d_latent + self.d_rope)
        seen = torch.zeros(every.n_pages, PAGE, dtype=torch.bool)
        for i, (n, p) in enumerate(zip(lengths, past, strict=True)):
            at = torch.arange(n + p)
            seen[self.spans.page_table[i, at // PAGE].long(), at % PAGE] = True
        self.latents = as_stored(latents.masked_fill(~seen[..., None], float("nan")), stored)
        self.q = random(2, dtype, sum(lengths), self.n_heads, self.d_latent)
        self.q_rope = random(3, dtype, sum(lengths), self.n_heads, self.d_rope)

    def run(self, module: ModuleType) -> Tensor:
        said: Tensor = module.latent_attention(self.q, self.q_rope, self.latents, self.spans, 0.09)
        return said


@each_dtype
@pytest.mark.parametrize("coded", [False, True], ids=["", "float8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_on_the_cpu(shape: str, dtype: torch.dtype, *, coded: bool) -> None:
    case = Attended(shape, dtype, FP8 if coded else dtype, past=[190, 100, 0], lengths=[5, 40, 7])
    near(case.run(cpu), case.run(reference))


@each_dtype
@pytest.mark.sampled
@pytest.mark.parametrize("coded", [False, True], ids=["", "float8"])
@pytest.mark.parametrize("shape", ["small", "odd"])
def test_attention_in_triton(
    shape: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, *, coded: bool
) -> None:
    """Over one run of positions and over two; the rows in one launch and in several."""
    case = Attended(shape, dtype, FP8 if coded else dtype, past=[600, 511, 0], lengths=[3, 2, 4])
    said = case.run(triton)
    near(said, case.run(reference))
    monkeypatch.setattr(triton, "MOST_SUMS", 2 * 2 * case.n_heads * case.d_latent)
    assert torch.equal(case.run(triton), said)
    monkeypatch.setattr(triton, "SPANS", 2)
    assert torch.equal(case.run(triton), said)


def near(said: Tensor, meant: Tensor) -> None:
    """Weights are rounded to the rows' dtype, and the sums once more."""
    assert said.dtype == meant.dtype
    share = 3e-6 if said.dtype == torch.float32 else 2.0**-7
    assert float((said.float() - meant.float()).abs().max()) < share * float(meant.float().abs().max())


def alone(run: Callable[[slice], Tensor], n_rows: int) -> None:
    """Rows computed at any width and place have the bits they have among all."""
    whole = run(slice(0, n_rows))
    for width in WIDTHS:
        for first in (0, n_rows - width):
            part = slice(first, first + width)
            assert torch.equal(run(part), whole[part]), (width, first)


@pytest.fixture(params=[1, 2], ids=["one-thread", "two-threads"])
def n_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


SEEN: dict[str, Tensor] = {}


@each_dtype
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_have_their_own_bits(shape: str, dtype: torch.dtype, n_threads: int) -> None:
    """On the CPU, at any width and number of threads: attention, the products of heads, what is written."""
    n_heads, d_latent, d_rope, d_plain, d_value = SHAPES[shape]
    n_rows, past = 40, 130
    every = Sequences([past + n_rows], CPU)
    latents = random(1, dtype, every.n_pages, PAGE, d_latent + d_rope)
    q, q_rope = random(2, dtype, n_rows, n_heads, d_latent), random(3, dtype, n_rows, n_heads, d_rope)
    values = cpu.pack_heads(random(4, dtype, n_heads, d_value, d_latent))
    queries, kv = (
        random(5, dtype, n_rows, n_heads, d_plain + d_rope),
        random(6, dtype, n_rows, d_latent + d_rope),
    )
    arguments = written_by(d_latent, d_rope, dtype)

    def spans(part: slice) -> PagedRows:
        return every.spans([part.stop - part.start], [past + part.start], [0])

    def attend(part: slice) -> Tensor:
        return cpu.latent_attention(q[part], q_rope[part], latents, spans(part), 0.1)

    def write(part: slice) -> Tensor:
        store = torch.zeros_like(latents)
        turned = cpu.write_latents(queries[part], kv[part], *arguments, spans(part), store)
        written = store[spans(part).row_pages, spans(part).row_offsets]
        return torch.cat((turned.flatten(1), written), -1)

    def multiply(part: slice) -> Tensor:
        return cpu.head_linear(q[part], values)

    for run in (attend, write, multiply):
        alone(run, n_rows)
        whole = run(slice(0, n_rows))
        assert torch.equal(SEEN.setdefault(f"{run.__name__} {shape} {dtype}", whole), whole), n_threads


def written_by(d_latent: int, d_rope: int, dtype: torch.dtype) -> tuple[LatentNorm, LatentRope]:
    angles = torch.arange(400)[:, None] * 0.1 ** torch.arange(d_rope // 2)
    return LatentNorm(random(7, dtype, d_latent), 1e-6), LatentRope(Rope(angles.cos(), angles.sin()))


@each_dtype
@pytest.mark.sampled
@pytest.mark.parametrize("turned", ["pairs", "halves", "not"])
@pytest.mark.parametrize("module", [cpu, triton], ids=["cpu", "triton"])
@pytest.mark.parametrize("shape", ["small", "odd"])
def test_what_is_written(shape: str, module: ModuleType, turned: str, dtype: torch.dtype) -> None:
    n_heads, d_latent, d_rope, d_plain, _ = SHAPES[shape]
    every = Sequences([200, 60], CPU)
    spans = every.spans([3, 6], [190, 0], [0, 1])
    q, kv = random(5, dtype, 9, n_heads, d_plain + d_rope), random(6, dtype, 9, d_latent + d_rope)
    norm, rope = written_by(d_latent, d_rope, dtype)
    rope = LatentRope(None if turned == "not" else rope.tables, interleaved=turned == "pairs")
    for scale in (norm.weight, norm.weight.float()):
        for stored in (dtype, FP8):
            found = []
            for each in (module, reference):
                store = as_stored(torch.full((every.n_pages, PAGE, d_latent + d_rope), 7.0), stored)
                rotated = each.write_latents(q, kv, LatentNorm(scale, 1e-6), rope, spans, store)
                found.append((rotated, store.float() if stored == FP8 else store))
            for got, meant in zip(*found, strict=True):
                if stored != FP8:
                    assert_near(got, meant, steps=2)  # a norm rounds, too
            assert (found[0][1] == 7).sum() == (found[1][1] == 7).sum()  # nothing else is written
            far = (found[0][1].float() - found[1][1].float()).abs()
            assert bool((far <= 2.0**-3 * found[1][1].float().abs() + 2.0**-9).all())


@each_dtype
@pytest.mark.sampled
@pytest.mark.parametrize("module", [cpu, triton], ids=["cpu", "triton"])
@pytest.mark.parametrize("shape", ["small", "odd"])
def test_products_of_heads(shape: str, module: ModuleType, dtype: torch.dtype) -> None:
    n_heads, d_latent, d_rope, d_plain, _ = SHAPES[shape]
    weight = random(4, dtype, n_heads, d_latent, d_plain) / d_plain**0.5
    whole = random(5, dtype, 21, n_heads, d_plain + d_rope)
    x = whole[..., :d_plain]  # a part of each head, as queries are
    packed = module.pack_heads(weight)
    assert packed.out_features == d_latent
    said = module.head_linear(x, packed)
    assert said.is_contiguous()
    assert_near(said, reference.head_linear(x, reference.pack_heads(weight)))
    alone(lambda part: module.head_linear(x[part], packed), 21)
    assert module.head_linear(x[:0], packed).shape == (0, n_heads, d_latent)


@pytest.mark.parametrize("module", [cpu, triton], ids=["cpu", "triton"])
def test_what_would_be_misread_is_refused(module: ModuleType) -> None:
    case = Attended("small", torch.float32, torch.float32)
    with pytest.raises(ValueError, match="do not fit latents of 48 values"):
        module.latent_attention(case.q, case.q_rope[..., :8], case.latents, case.spans, 0.1)
    with pytest.raises(ValueError, match="contiguous"):
        module.latent_attention(case.q, case.q_rope, case.latents[:, ::2], case.spans, 0.1)
    with pytest.raises(ValueError, match=r"float64|float32"):
        module.latent_attention(case.q, case.q_rope, case.latents.double(), case.spans, 0.1)
    with pytest.raises(TypeError, match="pack the heads with"):
        module.head_linear(case.q, reference.pack_heads(torch.zeros(4, 3, 32)))
    with pytest.raises(TypeError, match="pack the heads with"):
        reference.head_linear(case.q, cpu.pack_heads(torch.zeros(4, 3, 32)))
    odd = torch.zeros(2, 4, 31), torch.zeros(2, 4, 17)
    with pytest.raises(ValueError, match="even widths"):
        module.latent_attention(*odd, torch.zeros(3, PAGE, 48), case.spans, 0.1)
