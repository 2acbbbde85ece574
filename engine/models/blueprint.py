"""Networks without weights: what a config's decoder would hold, from tensors that have shapes and no memory.

The loaders themselves run, over tensors of torch's meta device, so nothing here repeats what a layer is made of.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.engine.cache.need import Need
from slipstream.engine.checkpoint.layouts import Mxfp4, Scheme, packed_bytes
from slipstream.engine.checkpoint.pieces import META
from slipstream.engine.errors import UnsupportedModel
from slipstream.engine.layers.decoder import DecoderSpec, load_block, load_decoder
from slipstream.engine.layers.linear import load_linear
from slipstream.engine.layers.norm import load_norm
from slipstream.engine.layers.rope import load_rope, rope_tables
from slipstream.engine.models.reading.config import ModelConfig
from slipstream.engine.models.reading.fields import MOST_PARTS
from slipstream.engine.models.registry import decoder_spec, select_outlined
from slipstream.engine.ranks import ALONE, Joint, Ranks
from slipstream.kernels.matmul.blocks import BlockWeight
from slipstream.kernels.matmul.quantized import Quantized, joined

CUDA = torch.device("cuda")
# What configs call the number of layers of multi-token prediction; each has one of these keys, or none.
MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


class Blueprint:
    """A source that has every tensor it is asked for, and counts what it hands out.

    As every name is there, an embedding that its config does not call tied has a head, and experts come fused, unless
    the scheme lists each.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        scheme: Scheme | None = None,
        target: torch.device = CUDA,
        ranks: Ranks = ALONE,
    ) -> None:
        """scheme: how matrices of few bits are stored. target: where they are to run. ranks: whose part it is."""
        self.dtype = dtype
        self.device = META
        self.ranks = ranks
        self._scheme, self._target = scheme or Scheme(method="none"), target
        self.n_params = 0
        self.n_bytes = 0

    def __contains__(self, name: str) -> bool:
        """Where experts are narrow, whether they are stored one by one: else any way to store them will do."""
        block, _, expert = name.partition(".experts.")
        if not expert:
            return True
        first = f"{block}.experts.0.gate_proj"
        if first in self._scheme.by_name:
            return name.removesuffix(".weight") in self._scheme.by_name
        layout = self._scheme.layout(first)
        return layout is None or isinstance(layout, Mxfp4) or expert.partition(".")[0].isdigit()

    def take(
        self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None, joint: Joint | None = None
    ) -> Tensor:
        """A tensor of that shape without memory, in `dtype` or the blueprint's."""
        tensor = torch.empty(tuple(shape), dtype=dtype or self.dtype, device=META)
        self._count(tensor)
        return tensor

    def take_linear(
        self, names: Sequence[str], d_in: int, d_outs: Sequence[int], joint: Sequence[int] = ()
    ) -> Tensor | Quantized:
        """The matrices below each other, narrow where the scheme says so."""
        shapes = [(d_out, d_in) for d_out in d_outs]
        matrix = joined([self._drawn(name, shape) for name, shape in zip(names, shapes, strict=True)])
        self._count(matrix)
        return matrix

    def take_matrix(
        self, name: str, shape: tuple[int, int], *, for_rows: bool = True
    ) -> Tensor | BlockWeight:
        """A matrix without memory, in blocks where the scheme lists it and its use can read them."""
        layout = self._scheme.by_name.get(name.removesuffix(".weight"))
        if layout is None or (for_rows and self._target.type != "cpu"):
            return self.take(name, shape)
        matrix = layout.outline(shape, self.dtype)
        self._count(matrix)
        return matrix

    def take_tied(self, name: str, original: Tensor | BlockWeight) -> Tensor | BlockWeight:
        """The same matrix once more, to be packed: it takes room again, but where it is in blocks."""
        if isinstance(original, BlockWeight):
            return original
        layout = self._scheme.by_name.get(name)
        matrix = (
            original if layout is None else layout.outline((len(original), original.shape[1]), self.dtype)
        )
        self.n_bytes += packed_bytes(matrix, self._target) // self.ranks.n
        return matrix

    def take_expert(self, name: str, shape: tuple[int, int]) -> Tensor | Quantized:
        """The same, on CPUs narrow wherever the scheme says so."""
        if self._target.type != "cpu":
            return self.take_matrix(name, shape)
        matrix = self._drawn(name.removesuffix(".weight"), shape)
        self._count(matrix)
        return matrix

    def leave(self, names: Iterable[str]) -> None:
        """Nothing is there that is not asked for."""

    def _drawn(self, name: str, shape: tuple[int, int]) -> Tensor | Quantized:
        layout = self._scheme.layout(name)
        if layout is None:
            return torch.empty(shape, dtype=self.dtype, device=META)
        return layout.outline(shape, self.dtype)

    def _count(self, taken: Tensor | Quantized) -> None:
        self.n_params += math.prod(taken.shape)
        self.n_bytes += packed_bytes(taken, self._target)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """There is none."""
        return None

    def drop_copy(self, name: str, original: Tensor | BlockWeight) -> bool:
        """A tied head needs no tensor of its own, so there is nothing to count."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """What one network takes of memory."""

    n_params: int
    weight_bytes: int
    position_bytes: int  # of its rotary tables, per position that they cover
    needs: list[Need]  # of each layer, from the cache
    ops: frozenset[str]  # that its layers call, besides products and norms


def draw(config: ModelConfig, dtype: torch.dtype, target: torch.device = CUDA, n_ranks: int = 1) -> Outline:
    """The outline of a network that is to run on `target`, of the part of one of n ranks.

    Raises `UnsupportedModel` naming key and value, `SettingError` where the parts do not come out even.
    """
    select_outlined(dtype)
    spec = decoder_spec(config, 1).split(n_ranks)
    weights = Blueprint(dtype, config.quantization, target, Ranks(0, n_ranks))
    decoder = load_decoder(weights, spec)
    return Outline(
        n_params=weights.n_params,
        weight_bytes=weights.n_bytes,
        position_bytes=position_bytes(spec),
        needs=[block.mixer.need for block in decoder.blocks],
        ops=spec.ops,
    )


def draw_mtp(config: ModelConfig, dtype: torch.dtype, n_layers: int) -> Outline:
    """The outline of a target's MTP layers. Raises `UnsupportedModel` for a target without attention.

    Such a layer is what the family says, or the last of the target's blocks that has no recurrent state, once more. It
    lies behind two norms and the matrix that joins token and hidden state, and before a norm of its own (DeepSeek-V3,
    arXiv 2412.19437, 2.2). Embedding, head and rotary tables are the target's.
    """
    select_outlined(dtype)
    spec, weights = decoder_spec(config, 1), Blueprint(dtype, config.quantization)
    needs = [_draw_mtp_layer(weights, spec, config, place) for place in range(n_layers)]
    return Outline(
        n_params=weights.n_params, weight_bytes=weights.n_bytes, position_bytes=0, needs=needs, ops=spec.ops
    )


def mtp_layers(config: ModelConfig) -> int:
    """How many MTP layers a config declares. Some checkpoints hold a layer that their config does not mention."""
    return sum(config.fields.count(key, 0, least=0, most=MOST_PARTS) for key in MTP_KEYS)


def position_bytes(spec: DecoderSpec) -> int:
    """Bytes of a network's rotary tables per position that they cover."""
    kinds = dict.fromkeys(block.mixer.rope for block in spec.blocks)
    return sum(table.nbytes for kind in kinds if kind is not None for table in rope_tables(kind, 1, META))


def _draw_mtp_layer(weights: Blueprint, spec: DecoderSpec, config: ModelConfig, place: int) -> Need:
    """What one layer needs from the cache; its tensors are counted. place: among the MTP layers."""
    cached = [block for block in spec.blocks if not block.mixer.need.is_recurrent]
    if spec.mtp_block is not None:
        cached = [spec.mtp_block(place)]
    if not cached or (kind := cached[-1].mixer.rope) is None:
        raise UnsupportedModel(f"{config.fields.where}: MTP layers beside a target without attention")
    ropes = {kind: load_rope(kind, 1, META)}
    for name in ("token_norm", "hidden_norm", "norm"):
        load_norm(weights, name, spec.d_model, spec.norm)
    load_linear(weights, ["joint"], 2 * spec.d_model, [spec.d_model], bias=False)
    return load_block(weights, "block", cached[-1], spec, ropes).mixer.need
