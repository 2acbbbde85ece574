"""A recurrent layer's convolution and delta rule, driven pass by pass over sequences of known tokens."""

from __future__ import annotations

import random as randoms
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slipstream.kernels.gated_delta.op import DeltaGate, DeltaState, RecurrentRows, gated_delta, settle
from slipstream.kernels.short_conv.op import ConvState, settle_window, short_conv

N_SLOTS, N_PARKED, N_TOKENS, WIDTH = 5, 40, 220, 4


@dataclass(frozen=True)
class Sizes:
    n_key_heads: int
    n_value_heads: int
    d_key: int
    d_value: int
    per_key: bool  # a decay for every key dimension (KDA)

    @property
    def n_channels(self) -> int:
        return 2 * self.n_key_heads * self.d_key + self.n_value_heads * self.d_value


@dataclass(frozen=True)
class Span:
    """What one slot does in a pass. parks: where its last rows leave their records."""

    slot: int
    tokens: Sequence[int] = ()  # numbers of rows of the table of tokens
    history: Sequence[int] = ()
    n_settled: int = 0
    parks: Sequence[int] = ()


def make_rows(spans: Sequence[Span]) -> RecurrentRows:
    parks = [[-1] * (len(one.tokens) - len(one.parks)) + list(one.parks) for one in spans]
    arrays = RecurrentRows.arrays(
        [one.slot for one in spans],
        [len(one.tokens) for one in spans],
        [one.history for one in spans],
        [one.n_settled for one in spans],
        [row for each in parks for row in each],
    )
    return RecurrentRows(*map(torch.from_numpy, arrays))


@dataclass(frozen=True)
class Tokens:
    """Inputs of the layer for every token that any slot may be fed, and the layer's weights."""

    x: Tensor  # [N_TOKENS, n_channels], a slice of wider rows
    raw_decay: Tensor  # [N_TOKENS, n_value_heads] or [N_TOKENS, n_value_heads, d_key]
    raw_beta: Tensor  # [N_TOKENS, n_value_heads]
    weight: Tensor  # [n_channels, WIDTH]
    gate: DeltaGate

    @classmethod
    def random(cls, sizes: Sizes, dtype: torch.dtype) -> Tokens:
        generator = torch.Generator().manual_seed(17)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(torch.bfloat16).to(dtype)

        decays = (sizes.n_value_heads, sizes.d_key) if sizes.per_key else (sizes.n_value_heads,)
        wide = torch.promote_types(dtype, torch.float32)
        return cls(
            x=normal(N_TOKENS, sizes.n_channels + 3)[:, : sizes.n_channels],
            raw_decay=normal(N_TOKENS, *decays),
            raw_beta=normal(N_TOKENS, sizes.n_value_heads),
            weight=normal(sizes.n_channels, WIDTH),
            gate=DeltaGate((normal(sizes.n_value_heads) - 1).to(wide), normal(*decays).to(wide)),
        )


@dataclass
class Layer:
    """States of all slots; parked rows, and slots that have not begun, hold NaN."""

    sizes: Sizes
    dtype: torch.dtype
    tokens: Tokens = field(init=False)
    delta: DeltaState = field(init=False)
    conv: ConvState = field(init=False)

    def __post_init__(self) -> None:
        s, wide = self.sizes, torch.promote_types(self.dtype, torch.float32)
        self.tokens = Tokens.random(s, self.dtype)

        def nan(*shape: int, dtype: torch.dtype = wide) -> Tensor:
            return torch.full(shape, torch.nan, dtype=dtype)

        decays = (s.n_value_heads, s.d_key) if s.per_key else (s.n_value_heads,)
        self.delta = DeltaState(
            state=nan(N_SLOTS, s.n_value_heads, s.d_key, s.d_value),
            parked_keys=nan(N_PARKED, s.n_key_heads, s.d_key),
            parked_deltas=nan(N_PARKED, s.n_value_heads, s.d_value),
            parked_decays=nan(N_PARKED, *decays),
        )
        self.conv = ConvState(
            window=nan(N_SLOTS, WIDTH - 1, s.n_channels, dtype=self.dtype),
            parked=nan(N_PARKED, s.n_channels, dtype=self.dtype),
        )

    def begin(self, *slots: int) -> Layer:
        for slot in slots:
            self.delta.state[slot] = 0
            self.conv.window[slot] = 0
        return self

    def feed(self, *spans: Span) -> list[tuple[Tensor, Tensor]]:
        """One pass; per span the convolution's and the delta rule's outputs, finite or not."""
        rows, t = make_rows(spans), self.tokens
        ids = torch.tensor([token for one in spans for token in one.tokens], dtype=torch.int64)
        wider = torch.nn.functional.pad(t.x[ids], (0, 5))  # rows apart by more than their length
        mixed = short_conv(wider[:, : self.sizes.n_channels], t.weight, self.conv, rows)
        o = gated_delta(mixed, t.raw_decay[ids], t.raw_beta[ids], t.gate, self.delta, rows)
        assert mixed.dtype == o.dtype == self.dtype
        lengths = [len(one.tokens) for one in spans]
        return list(zip(torch.split(mixed, lengths), torch.split(o, lengths), strict=True))

    def settle(self, *spans: Span) -> None:
        rows = make_rows(spans)
        settle_window(self.conv, rows)
        settle(self.delta, rows)

    def kept(self, slot: int) -> tuple[Tensor, Tensor]:
        """Copies of what is stored of a slot: window and state."""
        return self.conv.window[slot].clone(), self.delta.state[slot].clone()


def recurrence(tokens: Tokens, ids: Sequence[int], sizes: Sizes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The published formulas in float64, a token at a time: (mixed, o, window, state) of a sequence from nothing."""
    s = sizes
    x = torch.cat([torch.zeros(WIDTH - 1, s.n_channels, dtype=torch.float64), tokens.x[list(ids)].double()])
    state = torch.zeros(s.n_value_heads, s.d_key, s.d_value, dtype=torch.float64)
    all_mixed, outs = [], []
    for t, token in enumerate(ids):
        summed = torch.einsum("tc,ct->c", x[t : t + WIDTH], tokens.weight.double())
        mixed = summed / (1 + torch.exp(-summed))
        q, k, v = torch.split(mixed, [s.n_key_heads * s.d_key] * 2 + [s.n_value_heads * s.d_value])
        share = s.n_value_heads // s.n_key_heads
        q, k = (one.view(s.n_key_heads, 1, -1).expand(-1, share, -1).reshape(-1, s.d_key) for one in (q, k))
        q, k = (one / (torch.einsum("hd,hd->h", one, one) + 1e-6).sqrt()[:, None] for one in (q, k))
        raw = tokens.raw_decay[token].double() + tokens.gate.dt_bias.double()
        rate = torch.exp(tokens.gate.a_log.double()).view(-1, *[1] * (raw.dim() - 1))
        decay = torch.exp(-rate * torch.log1p(torch.exp(raw))).view(s.n_value_heads, -1)
        beta = 1 / (1 + torch.exp(-tokens.raw_beta[token].double()))
        state = decay[:, :, None] * state
        delta = beta[:, None] * (v.view(s.n_value_heads, -1) - torch.einsum("hkv,hk->hv", state, k))
        state = state + torch.einsum("hk,hv->hkv", k, delta)
        all_mixed.append(mixed)
        outs.append(torch.einsum("hkv,hk->hv", state, q) / s.d_key**0.5)
    return torch.stack(all_mixed), torch.stack(outs), x[len(ids) :], state


def assert_same(got: tuple[Tensor, ...], meant: tuple[Tensor, ...]) -> None:
    for one, other in zip(got, meant, strict=True):
        assert not one.isnan().any()
        assert torch.equal(one, other)


def assert_a_chain_replays(sizes: Sizes, dtype: torch.dtype) -> None:
    """A draft network: one provisional row per pass on top of the rows before, nothing stored."""
    chain, places = [60, 61, 62], [7, 1, 9]
    meant = Layer(sizes, dtype).begin(0).feed(Span(0, chain, n_settled=0, parks=places))[0]
    layer = Layer(sizes, dtype).begin(0)
    for i, token in enumerate(chain):
        row = layer.feed(Span(0, [token], history=places[:i], parks=[places[i]]))[0]
        assert_same(row, tuple(part[i : i + 1] for part in meant))
    assert not any(part.any() for part in layer.kept(0))


def assert_width_is_not_seen(sizes: Sizes, dtype: torch.dtype, n_tokens: int, widths: Sequence[int]) -> None:
    """A sequence has the same bits in passes of any of these widths, one of them beside others' rows."""
    whole = Layer(sizes, dtype).begin(1)
    meant = whole.feed(Span(1, range(n_tokens), n_settled=n_tokens))[0]
    others: Sequence[Span] = Span(0, [200], n_settled=1), Span(2, [9, 8, 7], n_settled=3)
    for width in widths:
        layer, rows = Layer(sizes, dtype).begin(0, 1, 2), []
        for start in range(0, n_tokens, width):
            n = min(width, n_tokens - start)
            span = Span(1, range(start, start + n), n_settled=n)
            among = (others[0], span, others[1]) if start == width else (span,)
            rows.append(layer.feed(*among)[among.index(span)])
        assert_same(tuple(torch.cat(parts) for parts in zip(*rows, strict=True)), meant)
        assert_same(layer.kept(1), whole.kept(1))


def assert_nan_stays_in_its_slot(sizes: Sizes, dtype: torch.dtype) -> None:
    clean, spoilt = Layer(sizes, dtype).begin(0, 1), Layer(sizes, dtype).begin(0, 1)
    spoilt.tokens.x[5] = torch.nan
    spans = Span(0, [1, 2, 3], n_settled=3), Span(1, [4, 5, 6], n_settled=3)
    meant, got = clean.feed(*spans), spoilt.feed(*spans)
    assert_same(got[0], meant[0])
    assert_same(spoilt.kept(0), clean.kept(0))
    assert_same(tuple(part[:1] for part in got[1]), tuple(part[:1] for part in meant[1]))
    assert all(part[1:].isnan().all() for part in got[1])
    assert spoilt.delta.state[1].isnan().all()


def everything(layer: Layer) -> list[Tensor]:
    """All that the ops may change, poison included."""
    kept, windows = layer.delta, layer.conv
    records = kept.parked_keys, kept.parked_deltas, kept.parked_decays
    return [kept.state, *records, windows.window, windows.parked]


class Schedule:
    """Random passes over three slots: chunks, drafts right and wrong, spans that idle or only fold, settling."""

    def __init__(self, seed: int) -> None:
        self.random = randoms.Random(seed)
        self.kept: dict[int, list[int]] = {slot: [] for slot in range(3)}

    def pass_of(self) -> list[Span]:
        spans = []
        for slot in self.random.sample(range(3), self.random.randint(1, 3)):
            n_certain, n_drafts = self.random.randint(0, 3), self.random.randint(0, 2)
            tokens = [self.random.randrange(200) for _ in range(n_certain + n_drafts)]
            places = self.random.sample(range(slot * 10, slot * 10 + 10), n_drafts)
            history = self.kept[slot]
            n_settled = len(history) + n_certain if self.random.random() < 0.8 else 0
            spans.append(Span(slot, tokens, history, n_settled, places))
            if n_settled > 0 or not history:
                self.kept[slot] = places[: self.random.randint(0, n_drafts)]
        return spans

    def settling(self) -> list[Span]:
        return [
            Span(slot, history=kept, n_settled=self.random.randint(0, len(kept)))
            for slot, kept in self.kept.items()
        ]
