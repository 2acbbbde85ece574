"""What Gemma 4 does at the end of a block: a small input of the layer's own, and a factor of the whole stream.

Each token has a vector for each layer (per-layer embeddings): from a table by its id, and from its embedding by a
product; both are known before the first block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.engine.checkpoint.tensor_source import TensorSource
from slipstream.engine.layers.embed import Embedding, load_embedding
from slipstream.engine.layers.linear import load_linear
from slipstream.engine.layers.norm import Norm, NormSpec, load_norm
from slipstream.kernels.gated.activation import GELU
from slipstream.kernels.gated.op import gated_mul
from slipstream.kernels.matmul.op import Packed, linear


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Each layer's inputs, of token ids and embeddings."""

    embedding: Embedding  # [vocab_rows, n_layers * d_input]
    projection: Packed  # [n_layers * d_input, d_model]
    norm: Norm
    scale: float  # of the projection
    n_layers: int
    pad_id: int  # the token that stands where images are

    def __call__(self, token_ids: Tensor, embedded: Tensor) -> Tensor:
        """token_ids: [n_tokens]. embedded: [n_tokens, d_model]. Returns [n_tokens, n_layers, d_input]."""
        shape = token_ids.shape[0], self.n_layers, -1
        projected = (linear(embedded, self.projection) * self.scale).view(shape)
        normed = self.norm(projected.flatten(0, 1)).view(projected.shape)
        return (normed + self.embedding(token_ids).view(shape)) * 2**-0.5


@dataclass(frozen=True, slots=True)
class LayerInputsSpec:
    """Their shape. Tensors are `model.embed_tokens_per_layer` and `model.per_layer_*`."""

    d_model: int
    d_input: int  # of one layer
    n_layers: int
    vocab_rows: int
    norm: NormSpec
    pad_id: int = 0

    def load(self, weights: TensorSource) -> LayerInputs:
        """The inputs of a network whose tensors are named as Gemma's are."""
        width = self.n_layers * self.d_input
        name = "model.embed_tokens_per_layer"
        return LayerInputs(
            embedding=load_embedding(weights, name, self.vocab_rows, width, self.d_input**0.5),
            projection=load_linear(
                weights, ["model.per_layer_model_projection"], self.d_model, [width], bias=False
            ),
            norm=load_norm(weights, "model.per_layer_projection_norm", self.d_input, self.norm),
            scale=self.d_model**-0.5,
            n_layers=self.n_layers,
            pad_id=self.pad_id,
        )


@dataclass(frozen=True, slots=True)
class InputGate:
    """x + norm(out(gelu(gate(x)) * input))."""

    gate: Packed  # [d_input, d_model]
    out: Packed  # [d_model, d_input]
    norm: Norm

    def __call__(self, x: Tensor, given: Tensor) -> Tensor:
        """x: [n_tokens, d_model]. given: [n_tokens, d_input]. Returns x's shape."""
        gated = gated_mul(torch.cat((linear(x, self.gate), given), -1), GELU)  # [n_tokens, d_input]
        return x + self.norm(linear(gated, self.out))


@dataclass(frozen=True, slots=True)
class BlockEnd:
    """The end of one block."""

    gate: InputGate | None
    factor: Tensor  # [1]

    def __call__(self, x: Tensor, given: Tensor | None) -> Tensor:
        """x: the stream, [n_tokens, d_model]. given: this layer's inputs, [n_tokens, d_input]. Returns x's shape."""
        if self.gate is not None:
            assert given is not None  # a decoder with such blocks makes them
            x = self.gate(x, given)
        return x * self.factor


@dataclass(frozen=True, slots=True)
class BlockEndSpec:
    """Its shape. Tensors are a block's `per_layer_*`, `post_per_layer_input_norm` and `layer_scalar`."""

    d_model: int
    d_input: int  # 0: layers have no inputs of their own
    norm: NormSpec

    def load(self, weights: TensorSource, block: str) -> BlockEnd:
        """The end of the block whose tensors start with `block`."""
        gate = None
        if self.d_input:
            parts = (
                ("per_layer_input_gate", self.d_model, self.d_input),
                ("per_layer_projection", self.d_input, self.d_model),
            )
            inner, outer = (
                load_linear(weights, [f"{block}.{name}"], d_in, [d_out], bias=False)
                for name, d_in, d_out in parts
            )
            gate = InputGate(
                inner,
                outer,
                load_norm(weights, f"{block}.post_per_layer_input_norm", self.d_model, self.norm),
            )
        return BlockEnd(gate, weights.take(f"{block}.layer_scalar", [1]))
