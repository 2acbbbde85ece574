"""Keys and values of eight bits: stored as torch rounds them, read as what they mean, and lossless all the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipstream import kernels
from slipstream.engine.cache.store import Store
from slipstream.kernels.attention.op import attention
from slipstream.kernels.norm_rope_write.op import HeadNorms, Rope, norm_rope_write
from tests.oracle import lab as bench_of
from tests.oracle.lab import Bench, Lab, play
from tests.oracle.lossless import DEMO, demo_cases, disturbed
from tests.oracle.test_kernels import FAST, Spans, assert_near, make_spans, random

FP8 = torch.float8_e4m3fn
each_dtype = pytest.mark.parametrize("dtype", FAST, ids=lambda dtype: str(dtype)[6:])


@pytest.fixture(params=["reference", "cpu"])
def chosen(request: pytest.FixtureRequest) -> object:
    with kernels.use(request.param, "attention", "norm_rope_write"):
        yield


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def stores(
    spans: Spans, n_kv: int, page_size: int, d_head: int, d_value: int | None = None
) -> tuple[Tensor, Tensor]:
    """Random keys and values of all pages, [n_pages, n_kv, page_size, width]. d_value: None for d_head."""
    keys, values = (
        random(spans.n_pages, n_kv, page_size, width, dtype=torch.float32, seed=seed)
        for seed, width in enumerate((d_head, d_value or d_head), 1)
    )
    return keys.to(FP8), values.to(FP8)


def cut(x: Tensor) -> Tensor:
    """The definition."""
    return x.clamp(-448, 448).to(FP8)


def hard_values(dtype: torch.dtype) -> Tensor:
    """Every bfloat16; of float32 all values of eight bits, what lies halfway between two, and their neighbours."""
    if dtype == torch.bfloat16:
        return torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    codes = torch.arange(127, dtype=torch.uint8).view(FP8).float()  # [127], ascending from 0
    halves = (codes[1:] + codes[:-1]) / 2
    wild = torch.tensor([0.0, 448.1, 464.0, 480.0, 1e9, float("inf"), float("nan"), 1e-45, 2.0**-10])
    exact = torch.cat((codes, halves, wild))
    near = torch.cat([torch.nextafter(exact, torch.tensor(to)) for to in (float("inf"), -float("inf"))])
    every = torch.cat((exact, near, -exact, -near))
    return torch.nn.functional.pad(every, (0, -len(every) % 64))


@each_dtype
def test_every_value_is_stored_as_torch_rounds_it(chosen: None, dtype: torch.dtype) -> None:
    x = hard_values(dtype).view(-1, 64)  # [n_rows, 64]
    spans = make_spans([len(x)], [0], 16)
    keys, values = (torch.zeros(spans.n_pages, 1, 16, 64).to(FP8) for _ in range(2))
    still = Rope(torch.ones(len(x), 0), torch.zeros(len(x), 0))
    norm_rope_write(torch.cat((x, x, x), 1), None, still, spans, keys, values)
    for store in (keys, values):
        stored = store[spans.row_pages, 0, spans.row_offsets]  # [n_rows, 64]
        assert torch.equal(stored.float().isnan(), x.isnan())
        assert torch.equal(bits(stored)[~x.isnan()], bits(cut(x))[~x.isnan()])


@each_dtype
@pytest.mark.parametrize("normed", [False, True])
def test_what_is_stored_is_what_would_have_been(chosen: None, dtype: torch.dtype, normed: bool) -> None:
    spans = make_spans([3, 1, 20], [0, 61, 5], 16)
    qkv = random(24, 5 * 40, dtype=dtype) * 300
    norms = HeadNorms(random(40, dtype=dtype, seed=1) * 400, random(40, dtype=dtype, seed=2) * 400, 1e-3)
    angles = torch.arange(80)[:, None] * 0.1 ** (torch.arange(12) / 12)
    rope = Rope(angles.cos(), angles.sin())
    wide = [torch.zeros(spans.n_pages, 1, 16, 40, dtype=dtype) for _ in range(2)]
    narrow = [one.to(FP8) for one in wide]
    q = norm_rope_write(qkv, norms if normed else None, rope, spans, *wide)
    assert torch.equal(norm_rope_write(qkv, norms if normed else None, rope, spans, *narrow), q)
    for store, meant in zip(narrow, wide, strict=True):
        assert float(meant.abs().max()) > 448
        assert torch.equal(bits(store), bits(cut(meant)))


@pytest.mark.sampled(keep=1)
@each_dtype
def test_every_code_is_read_as_what_it_means(chosen: None, dtype: torch.dtype) -> None:
    """A row that sees itself alone says its value."""
    spans = make_spans([1] * 16, [0] * 16, 16)
    values = torch.zeros(spans.n_pages, 1, 16, 16, dtype=torch.uint8)
    values[spans.row_pages, 0, 0] = torch.arange(256, dtype=torch.uint8).view(16, 16)
    keys = torch.zeros_like(values)
    said = attention(random(16, 1, 16, dtype=dtype), keys.view(FP8), values.view(FP8), spans, 1.0)
    meant = torch.arange(256, dtype=torch.uint8).view(FP8).to(dtype).view(16, 16)
    assert said.dtype == dtype
    assert torch.equal(said.nan_to_num(7e3), meant.nan_to_num(7e3))


@pytest.mark.sampled(keep=12)
@each_dtype
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(
    "shape",
    [
        (16, 4, 2, 8),
        (24, 3, 3, 16),
        (80, 6, 2, 16),
        (256, 2, 2, 128),
        (24, 4, 2, 16, 16),
        (192, 4, 2, 64, 128),
    ],
    ids=str,
)
def test_attention_over_codes_is_attention_over_their_values(
    chosen: None, dtype: torch.dtype, shape: tuple[int, ...], window: int | None
) -> None:
    d_head, n_heads, n_kv, page_size, d_value = (*shape, shape[0])[:5]
    lengths, past = [1, 5, 1, 70, 2, 3], [0, 0, 130, 3, 63, 191]
    spans = make_spans(lengths, past, page_size)
    q = random(sum(lengths), n_heads, d_head, dtype=dtype)
    keys, values = stores(spans, n_kv, page_size, d_head, d_value)
    got = attention(q, keys, values, spans, 0.3, window)
    with kernels.use("reference", "attention"):
        meant = attention(q.double(), keys.double(), values.double(), spans, 0.3, window)
    assert_near(got, meant, dtype)


@each_dtype
def test_a_nan_reaches_the_rows_that_see_it_and_no_other(dtype: torch.dtype) -> None:
    spans = make_spans([6, 2], [62, 3], 16)
    q = random(8, 2, 32, dtype=dtype)
    for place in range(2):
        both = stores(spans, 1, 16, 32)
        bits(both[place])[spans.row_pages[2], 0, spans.row_offsets[2], 5] = 0xFF
        with kernels.use("cpu", "attention"):
            found = attention(q, *both, spans, 1.0).isnan().any(1).tolist()
        assert found == [2 <= r < 6 for r in range(8)]


@each_dtype
def test_a_row_has_the_same_bits_alone_and_beside_others(dtype: torch.dtype) -> None:
    n_heads, n_kv, d_head, page_size = 4, 2, 40, 16
    keys, values = stores(make_spans([200], [0], page_size), n_kv, page_size, d_head)
    table = torch.randperm(13, generator=torch.Generator().manual_seed(3)).int()
    q = random(200, n_heads, d_head, dtype=dtype)

    def run(first: int, n: int) -> Tensor:
        spans = make_spans([n], [first], page_size)
        n_pages = -(-(first + n) // page_size)
        spans.page_table[0, :n_pages] = table[:n_pages]
        return attention(q[first : first + n], keys, values, spans, 0.2)

    with kernels.use("cpu", "attention"):
        whole = run(0, 195)
        for width in (1, 2, 3, 5, 8, 16, 64):
            for first in (0, 61, 195 - width):
                assert torch.equal(run(first, width), whole[first : first + width]), (width, first)


def test_other_dtypes_are_refused() -> None:
    spans = make_spans([2], [0], 16)
    keys, values = stores(spans, 1, 16, 8)
    with (
        kernels.use("cpu", "attention"),
        pytest.raises(ValueError, match=r"over torch.float8_e4m3fn and torch.fl"),
    ):
        attention(random(2, 1, 8, dtype=torch.float32), keys, values.float(), spans, 1.0)


@pytest.mark.sampled
def test_text_is_that_of_plain_decoding(monkeypatch: pytest.MonkeyPatch, *, is_whole: bool) -> None:
    """The lab's stores of target, draft and heads in eight bits: other text than in sixteen, the same with drafts."""
    lab = Lab(DEMO, torch.bfloat16)
    cases = demo_cases(lab, "all", 5 if is_whole else 3)
    sixteen = play(lab, Bench(), cases)
    monkeypatch.setattr(
        bench_of, "Store", lambda needs, *rest: Store([one.kept_in(FP8) for one in needs], *rest)
    )
    expected = play(lab, Bench(), cases)
    assert expected.tokens != sixteen.tokens
    for i, chain in enumerate(
        [("draft-model",), ("draft-mtp", "suffix"), ("draft-eagle3",), ("draft-dflash",)]
    ):
        found = disturbed(lab, Bench(types=chain, n_slots=2), cases, expected, seed=i)
        assert found.n_tokens > 0
        assert found.n_wrong == 0, chain
