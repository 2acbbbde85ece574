"""Write from a draft head of a small checkpoint one for its inflated target, which drafts the same tokens.

    python -m tests.bench.inflate demo/target /tmp/big --hidden 1024 --layers 28 --ffn 4096 --heads 8 --kv-heads 4
    python -m tests.bench.inflate_heads demo/eagle3 /tmp/big /tmp/big-eagle3

Works for EAGLE-3 as SafeAILab and SpecForge write it, with a head of its own; for one MTP layer in MiMo's names;
and for DFlash as z-lab writes it. The head gets the hidden width of the target and, unless told otherwise, its
feed-forward width, heads and head width; where the head has more of something already, or its heads cannot become
as wide, it keeps what it has. Blocks grow as `tests.bench.inflate_dense` describes. Beyond them:

- A matrix that reads several vectors side by side finds the old channels at the start of each of the wider ones,
  and reads zeros elsewhere: `fc`, `input_proj`, and the first projections of EAGLE-3.
- Tap ids name the layers where the old ones stand now, which the target's file shows: new layers write nothing.
- A head that scores with the target's own matrix must not draft the new tokens of a larger vocabulary. They read
  a constant channel, so the head carries it to its last norm: DFlash has it in the embeddings it starts from, MTP
  takes it from the embedding's half of `input_proj`. EAGLE-3 has a matrix of its own, `d2t` stays, `t2d` grows.

All of it is exact up to rounding but for one thing. MTP reads the target's stream after the last norm, where the
constant, times that norm's large weight, has become a number of the size of the old channels. With the demo
checkpoint `hidden_layernorm` then returns up to 1 % less at four times the hidden width, 4 % less at sixteen
times. So with a larger vocabulary MTP drafts nearly the same tokens, without one exactly the same.
Heads that get wider by another factor than 4 (DFlash of the demo) have scales that float32 holds, bfloat16 rounds.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from slipstream.engine.speculate.registry import kind_of
from tests.bench.inflate import write_safetensors
from tests.bench.inflate_dense import LAST_NORM_GAIN, Entry, Inflation, Shape, power_of_4, shape_of

INNER = "model.layers."  # how `Inflation` calls what belongs to a layer
WIDTHS = ("ffn", "heads", "kv_heads", "head_dim")
# MTP returns the channel and reads it again, so it is kept small: new tokens are below -16000 / rms(x).
MTP_NORM_GAIN = LAST_NORM_GAIN / 8
EAGLE_IDS, DFLASH_IDS = "eagle_aux_hidden_state_layer_ids", "target_layer_ids"


@dataclass(frozen=True)
class Layout:
    """How a kind of head names its tensors."""

    layers: str  # prefix of the tensors of its layers, before the number
    joining: frozenset[str]  # matrices that read several vectors side by side
    outside: frozenset[str]  # tensors that belong to no layer; all but t2d must be there
    last_norm: str = ""  # in front of the target's head, if that is what it scores with
    last_gain: float = 0.0


EAGLE_PARTS = frozenset({"fc", "q_proj", "k_proj", "v_proj"})
EAGLE_TENSORS = frozenset({"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"})
DFLASH_TENSORS = frozenset({"fc.weight", "hidden_norm.weight", "norm.weight"})
LAYOUTS = {
    "draft-eagle3": Layout("layers.", EAGLE_PARTS, EAGLE_TENSORS),
    "draft-mtp": Layout(
        "model.mtp_layers.", frozenset({"input_proj"}), frozenset(), "final_layernorm.weight", MTP_NORM_GAIN
    ),
    "draft-dflash": Layout("layers.", frozenset({"fc"}), DFLASH_TENSORS, "norm.weight", LAST_NORM_GAIN),
}


@dataclass(frozen=True)
class Head:
    """A head as it was trained: its tensors, those of its layers under the names `model.layers.{i}.…`."""

    kind: str
    config: dict[str, Any]
    weights: dict[str, Tensor]
    renamed: tuple[str, str]  # start of a layer tensor's name in the file, and here
    shape: Shape

    @property
    def n_streams(self) -> int:
        """Vectors of the hidden width that `fc` reads."""
        return self.weights["fc.weight"].shape[1] // self.shape.hidden


def read_head(folder: Path) -> Head:
    """The head in a folder. Raises ValueError for tensors of another layout."""
    kind = kind_of(folder)
    if kind not in LAYOUTS:
        raise ValueError(f"{folder}: {kind} is no head that is inflated here")
    layout, config = LAYOUTS[kind], json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    outer, inner = layout.layers, INNER
    if "midlayer.hidden_norm.weight" in weights:
        outer, inner = "midlayer.", f"{INNER}0."
    outside = {name for name in weights if not name.startswith(outer)}
    wrong = (layout.outside - {"t2d"} - outside) | (outside - layout.outside)
    if wrong:
        raise ValueError(
            f"{folder}: {kind} in another layout; missing or unknown: {', '.join(sorted(wrong))}"
        )
    weights = {
        name if name in outside else inner + name.removeprefix(outer): weights[name] for name in weights
    }
    shape = shape_of_head(config, weights)
    if shape.layers > 1 and kind != "draft-dflash":
        raise ValueError(f"{folder}: {kind} of {shape.layers} layers")
    return Head(kind, config, weights, (outer, inner), shape)


def shape_of_head(config: dict[str, Any], weights: dict[str, Tensor]) -> Shape:
    """The sizes that the tensors show; of the config only the number of query heads and the vocabulary."""
    names = {name.split(".")[2] for name in weights if name.startswith(INNER)}
    hidden, ffn = weights[f"{INNER}0.mlp.down_proj.weight"].shape
    heads = config["num_attention_heads"]
    head_dim = weights[f"{INNER}0.self_attn.o_proj.weight"].shape[1] // heads
    kv_heads = weights[f"{INNER}0.self_attn.k_proj.weight"].shape[0] // head_dim
    return Shape(hidden, len(names), ffn, heads, kv_heads, head_dim, config["vocab_size"])


@dataclass(frozen=True)
class Target:
    """What a head must know of the inflated checkpoint that it is made for."""

    config: dict[str, Any]
    layer_places: list[int]  # where the old layers stand
    constant: float  # in the first new channel of every embedding; 0 if there is no new vocabulary
    row_norm: float  # of an old embedding row, the median

    def moved(self, layer: int) -> int:
        """The layer whose output is that of old layer `layer`; -1 and the old number are the two ends."""
        if layer < 0:
            return layer
        n_layers: int = self.config["num_hidden_layers"]
        return [*self.layer_places, n_layers][layer]


def read_target(folder: Path, hidden: int, vocab: int) -> Target:
    """An inflated checkpoint; hidden, vocab: the sizes of the small one."""
    config = json.loads((folder / "config.json").read_text())
    with safe_open(folder / "model.safetensors", "pt") as file:
        outputs = [f"{INNER}{i}.self_attn.o_proj.weight" for i in range(config["num_hidden_layers"])]
        places = [i for i, name in enumerate(outputs) if bool(file.get_slice(name)[:hidden].any())]
        rows = file.get_slice("model.embed_tokens.weight")[
            :vocab, : hidden + 1
        ].float()  # [vocab, hidden + 1]
    constant = float(rows[0, hidden]) if rows.shape[1] > hidden else 0.0
    return Target(config, places, constant, float(rows[:, :hidden].norm(dim=1).median()))


class HeadInflation(Inflation):
    """The plan for one head."""

    def __init__(self, head: Head, target: Target, widths: dict[str, int], seed: int) -> None:
        """widths: as in `WIDTHS`, those that were asked for. Raises ValueError for sizes that cannot work."""
        old, self.source, self.target, self.layout = head.shape, head, target, LAYOUTS[head.kind]
        config = head.config | {"hidden_size": old.hidden, "num_hidden_layers": old.layers}
        config |= {"intermediate_size": old.ffn, "num_attention_heads": old.heads}
        config |= {"num_key_value_heads": old.kv_heads, "head_dim": old.head_dim}
        new = replace(new_shape(head, target), **widths)
        super().__init__(config, head.weights, new, seed)
        self.constant = target.constant
        self.n_joined = dict.fromkeys(self.layout.joining, 2)  # vectors that a matrix reads side by side
        if "fc" in self.n_joined:
            self.n_joined["fc"] = head.n_streams

    def entries(self) -> Iterator[Entry]:
        """All tensors of the new head, in the order in which they are written."""
        for layer in range(self.new.layers):
            for one in self.block(layer, layer):
                outer, inner = self.source.renamed
                yield replace(one, name=outer + one.name.removeprefix(inner))
        for name in sorted(self.layout.outside & self.weights.keys()):
            yield self.outside_entry(name, self.weights[name])

    def outside_entry(self, name: str, old: Tensor) -> Entry:
        """A tensor that belongs to no layer."""
        if name == "d2t":
            return Entry(name, tuple(old.shape), old.dtype, lambda: old)
        if name == "t2d":
            n_new = self.target.config["vocab_size"] - len(old)
            grown = torch.nn.functional.pad(old, (0, n_new))  # [vocab]: no new token can be drafted
            return Entry(name, tuple(grown.shape), old.dtype, lambda: grown)
        sizes = self.sizes()
        shape = tuple(sizes[kind] for kind in self.axes(name))
        return Entry(name, shape, self.dtype, lambda: self.block_tensor(name, shape, old))

    def sizes(self) -> dict[str, int]:
        """New length of each kind of axis."""
        joined = {f"{n} hidden": n * self.new.hidden for n in self.n_joined.values()}
        return super().sizes() | joined | {"draft id": self.n_draft_ids}

    @property
    def n_draft_ids(self) -> int:
        """Rows of the head's own output matrix."""
        return len(self.weights["lm_head.weight"]) if "lm_head.weight" in self.weights else 0

    def axes(self, name: str) -> tuple[str, ...]:
        """What each axis of a tensor counts."""
        kinds, part = super().axes(name), name.split(".")[-2]
        if part == "lm_head":
            return ("draft id", "hidden")
        if part in self.n_joined and len(kinds) == 2:
            return (kinds[0], f"{self.n_joined[part]} hidden")
        return kinds

    def places(self, kind: str, name: str) -> Tensor:
        """New index of each old one along an axis."""
        if kind == "draft id":
            return torch.arange(self.n_draft_ids)
        if kind.endswith(" hidden"):
            starts = torch.arange(self.sizes()[kind] // self.new.hidden) * self.new.hidden
            return (starts[:, None] + torch.arange(self.old.hidden)).flatten()
        return super().places(kind, name)

    def block_tensor(self, name: str, shape: tuple[int, ...], old: Tensor | None) -> Tensor:
        """One tensor, with its share in carrying the constant channel to the target's head."""
        made, channel = super().block_tensor(name, shape, old), self.old.hidden
        if not self.constant:
            return made
        if name == self.layout.last_norm:
            made[channel] = self.layout.last_gain
        elif self.source.kind == "draft-mtp" and name == "token_layernorm.weight":
            made[channel] = self.shrink  # returns constant * sqrt(old hidden) / the row's norm
        elif name == "input_proj.weight":  # reads [state | token]; about the constant comes out for most rows
            exact = self.target.row_norm / math.sqrt(self.old.hidden)
            made[channel, self.new.hidden + channel] = 2.0 ** round(math.log2(exact))
        return made

    def new_config(self) -> dict[str, Any]:
        """config.json of the new head."""
        old, target = self.source.config, self.target
        kept = ("num_hidden_layers", "tie_word_embeddings")
        config = super().new_config() | {key: old[key] for key in kept if key in old}
        config["vocab_size"] = target.config["vocab_size"]
        n_old, n_new = len(target.layer_places), target.config["num_hidden_layers"]
        if self.source.kind == "draft-mtp":  # the config is a copy of the target's
            shared = (*kept, "layer_types", "max_window_layers")
            return config | {key: target.config[key] for key in shared if key in target.config}
        if self.source.kind == "draft-dflash":
            nested = config.get("dflash_config", {})
            holder = nested if DFLASH_IDS in nested else config
            if DFLASH_IDS not in holder:
                raise ValueError(f"the config has no {DFLASH_IDS}")
            ids = {DFLASH_IDS: [target.moved(one) for one in holder[DFLASH_IDS]]}
            where = {"dflash_config": nested | ids} if holder is nested else ids
            return config | where | ({"num_target_layers": n_new} if "num_target_layers" in config else {})
        nested = config.get("eagle_config") or {}
        ids = nested.get(EAGLE_IDS, [1, n_old // 2 - 1, n_old - 4])  # by default as all projects have them
        moved = {EAGLE_IDS: [target.moved(one) for one in ids]}
        return config | {"eagle_config": nested | moved}


def new_shape(head: Head, target: Target) -> Shape:
    """The sizes of the inflated target, or of the head where they are larger or its heads cannot be as wide."""
    old, big = head.shape, shape_of(target.config)
    ratio = big.head_dim / old.head_dim
    normed = f"{INNER}0.self_attn.q_norm.weight" in head.weights
    wider = ratio >= 1 and ratio.is_integer() and (normed or power_of_4(ratio))
    return replace(
        old,
        hidden=big.hidden,
        ffn=max(old.ffn, big.ffn),
        heads=max(old.heads, big.heads),
        kv_heads=max(old.kv_heads, big.kv_heads),
        head_dim=big.head_dim if wider else old.head_dim,
    )


def check_pair(head: Head, target: Target) -> None:
    """Raise ValueError where a config shows that the head is for another target, or counts layers otherwise."""
    key = {"draft-mtp": "num_hidden_layers", "draft-dflash": "num_target_layers"}.get(head.kind, "")
    n_old = len(target.layer_places)
    if head.config.get(key, n_old) != n_old:
        raise ValueError(f"the head is for {head.config[key]} layers, the target was inflated from {n_old}")
    for name in ("speculators_model_type", "aux_hidden_states_layer_ids", EAGLE_IDS):
        if name in head.config:
            raise ValueError(f"the config counts hidden states another way: {name}")


def inflate_head(
    source: Path, target: Path, output: Path, widths: dict[str, int] | None = None, seed: int = 0
) -> Shape:
    """Write the inflated head. Raises ValueError for layouts that are not known and sizes that cannot work."""
    head = read_head(source)
    big = read_target(target, head.shape.hidden, head.shape.vocab)
    check_pair(head, big)
    inflation = HeadInflation(head, big, widths or {}, seed)
    config = json.dumps(inflation.new_config(), indent=2) + "\n"
    output.mkdir(parents=True, exist_ok=True)
    (output / "config.json").write_text(config)
    write_safetensors(output / "model.safetensors", list(inflation.entries()))
    return inflation.new


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="the head of the small checkpoint")
    parser.add_argument("target", type=Path, help="the inflated checkpoint")
    parser.add_argument("output", type=Path)
    for name in WIDTHS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help="instead of the target's")
    parser.add_argument("--seed", type=int, default=0)
    given = vars(parser.parse_args())
    widths = {name: given[name] for name in WIDTHS if given[name] is not None}
    start = time.perf_counter()
    new = inflate_head(given["source"], given["target"], given["output"], widths, given["seed"])
    size = (given["output"] / "model.safetensors").stat().st_size
    print(f"{new}: {size / 2**20:.0f} MiB in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
