"""How a Qwen3.5 checkpoint is inflated: gated-delta layers, gated attention, its MTP layer.

Heads, neurons, layers and the constant channel of a new vocabulary are as in `inflate_dense`. What differs, and why:

- Norms store what is added to 1, and the eps is also that of the norm inside a gated-delta layer, whose input does not
  change. So neither norms nor eps may. Instead the whole residual stream is 2^k as large when the hidden width is
  4^k times as large: then its mean square, with zeros in the new channels, is what it was, and every norm returns
  2^k times what it did. The embedding and all matrices that write the stream grow by 2^k, those that read it after a
  norm shrink by 2^k, which any float type holds exactly; `mtp.fc` does both. A tied head is untied for this.
- Old layers go to places of their own kind in the pattern of one full layer in so many, and keep their order.
- A value head goes with the key head of its group, which is repeated if the new groups are smaller, with its channels
  of the convolution. New heads take decays and time steps from trained ones, with noise, so their states stay bounded.
- Norms do with the constant channel what they do with others: nothing old reads it, and what is new writes nothing.
  All of a new token's distance is in the rows of the head, which read -2^17 / c. So the channel stays small where
  the MTP layer reads it, whose mean squares it does not change either. There it goes from the embedding's half of
  `mtp.fc` to the last norm, about as large as it was.

o_proj, out_proj and down_proj are zero where they are new.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from tests.bench.inflate_dense import Entry, Inflation, Shape, place_heads, shape_of

FULL, LINEAR = "full_attention", "linear_attention"
NEW_TOKEN_GAIN = 2.0**17  # over the final residual's rms: how far below zero the logit of a new token is
MTP = "mtp."
# What each axis of a tensor counts; names are those within a layer, or whole.
AXES: dict[str, tuple[str, ...]] = {
    "input_layernorm.weight": ("hidden",),
    "post_attention_layernorm.weight": ("hidden",),
    "self_attn.q_proj.weight": ("query and gate", "hidden"),
    "self_attn.k_proj.weight": ("kv", "hidden"),
    "self_attn.v_proj.weight": ("kv", "hidden"),
    "self_attn.o_proj.weight": ("hidden", "query"),
    "self_attn.q_norm.weight": ("head_dim",),
    "self_attn.k_norm.weight": ("head_dim",),
    "linear_attn.in_proj_qkv.weight": ("channel", "hidden"),
    "linear_attn.in_proj_z.weight": ("value", "hidden"),
    "linear_attn.in_proj_b.weight": ("value head", "hidden"),
    "linear_attn.in_proj_a.weight": ("value head", "hidden"),
    "linear_attn.conv1d.weight": ("channel", "one", "tap"),
    "linear_attn.A_log": ("value head",),
    "linear_attn.dt_bias": ("value head",),
    "linear_attn.norm.weight": ("value_dim",),
    "linear_attn.out_proj.weight": ("hidden", "value"),
    "mlp.gate_proj.weight": ("ffn", "hidden"),
    "mlp.up_proj.weight": ("ffn", "hidden"),
    "mlp.down_proj.weight": ("hidden", "ffn"),
    "model.norm.weight": ("hidden",),
    "mtp.fc.weight": ("hidden", "token and state"),
    "mtp.pre_fc_norm_embedding.weight": ("hidden",),
    "mtp.pre_fc_norm_hidden.weight": ("hidden",),
    "mtp.norm.weight": ("hidden",),
}
VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
IN_LAYER = re.compile(r"(?:model\.layers\.\d+|mtp\.layers\.0)\.")


@dataclass(frozen=True)
class HybridShape(Shape):
    """The sizes of a hybrid network."""

    linear_key_heads: int
    linear_value_heads: int


def hybrid_shape_of(config: dict[str, Any]) -> HybridShape:
    """The sizes in a config.json."""
    return HybridShape(
        **asdict(shape_of(config)),
        linear_key_heads=config["linear_num_key_heads"],
        linear_value_heads=config["linear_num_value_heads"],
    )


@dataclass(frozen=True)
class Axis:
    """What becomes of all axes that count the same."""

    size: int  # new length
    new: Tensor  # [n]: places that hold something old
    old: Tensor  # [n]: what that is; where heads are repeated, some come more than once


def kept(size: int, old: int) -> Axis:
    """An axis whose old part stays at its start."""
    return Axis(size, torch.arange(old), torch.arange(old))


def of_heads(n_heads: int, width: int, new: Sequence[int], old: Sequence[int]) -> Axis:
    """An axis of n_heads heads of `width`, in which new head new[i] is old head old[i]."""

    def spread(heads: Sequence[int]) -> Tensor:
        return (torch.tensor(heads)[:, None] * width + torch.arange(width)).flatten()

    return Axis(n_heads * width, spread(new), spread(old))


def joined(parts: Sequence[Axis], old_sizes: Sequence[int]) -> Axis:
    """Axes one after the other; old_sizes: how long each was."""
    size, start, new, old = 0, 0, [], []
    for part, old_size in zip(parts, old_sizes, strict=True):
        new.append(part.new + size)
        old.append(part.old + start)
        size, start = size + part.size, start + old_size
    return Axis(size, torch.cat(new), torch.cat(old))


def crossed(indices: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Index tensors, one per axis, that together name every combination."""
    return tuple(index.view(-1, *[1] * (len(indices) - 1 - i)) for i, index in enumerate(indices))


def pattern(config: dict[str, Any], n_layers: int) -> list[str]:
    """The kind of each layer: every so many a full one."""
    interval = config.get("full_attention_interval", 4)
    return [LINEAR if (place + 1) % interval else FULL for place in range(n_layers)]


def place_layers(old: Sequence[str], new: Sequence[str]) -> list[int]:
    """New place of each old layer: one of its kind, in order, spread evenly as far as that goes."""
    latest: list[int] = []
    end = len(new)
    for kind in reversed(old):
        end = next((at for at in reversed(range(end)) if new[at] == kind), -1)
        if end < 0:
            raise ValueError(f"{len(new)} layers have no places for {', '.join(old)} in this order")
        latest.insert(0, end)
    places: list[int] = []
    for i, kind in enumerate(old):
        first = max(i * len(new) // len(old), places[-1] + 1 if places else 0)
        found = next((at for at in range(first, len(new)) if new[at] == kind), len(new))
        places.append(min(found, latest[i]))
    return places


class HybridInflation(Inflation):
    """The plan for a hybrid."""

    read_shape = staticmethod(hybrid_shape_of)
    old: HybridShape
    new: HybridShape

    def __init__(
        self, config: dict[str, Any], weights: dict[str, Tensor], new: HybridShape, seed: int
    ) -> None:
        """Raises ValueError for sizes that cannot compute the same function and for unknown tensors."""
        super().__init__(config, weights, new, seed)
        self.kinds: list[str] = config.get("layer_types") or pattern(config, self.old.layers)
        self.new_kinds = self.kinds if new.layers == self.old.layers else pattern(config, new.layers)
        self.layer_places = place_layers(self.kinds, self.new_kinds)
        if not {*self.new_kinds} <= {*self.kinds}:
            raise ValueError(f"there is no {' and no '.join({*self.new_kinds} - {*self.kinds})} to copy")
        self.untied |= self.shrink != 1 or not config.get("tie_word_embeddings", False)
        self.kinds_of_axes = self._axes()

    def _check(self) -> None:
        super()._check()
        old, new = self.old, self.new
        if new.head_dim != old.head_dim:
            raise ValueError(f"the head_dim {old.head_dim} of a hybrid cannot become {new.head_dim}")
        if new.linear_value_heads % new.linear_key_heads:
            raise ValueError(
                f"{new.linear_value_heads} value heads are no multiple of {new.linear_key_heads} key heads"
            )
        for name in self.weights:
            if name not in VOCABULARY and IN_LAYER.sub("", name) not in AXES:
                raise ValueError(f"{name} is not known")

    def _axes(self) -> dict[str, Axis]:
        """What becomes of each kind of axis."""
        old, new, config = self.old, self.new, self.config
        d_key, d_value = config["linear_key_head_dim"], config["linear_value_head_dim"]
        value_places, key_sources = place_heads(
            (old.linear_value_heads, old.linear_key_heads), (new.linear_value_heads, new.linear_key_heads)
        )
        queries, values = list(range(old.heads)), list(range(old.linear_value_heads))
        key = of_heads(new.linear_key_heads, d_key, list(range(len(key_sources))), key_sources)
        value = of_heads(new.linear_value_heads, d_value, value_places, values)
        d_keys, d_values = old.linear_key_heads * d_key, old.linear_value_heads * d_value
        hidden, n_kv = kept(new.hidden, old.hidden), list(range(len(self.kv_sources)))
        taps = config["linear_conv_kernel_dim"]
        return {
            "hidden": hidden,
            "token and state": joined([hidden, hidden], [old.hidden] * 2),
            "ffn": kept(new.ffn, old.ffn),
            "query": of_heads(new.heads, old.head_dim, self.query_places, queries),
            "query and gate": of_heads(new.heads, 2 * old.head_dim, self.query_places, queries),
            "kv": of_heads(new.kv_heads, old.head_dim, n_kv, self.kv_sources),
            "channel": joined([key, key, value], [d_keys, d_keys, d_values]),
            "value": value,
            "value head": of_heads(new.linear_value_heads, 1, value_places, values),
            "head_dim": kept(old.head_dim, old.head_dim),
            "value_dim": kept(d_value, d_value),
            "one": kept(1, 1),
            "tap": kept(taps, taps),
        }

    def entries(self) -> Iterator[Entry]:
        """All tensors of the new checkpoint, in the order in which they are written."""
        yield from super().entries()
        for name, old in self.weights.items():
            if name.startswith(MTP):
                inner = IN_LAYER.sub("", name)
                shape = tuple(self.sizes()[kind] for kind in AXES[inner])

                def make(inner: str = inner, shape: tuple[int, ...] = shape, old: Tensor = old) -> Tensor:
                    return self.block_tensor(inner, shape, old)

                yield Entry(name, shape, old.dtype, make)

    def like(self, place: int) -> int:
        """An old layer of the kind that stands at a place."""
        return self.kinds.index(self.new_kinds[place])

    def dtype_of(self, name: str) -> torch.dtype:
        """What a layer's tensor is stored in."""
        return next(one.dtype for key, one in self.weights.items() if IN_LAYER.sub("", key) == name)

    def sizes(self) -> dict[str, int]:
        """New length of each kind of axis."""
        return {kind: axis.size for kind, axis in self.kinds_of_axes.items()}

    def axes(self, name: str) -> tuple[str, ...]:
        """What each axis of a tensor counts."""
        return AXES[name]

    def block_tensor(self, name: str, shape: tuple[int, ...], old: Tensor | None) -> Tensor:
        """One tensor of a layer, or of what leads into the MTP layer and out of it."""
        made = self.fresh(name, shape)
        if old is None:
            return made
        kinds = AXES[name]
        axes = [self.kinds_of_axes[kind] for kind in kinds]
        if kinds[1:] == ("hidden",):
            made[axes[0].new] = 0.0  # an old row reads old channels only
        scaled = old.float() * self.scale(kinds)
        made[crossed([axis.new for axis in axes])] = scaled[crossed([axis.old for axis in axes])]
        if self.constant and name == "mtp.fc.weight":  # what it reads is the constant over the row's rms
            made[self.old.hidden, self.old.hidden] = 2.0 ** round(math.log2(self.row_rms()))
        return made

    def fresh(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor of which nothing is old."""
        kinds = AXES[name]
        if kinds in (("hidden",), ("head_dim",)):
            return self.random(shape, 0.1)
        if kinds == ("value_dim",):
            return self.random_norm(shape[0])
        if kinds == ("value head",):
            known = torch.cat([one.float() for key, one in self.weights.items() if key.endswith(name)])
            drawn = torch.randint(len(known), shape, generator=self.generator)
            return known[drawn] + self.random(shape, 0.1)
        if kinds[-1] == "tap":
            made = self.random(shape, 0.1)
            made[..., -1] += 1.0  # of the row itself
            return made
        if kinds[0] == "hidden":
            return torch.zeros(shape)
        return self.random(shape, self.new.hidden**-0.5)  # normed rows have a mean square of about 1

    def scale(self, kinds: tuple[str, ...]) -> float:
        """What an old tensor is multiplied with; the stream is 1 / shrink as large as it was."""
        if len(kinds) != 2:
            return 1.0
        reads = self.shrink if kinds[1] in ("hidden", "token and state") else 1.0
        return reads / self.shrink if kinds[0] == "hidden" else reads

    def row_rms(self) -> float:
        """The median rms of an embedding's row, the same before and after."""
        rows = self.weights["model.embed_tokens.weight"].float()  # [old vocab, old hidden]
        return float(rows.square().mean(1).sqrt().median())

    def embedding(self) -> Tensor:
        """The embedding, 1 / shrink as large, the constant too."""
        return super().embedding().mul_(1.0 / self.shrink)

    def head(self) -> Tensor:
        """The head: old rows in old channels, new rows that read the constant."""
        made = super().head().mul_(self.shrink)
        if self.constant:
            made[self.old.vocab :, self.old.hidden] = -NEW_TOKEN_GAIN * self.shrink / self.constant
        return made

    def last_norm(self) -> Tensor:
        """The final norm's weights."""
        return self.block_tensor("model.norm.weight", (self.new.hidden,), self.weights["model.norm.weight"])

    def new_config(self) -> dict[str, Any]:
        """config.json of the new checkpoint."""
        config = super().new_config()
        config["rms_norm_eps"] = self.config.get("rms_norm_eps", 1e-6)
        config["layer_types"] = self.new_kinds
        config["linear_num_key_heads"] = self.new.linear_key_heads
        config["linear_num_value_heads"] = self.new.linear_value_heads
        return config
