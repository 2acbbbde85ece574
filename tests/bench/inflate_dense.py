"""How a checkpoint of ordinary layers is inflated: Llama, Mistral, Qwen2 and Qwen3, and the blocks of draft heads.

The new parts and why they change nothing:

- Hidden width times 4^k: new residual channels are zero in every embedding, and no output projection writes them.
  The mean square over 4^k times more channels is 4^k times smaller, so a norm's result is 2^k times larger; its
  weights shrink by 2^k and its eps by 4^k, both exact in any float type. The eps of head norms shrinks too, so
  q_proj and k_proj rows shrink by 2^k in front of them.
- New heads and feed-forward neurons have random insides and zero columns in o_proj and down_proj. A query head
  moves to a place where the grouping gives it its own K/V head, which is repeated if the new groups are smaller.
- New layers have random insides and zero o_proj and down_proj. The old layers keep their order among them.
- Head width times r: dimension j goes to r·j in its half, where the wider rotary table has the same frequency.
  Norm weights or q_proj make up for the other scale. Exact if r is a power of 4; with head norms other r work
  too, their weights are then stored in float32.
- New vocabulary: the first new channel is a constant c in every embedding and zero in all norm weights but the
  last. There its weight is 2^15, and every new row of the head reads it with -4 / c, so a new token's logit is
  about -2^17 / rms(x): below -1000 while the final residual's rms is below 100, and never picked. c is so small
  (1e-4 of an embedding row) that it changes mean squares by less than float32 can show. A tied head is untied for
  this. The tokenizer gets as many unreachable tokens.

Random insides have the spread of trained ones: nothing overflows, and no product is denormal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

LAST_NORM_GAIN = 2.0**15
ROWS_AT_ONCE = 16384  # random rows made at a time, so that a large vocabulary needs little memory


@dataclass(frozen=True)
class Shape:
    """The sizes of a network."""

    hidden: int
    layers: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


def shape_of(config: dict[str, Any]) -> Shape:
    """The sizes in a config.json."""
    heads = config["num_attention_heads"]
    return Shape(
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        ffn=config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab=config["vocab_size"],
    )


@dataclass(frozen=True)
class Entry:
    """One tensor of the new checkpoint; `make` builds it when its turn to be written comes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]


def power_of_4(ratio: float) -> bool:
    return ratio >= 1 and math.log(ratio, 4).is_integer()


def place_heads(old: tuple[int, int], new: tuple[int, int]) -> tuple[list[int], list[int]]:
    """(new head of each old one, old shared head of each new one that repeats one).

    old, new: how many heads, and how many of those that a group of them shares.
    """
    group, width = old[0] // old[1], new[0] // new[1]
    places: list[int] = []
    sources: list[int] = []
    for shared in range(old[1]):
        for start in range(0, group, width):
            first = len(sources) * width
            places += range(first, first + min(width, group - start))
            sources.append(shared)
    if len(sources) > new[1]:
        raise ValueError(f"{new[1]} groups of {width} heads cannot hold {old[0]} heads in groups of {group}")
    return places, sources


class Inflation:
    """The plan of one inflation: which tensors, and how each is made."""

    read_shape = staticmethod(shape_of)

    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor], new: Shape, seed: int) -> None:
        """Raises ValueError for sizes that cannot compute the same function."""
        self.config, self.weights, self.old, self.new = config, weights, self.read_shape(config), new
        self.generator = torch.Generator().manual_seed(seed)
        self.head_norms = "model.layers.0.self_attn.q_norm.weight" in weights
        self.dtype = weights["model.layers.0.mlp.down_proj.weight"].dtype
        self.ratio = new.head_dim / self.old.head_dim
        self._check()
        self.shrink = math.sqrt(self.old.hidden / new.hidden)  # 2^-k
        self.query_places, self.kv_sources = place_heads(
            (self.old.heads, self.old.kv_heads), (new.heads, new.kv_heads)
        )
        half, ratio = self.old.head_dim // 2, int(self.ratio)
        first = torch.arange(half) * ratio
        self.dims = torch.cat(
            (first, first + new.head_dim // 2)
        )  # [old head_dim]: new place of each dimension
        self.layer_places = [i * new.layers // self.old.layers for i in range(self.old.layers)]
        self.untied = new.vocab > self.old.vocab or "lm_head.weight" in weights
        self.constant = self._constant() if new.vocab > self.old.vocab else 0.0

    def _check(self) -> None:
        old, new = self.old, self.new
        for name, size in asdict(new).items():
            if size < asdict(old)[name]:
                raise ValueError(f"{name} {size} is below the checkpoint's {asdict(old)[name]}")
        if not power_of_4(new.hidden / old.hidden):
            raise ValueError(f"hidden {new.hidden} is not {old.hidden} times a power of 4")
        if new.vocab > old.vocab and new.hidden == old.hidden:
            raise ValueError("a larger vocabulary needs a larger hidden size, for its constant channel")
        if new.heads % new.kv_heads:
            raise ValueError(f"{new.heads} query heads are no multiple of {new.kv_heads} K/V heads")
        rope = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if self.ratio != 1 and kind == "yarn":
            raise ValueError("yarn depends on the number of dimensions, so heads cannot be made wider")
        if not self.ratio.is_integer() or not (self.head_norms or power_of_4(self.ratio)):
            raise ValueError(f"head_dim {new.head_dim} does not fit {old.head_dim}")

    def _constant(self) -> float:
        """A power of two of about 1e-4 of the smallest embedding row that is in use."""
        norms = self.weights["model.embed_tokens.weight"].float().norm(dim=1)  # [old vocab]
        smallest = norms[norms > 1e-3 * norms.median()].min()
        return 2.0 ** math.floor(math.log2(1e-4 * float(smallest)))

    def entries(self) -> Iterator[Entry]:
        """All tensors of the new checkpoint, in the order in which they are written."""
        hidden, vocab = self.new.hidden, self.new.vocab
        yield Entry("model.embed_tokens.weight", (vocab, hidden), self.dtype, self.embedding)
        for place in range(self.new.layers):
            source = self.layer_places.index(place) if place in self.layer_places else None
            yield from self.block(place, source)
        yield Entry("model.norm.weight", (hidden,), self.dtype, self.last_norm)
        if self.untied:
            yield Entry("lm_head.weight", (vocab, hidden), self.dtype, self.head)

    def block(self, place: int, source: int | None) -> Iterator[Entry]:
        """The tensors of one layer: of old layer `source`, or of a new one."""
        for name, shape in self.block_shapes(self.like(place)).items():
            old = None if source is None else self.weights[f"model.layers.{source}.{name}"]
            dtype = self.dtype_of(name)

            def make(name: str = name, shape: tuple[int, ...] = shape, old: Tensor | None = old) -> Tensor:
                return self.block_tensor(name, shape, old)

            yield Entry(f"model.layers.{place}.{name}", shape, dtype, make)

    def like(self, place: int) -> int:
        """An old layer of the kind that stands at a place."""
        return 0

    def dtype_of(self, name: str) -> torch.dtype:
        """What a layer's tensor is stored in."""
        exact = not name.endswith("k_norm.weight") or power_of_4(self.ratio)
        return self.dtype if exact else torch.float32

    def block_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Name and new shape of every tensor in a layer like old layer `layer`."""
        prefix, sizes = f"model.layers.{layer}.", self.sizes()
        names = [name.removeprefix(prefix) for name in self.weights if name.startswith(prefix)]
        return {name: tuple(sizes[one] for one in self.axes(name)) for name in sorted(names)}

    def sizes(self) -> dict[str, int]:
        """New length of each kind of axis."""
        new = self.new
        sizes = {"hidden": new.hidden, "ffn": new.ffn, "head_dim": new.head_dim}
        return sizes | {"q": new.heads * new.head_dim, "kv": new.kv_heads * new.head_dim}

    def axes(self, name: str) -> tuple[str, ...]:
        """What each axis of a tensor counts."""
        return axes(name)

    def block_tensor(self, name: str, shape: tuple[int, ...], old: Tensor | None) -> Tensor:
        """One tensor of a layer: random insides, zero outputs, and the old tensor in its place."""
        kinds = self.axes(name)
        writes = len(kinds) == 2 and kinds[0] == "hidden"
        if is_stream_norm(name):
            made = self.random_norm(shape[0]) * self.shrink
            made[self.old.hidden : self.old.hidden + 1] = 0.0  # hides the constant channel, if there is one
        elif kinds == ("head_dim",):
            made = self.random_norm(shape[0])
        elif writes or name.endswith("bias"):
            made = torch.zeros(shape)
        else:
            made = self.random(shape, self.old.hidden**-0.5)
        if old is None:
            return made
        index = [self.places(kind, name) for kind in kinds]
        old = self.scaled(name, self.repeated(old.float(), kinds[0], name))
        if len(kinds) == 1:
            made[index[0]] = old
            return made
        if not writes:
            made[self.owned_rows(kinds[0], name)] = 0.0  # an old row reads old channels only
        made[index[0][:, None], index[1]] = old
        return made

    def places(self, kind: str, name: str) -> Tensor:
        """New index of each old one along an axis; K/V rows in the order of `repeated`."""
        if kind == "q":
            heads = torch.tensor(self.query_places)
        elif kind == "kv":
            heads = torch.arange(len(self.kv_sources))
        elif kind == "head_dim":
            return self.dims
        else:
            return torch.arange(self.old.hidden if kind == "hidden" else self.old.ffn)
        return (heads[:, None] * self.new.head_dim + self.dims).flatten()

    def owned_rows(self, kind: str, name: str) -> Tensor:
        """All rows of the heads or neurons that hold old ones, wider head dimensions included."""
        if kind not in ("q", "kv"):
            return self.places(kind, name)
        heads = torch.tensor(self.query_places) if kind == "q" else torch.arange(len(self.kv_sources))
        return (heads[:, None] * self.new.head_dim + torch.arange(self.new.head_dim)).flatten()

    def repeated(self, old: Tensor, kind: str, name: str) -> Tensor:
        """An old tensor with its K/V heads repeated as `kv_sources` says."""
        if kind != "kv":
            return old
        by_head = old.view(self.old.kv_heads, self.old.head_dim, -1)  # [kv_heads, head_dim, columns]
        return by_head[torch.tensor(self.kv_sources)].flatten(0, 1).view(-1, *old.shape[1:])

    def scaled(self, name: str, old: Tensor) -> Tensor:
        """An old tensor times what makes up for wider norms and wider heads."""
        root = math.sqrt(self.ratio)
        if is_stream_norm(name):
            return old * self.shrink
        if name.endswith("k_norm.weight"):
            return old / root
        if self.head_norms and name.split(".")[-2] in ("q_proj", "k_proj"):
            return old * self.shrink * (root if power_of_4(self.ratio) else 1.0)
        return old * root if "q_proj" in name else old

    def embedding(self) -> Tensor:
        """The embedding: old rows in old channels, random new rows, the constant in every row."""
        old = self.weights["model.embed_tokens.weight"]
        made = self.random_rows(self.new.vocab, self.new.hidden, float(old.float().std()))
        made[: self.old.vocab] = 0.0
        made[: self.old.vocab, : self.old.hidden] = old
        if self.constant:
            made[:, self.old.hidden :] = 0.0
            made[:, self.old.hidden] = self.constant
        return made

    def head(self) -> Tensor:
        """The head: old rows in old channels, new rows that read the constant."""
        old = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        made = self.random_rows(self.new.vocab, self.new.hidden, float(old.float().std()))
        made[: self.old.vocab] = 0.0
        made[: self.old.vocab, : self.old.hidden] = old
        if self.constant:
            made[self.old.vocab :, self.old.hidden] = -4.0 / self.constant
        return made

    def last_norm(self) -> Tensor:
        """The final norm's weights, with the large one of the constant channel."""
        made = self.random_norm(self.new.hidden) * self.shrink
        made[: self.old.hidden] = self.weights["model.norm.weight"].float() * self.shrink
        if self.new.hidden > self.old.hidden:
            made[self.old.hidden] = LAST_NORM_GAIN if self.constant else 0.0
        return made

    def random(self, shape: Sequence[int], std: float) -> Tensor:
        return torch.randn(tuple(shape), generator=self.generator) * std

    def random_norm(self, width: int) -> Tensor:
        return 1.0 + self.random((width,), 0.1)

    def random_rows(self, n_rows: int, width: int, std: float) -> Tensor:
        """Random rows in the checkpoint's dtype, made a block at a time."""
        made = torch.empty((n_rows, width), dtype=self.dtype)
        for block in torch.split(made, ROWS_AT_ONCE):
            block.copy_(self.random(block.shape, std))
        return made

    def new_config(self) -> dict[str, Any]:
        """config.json of the new checkpoint."""
        new, config = self.new, dict(self.config)
        config |= {"hidden_size": new.hidden, "num_hidden_layers": new.layers, "intermediate_size": new.ffn}
        config |= {"num_attention_heads": new.heads, "num_key_value_heads": new.kv_heads}
        config |= {"head_dim": new.head_dim, "vocab_size": new.vocab, "tie_word_embeddings": not self.untied}
        config["rms_norm_eps"] = config.get("rms_norm_eps", 1e-6) * self.shrink**2
        if config.get("layer_types"):
            config["layer_types"] = [config["layer_types"][0]] * new.layers
        if config.get("max_window_layers"):
            config["max_window_layers"] = new.layers
        return config


def axes(name: str) -> tuple[str, ...]:
    """What each axis of a layer's tensor counts."""
    part, what = name.split(".")[-2:]
    outputs = {"q_proj": "q", "k_proj": "kv", "v_proj": "kv", "gate_proj": "ffn", "up_proj": "ffn"}
    inputs = {"o_proj": "q", "down_proj": "ffn"}
    if part in ("q_norm", "k_norm"):
        return ("head_dim",)
    if what == "bias" or part.endswith("norm"):
        return (outputs.get(part, "hidden"),)
    return (outputs.get(part, "hidden"), inputs.get(part, "hidden"))


def is_stream_norm(name: str) -> bool:
    """Whether a tensor scales a norm over the hidden width, not one over a head's."""
    return name.endswith("norm.weight") and axes(name) == ("hidden",)
