"""Grammar masks: logits of forbidden tokens become -inf."""

from __future__ import annotations

from torch import Tensor

from kernels.dispatch import op


@op("triton", "cpu", "reference", any_dtype=True)
def mask(logits: Tensor, rows: Tensor, allowed: Tensor) -> None:
    """Forbid tokens in place.

    logits: [n_rows, vocab]. rows: [n_masked] int64, each row once. allowed: [n_masked, n_words] int32, where bit i of
    word w stands for token 32 * w + i; n_words * 32 >= vocab. A token whose bit is 0 gets -inf.
    """
    raise NotImplementedError
