"""Sparse changes of logits before truncation: bias, then the repeat, presence and frequency penalties."""

from __future__ import annotations

from torch import Tensor

from kernels.dispatch import op
from kernels.edit.entries import Entries as Entries
from kernels.edit.entries import Penalties as Penalties


@op("triton", "reference", any_dtype=True)
def edit(logits: Tensor, entries: Entries, penalties: Penalties) -> None:
    """Change the named logits in place.

    logits: [n_rows, vocab], float32 or wider. Per entry: l += bias; if in_window, l = l / repeat where l > 0 and
    l * repeat elsewhere; then l -= presence * (count > 0) + frequency * count.
    """
    raise NotImplementedError
