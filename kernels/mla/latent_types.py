"""What the ops of multi-head latent attention take and give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from slipstream.kernels.norm_rope_write.rows import Rope


@dataclass(frozen=True, slots=True)
class LatentNorm:
    """The RMS norm of latents. Its dtype rounds as in `rms_norm`."""

    weight: Tensor  # [d_latent]
    eps: float


@dataclass(frozen=True, slots=True)
class LatentRope:
    """The rotation of the d_rope values that follow a head's or a latent's own."""

    tables: Rope | None  # of d_rope dimensions; None: nothing turns (Kimi-Linear)
    interleaved: bool = True  # dimension 2i turns with 2i + 1, and goes to i and i + d_rope / 2


class PackedHeads(Protocol):
    """A matrix for each head in the layout of one implementation; only that one's `head_linear` takes it."""

    @property
    def out_features(self) -> int: ...


def check_latents(q: Tensor, q_rope: Tensor, latents: Tensor) -> None:
    """Raises ValueError where queries and latents do not fit each other."""
    d_latent, d_rope = q.shape[2], q_rope.shape[2]
    if q_rope.shape[:2] != q.shape[:2] or latents.shape[2] != d_latent + d_rope:
        raise ValueError(
            f"queries {[*q.shape]} and {[*q_rope.shape]} do not fit latents of {latents.shape[2]} values"
        )
    if d_latent % 2 or d_rope % 2:
        raise ValueError(f"latents have even widths, not {d_latent} and {d_rope}")
