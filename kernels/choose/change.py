"""A row's entries and its mask in compiled code: `reference.edited` and `reference.masked` again, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np

from slipstream.kernels.choose.truncate import LEAST
from slipstream.kernels.compiled import float_pointer, inlined, int_pointer, routine, shifted


@inlined
def entries_of(edits: Any, i: int) -> Any:
    """(first, end) of row i's entries. edits: addresses of the columns of `Edits`, or zeros."""
    if edits[0] == 0:
        return 0, 0
    starts = int_pointer(edits[0])
    return np.int64(starts[i]), np.int64(starts[i + 1])


@inlined
def line_of(masks: Any, i: int) -> int:
    """Which line of `allowed` is row i's; -1: none. masks: addresses of the columns of `Masks`, or zeros; n_words."""
    if masks[0] == 0:
        return -1
    return np.int64(int_pointer(masks[0])[i])


@routine
def edit(row: Any, n: int, edits: Any, span: Any) -> None:
    """Change a row of n logits in place. span: `entries_of` it."""
    token_ids = int_pointer(edits[1])
    biases, repeats, penalties = float_pointer(edits[2]), float_pointer(edits[3]), float_pointer(edits[4])
    for entry in range(span[0], span[1]):
        token = token_ids[entry]
        if 0 <= token < n:
            biased = np.float32(row[token] + biases[entry])
            repeat = repeats[entry]
            repeated = np.float32(biased / repeat) if biased > 0 else np.float32(biased * repeat)
            row[token] = np.float32(repeated - penalties[entry])


@routine
def forbid(row: Any, n: int, masks: Any, line: int) -> None:
    """Give -inf to the tokens of a row of n logits that its mask does not allow, in place. line: `line_of` it."""
    words = shifted(int_pointer(masks[1]), line * masks[2])
    for w in range((n + 31) // 32):
        word, first = words[w], 32 * w
        for bit in range(min(32, n - first)):
            row[first + bit] = row[first + bit] if (word >> bit) & 1 else LEAST
