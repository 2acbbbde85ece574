"""How `records.py` lays out a matrix of few bits for products on CPUs, by the name of its type: GGUF's, or our own.

A record holds one block of each of 64 outputs: a half of each, for the types that have one; a second half; a byte of
each per group; a second byte; the codes. A weight is `scale * value`, plus the group's minimum for the types that have
one, where value is the number that a code stands for:

- scale: the half (times the group's byte), or 2^(byte - 128), or a float32
- minimum: the second half, or minus the second half times the group's second byte, or minus the scale times the zero

Codes lie in a stream of 16-bit words for each output and parity of inputs: a word of even inputs and one of odd ones
are neighbours, so that 16 outputs are one vector. Where fp8 is multiplied as pairs of bfloat16 (`code_pairs.py`), its
codes lie in the order in which interleaving bytes makes pairs of them. Where products are of whole numbers
(`code_bytes.py`), a word of an output has bits of four neighbouring inputs in its bytes. All scales,
bytes aside, have the file's own bits, and bytes what the file has in four to eight, so no value is rounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

PANEL = 64  # outputs of a record
CHUNK = 32  # inputs whose codes begin on a word
SIGNED, UNSIGNED, EXPONENT = "signed", "unsigned", "exponent"
HALF, FLOAT, ZERO = "half", "float", "zero"
# What products are of. Those of bytes are of whole units where that is exact and as fast, with the same bits, and in
# AMX's tiles of signed bytes.
OF_FLOATS, OF_PAIRS, OF_BYTES, OF_TILES = "floats", "pairs", "bytes", "tiles"
OF_UNITS, OF_SIGNED = "units", "signed"
# The same of inputs of eight bits (`code_a8.py`); in tiles, and where codes are laid down for many rows, signed.
OF_A8, OF_A8_SIGNED = "a8", "a8 signed"

# What the codes of IQ4_NL and IQ4_XS stand for.
NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # MXFP4's


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One type. Positions are in bytes."""

    bits: int  # of a code
    values: tuple[float, ...]  # by code
    block: int = 32  # inputs of a block
    group: int = 32  # inputs that share a scale
    half_at: int | None = 0  # in a block of the file: the half that scales
    second_at: int = 0  # the second half, if there is a minimum
    factor: str = ""  # the group's byte: "signed", "unsigned", "exponent", or none
    minimum: str = ""  # "half", "unsigned", "zero" (a byte of the block), or none
    scale: str = HALF  # of the block: "half", or "float"

    @property
    def n_groups(self) -> int:
        return self.block // self.group

    @property
    def is_nested(self) -> bool:
        """Whether the block's scale is for the sum of its groups, which bytes may have scaled."""
        return self.block > CHUNK or self.scale == FLOAT

    @property
    def scale_bytes(self) -> int:
        """Bytes of a block's scale."""
        return 4 if self.scale == FLOAT else 0 if self.half_at is None else 2

    @property
    def second(self) -> int:
        """Where a record has its second halves."""
        return self.scale_bytes * PANEL

    @property
    def factors(self) -> int:
        """Where a record has its groups' bytes, [n_groups, 64]."""
        return self.second + (2 * PANEL if self.minimum in (HALF, UNSIGNED) else 0)

    @property
    def second_factors(self) -> int:
        """Where a record has its groups' second bytes, [n_groups, 64], or its zeros, [64]."""
        return self.factors + (PANEL * self.n_groups if self.factor else 0)

    @property
    def codes(self) -> int:
        """Where a record has its codes, [n_chunks, bits, 64] words of 32 bits."""
        n_bytes = {UNSIGNED: self.n_groups, ZERO: 1}.get(self.minimum, 0)
        return self.second_factors + PANEL * n_bytes

    @property
    def record_bytes(self) -> int:
        return self.codes + PANEL * self.block * self.bits // 8


def _around(n_values: int, zero: int = 0) -> tuple[int, ...]:
    return tuple(range(-zero, n_values - zero))


FORMATS = {
    "Q4_0": BlockFormat(4, _around(16, 8)),
    "Q4_1": BlockFormat(4, _around(16), second_at=2, minimum=HALF),
    "Q5_0": BlockFormat(5, _around(32, 16)),
    "Q5_1": BlockFormat(5, _around(32), second_at=2, minimum=HALF),
    "Q8_0": BlockFormat(8, _around(256, 128)),
    "Q2_K": BlockFormat(2, _around(4), 256, 16, 80, 82, UNSIGNED, UNSIGNED),
    "Q3_K": BlockFormat(3, _around(8, 4), 256, 16, 108, factor=SIGNED),
    "Q4_K": BlockFormat(4, _around(16), 256, 32, 0, 2, UNSIGNED, UNSIGNED),
    "Q5_K": BlockFormat(5, _around(32), 256, 32, 0, 2, UNSIGNED, UNSIGNED),
    "Q6_K": BlockFormat(6, _around(64, 32), 256, 16, 208, factor=SIGNED),
    "IQ4_NL": BlockFormat(4, NONLINEAR),
    "IQ4_XS": BlockFormat(4, NONLINEAR, 256, 32, 0, factor=SIGNED),
    "MXFP4": BlockFormat(4, E2M1_DOUBLED, half_at=None, factor=EXPONENT),
}

# Types of safetensors checkpoints, by the inputs that a scale in float32 is for: AWQ's, GPTQ's, fp8's and int8's.
SIZES = (128, 64, 32)
_E4M3 = tuple(torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32).tolist())
INT4 = {n: f"int4 of {n}" for n in SIZES}
FP8 = {n: f"fp8 of {n}" for n in SIZES}
INT8 = {n: f"int8 of {n}" for n in SIZES}
SCALED = {
    **{INT4[n]: BlockFormat(4, _around(16), n, half_at=None, minimum=ZERO, scale=FLOAT) for n in SIZES},
    **{FP8[n]: BlockFormat(8, _E4M3, n, half_at=None, scale=FLOAT) for n in SIZES},
    **{INT8[n]: BlockFormat(8, _around(256, 128), n, half_at=None, scale=FLOAT) for n in SIZES},
}
LAYOUTS = FORMATS | SCALED
