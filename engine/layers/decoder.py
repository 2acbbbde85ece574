"""The residual loop that all decoder-only families share: blocks, final norm, head on the wanted rows.

Each norm is joined with the residual addition before it, so a block is two norms, four products, and the ops
between them: nine calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from slipstream.engine.batch import Batch
from slipstream.engine.cache.need import Need
from slipstream.engine.cache.store import Store
from slipstream.engine.checkpoint.tensor_source import TensorSource
from slipstream.engine.layers.attention import Ropes
from slipstream.engine.layers.block_end import BlockEnd, BlockEndSpec, LayerInputs, LayerInputsSpec
from slipstream.engine.layers.embed import Embedding, Head, load_embedding, load_head
from slipstream.engine.layers.image_rows import padded, turned, with_images
from slipstream.engine.layers.norm import Norm, NormNames, NormSpec, SumAlone, load_norm
from slipstream.engine.layers.rope import RopeSpec, load_rope


class Mixer(Protocol):
    """What moves information between the rows of a sequence: attention, or a recurrent layer."""

    @property
    def need(self) -> Need:
        """What it needs from a `Store`."""

    # `layer` is what `need` allocated, so its type depends on the mixer.
    def __call__(self, x: Tensor, batch: Batch, layer: Any) -> Tensor:
        """x: [n_tokens, d_model]. Returns the same shape; the layer's state takes the rows in."""


class FeedForward(Protocol):
    """What is computed of each row alone."""

    def __call__(self, x: Tensor) -> Tensor:
        """x: [n_tokens, d_model]. Returns the same shape."""


# What is done to a layer's output, [n_tokens, d_model], before it is added to the stream: the sum over ranks, a norm.
After = tuple[Callable[[Tensor], Tensor], ...]


@dataclass(frozen=True, slots=True)
class Block:
    """x += mixer(norm(x)); x += ffn(norm(x)); x = end(x), if it has an end."""

    mixer_norm: Norm
    mixer: Mixer
    ffn_norm: Norm | SumAlone
    ffn: FeedForward
    after_mixer: After = ()
    after_ffn: After = ()
    end: BlockEnd | None = None


@dataclass(frozen=True, slots=True)
class Decoder:
    """A whole network as a function of a batch and its store."""

    embedding: Embedding
    blocks: Sequence[Block]
    norm: Norm
    head: Head
    ropes: Ropes  # the tables that its layers read
    layer_inputs: LayerInputs | None = None

    def __call__(self, batch: Batch, store: Store, taps: Taps | None = None) -> Tensor:
        """Logits of the batch's wanted rows, [n_logits, vocab] float32. Writes all rows' keys and values.

        taps: streams to keep, of all rows. They are the rows that the logits come from: keeping streams changes
        nothing in the computation.
        """
        x = self.embedding(batch.token_ids)  # [n_tokens, d_model]
        batch, x = turned(batch, self.ropes), with_images(batch, x)
        inputs = None
        if self.layer_inputs is not None:
            inputs = self.layer_inputs(padded(batch, self.layer_inputs.pad_id), x)
        # [n_tokens, d_model] each
        x, added = run_blocks(self.blocks, (x, None), batch, store.layers, taps, inputs)
        n_layers = len(self.blocks)
        if taps is not None and not taps.ids.isdisjoint((n_layers, n_layers + 1)):
            normed, x = normed_sum(self.norm, added, x)  # [n_tokens, d_model] each
            taps.put(n_layers, x)
            taps.put(n_layers + 1, normed)
            (normed,) = wanted_rows(batch, normed)  # [n_logits, d_model]
        else:
            if added is not None:
                (added,) = wanted_rows(batch, added)  # [n_logits, d_model]
            (x,) = wanted_rows(batch, x)  # [n_logits, d_model]
            normed, _ = normed_sum(self.norm, added, x)
        return logits_of(self.head, normed)


class Taps:
    """Residual streams asked of a pass, each of all rows: what draft networks read of their target.

    Id k below n_layers is the stream entering block k, n_layers the stream before the final norm,
    n_layers + 1 the stream after it. (For k below n_layers that is transformers' `hidden_states[k]`; its
    `hidden_states[n_layers]` is our n_layers + 1.)
    """

    def __init__(self, ids: Iterable[int]) -> None:
        self.ids = frozenset(ids)
        self._streams: dict[int, Tensor] = {}  # id -> [n_tokens, d_model]

    def put(self, tap: int, stream: Tensor) -> None:
        """Keep a stream, [n_tokens, d_model], if it was asked for. Only the residual loop calls this."""
        if tap in self.ids:
            self._streams[tap] = stream

    def of(self, ids: Iterable[int]) -> list[Tensor]:
        """The streams of the last pass, [n_tokens, d_model] each, in the network's dtype on its device.

        ids may repeat. Raises `KeyError` for an id that was not asked for or that the network does not have.
        """
        return [self._streams[tap] for tap in ids]

    def copy(self) -> Taps:
        """The same streams in memory of their own."""
        copied = Taps(self.ids)
        copied._streams = {tap: stream.clone() for tap, stream in self._streams.items()}
        return copied


# A residual stream [n_tokens, d_model] and what is yet to be added to it, so that the norm that follows can be joined
# with the addition; None: nothing, as before the first block and behind one with an end.
Stream = tuple[Tensor, Tensor | None]


def run_blocks(
    blocks: Sequence[Block],
    stream: Stream,
    batch: Batch,
    layers: Sequence[Any],
    taps: Taps | None = None,
    inputs: Tensor | None = None,
) -> Stream:
    """The residual loop. Returns the stream behind the blocks.

    layers: the state of each block. inputs: what blocks take besides, [n_tokens, n_blocks, d_input].
    """
    x, added = stream
    deep = () if batch.images is None else batch.images.deep_rows
    for k, (block, layer) in enumerate(zip(blocks, layers, strict=True)):
        normed, x = normed_sum(block.mixer_norm, added, x)  # [n_tokens, d_model] each
        if taps is not None:
            taps.put(k, x)
        added = block.mixer(normed, batch, layer)
        for step in block.after_mixer:
            added = step(added)
        normed, x = block.ffn_norm.add(added, x)
        added = block.ffn(normed)
        for step in block.after_ffn:
            added = step(added)
        if k < len(deep):
            added = added.index_add(0, *deep[k])  # [n_tokens, d_model]
        if block.end is not None:
            x, added = block.end(x + added, None if inputs is None else inputs[:, k]), None
    return x, added


def normed_sum(norm: Norm, added: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
    """(norm of x + added, x + added), [n_rows, d_model] each. added: None for nothing."""
    return (norm(x), x) if added is None else norm.add(added, x)


def wanted_rows(batch: Batch, *streams: Tensor) -> tuple[Tensor, ...]:
    """The rows whose logits are wanted: [n_logits, d_model] of each [n_tokens, d_model]."""
    if batch.logit_index.shape[0] == batch.token_ids.shape[0]:  # equal counts: all rows, in order
        return streams
    return tuple(stream[batch.logit_index] for stream in streams)


class AnyHead(Protocol):
    """What turns rows into logits: a `Head`, or a draft network's own."""

    @property
    def vocab_size(self) -> int: ...

    def __call__(self, x: Tensor) -> Tensor: ...


def logits_of(head: AnyHead, normed: Tensor) -> Tensor:
    """[n_logits, vocab] float32 of normed rows [n_logits, d_model], of which there may be none."""
    if normed.shape[0] == 0:
        return normed.new_empty((0, head.vocab_size), dtype=torch.float32)
    return head(normed)


LLAMA_NORMS = NormNames()


class MixerSpec(Protocol):
    """What distinguishes one mixer from another, the names of its tensors within a block included."""

    ops: ClassVar[tuple[str, ...]]  # folders of `kernels` that it calls, besides products and norms

    @property
    def need(self) -> Need:
        """What the layer needs from a `Store`."""

    @property
    def rope(self) -> RopeSpec | None:
        """The rotary embedding it reads, if any."""

    def split(self, n: int) -> MixerSpec:
        """What each of n ranks computes. Raises `SettingError` naming what does not come out even."""

    def load(self, weights: TensorSource, block: str, ropes: Ropes) -> Mixer:
        """The layer of the block whose tensors start with `block`."""


class FeedForwardSpec(Protocol):
    """The same of a feed-forward layer."""

    ops: ClassVar[tuple[str, ...]]
    adds_itself: ClassVar[bool]  # what the ranks compute; else it is added behind the layer

    def split(self, n: int) -> FeedForwardSpec:
        """What each of n ranks computes. Raises `SettingError` naming what does not come out even."""

    def load(self, weights: TensorSource, name: str) -> FeedForward:
        """The layer whose tensors start with `name`."""


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """The parts list of one block."""

    mixer: MixerSpec
    ffn: FeedForwardSpec
    norms: NormNames = LLAMA_NORMS
    end: BlockEndSpec | None = None

    def split(self, n: int) -> BlockSpec:
        """What each of n ranks computes. Raises `SettingError`."""
        return replace(self, mixer=self.mixer.split(n), ffn=self.ffn.split(n))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """The parts list of a whole network: everything in which one decoder differs from another."""

    d_model: int
    vocab_rows: int  # rows of the stored embedding
    vocab_size: int  # real token ids, at most vocab_rows
    norm: NormSpec
    tied: bool | None  # None: the tensors decide
    blocks: Sequence[BlockSpec]
    n_positions: int = 0  # rows of the rotary tables
    embedding_scale: float | None = None
    logit_cap: float | None = None  # logits are softly kept below it
    layer_inputs: LayerInputsSpec | None = None  # what blocks with an end take besides the stream
    # The block of an MTP layer, by its number from 0, of families in which its tensors do not say all of it.
    mtp_block: Callable[[int], BlockSpec] | None = field(default=None, compare=False)

    def split(self, n: int) -> DecoderSpec:
        """What each of n ranks computes. Raises `SettingError`."""
        return self if n == 1 else replace(self, blocks=[block.split(n) for block in self.blocks])

    @property
    def ops(self) -> frozenset[str]:
        """Folders of `kernels` that its layers call, besides products and norms."""
        return frozenset(op for block in self.blocks for part in (block.mixer, block.ffn) for op in part.ops)


def load_decoder(weights: TensorSource, spec: DecoderSpec) -> Decoder:
    """Build the decoder from tensors named as Llama names them. `weights.finish` is the caller's.

    spec: of the part that `weights` hand out.
    """
    kinds = dict.fromkeys(block.mixer.rope for block in spec.blocks)
    ropes = {one: load_rope(one, spec.n_positions, weights.device) for one in kinds if one is not None}
    embedding = load_embedding(
        weights, "model.embed_tokens", spec.vocab_rows, spec.d_model, spec.embedding_scale
    )
    return Decoder(
        embedding=embedding,
        blocks=[
            load_block(weights, f"model.layers.{i}", block, spec, ropes)
            for i, block in enumerate(spec.blocks)
        ],
        norm=load_norm(weights, "model.norm", spec.d_model, spec.norm),
        head=load_head(weights, "lm_head", embedding, spec.vocab_size, tied=spec.tied, cap=spec.logit_cap),
        ropes=ropes,
        layer_inputs=None if spec.layer_inputs is None else spec.layer_inputs.load(weights),
    )


def load_block(weights: TensorSource, name: str, block: BlockSpec, spec: DecoderSpec, ropes: Ropes) -> Block:
    """The block whose tensors start with `name`."""
    names = block.norms

    def norm(part: str) -> Norm:
        return load_norm(weights, f"{name}.{part}", spec.d_model, spec.norm)

    def after(own: str | None, *, is_part: bool) -> After:
        added = (weights.ranks.add,) if is_part and weights.ranks.n > 1 else ()
        return added if own is None else (*added, norm(own))

    return Block(
        mixer_norm=norm(names.before_mixer),
        mixer=block.mixer.load(weights, name, ropes),
        ffn_norm=SumAlone() if names.before_ffn is None else norm(names.before_ffn),
        ffn=block.ffn.load(weights, f"{name}.mlp"),
        after_mixer=after(names.after_mixer, is_part=True),
        after_ffn=after(names.after_ffn, is_part=not block.ffn.adds_itself),
        end=None if block.end is None else block.end.load(weights, name),
    )
