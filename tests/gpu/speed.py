"""Each op's time at the shapes of real networks, against what the device can move and against torch's own operator.

Llama-3 8B shapes with a vocabulary of 151,936 for the products, 32 heads over 8 for attention, Qwen3.5-27B for the
recurrent layers, Qwen3-30B-A3B for the experts. Weights are worked through in turn, more than a gigabyte of them, so
that they come from memory as in a pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream import kernels
from slipstream.engine.batch import Batch, Span, upload
from slipstream.kernels.attention.op import attention
from slipstream.kernels.choose.op import RowParams, choose
from slipstream.kernels.gated.activation import SILU
from slipstream.kernels.gated.op import gated_mul
from slipstream.kernels.gated_delta.op import DeltaGate, DeltaState, gated_delta
from slipstream.kernels.gated_delta.spans import RecurrentRows
from slipstream.kernels.gated_norm.op import gated_norm
from slipstream.kernels.matmul.op import Packed, linear, pack
from slipstream.kernels.moe.op import Routing, experts, pack_experts, route
from slipstream.kernels.ngram.op import ngram
from slipstream.kernels.norm.op import add_rms_norm
from slipstream.kernels.norm_rope_write.op import HeadNorms, Rope, norm_rope_write
from slipstream.kernels.short_conv.op import ConvState, short_conv
from slipstream.kernels.verify.op import verify
from tests.gpu import quantized
from tests.gpu.ceilings import memory_rate
from tests.gpu.clock import Took, measure
from tests.gpu.setting import Figures, Finding, Findings, Setting, bar

CYCLED = 1.2e9  # bytes of weights worked through
DTYPE = torch.bfloat16


def cases(setting: Setting) -> list[str]:
    return ["matmul", "quantised", "attention", "choose", "ngram", "gated_delta", "rows", "moe"]


def run(setting: Setting, case: str) -> Findings:
    for dtype in (DTYPE, torch.float32):
        kernels.select(setting.device, dtype)
    yield from {
        "matmul": products,
        "quantised": packed_products,
        "attention": attentions,
        "choose": picks,
        "ngram": lookups,
        "gated_delta": recurrent,
        "rows": rows,
        "moe": mixtures,
    }[case](setting)


@functools.cache
def ceiling(setting: Setting) -> float:
    """Bytes a second of the memory; measured once per process."""
    return memory_rate(setting)


def figures(setting: Setting, took: Took, n_bytes: float = 0.0, other: Took | None = None) -> Figures:
    """The columns of one line."""
    told: Figures = {"us": took.us}
    if n_bytes:
        told |= {"GB/s": n_bytes / took.seconds / 1e9, "of memory": n_bytes / took.seconds / ceiling(setting)}
    if other is not None:
        told |= {"torch us": other.us, "x torch": other.seconds / took.seconds}
    if not took.in_graph:
        told["launches"] = f"counted{': ' + took.why if took.why else ''}"
    return told


def normal(setting: Setting, *shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(shape, device=setting.device, dtype=dtype)


SHAPES = {  # outputs, inputs, layers
    "qkv": (6144, 4096, 32),
    "o": (4096, 4096, 32),
    "gate_up": (28672, 4096, 32),
    "down": (4096, 14336, 32),
    "head": (151_936, 4096, 1),
}


class Weights(NamedTuple):
    """Enough of one shape that they come from memory."""

    packed: list[Packed]
    plain: list[Tensor]  # as torch's own product takes them
    n_bytes: int  # of one, as a checkpoint has it

    @classmethod
    def made(cls, setting: Setting, n_out: int, n_in: int, kind: str) -> Weights:
        """kind: "plain" or one of `quantized.KINDS`."""
        group, n_dense = setting.pick(128, 32), n_out * n_in * DTYPE.itemsize
        n_plain = max(1, min(64, -(-int(setting.pick(CYCLED, 1)) // n_dense)))
        if kind == "plain":
            plain = [normal(setting, n_out, n_in) / n_in**0.5 for _ in range(n_plain)]
            return cls([pack(one.clone()) for one in plain], plain, n_dense)
        g = torch.Generator(setting.device).manual_seed(1)
        some = quantized.fields(kind, (n_out, n_in), group, g)
        n_bytes = sum(one.nbytes for one in some.values())
        one = quantized.weight(kind, some, group, DTYPE)
        n_sets = -(-n_plain * n_dense // n_bytes)
        return cls([pack(one) for _ in range(n_sets)], [one.dense() for _ in range(n_plain)], n_bytes)


def products(setting: Setting) -> Findings:
    """Linear layers of one 8B layer and its head; a bar weighs 32 layers and the head as a pass does."""
    shapes = setting.pick(SHAPES, {"qkv": (96, 64, 2), "head": (128, 64, 1)})
    widths = setting.pick((1, 2, 4, 8, 16, 32, 64), (1, 4))
    yield from products_of(setting, "plain", shapes, widths, 0.7)


def packed_products(setting: Setting) -> Findings:
    """The same layers in groups of 128 inputs and blocks of 128 x 128; heads are not quantised."""
    shapes = setting.pick({name: SHAPES[name] for name in list(SHAPES)[:-1]}, {"qkv": (96, 64, 2)})
    for kind in quantized.KINDS:
        yield from products_of(setting, kind, shapes, setting.pick((1, 4, 16, 32, 64), (1, 4)), 0.75)


def products_of(
    setting: Setting, kind: str, shapes: dict[str, tuple[int, int, int]], widths: tuple[int, ...], goal: float
) -> Findings:
    """goal: of what the memory gives, at 16 rows and fewer."""
    total = {n: [0.0, 0.0, 0.0] for n in widths}  # bytes, seconds, torch's seconds of one pass
    label = "" if kind == "plain" else f"{kind} "
    complete = True
    for name, (n_out, n_in, n_layers) in shapes.items():
        weights = Weights.made(setting, n_out, n_in, kind)
        for n in widths:
            if setting.left_s() < 0:
                complete = False
                break
            x = normal(setting, n, n_in)
            took = measure([functools.partial(linear, x, one) for one in weights.packed], setting.device)
            other = measure([functools.partial(F.linear, x, one) for one in weights.plain], setting.device)
            yield Finding(
                f"{label}linear {name} {n_out}x{n_in}, {n} rows",
                None,
                figures(setting, took, weights.n_bytes, other),
            )
            for i, value in enumerate((weights.n_bytes, took.seconds, other.seconds)):
                total[n][i] += n_layers * value
    for n in widths if complete else ():
        n_bytes, seconds, torch_seconds = total[n]
        share, ratio = n_bytes / seconds / ceiling(setting), torch_seconds / seconds
        yield Finding(
            f"all {label}products of a pass, {n} rows",
            None,
            {"us": 1e6 * seconds, "of memory": share, "x torch": ratio},
        )
        if n <= 16:
            yield bar(f"{label}matmul, {n} rows, share of memory", share, f"{goal:g}", met=share >= goal)
        if n <= 16 and kind == "plain":
            yield bar(f"matmul, {n} rows, x torch", ratio, "0.95", met=ratio >= 0.95)


def attentions(setting: Setting) -> Findings:
    """One layer at 32k: paged against torch's fused attention over contiguous keys and values, which is not paged.

    Keys and values of float8 are half the bytes, and have no bar.
    """
    heads, n_kv, d, page = 32, 8, 128, 64
    for n_past in setting.pick((32_768, 4096), (100,)):
        n_pages = -(-(n_past + 64) // page)
        n_bytes = 2 * n_past * n_kv * d * DTYPE.itemsize
        n_sets = max(1, int(setting.pick(CYCLED, 1) // n_bytes))
        stores = [[normal(setting, n_pages, n_kv, page, d) for _ in range(2)] for _ in range(n_sets)]
        coded = [[one.to(torch.float8_e4m3fn) for one in pair] for pair in stores]
        flat = [[one.transpose(0, 1).reshape(1, n_kv, -1, d) for one in pair] for pair in stores]
        table = torch.randperm(n_pages).tolist()
        for n in setting.pick((1, 2, 4, 8, 16, 64), (1, 3)):
            batch = Batch.build([Span(0, [0] * n, n_past, 0, 1)], [table], page, setting.device)
            q = normal(setting, n, heads, d)
            works = [functools.partial(attention, q, k, v, batch, d**-0.5) for k, v in stores]
            took = measure(works, setting.device)
            query = q.transpose(0, 1)[None]  # [1, n_heads, n, d_head]
            mask = torch.ones(n, n_past + n, dtype=torch.bool, device=setting.device).tril(n_past)
            dense = functools.partial(F.scaled_dot_product_attention, query, enable_gqa=True)
            others = [
                functools.partial(
                    dense, k[:, :, : n_past + n], v[:, :, : n_past + n], attn_mask=mask if n > 1 else None
                )
                for k, v in flat
            ]
            other = measure(others, setting.device)
            yield Finding(f"attention, {n} rows after {n_past}", None, figures(setting, took, n_bytes, other))
            works = [functools.partial(attention, q, *pair, batch, d**-0.5) for pair in coded]
            label = f"attention over float8, {n} rows after {n_past}"
            yield Finding(label, None, figures(setting, measure(works, setting.device), n_bytes / 2))
            if n_past >= 32_768 and n <= 16:
                share = n_bytes / took.seconds / ceiling(setting)
                yield bar(f"attention at 32k, {n} rows, share of memory", share, "0.6", met=share >= 0.6)


def picks(setting: Setting) -> Findings:
    """8 slots x 16 rows x 151,936 words, together with the verification that follows."""
    n_spans, n_each, vocab = setting.pick((8, 16, 151_936), (2, 3, 700))
    n = n_spans * n_each
    judge = verification(setting, n_spans, n_each)
    for name, temperature, top_p, goal in (
        ("T 0", 0.0, 1.0, None),
        ("T 1", 1.0, 1.0, 60.0),
        ("T 1, top_p 0.95", 1.0, 0.95, 120.0),
    ):
        params = RowParams(
            torch.full((n,), temperature, device=setting.device),
            torch.zeros(n, dtype=torch.int32, device=setting.device),
            torch.full((n,), top_p, device=setting.device),
            torch.zeros(n, device=setting.device),
            torch.arange(n, device=setting.device),
            torch.arange(n, device=setting.device),
        )
        logits = [normal(setting, n, vocab, dtype=torch.float32) * 3 for _ in range(setting.pick(8, 1))]
        works = [lambda x=x, params=params: judge(choose(x, params).token_ids) for x in logits]
        took = measure(works, setting.device)
        label = f"choose + verify, {n_spans} x {n_each} x {vocab}, {name}"
        yield Finding(label, None, figures(setting, took, 4 * n * vocab))
        if goal is not None:
            yield bar(label, took.us, f"{goal:g} us", met=took.us <= goal)
        one = measure([lambda x=x, p=params: choose(x[:1], first_row(p)) for x in logits], setting.device)
        yield Finding(f"choose, 1 row of {vocab}, {name}", None, figures(setting, one, 4 * vocab))


def first_row(params: RowParams) -> RowParams:
    return RowParams(**{name: getattr(params, name)[:1] for name in RowParams.__slots__})


def verification(setting: Setting, n_spans: int, n_each: int) -> Callable[[Tensor], object]:
    """`verify` of spans of n_each rows whose drafts are all wrong, so that the texts grow by a token each."""
    whole = functools.partial(torch.zeros, device=setting.device)
    drafts = whole(n_spans * (n_each - 1), dtype=torch.int64) + 2**20  # no token
    starts = torch.arange(n_spans + 1, device=setting.device).int() * n_each
    slots = torch.arange(n_spans, device=setting.device)
    tokens, lengths = whole(n_spans, 32_768, dtype=torch.int32), whole(n_spans, dtype=torch.int32)
    return lambda picks: verify(picks, drafts, starts, slots, tokens, lengths)


def lookups(setting: Setting) -> Findings:
    """64 slots at 32k tokens each: the last token stands nowhere else, or as all others do."""
    n_slots, capacity = setting.pick((64, 32_768), (3, 100))
    apart = torch.arange(n_slots * capacity, device=setting.device).view(n_slots, capacity).int()
    lengths = torch.full((n_slots,), capacity, dtype=torch.int32, device=setting.device)
    slots = torch.arange(n_slots, device=setting.device)
    for name, tokens in (("no token twice", apart), ("one token", torch.zeros_like(apart))):
        took = measure([functools.partial(ngram, tokens, lengths, slots, 16)] * 4, setting.device)
        label = f"ngram, {n_slots} slots at {capacity}, {name}"
        yield Finding(label, None, figures(setting, took, 4 * n_slots * capacity))
        if tokens is apart:
            yield bar(label, took.us, "30 us", met=took.us <= 30)


def recurrent(setting: Setting) -> Findings:
    """The 48 recurrent layers of Qwen3.5-27B: convolution, delta rule and gated norm of one slot."""
    n_key, n_value, d, n_layers = setting.pick((16, 48, 128, 48), (1, 2, 16, 2))
    n_channels, n_parked, device = (2 * n_key + n_value) * d, 40, setting.device
    wide = functools.partial(normal, setting, dtype=torch.float32)
    deltas = [
        DeltaState(
            wide(2, n_value, d, d), wide(n_parked, n_key, d) / d**0.5, wide(n_parked, n_value, d),
            torch.rand(n_parked, n_value, device=device),
        )
        for _ in range(n_layers)
    ]  # fmt: skip
    convs = [
        ConvState(normal(setting, 2, 3, n_channels), normal(setting, n_parked, n_channels)) for _ in deltas
    ]
    weight, norm, gate = (
        normal(setting, 4, n_channels).T,
        normal(setting, d),
        DeltaGate(wide(n_value) - 1, wide(n_value)),
    )
    n_bytes = n_layers * 2 * 4 * n_value * d**2  # the states, read once and written once
    seconds = {}
    for n_rows, n_history in ((1, 0), (1, 7), (8, 0), (8, 7), (9, 8), (64, 0)):
        n_drafts = n_rows - 1 if n_rows < 64 else 0
        parks = [-1] * (n_rows - n_drafts) + list(range(20, 20 + n_drafts))
        settled = [n_history + n_rows - n_drafts]
        arrays = RecurrentRows.arrays([1], [n_rows], [list(range(n_history))], settled, parks)
        spans = RecurrentRows(*upload(arrays, device))
        x, z = normal(setting, n_rows, n_channels), normal(setting, n_rows, n_value * d)
        raw, beta = normal(setting, n_rows, n_value), normal(setting, n_rows, n_value)

        def layers(
            x: Tensor = x, z: Tensor = z, raw: Tensor = raw, beta: Tensor = beta, spans: RecurrentRows = spans
        ) -> None:
            for delta, conv in zip(deltas, convs, strict=True):
                o = gated_delta(short_conv(x, weight, conv, spans), raw, beta, gate, delta, spans)
                gated_norm(o, z, norm, 1e-6, "silu")

        took = measure([layers], setting.device)
        seconds[n_rows, n_history] = took.seconds
        label = f"{n_layers} recurrent layers, {n_rows} rows, {n_history} folded"
        yield Finding(label, None, figures(setting, took, n_bytes))
    for many in ((8, 7), (9, 8)):
        ratio = seconds[many] / seconds[1, 0]
        yield bar(f"GDN, {many[0]} rows with {many[1]} folded / 1 row", ratio, "1.2", met=ratio <= 1.2)


def rows(setting: Setting) -> Findings:
    """What an 8B layer does beside its products and attention."""
    hidden, ffn, heads, n_kv, d, page = setting.pick((4096, 14336, 32, 8, 128, 64), (64, 96, 4, 2, 16, 16))
    norms, weight = HeadNorms(normal(setting, d), normal(setting, d), 1e-6), normal(setting, hidden)
    angles = torch.rand(4096, d // 2, device=setting.device)
    keys, values = (normal(setting, 64, n_kv, page, d) for _ in range(2))
    for n in setting.pick((1, 8, 16, 64), (1, 3)):
        x, gate_up = normal(setting, n, hidden), normal(setting, n, 2 * ffn)
        qkv = normal(setting, n, (heads + 2 * n_kv) * d)
        batch = Batch.build([Span(0, [0] * n, 300, 0, 1)], [list(range(64))], page, setting.device)
        rope = Rope(angles.cos(), angles.sin())
        normed = functools.partial(add_rms_norm, x, x, weight, 1e-6)
        written = functools.partial(norm_rope_write, qkv, norms, rope, batch, keys, values)
        works: list[tuple[str, Callable[[], object], Callable[[], object] | None]] = [
            ("add_rms_norm", normed, lambda x=x: F.rms_norm(x + x, (hidden,), weight)),
            (
                "gated_mul",
                functools.partial(gated_mul, gate_up, SILU),
                lambda y=gate_up: F.silu(y[:, :ffn]) * y[:, ffn:],
            ),
            ("norm_rope_write", written, None),
        ]
        for name, work, own in works:
            took = measure([work] * 8, setting.device)
            other = None if own is None else measure([own] * 8, setting.device)
            yield Finding(f"{name}, {n} rows", None, figures(setting, took, other=other))


def mixtures(setting: Setting) -> Findings:
    """128 experts of 2048 -> 768, 8 a row; bytes are those of the experts that some row asks for."""
    n_experts, d_model, d_inner, top_k = setting.pick((128, 2048, 768, 8), (16, 40, 16, 2))
    each = 3 * d_model * d_inner * DTYPE.itemsize
    packed = pack_experts(
        normal(setting, n_experts, 2 * d_inner, d_model) / d_model**0.5,
        normal(setting, n_experts, d_model, d_inner) / d_inner**0.5,
    )
    routing = Routing(top_k=top_k, scores="softmax", normed=True)
    for n in setting.pick((1, 2, 4, 8, 16, 64), (1, 3)):
        x = normal(setting, n, d_model)
        logits = [normal(setting, n, n_experts) for _ in range(setting.pick(16, 2))]
        routed = [route(one, routing) for one in logits]
        touched = sum(len(set(one.expert_ids.flatten().tolist())) for one in routed) / len(routed)
        took = measure([functools.partial(experts, x, one, packed) for one in routed], setting.device)
        label = f"experts, {n} rows, {touched:.0f} touched"
        yield Finding(label, None, figures(setting, took, touched * each))
        took = measure([functools.partial(route, one, routing) for one in logits], setting.device)
        yield Finding(f"route, {n} rows", None, figures(setting, took))
