"""Whether inputs of products with weights of few bits are rounded to eight bits: `--round-activations`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slipstream.engine.errors import SettingError
from slipstream.engine.service.start.sizes import Checkpoint
from slipstream.engine.settings import Settings
from slipstream.kernels.matmul.quantized import round_inputs


def take_rounding(sources: Sequence[Checkpoint], settings: Settings) -> None:
    """Have weights packed from now on round their inputs, or not.

    sources: the target first. Raises `SettingError` if the setting would change nothing, with the target's reason.
    """
    round_inputs(settings.round_activations)
    if not settings.round_activations:
        return
    reasons = [_why_not(one) for one in sources]
    if None not in reasons:
        raise SettingError("round_activations", value=True, reason=f"it would change nothing: {reasons[0]}")


def _why_not(source: Checkpoint) -> str | None:
    """Why none of a network's products rounds its inputs; None if some do."""
    if source.device.type != "cpu":
        return f"only products on the CPU round, and the model runs on {source.device}"
    if source.dtype is not torch.bfloat16:
        return f"the model runs in {str(source.dtype).removeprefix('torch.')}, not in bfloat16"
    scheme = source.config.quantization
    if scheme is None or not scheme.has_integers:
        return "its weights are no whole numbers of few bits"
    from slipstream.kernels.matmul import narrow  # a second of numba, for weights of few bits alone

    reason = narrow.refusal()
    return None if reason is None else f"weights of few bits are widened: {reason}"
