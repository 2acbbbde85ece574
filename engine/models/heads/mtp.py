"""Multi-token prediction: the extra layer that a target was trained with (DeepSeek-V3, arXiv 2412.19437, 2.2).

For a feature position p it takes the token x_{p+1} and the target's hidden state at p after the final norm, and
predicts x_{p+2} with the target's own head. What it returns, normed once, stands in for the target's state at
the next position. The tensors lie in the target's folder, under names that differ by family, or beside it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.engine.batch import Batch
from slipstream.engine.cache.need import Need
from slipstream.engine.cache.store import Store
from slipstream.engine.checkpoint.weights import Weights
from slipstream.engine.errors import DraftMismatch, LoadError, UnsupportedModel
from slipstream.engine.layers.decoder import AnyHead, Block, load_block, logits_of, run_blocks, wanted_rows
from slipstream.engine.layers.embed import Embedding
from slipstream.engine.layers.norm import Norm, load_norm
from slipstream.engine.models.heads.draft_parts import (
    BlockPlan,
    experts_of,
    final_tap,
    latents_of,
    load_any_linear,
    load_draft_block,
    load_draft_embedding,
    load_draft_head,
    read_plan,
    rope_table,
)
from slipstream.engine.models.heads.head_choices import NO_CHOICE, HeadChoices
from slipstream.engine.models.network import Network
from slipstream.engine.models.reading.documents import has_config, read_documents
from slipstream.kernels.matmul.op import Packed, linear


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What a family calls the tensors of one layer of its head; `{i}` is the layer's number."""

    layer: str  # prefix of all tensors of the layer
    token_norm: str
    hidden_norm: str
    joint: str
    norm: str
    block: str
    embedding: str | None = None  # a copy of the target's, if any
    head: str | None = None
    hidden_first: bool = False  # order of the two halves that `joint` reads
    one_plus: bool = False
    reads_raw: bool = False  # the target's stream before its final norm, not behind it
    recycled: str = "normed"  # as `HeadChoices.recycled`


DEEPSEEK = Names(
    layer="model.layers.{i}.",
    token_norm="model.layers.{i}.enorm",
    hidden_norm="model.layers.{i}.hnorm",
    joint="model.layers.{i}.eh_proj",
    norm="model.layers.{i}.shared_head.norm",
    block="model.layers.{i}",
    embedding="model.layers.{i}.embed_tokens",
    head="model.layers.{i}.shared_head.head",
)
MIMO = Names(
    layer="model.mtp_layers.{i}.",
    token_norm="model.mtp_layers.{i}.token_layernorm",
    hidden_norm="model.mtp_layers.{i}.hidden_layernorm",
    joint="model.mtp_layers.{i}.input_proj",
    norm="model.mtp_layers.{i}.final_layernorm",
    block="model.mtp_layers.{i}",
    hidden_first=True,
)
QWEN = Names(
    layer="mtp.",
    token_norm="mtp.pre_fc_norm_embedding",
    hidden_norm="mtp.pre_fc_norm_hidden",
    joint="mtp.fc",
    norm="mtp.norm",
    block="mtp.layers.0",
    one_plus=True,
)
# As SGLang runs it: every layer reads the target's stream. llama.cpp chains them, vLLM runs the first alone.
MIMO_V2 = Names(
    layer="model.mtp.layers.{i}.",
    token_norm="model.mtp.layers.{i}.enorm",
    hidden_norm="model.mtp.layers.{i}.hnorm",
    joint="model.mtp.layers.{i}.eh_proj",
    norm="model.mtp.layers.{i}.final_layernorm",
    block="model.mtp.layers.{i}",
    reads_raw=True,
    recycled="target",
)
# As vLLM runs it, to which StepFun gave the code; transformers norms both the target's state and those handed on.
STEP = replace(
    DEEPSEEK,
    norm="model.layers.{i}.transformer.shared_head.norm",
    head="model.layers.{i}.transformer.shared_head.output",
    one_plus=True,
    reads_raw=True,
    recycled="raw",
)
FAMILIES = (DEEPSEEK, STEP, MIMO, MIMO_V2, QWEN)
NUMBERED = (DEEPSEEK, STEP)  # on from the target's last layer
EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpLayer:
    """One layer with its norms, its input projection and its head."""

    place: int  # among the head's layers, and of its keys and values in the store
    token_norm: Norm
    hidden_norm: Norm
    joint: Packed  # [d_model, 2 * d_model]
    hidden_first: bool
    block: Block
    norm: Norm
    embedding: Embedding
    head: AnyHead
    recycle_normed: bool

    def join(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """token_ids: [n_rows]. hidden: [n_rows, d_model]. Returns what enters the block, [n_rows, d_model]."""
        token = self.token_norm(self.embedding(token_ids))  # [n_rows, d_model]
        state = self.hidden_norm(hidden)  # [n_rows, d_model]
        halves = (state, token) if self.hidden_first else (token, state)
        return linear(torch.cat(halves, -1), self.joint)

    def run(self, batch: Batch, hidden: Tensor, store: Store) -> tuple[Tensor, Tensor]:
        """What `logits` reads and the recurrence of the wanted rows, [n_logits, d_model] each.

        batch: token x_{p+1+place} at position p. hidden: [n_tokens, d_model] in the target's dtype: of the first layer
        the target's state at p, of any other the recurrence at p of the layer before it if they are chained; where a
        layer is looped, the recurrence of the row that guessed the token. Writes its keys and values of all rows. Runs
        under `torch.inference_mode`.
        """
        joined = self.join(batch.token_ids, hidden)  # [n_tokens, d_model]
        # Both are [n_tokens, d_model].
        x, added = run_blocks([self.block], (joined, None), batch, [store.layers[self.place]])
        assert added is not None  # there is one block
        normed, x = self.norm.add(*wanted_rows(batch, added, x))  # [n_logits, d_model] each
        return normed, normed if self.recycle_normed else x

    def logits(self, said: Tensor) -> Tensor:
        """[n_rows, d_model] -> [n_rows, vocab] float32."""
        return logits_of(self.head, said)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mtp:
    """The head as a network. It holds no state of any sequence; its store holds one entry per layer and position p.

    Most checkpoints have one layer, trained for the first guess and looped for more. Where there are several,
    layer i was trained for guess i + 1 and has keys and values of its own, which the whole text must have been
    fed to with tokens shifted by i + 1.
    """

    taps: tuple[int, ...]  # only the stream after the target's final norm, or before it
    is_chained: bool  # each layer reads the state of the layer before; else all read the target's
    d_model: int
    n_params: int  # without what it shares with the target
    modules: Sequence[MtpLayer]  # the layers that guess, in turn; the last is looped for further guesses

    @property
    def needs(self) -> list[Need]:
        """What each layer needs from a `Store`."""
        return [layer.block.mixer.need for layer in self.modules]

    def fuse(self, taps: Sequence[Tensor]) -> Tensor:
        """The streams `self.taps`, [n_rows, d_model] each -> what the first layer reads, [n_rows, d_model]."""
        (hidden,) = taps
        return hidden


def mtp_tensors(names: Collection[str], n_layers: int) -> frozenset[str]:
    """Which of a folder's tensors belong to an MTP head, for a target of n_layers layers; none if it has none.

    Tensors that merely look like it, without the matrix that every head has, are not among them.
    """
    prefixes = tuple(names_of.layer for names_of, _ in found_layers(names, n_layers))
    return frozenset(name for name in names if name.startswith(prefixes))


def is_whole_model(names: Collection[str]) -> bool:
    """Whether a folder holds a model, with or without an MTP head, rather than a head alone."""
    return "model.layers.0.input_layernorm.weight" in names and "model.layers.0.eh_proj.weight" not in names


def found_layers(names: Collection[str], n_layers: int) -> list[tuple[Names, int]]:
    """The layers that a folder holds, in order: their names, filled in, and their numbers.

    DeepSeek and Step number them on from the target's last layer; below n_layers there is none.
    """
    found: dict[str, tuple[Names, int]] = {}  # by prefix: of two families the one whose last norm is there
    for family in FAMILIES:
        pattern = re.compile(re.escape(family.joint + ".weight").replace(r"\{i\}", r"(\d+)"))
        for name in names:
            match = pattern.fullmatch(name)
            number = int(match[1]) if match and match.groups() else 0
            if match and (family not in NUMBERED or number >= n_layers):
                filled = _filled(family, number)
                if filled.layer not in found or f"{filled.norm}.weight" in names:
                    found[filled.layer] = filled, number
    return sorted(found.values(), key=lambda one: one[1])


def _filled(family: Names, number: int) -> Names:
    """The names of one layer."""
    filled: dict[str, Any] = {
        key: value.replace("{i}", str(number))
        for key in Names.__dataclass_fields__
        if isinstance(value := getattr(family, key), str)
    }
    return replace(family, **filled)


def load_mtp(path: Path | str, target: Network, n_ctx: int, choices: HeadChoices = NO_CHOICE) -> Mtp:
    """The head in the target's own folder or another folder, in the target's dtype on its device.

    n_ctx: positions the rotary tables cover. Tensors of other networks in the folder are left alone. Raises `LoadError`
    and its subclasses naming file, tensor and value.
    """
    weights = Weights(path, target.dtype, target.device, target.config.quantization)
    first = target.config.n_layers if is_whole_model(weights.names) else 0
    found = found_layers(weights.names, first)
    check_layers(weights, found)
    weights.leave(weights.names - mtp_tensors(weights.names, first))
    first_names = found[0][0]
    plan = plan_of(weights, first_names, target, n_ctx)
    recycled = first_names.recycled if choices.recycled == "auto" else choices.recycled
    if choices.recycled == "target" and len(found) == 1:
        raise DraftMismatch(
            f"{path}: has one layer, which reads the target as it is (--draft-recycled target)"
        )
    mtp = Mtp(
        taps=final_tap(weights.folder, target, choices, shift=-1 if first_names.reads_raw else 0),
        is_chained=recycled != "target",
        d_model=plan.d_model,
        modules=[
            load_layer(weights, names, plan, target, place, recycle_normed=recycled != "raw")
            for place, (names, _) in enumerate(found)
        ],
        n_params=weights.n_params,  # last: all tensors have been taken
    )
    weights.finish()
    if any(need != mtp.needs[0] for need in mtp.needs):
        raise UnsupportedModel(f"{path}: the layers of the MTP head differ in shape")
    return mtp


def check_layers(weights: Weights, layers: Sequence[tuple[Names, int]]) -> None:
    """Raise `LoadError` or `UnsupportedModel` unless the folder holds at least one layer, all of one family.

    layers: as `found_layers` gives them. Where one between others has lost the matrix by which layers are known, those
    behind it would guess in its place.
    """
    found, numbers = [names for names, _ in layers], [number for _, number in layers]
    if not found:
        known = ", ".join(f"{family.joint}.weight" for family in FAMILIES)
        raise LoadError(f"{weights.folder}: no MTP head here; none of its tensors is named {known}")
    shapes = [weights.shape(f"{names.joint}.weight") for names in found]
    families = {(names.hidden_first, names.one_plus, names.recycled) for names in found}
    if len(set(shapes)) > 1 or len(families) > 1:
        raise UnsupportedModel(
            f"{weights.folder}: {found[0].joint}.weight and {found[-1].joint}.weight are not of one kind"
        )
    if numbers != list(range(numbers[0], numbers[0] + len(found))):
        raise LoadError(f"{weights.folder}: has layers {numbers} of an MTP head, and none between")


def plan_of(weights: Weights, names: Names, target: Network, n_ctx: int) -> BlockPlan:
    """The plan of the block: the target's in its own folder, without a config, or where the target's family knows the
    block; else from the folder's config."""
    config, path = target.config, weights.folder
    is_apart = has_config(path) and not is_whole_model(weights.names)
    if is_apart and target.spec.mtp_block is None:
        plan = read_plan(read_documents(path)[0], weights, names.block, config.d_model, n_ctx, target)
    else:
        plan = BlockPlan(
            d_model=config.d_model,
            n_heads=config.n_heads,
            d_head=config.d_head,
            norm=config.norm,
            rope=config.rope,
            table=rope_table(config.rope, n_ctx, target),
            n_ctx=n_ctx,
        )
    norm = replace(plan.norm, one_plus=names.one_plus)
    return replace(plan, norm=norm, moe=experts_of(target), latents=latents_of(target))


def load_layer(
    weights: Weights, names: Names, plan: BlockPlan, target: Network, place: int, *, recycle_normed: bool
) -> MtpLayer:
    """The layer in a place of the head. Its embedding and head are the target's unless it has others of its own."""
    d_model = plan.d_model
    embedding, head = target.decoder.embedding, target.whole_head()
    own_head: AnyHead = head
    if names.embedding is not None:
        embedding = load_draft_embedding(weights, names.embedding, d_model, target)
    if names.head is not None and not repeats_head(weights, f"{names.head}.weight", target):
        own_head = load_draft_head(weights, names.head, d_model, target)
    return MtpLayer(
        place=place,
        token_norm=load_norm(weights, names.token_norm, d_model, plan.norm),
        hidden_norm=load_norm(weights, names.hidden_norm, d_model, plan.norm),
        joint=load_any_linear(weights, names.joint, 2 * d_model, d_model),
        hidden_first=names.hidden_first,
        block=load_mtp_block(weights, names.block, plan, target, place),
        norm=load_norm(weights, names.norm, d_model, plan.norm),
        embedding=embedding,
        head=own_head,
        recycle_normed=recycle_normed,
    )


def load_mtp_block(weights: Weights, name: str, plan: BlockPlan, target: Network, place: int) -> Block:
    """The block of the layer in a place of the head: what the target's family says it is, else what its tensors say."""
    if target.spec.mtp_block is None:
        return load_draft_block(weights, name, plan)
    block = target.spec.mtp_block(place)
    rope = block.mixer.rope
    ropes = {} if rope is None else {rope: rope_table(rope, plan.n_ctx, target)}
    return load_block(weights, name, block, target.spec, ropes)


def repeats_head(weights: Weights, name: str, target: Network) -> bool:
    """Whether a tensor is a copy of the target's head; if so it is accounted for.

    The target's head is packed and cannot be compared. So the folder must be the target's own, which its
    embedding shows, and hold the original beside the copy.
    """
    embedding = target.decoder.embedding.weight
    if not is_whole_model(weights.names) or EMBEDDING not in weights:
        return False
    if weights.shape(EMBEDDING) != tuple(embedding.shape):
        return False
    original = "lm_head.weight" if "lm_head.weight" in weights else EMBEDDING
    return weights.drop_copy(EMBEDDING, embedding) and weights.drop_twin(name, original)
