"""Flags of llama-server and vLLM that name no setting here: what each means, or why it is refused.

A flag that acts is another way to give a setting. A flag about a mechanism that does not exist here is accepted, and
the log says so. What would change results or memory in a way that is not built is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Changes = Mapping[str, str | bool]  # settings, as a command line would give them

_ALL_LAYERS = 99  # what people write for all of them
_WIDE_CACHE = ("f32", "f16", "bf16", "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A flag with its other names. `value`: what it takes in the usage, None for a switch; `read` raises ValueError."""

    flags: tuple[str, ...]
    meaning: str
    value: str | None = None
    is_optional: bool = False  # the value may be left out
    read: Callable[[str], Changes] = lambda text: {}  # of "" where there is no value
    reason: str | None = None  # why it changes nothing, for the log; None: it acts


def _layers(text: str) -> Changes:
    """0 is the CPU, all is a GPU if there is one; some of them on each is not built."""
    if text in ("auto", "all", "-1") or (text.isdecimal() and int(text) >= _ALL_LAYERS):
        return {}
    if text == "0":
        return {"device": "cpu"}
    raise ValueError(f"{text}: layers are on one device: 0 means the CPU, {_ALL_LAYERS} or all the GPU")


def _draft_layers(text: str) -> Changes:
    return {name.replace("device", "device_draft"): value for name, value in _layers(text).items()}


def _cache_type(text: str) -> Changes:
    if text in _WIDE_CACHE:
        return {}
    raise ValueError(f"{text}: keys and values are cached in the model's type, or with --kv-cache-dtype fp8")


def _reasoning(text: str) -> Changes:
    known = {"none": "none", "deepseek": "reasoning_content", "auto": "reasoning_content"}
    if text not in known:
        raise ValueError(f"{text}: must be one of {', '.join(known)}")
    return {"reasoning_field": known[text]}


def _verbosity(text: str) -> Changes:
    if not text.isdecimal():
        raise ValueError(f"{text}: must be a whole number")
    levels = ("error", "error", "warning", "info")
    return {"log_level": levels[int(text)] if int(text) < len(levels) else "debug"}


def _idle(reason: str, *flags: str, value: str | None = None, is_optional: bool = False) -> Foreign:
    meaning = f"accepted without effect: {reason}"
    return Foreign(flags=flags, meaning=meaning, value=value, is_optional=is_optional, reason=reason)


def _cached(*flags: str) -> Foreign:
    reason = "keys and values are cached in the model's type"
    meaning = f"{', '.join(_WIDE_CACHE)} are accepted without effect: {reason}; others are refused"
    return Foreign(flags=flags, meaning=meaning, value="TYPE", read=_cache_type, reason=reason)


FOREIGN: Sequence[Foreign] = (
    Foreign(
        flags=("-ngl", "--n-gpu-layers", "--gpu-layers"), meaning="0: --device cpu", value="N", read=_layers
    ),
    Foreign(
        flags=("-ngld", "--n-gpu-layers-draft", "--gpu-layers-draft"),
        meaning="0: --device-draft cpu",
        value="N",
        read=_draft_layers,
    ),
    _cached("-ctk", "--cache-type-k"),
    _cached("-ctv", "--cache-type-v"),
    Foreign(flags=("--reasoning-format",), meaning="as --reasoning-field", value="FORMAT", read=_reasoning),
    Foreign(flags=("-v", "--verbose"), meaning="--log-level debug", read=lambda text: {"log_level": "debug"}),
    Foreign(
        flags=("-lv", "--verbosity", "--log-verbosity"), meaning="as --log-level", value="N", read=_verbosity
    ),
    _idle("templates are always rendered so", "--jinja"),
    _idle("always there", "--metrics"),
    _idle("always there", "--slots"),
    _idle("attention has one form", "-fa", "--flash-attn", value="on|off|auto", is_optional=True),
    _idle("files are mapped where that serves", "--no-mmap"),
    _idle("nothing is locked in memory", "--mlock"),
    _idle("prompts have the threads of replies", "-tb", "--threads-batch", value="N"),
    _idle("slots always share their pages", "--kv-unified"),
    _idle("always on", "-cb", "--cont-batching"),
    _idle("prefixes are found whole or not", "--cache-reuse", value="N"),
    _idle("passes are not cut any further", "-ub", "--ubatch-size", value="N"),
    _idle("the cache is never defragmented", "-dt", "--defrag-thold", value="X"),
    _idle("a draft has the target's context", "-cd", "--ctx-size-draft", value="N"),
    _idle("a model is on one device", "-sm", "--split-mode", value="MODE"),
    _idle("a model is on one device", "-ts", "--tensor-split", value="SHARES"),
    _idle("--device names it", "-mg", "--main-gpu", value="N"),
)
