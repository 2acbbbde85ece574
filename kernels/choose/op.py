"""One token per row of logits, in one pass: edits, mask, top_k, top_p, min_p, temperature, pick.

Together with the seed this fixes the text. Everything is defined bit for bit, so that two implementations, devices or
drafters pick the same token from the same logits: masses are integers (`mass.py`), noise is a hash of (seed, position,
token) (`noise.py`).
"""

from __future__ import annotations

from torch import Tensor

from slipstream.kernels.choose.row_params import Choice as Choice
from slipstream.kernels.choose.row_params import Edits as Edits
from slipstream.kernels.choose.row_params import Masks as Masks
from slipstream.kernels.choose.row_params import RowParams as RowParams
from slipstream.kernels.dispatch import op


@op("cuda", "cpu", "reference", any_dtype=True)
def choose(
    logits: Tensor,
    params: RowParams,
    edits: Edits | None = None,
    masks: Masks | None = None,
    *,
    want_probability: bool = False,
) -> Choice:
    """Pick one token of every row.

    logits: [n_rows, vocab], any float dtype, read as float32; the same after the call as before it. First the row's
    entries of `edits` change it, then tokens its mask does not allow get -inf. top_k keeps the k largest logits. top_p
    keeps the fewest largest of those whose probability, at temperature 1 among them, reaches top_p; at least one. Equal
    logits: lower ids are kept first. min_p keeps a probability of at least min_p times the largest. Then argmax of
    logit / temperature + Gumbel noise; at temperature 0 argmax of the logit. Equal values: the lowest id.
    """
    raise NotImplementedError
