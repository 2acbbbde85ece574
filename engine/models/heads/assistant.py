"""Gemma 4's assistant: a few layers with queries alone, which attend to the target's own keys and values.

A row reads a token's embedding in the target and a state of the target's width: at first that of the last position,
after the final norm, then its own output, projected back. It has no keys and values of its own, so nothing is fed,
cached or rolled back, and its place does not move while it guesses: all guesses of a draft look at the same context.
Each layer reads the last layer of its kind (full or sliding) that has keys and values of its own.

Sources: `Gemma4AssistantForCausalLM` of transformers; llama.cpp and vLLM. They differ in two points, on which
acceptance depends and no text does. Queries turn by the newest token's position (transformers, llama.cpp) or by the one
before (vLLM): `--draft-position`. Of a window of n positions they see n + 1 (transformers) or n (vLLM) at the text's
end: here n - 1, what the newest token's own row will see of the text before it, as the cache is sure to hold no more.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from slipstream.engine.batch import Batch
from slipstream.engine.cache.kv import KV
from slipstream.engine.cache.need import Need
from slipstream.engine.cache.store import Store
from slipstream.engine.checkpoint.weights import Weights
from slipstream.engine.errors import DraftMismatch, LoadError
from slipstream.engine.layers.block_end import BlockEndSpec
from slipstream.engine.layers.decoder import (
    AnyHead,
    Block,
    BlockSpec,
    load_decoder,
    logits_of,
    normed_sum,
    run_blocks,
)
from slipstream.engine.layers.embed import Embedding
from slipstream.engine.layers.linear import load_linear
from slipstream.engine.layers.mlp import MLPSpec
from slipstream.engine.layers.norm import SANDWICH_NORMS, Norm, NormSpec
from slipstream.engine.layers.shared_attention import SharedAttentionSpec
from slipstream.engine.models.families import gemma4_text
from slipstream.engine.models.heads.draft_parts import final_tap
from slipstream.engine.models.heads.head_choices import NO_CHOICE, HeadChoices
from slipstream.engine.models.network import Network
from slipstream.engine.models.reading.config import ModelConfig, read_config
from slipstream.engine.models.reading.documents import read_documents
from slipstream.engine.models.reading.fields import MOST_PARTS, Fields
from slipstream.engine.models.registry import FAMILIES
from slipstream.kernels.gated.activation import GELU
from slipstream.kernels.matmul.blocks import BlockWeight
from slipstream.kernels.matmul.op import Packed, linear, take_rows

ARCHITECTURES = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")
CLUSTERS, ORDER = "masked_embedding.centroids", "masked_embedding.token_ordering"


@dataclass(frozen=True, slots=True, kw_only=True)
class Assistant:
    """The network. It holds no state of any sequence, and no store does for it."""

    taps: tuple[int, ...]  # only the stream after the target's final norm
    n_params: int  # without what it shares with the target
    embedding: Embedding  # the target's
    join: Packed  # [d_model, 2 * d_target]: of a token and a state
    blocks: Sequence[Block]
    sources: Sequence[int]  # per block the target's layer whose keys and values it reads
    norm: Norm
    back: Packed  # [d_target, d_model]
    head: AnyHead
    n_ahead: int  # positions between a row's and the one its queries turn by

    @property
    def needs(self) -> list[Need]:
        """What its layers need from a `Store` of their own: nothing."""
        return []

    def run(self, batch: Batch, states: Tensor, store: Store) -> tuple[Tensor, Tensor]:
        """What `logits` reads, [n_rows, d_model], and the states for the next guess, [n_rows, d_target].

        batch: one row per span, at the last position whose keys and values are there, with the token that follows it.
        states: [n_rows, d_target], after the target's final norm. store: the target's. Runs under
        `torch.inference_mode`.
        """
        rows = turned(batch, self.n_ahead)
        joined = linear(torch.cat((self.embedding(batch.token_ids), states), -1), self.join)
        layers = [store.layers[source] for source in self.sources]
        x, added = run_blocks(self.blocks, (joined, None), rows, layers)  # [n_rows, d_model] each
        said, _ = normed_sum(self.norm, added, x)
        return said, linear(said, self.back)

    def logits(self, said: Tensor) -> Tensor:
        """[n_rows, d_model] -> [n_rows, vocab] float32."""
        return logits_of(self.head, said)


def turned(batch: Batch, n_ahead: int) -> Batch:
    """The same rows, seeing what they see, turned as rows so many positions on are."""
    positions = batch.positions + n_ahead  # [n_rows]
    window = None if batch.window is None else replace(batch.window, positions=positions)
    return replace(batch, positions=positions, window=window)


@dataclass(frozen=True, slots=True)
class ClusteredHead:
    """Logits of the tokens in the clusters that fit a row best, minus infinity elsewhere."""

    centroids: Packed  # [n_clusters, d_model]
    token_ids: Tensor  # [n_clusters, n_each] int64: whose tokens
    matrix: Tensor | BlockWeight  # [vocab_rows, d_model]
    n_best: int
    vocab_size: int

    def __call__(self, x: Tensor) -> Tensor:
        """x: [n_rows, d_model]. Returns [n_rows, vocab] float32."""
        best = linear(x, self.centroids, torch.float32).topk(self.n_best).indices  # [n_rows, n_best]
        token_ids = self.token_ids[best].flatten(1)  # [n_rows, n_known]
        # Of the matrix, [n_rows, n_known, d_model].
        rows = take_rows(self.matrix, token_ids.flatten()).view(*token_ids.shape, -1)
        known = torch.einsum("rd,rkd->rk", x.float(), rows.float())  # [n_rows, n_known]
        logits = known.new_full((len(x), self.matrix.shape[0]), float("-inf"))  # [n_rows, vocab_rows]
        return logits.scatter_(1, token_ids, known)[:, : self.vocab_size].contiguous()


def is_assistant(names: Collection[str]) -> bool:
    """Whether a folder with these tensors holds an assistant."""
    return "pre_projection.weight" in names and "post_projection.weight" in names


def load_assistant(
    path: Path | str, target: Network, n_ctx: int, choices: HeadChoices = NO_CHOICE
) -> Assistant:
    """The assistant of a folder, in the target's dtype on its device.

    n_ctx: positions of a sequence. Raises `LoadError` and its subclasses naming file, tensor and value.
    """
    outer = read_documents(Path(path))[0]
    config = read_config(path, dict.fromkeys(ARCHITECTURES, FAMILIES["Gemma4ForCausalLM"]))
    check_shape(outer, config, target)
    sources = [source_of(config, target, window) for window in config.windows]
    norm = NormSpec(config.norm_eps, wide=True)
    specs = [block_spec(config, norm, *one) for one in zip(config.windows, sources, strict=True)]
    weights = Weights(path, target.dtype, target.device)
    spec = config.decoder(specs, norm=norm, n_positions=n_ctx, vocab_size=target.vocab_size)
    decoder = load_decoder(weights, spec)
    d_model, d_target = config.d_model, target.config.d_model
    head: AnyHead = decoder.head
    if outer.flag("use_ordered_embeddings", default=False):
        head = load_clusters(weights, outer, decoder.embedding.weight, d_model, target.vocab_size)
    assistant = Assistant(
        taps=final_tap(weights.folder, target, choices),
        embedding=target.decoder.embedding,
        join=load_linear(weights, ["pre_projection"], 2 * d_target, [d_model], bias=False),
        blocks=decoder.blocks,
        sources=sources,
        norm=decoder.norm,
        back=load_linear(weights, ["post_projection"], d_model, [d_target], bias=False),
        head=head,
        n_ahead=1 if choices.position == "newest" else 0,
        n_params=weights.n_params,  # last: all tensors have been taken
    )
    weights.finish()
    return assistant


def check_shape(outer: Fields, config: ModelConfig, target: Network) -> None:
    """Raise `UnsupportedModel` for parts that no assistant has, `DraftMismatch` if it is made for another target."""
    fields = config.fields
    gemma4_text.refuse(fields)
    for key in ("enable_moe_block", "use_double_wide_mlp"):
        if fields.flag(key, default=False):
            raise fields.refuse(key, "an assistant has no such layers")
    if fields.count("hidden_size_per_layer_input", 0, least=0):
        raise fields.refuse(
            "hidden_size_per_layer_input", "an assistant's layers have no inputs of their own"
        )
    if fields.count("num_kv_shared_layers", config.n_layers) != config.n_layers:
        raise fields.refuse("num_kv_shared_layers", f"must be all {config.n_layers} layers of an assistant")
    if (d_target := outer.count("backbone_hidden_size")) != target.config.d_model:
        raise DraftMismatch(
            f"{outer.where}: backbone_hidden_size = {d_target}, the target has {target.config.d_model}"
        )
    if config.vocab_rows < target.vocab_size:
        raise DraftMismatch(
            f"{fields.where}: vocab_size = {config.vocab_rows}, the target has {target.vocab_size} tokens"
        )


def source_of(config: ModelConfig, target: Network, window: int | None) -> int:
    """The target's last layer with keys and values of its own among those with a window, or those without.

    Raises `DraftMismatch` if there is none, or if the assistant's queries do not fit its keys.
    """
    where, heads = config.fields.where, gemma4_text.read_attention(config, NormSpec(config.norm_eps), window)
    found = [
        (i, need)
        for i, need in enumerate(target.needs)
        if isinstance(need, KV) and (need.window is None) == (window is None)
    ]
    if not found:
        raise DraftMismatch(
            f"{where}: the target has no layers {'without' if window is None else 'with'} a window"
        )
    i, need = found[-1]
    if (heads.n_kv_heads, heads.d_head) != (need.n_kv_heads, need.d_head):
        raise DraftMismatch(
            f"{where}: queries for {heads.n_kv_heads} heads of {heads.d_head} values,"
            f" layer {i} of the target has {need.n_kv_heads} of {need.d_head}"
        )
    if window is not None and need.window is not None and not 1 < window <= need.window:
        raise DraftMismatch(f"{where}: sliding_window = {window}, layer {i} of the target has {need.window}")
    return i


def block_spec(config: ModelConfig, norm: NormSpec, window: int | None, source: int) -> BlockSpec:
    """A block whose rows lie at the last position before the newest token, and see what that token's row will."""
    heads = gemma4_text.read_attention(config, norm, window)
    seen = replace(heads, window=None if window is None else window - 1)
    ffn, end = MLPSpec(config.d_model, config.d_ffn, activation=GELU), BlockEndSpec(config.d_model, 0, norm)
    return BlockSpec(SharedAttentionSpec(seen, source), ffn, SANDWICH_NORMS, end)


def load_clusters(
    weights: Weights, outer: Fields, matrix: Tensor | BlockWeight, d_model: int, vocab_size: int
) -> ClusteredHead:
    """A head that looks at some clusters of tokens only. matrix: [vocab_rows, d_model]."""
    n_rows, n_clusters = matrix.shape[0], outer.count("num_centroids", 2048, most=MOST_PARTS)
    n_best = outer.count("centroid_intermediate_top_k", 32)
    if n_rows % n_clusters:
        raise outer.refuse("num_centroids", f"must divide the {n_rows} rows of the embedding")
    if n_best > n_clusters:
        raise outer.refuse("centroid_intermediate_top_k", f"must be at most num_centroids, {n_clusters}")
    token_ids = weights.take_integers(ORDER, n_rows)  # [vocab_rows]
    if not torch.equal(token_ids.sort().values, torch.arange(n_rows, device=token_ids.device)):
        raise LoadError(f"{weights.folder}: tensor {ORDER} does not name each of {n_rows} tokens once")
    return ClusteredHead(
        centroids=load_linear(weights, [CLUSTERS], d_model, [n_clusters], bias=False),
        token_ids=token_ids.view(n_clusters, -1),
        matrix=matrix,
        n_best=n_best,
        vocab_size=vocab_size,
    )
