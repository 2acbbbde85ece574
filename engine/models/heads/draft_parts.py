"""Parts that draft heads share: blocks whose shape is taken from the tensors, embeddings and heads of their own.

The configs of published heads are often the target's, copied: they carry its number of layers, its head size,
its vocabulary. What the tensors say therefore wins over what the config says; the config gives only what no
tensor can, the number of heads, the rotary embedding and the epsilon of the norms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from slipstream.engine.checkpoint.weights import Weights
from slipstream.engine.errors import DraftMismatch, LoadError, UnsupportedModel
from slipstream.engine.layers.attention import Attention, AttentionSpec
from slipstream.engine.layers.decoder import AnyHead, Block, FeedForward, Mixer
from slipstream.engine.layers.embed import Embedding, Head, load_embedding
from slipstream.engine.layers.latent_attention import LatentAttentionSpec
from slipstream.engine.layers.linear import load_linear
from slipstream.engine.layers.mlp import MLPSpec
from slipstream.engine.layers.moe import MoESpec
from slipstream.engine.layers.norm import NormSpec, load_norm
from slipstream.engine.layers.rope import RopeSpec, load_rope
from slipstream.engine.models.heads.head_choices import HeadChoices
from slipstream.engine.models.network import Network
from slipstream.engine.models.reading.config import refuse_sliding_window, refuse_unsupported
from slipstream.engine.models.reading.fields import Fields
from slipstream.engine.models.reading.rotation import read_rope
from slipstream.kernels.matmul.op import Packed, linear, pack
from slipstream.kernels.norm_rope_write.op import Rope

# Parts of a block that only heads of a target with experts have: a piece of a tensor's name -> what it is for.
EXPERT_PARTS = {
    ".mlp.experts.": "a mixture of experts",
    ".mlp.gate.": "a mixture of experts",
    ".mlp.shared_expert": "a mixture of experts",
}
LATENT_PART = ".self_attn.kv_a_proj_with_mqa."  # only heads of a target with latent attention have it
# Parts that no head here has.
FOREIGN_PARTS = {
    **EXPERT_PARTS,
    LATENT_PART: "latent attention",
    ".linear_attn.": "linear attention",
    ".self_attn.sinks": "attention sinks",
    "attention_sink_bias": "attention sinks",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan:
    """What all blocks of a head have in common beside the shapes of their tensors."""

    d_model: int
    n_heads: int
    d_head: int
    norm: NormSpec
    rope: RopeSpec
    table: Rope  # of `rope`
    n_ctx: int  # positions that rotary tables cover
    moe: MoESpec | None = None  # how the target mixes experts, for blocks that do
    latents: LatentAttentionSpec | None = None  # the target's attention, for blocks that have the same


def read_plan(
    fields: Fields, weights: Weights, block: str, d_model: int, n_ctx: int, target: Network
) -> BlockPlan:
    """The plan of a head with a config of its own; `block` is the name of one of its blocks.

    n_ctx: positions the rotary tables cover. The target's tables serve if they are the same. Raises
    `UnsupportedModel` naming key and value, `LoadError` naming a tensor that does not divide into heads.
    """
    refuse_unsupported(fields, target.config.heeded)
    refuse_sliding_window(without_recurrent_layers(fields))
    name, n_heads = f"{block}.self_attn.q_proj.weight", fields.count("num_attention_heads")
    # q_proj has more rows where there is a gate.
    d_q = matrix_shape(weights, f"{block}.self_attn.o_proj.weight")[1]
    if d_q % n_heads:
        raise LoadError(f"{weights.folder}: tensor {name} has {d_q} rows for {n_heads} query heads")
    rope = read_rope(fields, d_q // n_heads)
    return BlockPlan(
        d_model=d_model,
        n_heads=n_heads,
        d_head=d_q // n_heads,
        norm=NormSpec(fields.positive("rms_norm_eps", 1e-6)),
        rope=rope,
        table=rope_table(rope, n_ctx, target),
        n_ctx=n_ctx,
    )


def without_recurrent_layers(fields: Fields) -> Fields:
    """The same, with no recurrent layers among `layer_types`.

    Heads come with copies of their target's config. That their own layers are not recurrent their tensors say.
    """
    kinds = fields.values.get("layer_types")
    if not isinstance(kinds, list):
        return fields
    return Fields(
        {**fields.values, "layer_types": [one for one in kinds if one != "linear_attention"]}, fields.where
    )


def rope_table(rope: RopeSpec, n_ctx: int, target: Network) -> Rope:
    """The table of a rotary embedding over n_ctx positions: the target's, if it has it."""
    tables = {one.of_text: table for one, table in target.decoder.ropes.items()}
    table = tables.get(rope.of_text)
    return load_rope(rope, n_ctx, target.device) if table is None or n_ctx > target.n_ctx else table


def refuse_tensors(weights: Weights, foreign: Mapping[str, str], prefix: str = "") -> None:
    """Raise `UnsupportedModel` naming the first tensor under `prefix` whose name holds one of the pieces.

    foreign: piece of a name -> what such a tensor is for.
    """
    for name in sorted(weights.names):
        for piece, what in foreign.items():
            if name.startswith(prefix) and piece in name:
                raise UnsupportedModel(f"{weights.folder}: tensor {name}: {what}, which is not supported")


def matrix_shape(weights: Weights, name: str) -> tuple[int, int]:
    """Rows and columns of a tensor as stored. Raises `LoadError` if it is not there, or no matrix."""
    shape = weights.shape(name)
    if len(shape) != 2 or 0 in shape:
        raise LoadError(f"{weights.folder}: tensor {name} has shape {list(shape)}, which is not a matrix's")
    return shape[0], shape[1]


def load_draft_attention(weights: Weights, block: str, plan: BlockPlan, d_in: int) -> Attention:
    """The attention of the block whose tensors start with `block`, reading rows of width d_in.

    The number of key heads, biases, head norms and whether the output is gated come from the tensors. Raises
    `LoadError` or `UnsupportedModel` naming the tensor that does not fit.
    """
    name, d_head = f"{block}.self_attn", plan.d_head
    d_q, d_kv = (matrix_shape(weights, f"{name}.{part}_proj.weight")[0] for part in "qk")
    if d_kv % d_head or plan.n_heads % (d_kv // d_head):
        raise LoadError(
            f"{weights.folder}: tensor {name}.k_proj.weight has {d_kv} rows, which do not serve"
            f" {plan.n_heads} query heads of width {d_head}"
        )
    has_norms = any(f"{name}.{part}_norm.weight" in weights for part in ("q", "k"))
    spec = AttentionSpec(
        d_model=plan.d_model,
        d_in=d_in,
        n_heads=plan.n_heads,
        n_kv_heads=d_kv // d_head,
        d_head=d_head,
        rope=plan.rope,
        qkv_bias=f"{name}.q_proj.bias" in weights,
        out_bias=f"{name}.o_proj.bias" in weights,
        head_norm=plan.norm if has_norms else None,
        gate="element" if d_q == 2 * plan.n_heads * d_head else None,
    )
    return spec.load(weights, block, {plan.rope: plan.table})


def load_any_linear(weights: Weights, name: str, d_in: int, d_out: int) -> Packed:
    """The linear layer `name`, with its bias if the files hold one."""
    return load_linear(weights, [name], d_in, [d_out], bias=f"{name}.bias" in weights)


def load_draft_block(weights: Weights, name: str, plan: BlockPlan) -> Block:
    """The block whose tensors start with `name`, its shape taken from them, except that of experts and latents."""
    has_experts = plan.moe is not None and f"{name}.mlp.gate.weight" in weights
    foreign = dict(FOREIGN_PARTS)
    for piece in (*(EXPERT_PARTS if has_experts else ()), *((LATENT_PART,) if plan.latents else ())):
        del foreign[piece]
    refuse_tensors(weights, foreign, f"{name}.")
    mixer: Mixer
    if plan.latents is None:
        mixer = load_draft_attention(weights, name, plan, plan.d_model)
    else:
        mixer = plan.latents.load(weights, name, {plan.rope: plan.table})
    return Block(
        mixer_norm=load_norm(weights, f"{name}.input_layernorm", plan.d_model, plan.norm),
        mixer=mixer,
        ffn_norm=load_norm(weights, f"{name}.post_attention_layernorm", plan.d_model, plan.norm),
        ffn=load_draft_ffn(weights, f"{name}.mlp", plan, plan.moe if has_experts else None),
    )


def load_draft_ffn(weights: Weights, name: str, plan: BlockPlan, moe: MoESpec | None) -> FeedForward:
    """The feed-forward layer whose tensors start with `name`: a mixture of experts, or one MLP of any width."""
    if moe is not None:
        return moe.load(weights, name)
    gate = f"{name}.gate_proj"
    d_ffn = matrix_shape(weights, f"{gate}.weight")[0]
    return MLPSpec(plan.d_model, d_ffn, bias=f"{gate}.bias" in weights).load(weights, name)


def experts_of(target: Network) -> MoESpec | None:
    """How the last of the target's blocks that mixes experts does it; None if there is none."""
    mixed = [block.ffn for block in target.spec.blocks if isinstance(block.ffn, MoESpec)]
    return mixed[-1] if mixed else None


def latents_of(target: Network) -> LatentAttentionSpec | None:
    """The latent attention of the last of the target's blocks that has one; None if there is none."""
    mixers = [block.mixer for block in target.spec.blocks if isinstance(block.mixer, LatentAttentionSpec)]
    return mixers[-1] if mixers else None


@dataclass(frozen=True, slots=True)
class ReducedHead:
    """Logits over a part of the target's vocabulary, minus infinity elsewhere."""

    packed: Packed
    token_ids: Tensor  # [n_draft_ids] int64: the target's id of each row of the matrix, none twice
    vocab_size: int  # of the target

    def __call__(self, x: Tensor) -> Tensor:
        """x: [n_rows, d_model]. Returns [n_rows, vocab] float32."""
        known = linear(x, self.packed, torch.float32)  # [n_rows, n_draft_ids]
        logits = known.new_full((x.shape[0], self.vocab_size), float("-inf"))  # [n_rows, vocab]
        return logits.index_copy_(1, self.token_ids, known)


def load_draft_ends(weights: Weights, d_model: int, target: Network) -> tuple[Embedding, AnyHead]:
    """`embed_tokens` and `lm_head` of a draft, the target's for those that are not there.

    Raises `UnsupportedModel` for a draft with an embedding of its own and no head: whether it means the
    target's head or its embedding cannot be known.
    """
    embedding = load_draft_embedding(weights, "embed_tokens", d_model, target)
    if embedding is not target.decoder.embedding and "lm_head.weight" not in weights:
        raise UnsupportedModel(
            f"{weights.folder}: tensor embed_tokens.weight differs from the target's and there is no"
            " lm_head.weight; tied draft heads are not supported"
        )
    return embedding, load_draft_head(weights, "lm_head", d_model, target)


def load_draft_head(weights: Weights, name: str, d_model: int, target: Network) -> AnyHead:
    """The draft's own head `name`, reduced to the ids that `d2t` names if that is there; the target's if it has none.

    d2t[i] is what to add to draft id i to get the target's id. Raises `LoadError` for ids outside the target's
    vocabulary and `DraftMismatch` for widths that do not fit.
    """
    name = f"{name}.weight"
    if name not in weights:
        if target.config.d_model != d_model:
            raise DraftMismatch(
                f"{weights.folder}: has no {name}, and the target's has width {target.config.d_model}"
                f" where the draft's has {d_model}"
            )
        return target.whole_head()
    n_rows = matrix_shape(weights, name)[0]
    token_ids = read_draft_ids(weights, name, n_rows, target)  # [n_rows] int64 on the CPU
    matrix = weights.take(name, [n_rows, d_model])
    if "d2t" not in weights:
        return Head(pack(matrix[: target.vocab_size]), target.vocab_size)
    kept = (token_ids < target.vocab_size).nonzero()[:, 0]  # [n_kept]: rows of ids that the tokenizer has
    matrix = matrix.index_select(0, kept.to(weights.device))  # [n_kept, d_model]
    return ReducedHead(pack(matrix), token_ids[kept].to(weights.device), target.vocab_size)


def read_draft_ids(weights: Weights, name: str, n_draft_ids: int, target: Network) -> Tensor:
    """The target's id of each row of the draft's head, [n_draft_ids] int64 on the CPU.

    Ids of padding rows, which only the target's embedding has, are among them. Raises `LoadError` naming the
    id that does not exist, or that two rows claim.
    """
    n_rows = target.config.vocab_rows
    draft_ids = torch.arange(n_draft_ids, dtype=torch.int64)  # [n_draft_ids]
    if "d2t" not in weights:
        if not target.vocab_size <= n_draft_ids <= n_rows:
            raise LoadError(
                f"{weights.folder}: {name} has {n_draft_ids} rows, the target {target.vocab_size} tokens"
                f" in {n_rows} rows, and there is no d2t that says which is which"
            )
        return draft_ids
    token_ids = draft_ids + weights.take_integers("d2t", n_draft_ids).cpu()  # [n_draft_ids]
    outside = ((token_ids < 0) | (token_ids >= n_rows)).nonzero()  # [n_outside, 1]
    if len(outside):
        at = int(outside[0])
        raise LoadError(
            f"{weights.folder}: d2t[{at}] maps draft id {at} to {int(token_ids[at])},"
            f" outside the target's vocabulary of {n_rows}"
        )
    if len(torch.unique(token_ids)) != n_draft_ids:
        raise LoadError(f"{weights.folder}: d2t maps two draft ids to one token of the target")
    return token_ids


def load_draft_embedding(weights: Weights, name: str, d_model: int, target: Network) -> Embedding:
    """The embedding `name` of the draft, or the target's if the draft has none or has a copy of it.

    Raises `DraftMismatch` if it has too few rows, or if the target's would be needed and has another width.
    """
    tensor, shared = f"{name}.weight", target.decoder.embedding
    width = shared.weight.shape[1]
    if tensor not in weights:
        if width != d_model:
            raise DraftMismatch(
                f"{weights.folder}: has no {tensor}, and the target's has width {width}"
                f" where the draft's needs {d_model}"
            )
        return shared
    shape = matrix_shape(weights, tensor)
    if shape == tuple(shared.weight.shape) and weights.drop_copy(tensor, shared.weight):
        return shared
    if shape[0] < target.vocab_size:
        raise DraftMismatch(
            f"{weights.folder}: {tensor} has {shape[0]} rows, the target has {target.vocab_size} tokens"
        )
    return load_embedding(weights, name, shape[0], d_model)


def listed_taps(*keys: tuple[Fields, str, int]) -> tuple[int, ...] | None:
    """The hidden states that a config lists, in our numbers; None if it has none of the keys.

    keys: where a list may be, its key, and what is to be added to its numbers; the first that is there counts. An empty
    list, which ModelOpt writes, names none.
    """
    for source, key, shift in keys:
        ids = source.values.get(key)
        if ids is not None and ids != []:
            if not isinstance(ids, list) or not all(type(one) is int for one in ids):
                raise source.refuse(key, "must be a list of layer numbers")
            return tuple(one + shift for one in ids)
    return None


def fusion_width(weights: Weights, n_taps: int, target: Network) -> int:
    """What the matrix `fc` reads. Raises `DraftMismatch` if it is made for another number of streams or width."""
    d_target, d_in = target.config.d_model, matrix_shape(weights, "fc.weight")[1]
    if d_in != n_taps * d_target:
        raise DraftMismatch(
            f"{weights.folder}: tensor fc.weight reads {d_in} numbers,"
            f" {n_taps} hidden states of the target have {n_taps * d_target}"
        )
    return d_in


def final_tap(folder: Path, target: Network, choices: HeadChoices, shift: int = 0) -> tuple[int]:
    """The only stream that a head reads: as chosen, or the one after the target's final norm, or `shift` from there.

    Raises `DraftMismatch` if another number of them is chosen, or one that the target has not.
    """
    (*others, tap) = (target.config.n_layers + 1 + shift,) if choices.taps is None else choices.taps
    if others:
        raise DraftMismatch(f"{folder}: reads one hidden state, not {len(others) + 1} (--draft-taps)")
    check_taps(folder, [tap], target)
    return (tap,)


def check_taps(folder: Path, taps: Sequence[int], target: Network) -> tuple[int, ...]:
    """The tap ids if the target has them all. Raises `DraftMismatch` naming the first that it has not."""
    last = target.config.n_layers + 1
    for tap in taps:
        if not 0 <= tap <= last:
            raise DraftMismatch(f"{folder}: hidden state {tap} is asked for, the target has 0 to {last}")
    return tuple(taps)
