"""What DFlash and DSpark share: layers that attend to the target's features and draft a whole block in one pass.

The target's streams of the context, fused and normed once, become keys and values in every layer of the draft
("injected"): they depend on the target alone and are never computed again. A block of an anchor token and mask
tokens then runs through the layers, each of its rows attending to all context and to the whole block.

That is not a causal mask, but needs no other operator: attention is given every row as a span of its own whose last
position is the block's. Rotary positions and page writes keep the true positions.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

import torch
from torch import Tensor

from slipstream.engine.batch import Batch
from slipstream.engine.cache.need import Need
from slipstream.engine.cache.store import Store
from slipstream.engine.checkpoint.weights import Weights
from slipstream.engine.errors import DraftMismatch, UnsupportedModel
from slipstream.engine.layers.attention import Attention
from slipstream.engine.layers.decoder import AnyHead, Block, logits_of, run_blocks, wanted_rows
from slipstream.engine.layers.embed import Embedding
from slipstream.engine.layers.norm import Norm, load_norm
from slipstream.engine.models.heads.draft_parts import (
    FOREIGN_PARTS,
    check_taps,
    fusion_width,
    listed_taps,
    load_any_linear,
    load_draft_block,
    load_draft_ends,
    matrix_shape,
    read_plan,
    refuse_tensors,
)
from slipstream.engine.models.network import Network
from slipstream.engine.models.reading.documents import read_documents
from slipstream.engine.models.reading.fields import Fields
from slipstream.kernels.matmul.op import Packed, linear, pack
from slipstream.kernels.norm_rope_write.op import norm_rope_write

log = logging.getLogger(__name__)

MOST_ROWS = 128  # of a block
# Pieces of names that only relatives of DFlash have, none of which is implemented.
VARIANTS = {
    **FOREIGN_PARTS,
    "k_proj_target": "keys of the context from a matrix of their own (DFlare)",
    "v_proj_target": "values of the context from a matrix of their own (DFlare)",
    "layer_fusion_weights": "a mix of hidden states per layer (DFlare)",
    "gru": "a recurrent head (Domino)",
    "conv": "a convolution over the block (DFlash 2)",
    "selector": "a selector over candidates (DFlash 2)",
    "mask_embedding": "a mask vector that is no row of the target's embedding",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockDraft:
    """The network. It holds no state of any sequence; its store holds one entry per position of the context."""

    taps: tuple[int, ...]  # ids as `engine.layers.decoder.Taps` counts them
    block_size: int  # rows of a block, the anchor among them
    mask_id: int
    embedding: Embedding
    fusion: Packed  # [d_model, n_taps * d_target]
    context_norm: Norm
    blocks: Sequence[Block]
    context: Sequence[Packed]  # per layer, the key and value projections alone: [2 * d_kv, d_model]
    norm: Norm
    head: AnyHead

    n_params: int  # without what it shares with the target
    from_anchor: bool  # the anchor's row predicts too: row i the token after its position, not at it

    @property
    def d_model(self) -> int:
        """Width of the draft."""
        return self.fusion.out_features

    @property
    def n_drafts(self) -> int:
        """Tokens that one block predicts: the logits rows to ask for, the last of each span."""
        return self.block_size if self.from_anchor else self.block_size - 1

    @property
    def needs(self) -> list[Need]:
        """What each layer needs from a `Store`."""
        return [block.mixer.need for block in self.blocks]

    def inject(self, batch: Batch, features: Sequence[Tensor], store: Store) -> None:
        """Write keys and values of context rows, for good.

        batch: the rows' places; its tokens are not read. features: the target's streams `self.taps` at those
        positions, [n_tokens, d_target] each. Runs under `torch.inference_mode`.
        """
        fused = linear(torch.cat(tuple(features), -1), self.fusion)  # [n_tokens, d_model]
        context = self.context_norm(fused)  # [n_tokens, d_model]: read by the layers as it is, without norm
        for block, matrix, layer in zip(self.blocks, self.context, store.layers, strict=True):
            attention = block.mixer
            assert isinstance(attention, Attention)  # as `load_draft_block` makes them
            pair = linear(context, matrix)  # [n_tokens, 2 * d_kv]: no query heads
            norm_rope_write(pair, attention.norms, attention.rope, batch, layer.keys, layer.values)

    def run(self, batch: Batch, store: Store) -> tuple[Tensor, Tensor]:
        """Logits of the wanted rows, [n_logits, vocab] float32, and what the head read of them, [n_logits, d_model].

        Every span is one block: anchor, then masks. A span's n_past is the anchor's position; all positions before
        it have been injected. The row at position n + i predicts the token there, or the next if `from_anchor`.
        The block's own keys and values are written past n_past, to be overwritten. Runs under `torch.inference_mode`.
        """
        rows = without_mask(batch)
        start = self.embedding(batch.token_ids)  # [n_tokens, d_model]
        x, added = run_blocks(self.blocks, (start, None), rows, store.layers)  # [n_tokens, d_model] each
        assert added is not None  # there is at least one layer
        normed, _ = self.norm.add(*wanted_rows(batch, added, x))  # [n_logits, d_model]
        return logits_of(self.head, normed), normed

    def correct(self, logits: Tensor, previous: Tensor) -> Tensor:
        """Logits of rows once the tokens before them, [n_rows] int64, are picked: the same, [n_rows, vocab].

        The rows of a block do not depend on each other's tokens. DSpark's do; it overrides this with its correction.
        """
        return logits

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor | None:
        """How likely a row's pick is to be accepted. None: no estimate but the pick's own probability."""
        return None


def without_mask(batch: Batch) -> Batch:
    """The same rows at the same places, each attending up to its span's last position. Reads no value."""
    starts, n_rows = batch.span_starts, batch.positions.shape[0]
    rows = torch.arange(n_rows + 1, dtype=torch.int32, device=starts.device)  # [n_tokens + 1]
    owner = torch.searchsorted(starts[1:], rows[:-1], right=True)  # [n_tokens] int64
    owner = owner.clamp_max(batch.n_past.shape[0] - 1)  # rows of no span see what the last span sees
    last = (batch.n_past + starts.diff() - 1).clamp_min(0)  # [n_spans]
    return replace(
        batch,
        span_starts=rows,
        n_past=last[owner],  # [n_tokens]
        page_table=batch.page_table[owner],  # [n_tokens, n_pages_max]
    )


def load_block_draft(weights: Weights, target: Network, n_ctx: int, taps: Sequence[int] | None) -> BlockDraft:
    """The draft of a folder, for blocks that begin at positions below `n_ctx`. `weights.finish` is the caller's.

    Raises `LoadError` and its subclasses.
    """
    fields = read_documents(weights.folder)[0]
    refuse_variants(weights, fields)
    inner = fields.child("transformer_layer_config") if fields.has("speculators_model_type") else fields
    d_model = matrix_shape(weights, "fc.weight")[0]
    from_anchor = read_from_anchor(fields)
    # The anchor alone, if its row predicts nothing, is no draft.
    block_size = holder(fields, "block_size").count("block_size", least=1 if from_anchor else 2)
    if block_size > MOST_ROWS:
        raise UnsupportedModel(f"{fields.where}: block_size = {block_size} is more than {MOST_ROWS}")
    plan = read_plan(inner, weights, "layers.0", d_model, n_ctx + block_size, target)
    n_layers = next(i for i in count() if f"layers.{i}.self_attn.q_proj.weight" not in weights)
    if fields.has("num_target_layers") and fields.count("num_target_layers") != target.config.n_layers:
        raise DraftMismatch(
            f"{fields.where}: num_target_layers = {fields.count('num_target_layers')},"
            f" the target has {target.config.n_layers}"
        )
    given = resolve_taps(fields, n_layers, target) if taps is None else taps
    resolved = check_taps(weights.folder, given, target)
    log.info("%s: drafts blocks, reads hidden states %s", weights.folder, list(resolved))
    embedding, head = load_draft_ends(weights, d_model, target)
    return BlockDraft(
        taps=resolved,
        block_size=block_size,
        mask_id=read_mask_id(fields, embedding),
        from_anchor=from_anchor,
        embedding=embedding,
        fusion=load_any_linear(weights, "fc", fusion_width(weights, len(resolved), target), d_model),
        context_norm=load_norm(weights, "hidden_norm", d_model, plan.norm),
        blocks=[load_draft_block(weights, f"layers.{i}", plan) for i in range(n_layers)],
        context=[load_context(weights, f"layers.{i}.self_attn") for i in range(n_layers)],
        norm=load_norm(weights, "norm", d_model, plan.norm),
        head=head,
        n_params=weights.n_params,  # last: all tensors have been taken
    )


def refuse_variants(weights: Weights, fields: Fields) -> None:
    """Raise `UnsupportedModel` naming the tensor, file or key of a relative that computes something else."""
    refuse_tensors(weights, VARIANTS)
    vector = weights.folder / "mask_embedding.pt"
    if vector.exists():
        raise UnsupportedModel(f"{vector}: a mask vector of its own is not supported, nor are pickled files")
    for key in ("causal", "use_swa", "attention_sink_bias"):
        source = holder(fields, key)
        if source.flag(key, default=False):
            raise source.refuse(key, "not supported")


def holder(fields: Fields, key: str) -> Fields:
    """The object that holds a key: `dflash_config` if it does, else the config itself."""
    nested = fields.child("dflash_config")
    return nested if nested.has(key) else fields


def resolve_taps(fields: Fields, n_layers: int, target: Network) -> tuple[int, ...]:
    """The hidden states that a config asks for, in our numbers.

    `target_layer_ids` counts layers whose output is taken, `aux_hidden_state_layer_ids` layers applied, which is
    our number. Without either: as many as the draft has layers, evenly over the target, its ends left out.
    """
    shifts = {"target_layer_ids": 1, "aux_hidden_state_layer_ids": 0}
    listed = listed_taps(*((holder(fields, key), key, shift) for key, shift in shifts.items()))
    if listed is not None:
        return listed
    n = target.config.n_layers
    if n_layers == 1:
        return (n // 2 + 1,)
    return tuple(round(1 + i * (n - 4) / (n_layers - 1)) + 1 for i in range(n_layers))


def read_mask_id(fields: Fields, embedding: Embedding) -> int:
    """The token that stands for a token to be predicted, a row of the embedding."""
    source = holder(fields, "mask_token_id")
    mask_id, n_rows = source.values.get("mask_token_id"), embedding.weight.shape[0]
    if type(mask_id) is not int or not 0 <= mask_id < n_rows:
        raise source.refuse("mask_token_id", f"must be a token id below {n_rows}")
    return mask_id


def read_from_anchor(fields: Fields) -> bool:
    """Whether the anchor's row predicts too. If no key says so, it does in DSpark's own files and in no others."""
    names = fields.values.get("architectures")
    name = names[0] if isinstance(names, list) and names else ""
    exported = fields.has("speculators_model_type") or fields.has("dflash_config")
    own_file = isinstance(name, str) and "DSpark" in name and not exported
    return holder(fields, "sample_from_anchor").flag("sample_from_anchor", default=own_file)


def load_context(weights: Weights, name: str) -> Packed:
    """The key and value projections of the attention `name`, a second time and without the queries'."""
    matrix = torch.cat([weights.take_again(f"{name}.{part}_proj.weight") for part in ("k", "v")])
    if f"{name}.k_proj.bias" not in weights:  # [2 * d_kv, d_model]
        return pack(matrix)
    return pack(matrix, torch.cat([weights.take_again(f"{name}.{part}_proj.bias") for part in ("k", "v")]))
