"""Linear layers out of a checkpoint: separate projections of one input are joined into one matrix at load."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slipstream.engine.checkpoint.tensor_source import TensorSource
from slipstream.kernels.matmul.op import Packed, pack


def load_linear(
    weights: TensorSource,
    names: Sequence[str],
    d_in: int,
    d_outs: Sequence[int],
    *,
    bias: bool,
    joint: Sequence[int] = (),
) -> Packed:
    """One packed matrix of the projections `name.weight` [d_out, d_in], their outputs side by side.

    joint: outputs of the projections that are stored as the first, if these are several.
    """
    matrix = weights.take_linear(names, d_in, d_outs, joint)  # [sum of d_outs, d_in]
    if not bias:
        return pack(matrix)
    biases = [weights.take(f"{name}.bias", [d_out]) for name, d_out in zip(names, d_outs, strict=True)]
    return pack(matrix, torch.cat(biases))
