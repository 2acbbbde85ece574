"""EAGLE-3 (Li et al. 2503.01840): one layer that reads three of the target's hidden states and its own output.

For a feature position p the head takes the token x_{p+1} and a vector h: at first the target's streams at p,
fused, then, for guessed tokens, what it returned itself. It predicts x_{p+2}. Four projects write such heads
(SafeAILab, SpecForge, AngelSlim, speculators); they differ in names and in how they count hidden states.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.engine.batch import Batch
from slipstream.engine.cache.kv import KVLayer
from slipstream.engine.cache.need import Need
from slipstream.engine.cache.store import Store
from slipstream.engine.checkpoint.weights import Weights
from slipstream.engine.errors import LoadError
from slipstream.engine.layers.attention import Attention
from slipstream.engine.layers.decoder import AnyHead, Block, FeedForward, logits_of, run_blocks, wanted_rows
from slipstream.engine.layers.embed import Embedding
from slipstream.engine.layers.norm import Norm, load_norm
from slipstream.engine.models.heads.draft_parts import (
    FOREIGN_PARTS,
    BlockPlan,
    check_taps,
    fusion_width,
    listed_taps,
    load_any_linear,
    load_draft_attention,
    load_draft_block,
    load_draft_ends,
    load_draft_ffn,
    matrix_shape,
    read_plan,
    refuse_tensors,
)
from slipstream.engine.models.heads.head_choices import NO_CHOICE, HeadChoices
from slipstream.engine.models.network import Network
from slipstream.engine.models.reading.documents import read_documents
from slipstream.engine.models.reading.fields import Fields
from slipstream.kernels.matmul.op import Packed, linear

log = logging.getLogger(__name__)

Pair = tuple[Tensor, Tensor]

# Pieces of names that only variants of EAGLE-3 have, none of which is implemented.
VARIANTS = {
    **FOREIGN_PARTS,
    "mask_hidden": "parallel drafting (P-EAGLE)",
    "embed_norm": "a norm of the embedding",
    "fc_1.": "a fusion of several layers",
    "fc.0.": "a fusion of several layers",
}

# Keys of `eagle_config` that change the function computed, with the values under which they do not.
HARMLESS: dict[str, tuple[Any, ...]] = {
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "parallel_draft_step": (0, 1),
}


FIRST_LAYERS = ("midlayer", "layers.0")  # what files call the layer that reads two streams


@dataclass(frozen=True, slots=True)
class FirstLayer:
    """The layer that joins token and hidden state: attention reads both, the residual is the hidden state."""

    token_norm: Norm
    hidden_norm: Norm
    attention: Attention  # reads rows of width 2 * d_model
    mlp_norm: Norm
    mlp: FeedForward
    norm_before_residual: bool

    def __call__(self, embedded: Tensor, hidden: Tensor, batch: Batch, layer: KVLayer) -> Pair:
        """embedded, hidden: [n_tokens, d_model]. Returns the stream and what is yet to be added, the same."""
        normed_hidden = self.hidden_norm(hidden)  # [n_tokens, d_model]
        joined = torch.cat((self.token_norm(embedded), normed_hidden), -1)  # [n_tokens, 2 * d_model]
        residual = normed_hidden if self.norm_before_residual else hidden
        normed, x = self.mlp_norm.add(self.attention(joined, batch, layer), residual)
        return x, self.mlp(normed)


@dataclass(frozen=True, slots=True)
class Fusion:
    """Several hidden states of the target -> one vector of the head's width."""

    each: Sequence[Norm]  # one per stream ("fc_norm"), or none
    joint: Norm | None  # over all streams side by side ("norm_before_fc")
    matrix: Packed  # [d_model, n_taps * d_target]

    def __call__(self, streams: Sequence[Tensor]) -> Tensor:
        """streams: [n_rows, d_target] each. Returns [n_rows, d_model]."""
        if self.each:
            streams = [norm(stream) for norm, stream in zip(self.each, streams, strict=True)]
        joined = torch.cat(tuple(streams), -1)  # [n_rows, n_taps * d_target]
        return linear(joined if self.joint is None else self.joint(joined), self.matrix)


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3:
    """The head as a network. It holds no state of any sequence; its store holds one entry per position p."""

    layout: str
    taps: tuple[int, ...]  # ids as `engine.layers.decoder.Taps` counts them, one per part of the fusion
    d_model: int
    n_params: int  # without what it shares with the target
    embedding: Embedding
    fusion: Fusion
    first: FirstLayer
    more: Sequence[Block]  # usually none
    norm: Norm
    head: AnyHead
    norm_output: bool  # what is returned for the next step is taken after the final norm

    @property
    def modules(self) -> Sequence[Eagle3]:
        """The networks that guess, in turn; the last is looped for further guesses. Here: this network alone."""
        return (self,)

    @property
    def is_chained(self) -> bool:
        """Whether a module reads the states of the module before, of which there is none here."""
        return True

    @property
    def needs(self) -> list[Need]:
        """What each layer needs from a `Store`."""
        return [self.first.attention.need, *(block.mixer.need for block in self.more)]

    def fuse(self, taps: Sequence[Tensor]) -> Tensor:
        """The streams `self.taps`, [n_rows, d_target] each -> what `run` takes, [n_rows, d_model]."""
        return self.fusion(taps)

    def logits(self, said: Tensor) -> Tensor:
        """[n_rows, d_model] -> [n_rows, vocab] float32; ids outside the draft's vocabulary get minus infinity."""
        return logits_of(self.head, said)

    def run(self, batch: Batch, hidden: Tensor, store: Store) -> tuple[Tensor, Tensor]:
        """What `logits` reads and the recurrence of the wanted rows, [n_logits, d_model] each.

        batch: token x_{p+1} at position p. hidden: [n_tokens, d_model] in the target's dtype, `fuse` of the
        target's streams at p or the recurrence of the row that guessed x_{p+1}. Writes keys and values of all
        rows. Runs under `torch.inference_mode`.
        """
        first, *more = store.layers
        stream = self.first(self.embedding(batch.token_ids), hidden, batch, first)
        x, added = run_blocks(self.more, stream, batch, more)  # [n_tokens, d_model] each
        assert added is not None  # the first layer's
        normed, x = self.norm.add(*wanted_rows(batch, added, x))  # [n_logits, d_model] each
        return normed, normed if self.norm_output else x


def is_eagle3(names: Collection[str]) -> bool:
    """Whether a folder with these tensors holds an EAGLE-3 head."""
    return "fc.weight" in names and any(f"{layer}.hidden_norm.weight" in names for layer in FIRST_LAYERS)


def load_eagle3(path: Path | str, target: Network, n_ctx: int, choices: HeadChoices = NO_CHOICE) -> Eagle3:
    """The head of a folder, in the target's dtype on its device.

    n_ctx: positions the rotary tables cover. choices: its hidden states are read instead of those that the folder's
    config asks for: some published files do not say how they number theirs. Raises `LoadError` and its subclasses
    naming file, tensor and value.
    """
    weights = Weights(path, target.dtype, target.device)
    fields = read_documents(weights.folder)[0]
    layout = layout_of(fields)
    refuse_tensors(weights, VARIANTS)
    nested = fields.child("eagle_config")
    for key, harmless in HARMLESS.items():
        if nested.has(key) and nested.values[key] not in harmless:
            raise nested.refuse(key, "not supported")
    inner = fields.child("transformer_layer_config") if layout == "speculators" else fields
    prefix = "midlayer" if "midlayer.self_attn.q_proj.weight" in weights else "layers.0"
    d_model = matrix_shape(weights, "fc.weight")[0]
    plan = read_plan(inner, weights, prefix, d_model, n_ctx, target)
    given = resolve_taps(fields, target) if choices.taps is None else choices.taps
    resolved = check_taps(weights.folder, given, target)
    log.info("%s: EAGLE-3 in the layout of %s, reads hidden states %s", path, layout, list(resolved))
    embedding, head = load_draft_ends(weights, d_model, target)
    eagle = Eagle3(
        layout=layout,
        taps=resolved,
        d_model=d_model,
        embedding=embedding,
        fusion=load_fusion(weights, fields, len(resolved), plan, target),
        first=load_first_layer(weights, fields, prefix, plan),
        more=load_more_layers(weights, prefix, plan),
        norm=load_norm(weights, "norm", d_model, plan.norm),
        head=head,
        norm_output=option(fields, "norm_output", default=False),
        n_params=weights.n_params,  # last: all tensors have been taken
    )
    weights.leave(["t2d"])  # which ids the draft has: for training; d2t has the same
    weights.finish()
    return eagle


def layout_of(fields: Fields) -> str:
    """Which project's layout a config is written in."""
    names = fields.values.get("architectures") or [""]
    name = names[0] if isinstance(names, list) and isinstance(names[0], str) else ""
    if fields.has("speculators_model_type"):
        return "speculators"
    if fields.has("aux_hidden_states_layer_ids") or name.startswith("Eagle3"):
        return "AngelSlim"
    if name.endswith("Eagle3") or fields.has("eagle_config"):
        return "SpecForge"
    return "SafeAILab"


def resolve_taps(fields: Fields, target: Network) -> tuple[int, ...]:
    """The hidden states that a config asks for, in our numbers.

    One key means two things: nested in `eagle_config`, and in AngelSlim's spelling, it counts layers whose
    output is taken; at the top (speculators) it counts layers applied, which is our number. Without a key all
    projects mean the same three streams.
    """
    nested = fields.child("eagle_config")
    n_layers = target.config.n_layers
    listed = listed_taps(
        (fields, "aux_hidden_states_layer_ids", 1),
        (nested, "eagle_aux_hidden_state_layer_ids", 1),
        (fields, "eagle_aux_hidden_state_layer_ids", 0),
    )
    return listed or (2, n_layers // 2, n_layers - 3)


def option(fields: Fields, key: str, *, default: bool) -> bool:
    """A flag at the top of the config or in its `eagle_config`."""
    return fields.flag(key, default=fields.child("eagle_config").flag(key, default=default))


def load_fusion(weights: Weights, fields: Fields, n_taps: int, plan: BlockPlan, target: Network) -> Fusion:
    """The fusion of n_taps streams. Raises `DraftMismatch`."""
    d_target, d_in = target.config.d_model, fusion_width(weights, n_taps, target)
    each: list[Norm] = []
    if "fc_norm.0.weight" in weights or option(fields, "fc_norm", default=False):
        each = [load_norm(weights, f"fc_norm.{i}", d_target, plan.norm) for i in range(n_taps)]
    joint = None
    if "input_norm.weight" in weights or option(fields, "norm_before_fc", default=False):
        joint = load_norm(weights, "input_norm", d_in, plan.norm)
    return Fusion(each, joint, load_any_linear(weights, "fc", d_in, plan.d_model))


def load_first_layer(weights: Weights, fields: Fields, name: str, plan: BlockPlan) -> FirstLayer:
    """The layer whose tensors start with `name`."""
    by_default = fields.has("speculators_model_type")
    return FirstLayer(
        token_norm=load_norm(weights, f"{name}.input_layernorm", plan.d_model, plan.norm),
        hidden_norm=load_norm(weights, f"{name}.hidden_norm", plan.d_model, plan.norm),
        attention=load_draft_attention(weights, name, plan, 2 * plan.d_model),
        mlp_norm=load_norm(weights, f"{name}.post_attention_layernorm", plan.d_model, plan.norm),
        mlp=load_draft_ffn(weights, f"{name}.mlp", plan, None),
        norm_before_residual=option(fields, "norm_before_residual", default=by_default),
    )


def load_more_layers(weights: Weights, first: str, plan: BlockPlan) -> list[Block]:
    """The ordinary layers after the first, as many as there are tensors for."""
    more: list[Block] = []
    for i in count(1):
        if f"layers.{i}.self_attn.q_proj.weight" not in weights:
            break
        more.append(load_draft_block(weights, f"layers.{i}", plan))
    if more and first != "layers.0":
        raise LoadError(f"{weights.folder}: tensors of {first} and of layers.1: one layout or the other")
    return more
