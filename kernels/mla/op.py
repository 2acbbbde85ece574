"""Multi-head latent attention (MLA, DeepSeek-V2, arXiv 2405.04434, 2.1) over the ragged rows of a pass.

The cache holds one latent and one rotated key per position, for all heads. Keys and values are products of latents
with a matrix for each head; those products are moved over to the queries and to what attention returns (the absorbed
form), for every row alike, so nothing hangs on how many rows there are:

    q_rope = write_latents(q, kv, …)                       # kv into the pages, norm and rotation
    mixed = latent_attention(head_linear(q[..., :d_nope], keys), q_rope, …)
    out = head_linear(mixed, values)

A row's result does not depend on how many rows are computed with it, nor on the number of threads, except in the
`reference` implementation.
"""

from __future__ import annotations

from torch import Tensor

from slipstream.kernels.attention.spans import Spans as Spans
from slipstream.kernels.dispatch import op
from slipstream.kernels.mla.latent_types import LatentNorm as LatentNorm
from slipstream.kernels.mla.latent_types import LatentRope as LatentRope
from slipstream.kernels.mla.latent_types import PackedHeads as PackedHeads
from slipstream.kernels.norm_rope_write.rows import Rows as Rows


@op("triton", "cpu", "reference")
def write_latents(
    q: Tensor, kv: Tensor, norm: LatentNorm, rope: LatentRope, rows: Rows, latents: Tensor
) -> Tensor:
    """Norm the latents, rotate what is rotated, write latents and rotated keys into their pages, return q's part.

    q: [n_rows, n_heads, d_nope + d_rope], of which the last d_rope are rotated; the rest is not read.
    kv: [n_rows, d_latent + d_rope], latent first.
    latents: one layer's store, [n_pages, page_size, d_latent + d_rope]; written in place at
    [row_pages[r], row_offsets[r]]. Its dtype is kv's, or float8_e4m3fn as in `norm_rope_write`.
    Returns [n_rows, n_heads, d_rope]. The norm rounds as `rms_norm` does; the rotation is float32, rounded once.
    """
    raise NotImplementedError


@op("triton", "cpu", "reference")
def pack_heads(weight: Tensor) -> PackedHeads:
    """Lay a matrix for each head out for `head_linear`.

    weight: [n_heads, out_features, in_features]. Keeps no reference to it where the layout is a copy.
    """
    raise NotImplementedError


@op("triton", "cpu", "reference")
def head_linear(x: Tensor, packed: PackedHeads) -> Tensor:
    """Each head's rows times its own matrix.

    x: [n_rows, n_heads, in_features], dtype of the matrices; its last dimension contiguous.
    Returns [n_rows, n_heads, out_features], contiguous, the same dtype.
    Raises TypeError if `packed` comes from another implementation.
    """
    raise NotImplementedError


@op("triton", "cpu", "reference")
def latent_attention(q: Tensor, q_rope: Tensor, latents: Tensor, spans: Spans, scale: float) -> Tensor:
    """softmax(scale * (q·latent + q_rope·key)) latent over positions 0 … p for the row at position p of its span.

    p = n_past[i] + (row - starts[i]). All heads read the same latents.

    q: [n_rows, n_heads, d_latent]. q_rope: [n_rows, n_heads, d_rope]. Both contiguous, widths even.
    latents: one layer's store, [n_pages, page_size, d_latent + d_rope]; the pass's own rows are in it. Its dtype is
    q's, or float8_e4m3fn whatever q's is: then a code stands for its value, and nothing is scaled.
    Returns [n_rows, n_heads, d_latent], q's dtype. Scores, their softmax and all sums are float32; the weights may be
    rounded to q's dtype before they are multiplied with latents, the sum that they are divided by is not.
    Neither what lies past a span's last position nor pages beyond it are read.
    """
    raise NotImplementedError
