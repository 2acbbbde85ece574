"""Rotary position tables and their scalings; the rotation itself happens in the op that writes the cache.

Angles are made in float32 exactly as the checkpoints' own code makes them: a float64 table would be closer to
the mathematics and further from what the weights were trained with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.kernels.norm_rope_write.rows import Rope


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """The rotary embedding of a checkpoint; fields a kind does not use keep their defaults."""

    kind: str
    theta: float
    n_dims: int  # leading dimensions of a head that are rotated; even
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    n_ctx_original: int = 0  # positions of the training before stretching
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # cos and sin are multiplied by it
    divisors: tuple[float, ...] = ()  # of the frequencies, n_dims / 2
    share: float = 1.0  # of the frequencies that turn; the slower ones stand still
    # How many frequencies turn with time, height and width (M-RoPE), n_dims / 2 in all; (): all with the position.
    sections: tuple[int, ...] = ()
    interleaved: bool = False  # the three take turns from the fastest on, else one section follows another
    # Queries count more with every n_ctx_original positions, by this share of a logarithm (Llama 4, Ministral 3).
    query_growth: float = 0.0

    @property
    def of_text(self) -> RopeSpec:
        """The same without sections, which change nothing in the tables."""
        return replace(self, sections=(), interleaved=False)


def load_rope(spec: RopeSpec, n_positions: int, device: torch.device) -> Rope:
    """The rotation of all positions, as layers read it."""
    return Rope(*rope_tables(spec, n_positions, device), query_factors(spec, n_positions, device))


def rope_tables(spec: RopeSpec, n_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of all positions, each [n_positions, n_dims / 2] float32."""
    frequencies = SCALINGS[spec.kind](spec, plain_frequencies(spec))  # [n_dims / 2]
    positions = torch.arange(n_positions, dtype=torch.float32)  # [n_positions]
    angles = torch.outer(positions, frequencies)  # [n_positions, n_dims / 2]
    factor = spec.attention_factor
    return (angles.cos() * factor).to(device), (angles.sin() * factor).to(device)


def query_factors(spec: RopeSpec, n_positions: int, device: torch.device) -> Tensor | None:
    """What queries are multiplied by behind the rotation, [n_positions] float32; None: nothing."""
    if not spec.query_growth:
        return None
    turns = torch.floor(torch.arange(n_positions, dtype=torch.float32) / spec.n_ctx_original)  # [n_positions]
    return (1 + spec.query_growth * torch.log(1 + turns)).to(device)


def axis_of(spec: RopeSpec, device: torch.device | None = None) -> Tensor:
    """Whose position turns each frequency: [n_dims / 2] int64, 0 time, 1 height, 2 width (M-RoPE).

    Both halves of a head are turned alike, so that sections count frequencies, not dimensions.
    """
    index = torch.arange(spec.n_dims // 2, device=device)  # [n_dims / 2]
    if not spec.sections:
        return torch.zeros_like(index)
    time, height, width = spec.sections
    if not spec.interleaved:
        return (index >= time).long() + (index >= time + height).long()
    # Time has every third and what the others leave.
    is_height = (index % 3 == 1) & (index < 3 * height)
    is_width = (index % 3 == 2) & (index < 3 * width)
    return is_height.long() + 2 * is_width.long()


def mixed_angles(tables: tuple[Tensor, Tensor], spec: RopeSpec, axes: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rows that stand at three positions, each [n_rows, n_dims / 2].

    tables: of `rope_tables`, [n_positions, n_dims / 2] each. axes: [3, n_rows] int64 of time, height and width. A row
    with three equal positions is the tables' row to the bit.
    """
    positions = axes[axis_of(spec, axes.device)].t()  # [n_rows, n_dims / 2]
    cos, sin = tables
    return cos.gather(0, positions), sin.gather(0, positions)


def plain_frequencies(spec: RopeSpec) -> Tensor:
    """theta ** (-2 j / n_dims) for j < n_dims / 2: [n_dims / 2] float32."""
    exponents = torch.arange(0, spec.n_dims, 2, dtype=torch.int64).float() / spec.n_dims  # [n_dims / 2]
    return 1.0 / (spec.theta**exponents)


def default(spec: RopeSpec, frequencies: Tensor) -> Tensor:
    """No scaling."""
    return frequencies


def linear(spec: RopeSpec, frequencies: Tensor) -> Tensor:
    """All positions squeezed by the factor."""
    return frequencies / spec.factor


def llama3(spec: RopeSpec, frequencies: Tensor) -> Tensor:
    """Long wavelengths squeezed, short wavelengths left alone, a linear blend between (Llama 3.1)."""
    wavelengths = 2 * math.pi / frequencies  # [n_dims / 2]
    low, high = spec.low_freq_factor, spec.high_freq_factor
    blend = (spec.n_ctx_original / wavelengths - low) / (high - low)  # [n_dims / 2]
    mixed = (1 - blend) * frequencies / spec.factor + blend * frequencies  # [n_dims / 2]
    scaled = torch.where(wavelengths > spec.n_ctx_original / low, frequencies / spec.factor, mixed)
    return torch.where(wavelengths < spec.n_ctx_original / high, frequencies, scaled)


def divided(spec: RopeSpec, frequencies: Tensor) -> Tensor:
    """Each frequency divided by a number of its own: how GGUF files keep Llama 3.1's scaling."""
    return frequencies / torch.tensor(spec.divisors)


def proportional(spec: RopeSpec, frequencies: Tensor) -> Tensor:
    """A share of the frequencies, the fast ones, turns; dimensions stay paired over the whole head (Gemma 4)."""
    n_turning = int(spec.share * spec.n_dims // 2)
    standing = torch.arange(spec.n_dims // 2) >= n_turning  # [n_dims / 2]
    return (frequencies / spec.factor).masked_fill(standing, 0.0)


def yarn(spec: RopeSpec, frequencies: Tensor) -> Tensor:
    """Dimensions that turn often are kept, slow dimensions squeezed, a ramp between (YaRN, section 3)."""

    def dimension(n_turns: float) -> float:
        """The dimension that turns so often within the original context."""
        turns = spec.n_ctx_original / (n_turns * 2 * math.pi)
        return spec.n_dims * math.log(turns) / (2 * math.log(spec.theta))

    first, last = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, spec.n_dims - 1)
    width = last - first if last != first else 0.001  # a ramp of no width would divide by zero
    index = torch.arange(spec.n_dims // 2, dtype=torch.float32)  # [n_dims / 2]
    squeezed = ((index - first) / width).clamp(0, 1)  # [n_dims / 2]
    return squeezed * (frequencies / spec.factor) + (1 - squeezed) * frequencies


def yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """What yarn multiplies cos and sin by when the checkpoint does not say."""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if mscale and mscale_all_dim:
        return scale(mscale) / scale(mscale_all_dim)
    return scale(1.0)


SCALINGS: dict[str, Callable[[RopeSpec, Tensor], Tensor]] = {
    "default": default,
    "linear": linear,
    "llama3": llama3,
    "divided": divided,
    "proportional": proportional,
    "yarn": yarn,
}
