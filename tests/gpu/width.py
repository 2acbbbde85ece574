"""A row has the same bits whatever is computed with it: widths 1, 2, 3, 5, 8, 16 and 64, alone and beside others.

The references promise nothing of the kind and are not asked.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from slipstream import kernels
from slipstream.engine.batch import RecurrentRows
from slipstream.kernels import dispatch
from slipstream.kernels.attention.op import attention
from slipstream.kernels.choose.op import Edits, Masks, RowParams, choose
from slipstream.kernels.gated.op import clamped_mul, gelu_mul, sigmoid_mul, silu_mul
from slipstream.kernels.gated_delta.op import DeltaGate, DeltaState, gated_delta
from slipstream.kernels.gated_norm.op import gated_norm
from slipstream.kernels.matmul.op import linear, pack
from slipstream.kernels.moe.op import Clamped, ExpertBiases, Routed, Routing, experts, pack_experts, route
from slipstream.kernels.norm.op import add_rms_norm
from slipstream.kernels.norm_rope_write.op import HeadNorms, Rope, norm_rope_write
from slipstream.kernels.short_conv.op import ConvState, short_conv
from tests.gpu import quantized
from tests.gpu.dice import Pages, page_tensors
from tests.gpu.parity import DTYPES, bits, implementations, short, split
from tests.gpu.setting import Finding, Findings, Setting, selected

WIDTHS = (1, 2, 3, 5, 8, 16, 64)
N_ROWS = 70
# (first row, number of rows) -> their results, each [n, ...]; computed in one call of the op.
Compute = Callable[[int, int], Sequence[Tensor]]


class Things:
    """Random tensors on the device."""

    def __init__(self, setting: Setting, dtype: torch.dtype) -> None:
        self.setting, self.dtype = setting, dtype
        self.device = setting.device
        self.g = torch.Generator().manual_seed(11)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self.g).to(dtype or self.dtype).to(self.device)


def of_matmul(things: Things) -> Compute:
    n_out, n_in = things.setting.pick((1024, 4096), (48, 96))
    packed, x = pack(things.normal(n_out, n_in) / n_in**0.5), things.normal(N_ROWS, n_in)
    return lambda first, n: [linear(x[first : first + n], packed)]


def of_quantized(things: Things, kind: str) -> Compute:
    n_out, n_in, group = things.setting.pick((1024, 4096, 128), (48, 96, 32))
    fields = quantized.fields(kind, (n_out, n_in), group, things.g)
    moved = {name: value.to(things.device) for name, value in fields.items()}
    packed, x = pack(quantized.weight(kind, moved, group, things.dtype)), things.normal(N_ROWS, n_in)
    return lambda first, n: [linear(x[first : first + n], packed)]


def of_norm(things: Things) -> Compute:
    d = things.setting.pick(4096, 100)
    x, residual, weight = things.normal(N_ROWS, d), things.normal(N_ROWS, d), things.normal(d)

    def compute(first: int, n: int) -> Sequence[Tensor]:
        rows = slice(first, first + n)
        return add_rms_norm(x[rows], residual[rows], weight, 1e-6)

    return compute


def of_gated(things: Things) -> Compute:
    d = things.setting.pick(14336, 50)
    gate_up, x, gate = things.normal(N_ROWS, 2 * d), things.normal(N_ROWS, d), things.normal(N_ROWS, 1)

    def compute(first: int, n: int) -> Sequence[Tensor]:
        rows = slice(first, first + n)
        return (
            *(silu_mul(gate_up[rows]), gelu_mul(gate_up[rows]), clamped_mul(gate_up[rows], 1.0, 1.702)),
            sigmoid_mul(x[rows], gate[rows]),
        )

    return compute


def of_gated_norm(things: Things) -> Compute:
    heads, d = things.setting.pick((48, 128), (3, 10))
    x, gate, weight = things.normal(N_ROWS, heads, d), things.normal(N_ROWS, heads * d), things.normal(d)
    return lambda first, n: [gated_norm(x[first : first + n], gate[first : first + n], weight, 1e-6, "silu")]


def of_moe(things: Things, *, biased: bool = False) -> Compute:
    d_model, d_inner, n_experts, top_k = things.setting.pick((2048, 768, 128, 8), (40, 16, 16, 4))
    matrices = (
        things.normal(n_experts, 2 * d_inner, d_model) / d_model**0.5,
        things.normal(n_experts, d_model, d_inner) / d_inner**0.5,
    )
    biases, clamped = None, None
    if biased:
        biases = ExpertBiases(things.normal(n_experts, 2 * d_inner), things.normal(n_experts, d_model))
        clamped = Clamped(limit=1.0, steepness=1.702)
    packed = pack_experts(*matrices, biases, clamped)
    logits, x = things.normal(N_ROWS, n_experts), things.normal(N_ROWS, d_model)
    logits[40:] = logits[40]  # many rows of the same experts
    routing = Routing(top_k=top_k, scores="softmax", normed=True)

    def compute(first: int, n: int) -> Sequence[Tensor]:
        rows = slice(first, first + n)
        found = route(logits[rows], routing)
        said = experts(x[rows], Routed(found.expert_ids, found.weights), packed)
        return found.expert_ids, found.weights, said

    return compute


def of_choose(things: Things) -> Compute:
    vocab = things.setting.pick(151_936, 3000)
    logits = things.normal(N_ROWS, vocab) * 3

    def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(
            [values[i % len(values)] for i in range(N_ROWS)], dtype=dtype, device=things.device
        )

    params = {
        "temperature": column([1.0, 0.0, 0.7, 1.0], torch.float32),
        "top_k": column([0, 0, 40, 0, 0], torch.int32),
        "top_p": column([1.0, 0.9, 0.5], torch.float32),
        "min_p": column([0.0, 0.05], torch.float32),
        "seed": column(range(N_ROWS), torch.int64),
        "position": column(range(N_ROWS), torch.int64),
    }
    n_entries = 5  # of every row: its largest logits, pushed down
    token_ids = logits.topk(n_entries).indices.int().flatten()
    starts = torch.arange(N_ROWS + 1, device=things.device).int() * n_entries
    values = things.normal(3, len(token_ids)).float().abs() + 0.1
    index = column([-1, 0, 1], torch.int32)
    allowed = torch.arange(2 * -(-vocab // 32), device=things.device).int().view(2, -1) * 0x9E3779B

    def compute(first: int, n: int) -> Sequence[Tensor]:
        rows, entries = slice(first, first + n), slice(first * n_entries, (first + n) * n_entries)
        some = RowParams(**{name: value[rows] for name, value in params.items()})
        edits = Edits(starts[: n + 1], token_ids[entries], *(one[entries] for one in values))
        found = choose(logits[rows], some, edits, Masks(index[rows], allowed), want_probability=True)
        assert found.probability is not None
        return found.token_ids, found.probability

    return compute


def spans_of(lengths: Sequence[int], past: Sequence[int], of: Pages, owners: Sequence[int]) -> Pages:
    """Spans that read the pages of the sequences `owners` of another batch, as its rows would be."""
    device, page_size = of.page_table.device, 16
    owner = torch.repeat_interleave(torch.tensor(owners), torch.tensor(lengths))
    table = of.page_table.cpu()[list(owners)]
    positions = torch.cat([torch.arange(p, p + n) for p, n in zip(past, lengths, strict=True)])
    return Pages(
        span_starts=torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device),
        n_past=torch.tensor(past, dtype=torch.int32, device=device),
        page_table=table.to(device),
        positions=positions.to(device),
        row_pages=of.page_table.cpu()[owner, positions // page_size].long().to(device),
        row_offsets=(positions % page_size).to(device),
    )


def sequences(things: Things, n_past: int) -> tuple[Pages, int]:
    """Three sequences on pages of 16: 0 has all the rows that are tested, 1 and 2 are company."""
    g = torch.Generator().manual_seed(3)
    tensors = page_tensors([N_ROWS, 1, 1], [n_past, n_past + 300, 90], 16, g)
    n_pages = int(tensors.pop("n_pages"))
    tensors["page_table"].clamp_(max=n_pages - 1)
    return Pages(**{name: value.to(things.device) for name, value in tensors.items()}), n_pages


def of_attention(
    things: Things, window: int | None = None, *, coded: bool = False, sunk: bool = False
) -> Compute:
    n_past = things.setting.pick(1000, 130)
    heads, n_kv, d = things.setting.pick((16, 4, 128), (4, 2, 16))
    every, n_pages = sequences(things, n_past)
    keys, values = (things.normal(n_pages, n_kv, 16, d) for _ in range(2))
    if coded:
        keys, values = keys.to(torch.float8_e4m3fn), values.to(torch.float8_e4m3fn)
    q, company = things.normal(N_ROWS, heads, d), things.normal(12, heads, d)
    sinks = things.normal(heads, dtype=torch.float32) if sunk else None

    def compute(first: int, n: int) -> Sequence[Tensor]:
        if n in (3, 16):  # beside other spans, which come before and behind
            spans = spans_of([5, n, 7], [n_past + 200, n_past + first, 40], every, [1, 0, 2])
            rows = torch.cat((company[:5], q[first : first + n], company[5:]))
            return [attention(rows, keys, values, spans, d**-0.5, window, sinks)[5 : 5 + n]]
        spans = spans_of([n], [n_past + first], every, [0])
        return [attention(q[first : first + n], keys, values, spans, d**-0.5, window, sinks)]

    return compute


def of_norm_rope_write(things: Things) -> Compute:
    heads, n_kv, d = things.setting.pick((32, 8, 128), (4, 2, 16))
    every, n_pages = sequences(things, 40)
    qkv = things.normal(N_ROWS, (heads + 2 * n_kv) * d)
    angles = torch.arange(500, device=things.device)[:, None] * 0.1 ** (
        torch.arange(d // 2, device=things.device) / (d // 2)
    )
    norms, rope = HeadNorms(things.normal(d), things.normal(d), 1e-6), Rope(angles.cos(), angles.sin())

    def compute(first: int, n: int) -> Sequence[Tensor]:
        spans = spans_of([n], [40 + first], every, [0])
        keys, values = (
            torch.zeros(n_pages, n_kv, 16, d, dtype=things.dtype, device=things.device) for _ in range(2)
        )
        q = norm_rope_write(qkv[first : first + n], norms, rope, spans, keys, values)
        return q, keys[spans.row_pages, :, spans.row_offsets], values[spans.row_pages, :, spans.row_offsets]

    return compute


def recurrence(things: Things, folder: str) -> Callable[[Sequence[int], bool], tuple[Tensor, Tensor]]:
    """Feeds a sequence in passes of given lengths, alone or beside others: (outputs, what is stored at the end)."""
    n_key, n_value, d = things.setting.pick((4, 12, 128), (1, 2, 16))
    n_channels, device = (2 * n_key + n_value) * d, things.device
    x, decay, beta = (
        things.normal(N_ROWS, n_channels),
        things.normal(N_ROWS, n_value),
        things.normal(N_ROWS, n_value),
    )
    gate = DeltaGate(things.normal(n_value, dtype=torch.float32), things.normal(n_value, dtype=torch.float32))
    weight = things.normal(4, n_channels).T

    def feed(lengths: Sequence[int], beside: bool) -> tuple[Tensor, Tensor]:
        delta = DeltaState(
            torch.zeros(3, n_value, d, d, device=device),
            torch.zeros(8, n_key, d, device=device),
            torch.zeros(8, n_value, d, device=device),
            torch.zeros(8, n_value, device=device),
        )
        conv = ConvState(
            torch.zeros(3, 3, n_channels, dtype=x.dtype, device=device),
            torch.zeros(8, n_channels, dtype=x.dtype, device=device),
        )
        said, start = [], 0
        for n in lengths:
            others = [5, 2] if beside else []
            slots, counts = ([0, 1, 2], [5, n, 2]) if beside else ([1], [n])
            rows = RecurrentRows.build(
                slots, counts, [[]] * len(slots), counts, [-1] * sum(counts), torch.device("cpu")
            )
            rows = RecurrentRows(**{name: getattr(rows, name).to(device) for name in RecurrentRows.__slots__})
            index = [
                *range(60, 60 + sum(others[:1])),
                *range(start, start + n),
                *range(50, 50 + sum(others[1:])),
            ]
            at, skip = torch.tensor(index, device=device), sum(others[:1])
            if folder == "short_conv":
                out = short_conv(x[at], weight, conv, rows)
            else:
                out = gated_delta(x[at], decay[at], beta[at], gate, delta, rows)
            said.append(out[skip : skip + n])
            start += n
        return torch.cat(said), (conv.window if folder == "short_conv" else delta.state)[1]

    return feed


def check_passes(things: Things, folder: str) -> str | None:
    """What differs between ways to cut a sequence into passes; None if nothing does."""
    feed = recurrence(things, folder)
    meant = feed([N_ROWS], False)
    for width in WIDTHS:
        lengths = [min(width, N_ROWS - start) for start in range(0, N_ROWS, width)]
        for beside in (False, True):
            got = feed(lengths, beside)
            if not all(torch.equal(bits(a), bits(b)) for a, b in zip(got, meant, strict=True)):
                return f"passes of {width}{', beside others' if beside else ''}"
    return None


def check_rows(compute: Compute) -> str | None:
    """What differs between rows alone and among all; None if nothing does."""
    whole = compute(0, N_ROWS)
    for width in WIDTHS:
        for first in sorted({0, 3, N_ROWS - width}):
            if first + width > N_ROWS:
                continue
            some = compute(first, width)
            for i, (one, meant) in enumerate(zip(some, whole, strict=True)):
                if not torch.equal(bits(one), bits(meant[first : first + width])):
                    return f"{width} rows from row {first}, result {i}"
    return None


ROWS: dict[str, Sequence[Callable[[Things], Compute]]] = {
    "matmul": (of_matmul, *(partial(of_quantized, kind=kind) for kind in quantized.KINDS)),
    "norm": (of_norm,),
    "norm_rope_write": (of_norm_rope_write,),
    "attention": (
        of_attention,
        partial(of_attention, window=100),
        partial(of_attention, coded=True),
        partial(of_attention, window=100, sunk=True),
    ),
    "gated": (of_gated,),
    "moe": (of_moe, partial(of_moe, biased=True)),
    "gated_norm": (of_gated_norm,),
    "choose": (of_choose,),
}
PASSES = ("short_conv", "gated_delta")


def cases(setting: Setting) -> list[str]:
    """The op folders whose rows are sums, each dtype by itself."""
    return [
        f"{folder} {short(dtype)}"
        for folder in (*ROWS, *PASSES)
        for dtype in setting.pick(DTYPES, DTYPES[2:])
    ]


def run(setting: Setting, case: str) -> Findings:
    """One finding per implementation."""
    folder, dtype = split(case)
    selected(setting.device, dtype)
    asked = False
    for name in implementations(folder, setting.device):
        if name == "reference" or dispatch._refusal(folder, name, setting.device, dtype) is not None:
            continue  # said by the part "parity"
        asked, things = True, Things(setting, dtype)
        with kernels.use(name, folder):
            if folder in PASSES:
                wrong = check_passes(things, folder)
            else:
                wrong = next(filter(None, (check_rows(make(things)) for make in ROWS[folder])), None)
        figures = {"widths": ", ".join(map(str, WIDTHS))} if wrong is None else {"why": f"differs: {wrong}"}
        yield Finding(f"{folder}.{name} {short(dtype)}", ok=wrong is None, figures=figures)
    if not asked:
        yield Finding(case, None, {"why": "nothing but the reference runs here"})
