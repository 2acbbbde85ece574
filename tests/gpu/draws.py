"""Fresh random inputs for every op, small enough for a float64 reference on the host.

Layer sizes come from a short list per op, because Triton compiles its kernels for each; what a pass may bring (rows,
spans, lengths, pages, windows) is drawn anew each time, empty spans and odd numbers included. Memory that must not be
read holds NaN, page tables end in a page that does not exist.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from slipstream.kernels.attention.op import attention
from slipstream.kernels.choose.op import Edits, Masks, RowParams, choose
from slipstream.kernels.gated.activation import GELU, SILU, Activation
from slipstream.kernels.gated.op import gated_mul, sigmoid_mul, soft_cap
from slipstream.kernels.gated_delta.op import DeltaGate, DeltaState, gated_delta
from slipstream.kernels.gated_delta.spans import RecurrentRows
from slipstream.kernels.gated_norm.op import gated_norm
from slipstream.kernels.matmul.op import linear, pack
from slipstream.kernels.moe.op import (
    ExpertBiases,
    Routed,
    Routing,
    experts,
    pack_experts,
    route,
)
from slipstream.kernels.ngram.op import ngram
from slipstream.kernels.norm.op import add_rms_norm, rms_norm
from slipstream.kernels.norm_rope_write.op import HeadNorms, Rope, norm_rope_write
from slipstream.kernels.short_conv.op import ConvState, short_conv
from slipstream.kernels.verify.op import verify
from tests.gpu import quantized
from tests.gpu.dice import Dice, Draw, Tensors, page_tensors, pages_of
from tests.gpu.latents import an_mla, as_float8


def a_matmul(dice: Dice) -> Draw:
    n_out, n_in = dice.random.choice(
        [(70, 36), (96, 64)] if dice.quick else [(192, 1024), (70, 1000), (384, 2560)]
    )
    n_rows, wide = dice.n_rows(), dice.random.random() < 0.3
    fields, weight, says = quantized.drawn(dice, n_out, n_in)
    tensors = {"x": dice.normal(n_rows, n_in), **fields}
    if dice.random.random() < 0.5:
        tensors["bias"] = dice.normal(n_out)

    def call(t: Tensors) -> tuple[Tensor, ...]:
        out_dtype = torch.promote_types(t["x"].dtype, torch.float32) if wide else None
        return (linear(t["x"], pack(weight(t), t.get("bias")), out_dtype),)

    return Draw(tensors, call, f"{n_rows} rows, {n_out} x {n_in}, {says}")


def a_norm(dice: Dice) -> Draw:
    n_rows, d = dice.n_rows(), dice.random.choice([24, 130] if dice.quick else [1000, 4096])
    tensors = {"x": dice.normal(n_rows, d), "residual": dice.normal(n_rows, d)}
    tensors["weight"] = dice.normal(d, dtype=dice.scale_dtype())

    def call(t: Tensors) -> tuple[Tensor, ...]:
        alone = rms_norm(t["x"], t["weight"], 1e-6)
        return (alone, *add_rms_norm(t["x"], t["residual"], t["weight"], 1e-6))

    return Draw(tensors, call, f"{n_rows} rows of {d}, weight {tensors['weight'].dtype}")


def a_norm_rope_write(dice: Dice) -> Draw:
    d_head, d_value, half, n_heads, n_kv, page_size = dice.random.choice(
        [(8, 8, 4, 4, 2, 16), (20, 20, 3, 3, 3, 64), (24, 16, 4, 4, 2, 16)]
        if dice.quick
        else [
            (128, 128, 64, 32, 8, 64),
            (256, 256, 32, 4, 1, 16),
            (192, 128, 32, 8, 2, 64),
            (512, 512, 256, 4, 1, 16),
        ]
    )
    lengths, past = dice.lengths()
    tensors = page_tensors(lengths, past, page_size, dice.g)
    n_pages, scale = int(tensors.pop("n_pages")), dice.scale_dtype()
    angles = torch.arange(1300)[:, None] * 0.1 ** (torch.arange(half) / half)
    tensors |= {"cos": angles.cos(), "sin": angles.sin()}
    tensors["qkv"] = dice.normal(sum(lengths), (n_heads + n_kv) * d_head + n_kv * d_value)
    values = dice.random.random() < 0.3
    if normed := dice.random.random() < 0.7:
        tensors |= {"q_norm": dice.normal(d_head, dtype=scale), "k_norm": dice.normal(d_head, dtype=scale)}
    for name, width in (("keys", d_head), ("values", d_value)):
        tensors[name] = dice.normal(n_pages, n_kv, page_size, width)

    def call(t: Tensors) -> tuple[Tensor, ...]:
        norms = HeadNorms(t["q_norm"], t["k_norm"], 1e-6, values) if normed else None
        rope = Rope(t["cos"], t["sin"])
        stores = [t["keys"], t["values"]]
        coded = [as_float8(store) for store in stores]
        norm_rope_write(t["qkv"], norms, rope, pages_of(t), *coded)
        q = norm_rope_write(t["qkv"], norms, rope, pages_of(t), *stores)
        as_meant = [a.float() == as_float8(b).float() for a, b in zip(coded, stores, strict=True)]
        return q, *stores, *as_meant

    return Draw(
        tensors,
        call,
        f"rows {lengths} after {past}, heads {d_head} and {d_value}, page {page_size}, norms {normed}",
    )


def an_attention(dice: Dice) -> Draw:
    d_head, d_value, n_heads, n_kv = dice.random.choice(
        [(16, 16, 4, 2), (24, 24, 3, 3), (32, 16, 4, 2)]
        if dice.quick
        else [
            (128, 128, 8, 2),
            (64, 64, 4, 4),
            (256, 256, 8, 1),
            (96, 96, 6, 2),
            (192, 128, 8, 2),
            (512, 512, 8, 1),
        ]
    )
    lengths, past = dice.lengths()
    page_size = dice.random.choice([16, 64])
    window = dice.random.choice([None, None, 1, 63, 64, 100, 600])
    tensors = page_tensors(lengths, past, page_size, dice.g)
    n_pages = int(tensors.pop("n_pages"))
    tensors["q"] = dice.normal(sum(lengths), n_heads, d_head)
    if pictured := dice.random.random() < 0.4:
        tensors["wholes"] = dice.wholes(lengths, past)
    spoilt = torch.full((n_pages, page_size), fill_value=True)  # what no row may see
    for i, (n, n_past) in enumerate(zip(lengths, past, strict=True)):
        first = 0 if window is None else max(0, n_past - window + 1)
        if pictured:
            first = min(first, int(tensors["wholes"][sum(lengths[:i]), 0]))
        seen = torch.arange(first, n_past + n)
        spoilt[tensors["page_table"][i, seen // page_size].long(), seen % page_size] = False
    if sunk := dice.random.random() < 0.4:
        tensors["sinks"] = dice.normal(n_heads, dtype=torch.float32) * 3
    coded = d_head % 16 == 0 and dice.random.random() < 0.4
    for name, width in (("keys", d_head), ("values", d_value)):
        store = dice.normal(n_pages, n_kv, page_size, width).masked_fill(
            spoilt[:, None, :, None], float("nan")
        )
        tensors[name] = as_float8(store).to(dice.dtype) if coded else store

    def call(t: Tensors) -> tuple[Tensor, ...]:
        stores = [as_float8(t[name]) if coded else t[name] for name in ("keys", "values")]
        sinks = t["sinks"].float() if sunk else None  # float32 beside any rows
        return (attention(t["q"], *stores, pages_of(t), d_head**-0.5, window, sinks),)

    shape = f"{n_heads} / {n_kv} heads of {d_head} and {d_value}, page {page_size}, window {window}, float8 {coded}"
    return Draw(tensors, call, f"rows {lengths} after {past}, {shape}, sinks {sunk}, images {pictured}")


def a_gated(dice: Dice) -> Draw:
    n_rows, d = dice.n_rows(), dice.random.choice([3, 34] if dice.quick else [333, 14336])
    tensors = {"gate_up": dice.normal(n_rows, 2 * d) * 3, "x": dice.normal(n_rows, d)}
    tensors["gate"] = dice.normal(n_rows, dice.random.choice([1, d]))
    activations = SILU, GELU, Activation("clamped", 4.0, 1.702), Activation("limited", 1.0)

    def call(t: Tensors) -> tuple[Tensor, ...]:
        gate_up = t["gate_up"]
        return (
            *(gated_mul(gate_up, one) for one in activations),
            soft_cap(gate_up, 3.0),
            sigmoid_mul(t["x"], t["gate"]),
        )

    return Draw(tensors, call, f"{n_rows} rows of {d}, gate {[*tensors['gate'].shape]}")


def a_gated_norm(dice: Dice) -> Draw:
    n_heads, d, activation = dice.random.choice(
        [(3, 10, "silu")] if dice.quick else [(48, 128, "silu"), (5, 40, "sigmoid")]
    )
    n_rows = dice.n_rows()
    tensors = {"x": dice.normal(n_rows, n_heads, d), "wider": dice.normal(n_rows, n_heads * d + 8)}
    tensors["weight"] = dice.normal(d, dtype=dice.scale_dtype())

    def call(t: Tensors) -> tuple[Tensor, ...]:
        gate = t["wider"][:, : n_heads * d]  # a slice of wider rows
        return (gated_norm(t["x"], gate, t["weight"], 1e-6, activation),)

    return Draw(tensors, call, f"{n_rows} rows, {n_heads} x {d}, {activation}")


def a_moe(dice: Dice) -> Draw:
    d_model, d_inner, n_experts, top_k = dice.random.choice(
        [(40, 16, 16, 4)] if dice.quick else [(256, 96, 16, 3), (256, 64, 128, 8)]
    )
    n_rows, grouped, biased = dice.n_rows(), dice.random.random() < 0.4, dice.random.random() < 0.4
    unbiased = dice.random.choice([GELU, Activation("limited", 0.5), SILU, SILU])
    tensors = {
        "logits": dice.normal(n_rows, n_experts),
        "x": dice.normal(n_rows, d_model),
        "gate_up": dice.normal(n_experts, 2 * d_inner, d_model) / d_model**0.5,
        "down": dice.normal(n_experts, d_model, d_inner) / d_inner**0.5,
        "bias": dice.normal(n_experts, dtype=torch.float32),
        "gate_up_bias": dice.normal(n_experts, 2 * d_inner),
        "down_bias": dice.normal(n_experts, d_model),
    }
    # What the experts are asked for is fixed, so that rounding in the router does not send a row elsewhere.
    order = torch.rand(n_rows, n_experts, generator=dice.g).argsort(-1)[:, :top_k]
    tensors |= {"ids": order.sort(-1).values.int(), "weights": dice.uniform(n_rows, top_k)}

    def call(t: Tensors) -> tuple[Tensor, ...]:
        routing = Routing(top_k=top_k, scores="softmax", normed=True)
        if grouped:
            routing = Routing(
                top_k=top_k,
                scores="sigmoid",
                normed=True,
                scale=2.5,
                bias=t["bias"],
                n_groups=4,
                n_groups_kept=2,
            )
        found = route(t["logits"], routing)
        biases: ExpertBiases | None = None
        activation = unbiased
        if biased:  # as in gpt-oss
            biases = ExpertBiases(t["gate_up_bias"], t["down_bias"])
            activation = Activation("clamped", 1.0, 1.702)
        packed = pack_experts(t["gate_up"].clone(), t["down"].clone(), biases, activation)
        said = experts(t["x"], Routed(t["ids"], t["weights"]), packed)
        return found.expert_ids, found.weights, said

    shape = f"{top_k} of {n_experts}, {d_model} -> {d_inner}"
    return Draw(tensors, call, f"{n_rows} rows, {shape}, groups {grouped}, biases {biased}")


def recurrent_tensors(dice: Dice, n_slots: int, n_parked: int) -> dict[str, Tensor]:
    """The tensors of `RecurrentRows`: spans with history, drafts that are parked, or nothing at all."""
    n_spans, random = dice.random.randint(1, n_slots), dice.random
    lengths = [random.choice([0, 1, 1, 3, 9, 17]) for _ in range(n_spans)]
    if not any(lengths):
        lengths[0] = 2
    places = random.sample(range(n_parked), n_parked)
    history: list[list[int]] = []
    settled, parks = [], []
    for n in lengths:
        history.append([places.pop() for _ in range(random.randint(0, 4))])
        n_drafts = random.randint(0, min(n, 8))
        free = [
            *history[-1],
            *(places.pop() for _ in range(n_drafts)),
        ]  # rows of its own history are used again
        settled.append(random.choice([len(history[-1]) + n - n_drafts, random.randint(0, len(history[-1]))]))
        parks += [-1] * (n - n_drafts) + random.sample(free, n_drafts)
    arrays = RecurrentRows.arrays(random.sample(range(n_slots), n_spans), lengths, history, settled, parks)
    return dict(zip(RecurrentRows.__slots__, map(torch.from_numpy, arrays), strict=True))


def recurrent_rows(t: Tensors) -> RecurrentRows:
    return RecurrentRows(**{name: t[name] for name in RecurrentRows.__slots__})


def a_short_conv(dice: Dice) -> Draw:
    n_channels, width, n_slots, n_parked = (
        dice.random.choice([60, 75] if dice.quick else [10240, 333]),
        4,
        5,
        80,
    )
    tensors = recurrent_tensors(dice, n_slots, n_parked)
    n_rows = len(tensors["park_rows"])
    tensors |= {"wider": dice.normal(n_rows, n_channels + 3), "weight": dice.normal(width, n_channels)}
    tensors |= {
        "window": dice.normal(n_slots, width - 1, n_channels),
        "parked": dice.normal(n_parked, n_channels),
    }

    def call(t: Tensors) -> tuple[Tensor, ...]:
        state = ConvState(t["window"], t["parked"])
        out = short_conv(t["wider"][:, :n_channels], t["weight"].T, state, recurrent_rows(t))
        return out, t["window"], t["parked"]

    return Draw(tensors, call, f"spans at {tensors['span_starts'].tolist()}, {n_channels} channels")


def a_gated_delta(dice: Dice) -> Draw:
    n_key, n_value, d_key, d_value, per_key = dice.random.choice(
        [(2, 4, 24, 37, False), (1, 2, 16, 64, True)]
        if dice.quick
        else [(4, 12, 128, 128, False), (2, 2, 64, 96, True)]
    )
    n_slots, n_parked, wide = 5, 80, torch.float32
    decays = (n_value, d_key) if per_key else (n_value,)
    tensors = recurrent_tensors(dice, n_slots, n_parked)
    n_rows = len(tensors["park_rows"])
    keys = torch.nn.functional.normalize(dice.normal(n_parked, n_key, d_key, dtype=wide), dim=-1)
    tensors |= {
        "mixed": dice.normal(n_rows, 2 * n_key * d_key + n_value * d_value),
        "raw_decay": dice.normal(n_rows, *decays),
        "raw_beta": dice.normal(n_rows, n_value),
        "a_log": dice.normal(n_value, dtype=wide) - 1,
        "dt_bias": dice.normal(*decays, dtype=wide),
        "state": dice.normal(n_slots, n_value, d_key, d_value, dtype=wide),
        "keys": keys,
        "deltas": dice.normal(n_parked, n_value, d_value, dtype=wide),
        "decays": dice.uniform(n_parked, *decays),
    }

    def call(t: Tensors) -> tuple[Tensor, ...]:
        gate = DeltaGate(t["a_log"], t["dt_bias"])
        state = DeltaState(t["state"], t["keys"], t["deltas"], t["decays"])
        o = gated_delta(t["mixed"], t["raw_decay"], t["raw_beta"], gate, state, recurrent_rows(t))
        return o, t["state"], t["keys"], t["deltas"], t["decays"]

    shape = f"{n_key} / {n_value} heads, {d_key} x {d_value}, decay per key {per_key}"
    return Draw(tensors, call, f"spans at {tensors['span_starts'].tolist()}, {shape}")


def a_choose(dice: Dice) -> Draw:
    n, vocab = dice.random.choice([1, 3, 12]), dice.random.choice([1, 31, 700, 2500, 5003])
    logits = dice.normal(n, vocab, dtype=torch.float32) * dice.random.choice([0.01, 1.0, 3.0, 8.0])
    kind = dice.random.randrange(5)
    if kind == 0:
        logits = (logits * 2).round() / 2  # ties
    elif kind == 1:
        logits[:, torch.randperm(vocab, generator=dice.g)[: vocab // 2]] = float("-inf")
    elif kind == 2:
        logits[0, 0], logits[-1, vocab // 2] = float("nan"), float("inf")

    def some(values: Tensor, otherwise: float, share: float) -> Tensor:
        return torch.where(dice.uniform(n) < share, values, otherwise)

    tensors = {
        "logits": logits.to(dice.dtype),
        "temperature": some(dice.uniform(n) ** 3 * 6, 0.0, 0.9),
        "top_k": some(torch.randint(1, 60, (n,), generator=dice.g), 0, 0.5).int(),
        "top_p": some(dice.uniform(n), 1.0, 0.5),
        "min_p": some(dice.uniform(n) * 0.3, 0.0, 0.5),
        "seed": torch.randint(-(2**62), 2**62, (n,), generator=dice.g),
        "position": torch.randint(0, 9999, (n,), generator=dice.g),
    }
    if is_edited := dice.random.random() < 0.6:
        tensors |= edit_tensors(dice, n, vocab)
    if is_masked := dice.random.random() < 0.4:
        tensors |= mask_tensors(dice, n, vocab)

    def call(t: Tensors) -> tuple[Tensor, ...]:
        params = RowParams(**{name: t[name] for name in RowParams.__slots__})
        edits = Edits(**{name: t[name] for name in Edits.__slots__}) if is_edited else None
        masks = Masks(**{name: t[name] for name in Masks.__slots__}) if is_masked else None
        got = choose(t["logits"], params, edits, masks, want_probability=True)
        assert got.probability is not None
        return got.token_ids, got.probability, t["logits"]  # which are to be left as they are

    return Draw(tensors, call, f"{n} rows of {vocab}, kind {kind}, edited {is_edited}, masked {is_masked}")


def edit_tensors(dice: Dice, n_rows: int, vocab: int) -> dict[str, Tensor]:
    """The tensors of `Edits`: rows without entries among them, and tokens that there are not."""
    each = [
        torch.randperm(vocab + 3, generator=dice.g)[: dice.random.choice([0, 1, 5, 300])]
        for _ in range(n_rows)
    ]
    n = sum(map(len, each))
    return {
        "starts": torch.tensor([0, *itertools.accumulate(map(len, each))], dtype=torch.int32),
        "token_ids": torch.cat(each).int(),
        "bias": dice.normal(n, dtype=torch.float32),
        "repeat": 0.5 + dice.uniform(n),
        "penalty": dice.normal(n, dtype=torch.float32),
    }


def mask_tensors(dice: Dice, n_rows: int, vocab: int) -> dict[str, Tensor]:
    """The tensors of `Masks`: rows without a mask, rows that share one, perhaps a word to spare."""
    n, n_words = dice.random.randint(1, n_rows), -(-vocab // 32) + dice.random.randint(0, 1)
    return {
        "index": torch.randint(-1, n, (n_rows,), generator=dice.g).int(),
        "allowed": torch.randint(-(2**31), 2**31, (n, n_words), generator=dice.g).int(),
    }


def an_ngram(dice: Dice) -> Draw:
    n_slots, capacity = 6, dice.random.choice([40, 1000, 5000])
    n_words = dice.random.choice([1, 2, 5, 300])  # few words: many occurrences, and long ones
    n_active, n_drafts_max = dice.random.choice([1, 4, 9]), dice.random.choice([1, 8, 16])
    lengths = torch.randint(0, capacity + 1, (n_slots,), generator=dice.g)
    lengths[0], lengths[1] = dice.random.randint(0, 3), capacity
    tensors = {
        "tokens": torch.randint(0, n_words, (n_slots, capacity), generator=dice.g).int(),
        "lengths": lengths.int(),
        "slots": torch.randint(-1, n_slots, (n_active,), generator=dice.g),
    }

    def call(t: Tensors) -> tuple[Tensor, ...]:
        return ngram(t["tokens"], t["lengths"], t["slots"], n_drafts_max)

    return Draw(tensors, call, f"{n_active} rows in {n_slots} texts of {capacity}, {n_words} words")


def a_verify(dice: Dice) -> Draw:
    n_slots, capacity, random = 9, dice.random.choice([40, 1000]), dice.random
    lengths = [random.choice([0, 1, 1, 2, 9, 17, 40]) for _ in range(random.randint(1, n_slots))]
    starts = [0, *itertools.accumulate(lengths)]
    n_words = random.choice([1, 2, 5000])  # few words: many drafts are right
    picks = torch.randint(0, n_words, (starts[-1],), generator=dice.g)
    drafts = torch.cat([picks[:0], *(picks[a : b - 1] for a, b in itertools.pairwise(starts) if b > a)])
    for x, share in ((picks, 0.05), (drafts, 0.05)):  # rows with NaN; padding
        x[torch.rand(len(x), generator=dice.g) < share] = -1
    wrong = torch.rand(len(drafts), generator=dice.g) < random.choice([0.0, 0.1, 0.5])
    drafts[wrong] = (drafts[wrong] + 1) % 5000
    order = torch.randperm(n_slots, generator=dice.g)[: len(lengths)]
    tensors = {
        "picks": picks,
        "drafts": drafts,
        "starts": torch.tensor(starts, dtype=torch.int32),
        "slots": torch.where(torch.rand(len(lengths), generator=dice.g) < 0.1, -1, order),
        "tokens": torch.randint(0, 5000, (n_slots, capacity), generator=dice.g).int(),
        "lengths": torch.randint(0, capacity + 1, (n_slots,), generator=dice.g).int(),
    }

    def call(t: Tensors) -> tuple[Tensor, ...]:
        found = verify(t["picks"], t["drafts"], t["starts"], t["slots"], t["tokens"], t["lengths"])
        return (*found, t["tokens"], t["lengths"])

    return Draw(tensors, call, f"spans of {lengths}, {n_words} words, room {capacity}")


MAKERS: dict[str, Callable[[Dice], Draw]] = {
    "matmul": a_matmul,
    "norm": a_norm,
    "norm_rope_write": a_norm_rope_write,
    "attention": an_attention,
    "mla": an_mla,
    "gated": a_gated,
    "gated_norm": a_gated_norm,
    "moe": a_moe,
    "short_conv": a_short_conv,
    "gated_delta": a_gated_delta,
    "choose": a_choose,
    "ngram": an_ngram,
    "verify": a_verify,
}
