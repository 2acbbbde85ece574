"""Ranges of a request's sampling fields, one for requests, flags and checkpoints alike."""

from __future__ import annotations

from collections.abc import Mapping

INT32 = 2**31 - 1
# (least, most) of the fields of `api.Sampling`.
SAMPLING_RANGES: Mapping[str, tuple[float, float]] = {
    "seed": (0, 2**64 - 1),
    "temperature": (0.0, 100.0),
    "top_k": (0, INT32),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repeat_penalty": (0.001, 100.0),
    "repeat_last_n": (0, INT32),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "logit_bias": (-100.0, 100.0),
}
