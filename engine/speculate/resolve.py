"""Speculation in force for a request: what the server loaded, narrowed by what the request asks."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.engine.api import Speculate
from slipstream.engine.errors import InvalidRequest, Unsupported
from slipstream.engine.naming import ALL_DRAFTERS, NO_DRAFTER
from slipstream.engine.settings import SPECULATE_RANGES, Settings
from slipstream.engine.slot import SpeculateParams
from slipstream.engine.speculate.registry import BY_NAME, DRAFTERS

_SIZED = [row.name for row in DRAFTERS if row.is_sized]
_BROUGHT_BY = {row.name: row.brought_by for row in DRAFTERS if row.brought_by is not None}


def resolve_speculate(
    settings: Settings,
    loaded: Sequence[str],
    asked: Speculate,
    *,
    predicts: bool = False,
    constrained: bool = False,
) -> SpeculateParams:
    """The request's speculation. `n_max` above the server's is lowered; everything else is honoured or refused.

    predicts, constrained: the request brings a predicted text, a grammar; these are drafted from beside whatever types
    it names, and without them their drafters are not asked.

    Raises `InvalidRequest` for values out of range and `Unsupported` for drafters that are not loaded.
    """
    types = tuple(loaded) if asked.types is None else _types(asked.types, loaded)
    if predicts and not loaded:
        raise Unsupported("prediction", "this server drafts nothing (--spec-type none)")
    brought = {"prediction": predicts, "grammar": constrained}
    if types:
        types = tuple(
            name for name in loaded if (brought[_BROUGHT_BY[name]] if name in _BROUGHT_BY else name in types)
        )
    for name in SPECULATE_RANGES:
        _check_number(name, getattr(asked, name), types)
    n_max = settings.draft_max if asked.n_max is None else min(asked.n_max, settings.draft_max)
    n_min = settings.draft_min if asked.n_min is None else asked.n_min
    return SpeculateParams(
        types=types,
        n_max=n_max,
        n_min=min(n_min, n_max),
        p_min=settings.draft_p_min if asked.p_min is None else asked.p_min,
        ngram_size_n=asked.ngram_size_n,
        ngram_size_m=asked.ngram_size_m,
        ngram_min_hits=asked.ngram_min_hits,
        why_not=None if types and n_max else "not_asked_for" if loaded else "no_drafter",
    )


def _check_number(name: str, value: float | None, types: Sequence[str]) -> None:
    if value is None:
        return
    param, (least, most) = f"speculative.{name}", SPECULATE_RANGES[name]
    if not least <= value <= most:
        raise InvalidRequest(param, f"{value} is not between {least} and {most}")
    if name.startswith("ngram_") and types and not set(types) & set(_SIZED):
        raise Unsupported(param, f"has no use without {', '.join(_SIZED)} (--spec-type loads them)")


def _types(asked: Sequence[str], loaded: Sequence[str]) -> tuple[str, ...]:
    names = [BY_NAME[name].name if name in BY_NAME else name for name in asked]
    if NO_DRAFTER in names:
        return ()
    if ALL_DRAFTERS in names:
        return tuple(loaded)
    for name in names:
        if name not in loaded:
            raise Unsupported(
                "speculative.types",
                f"{name} is not loaded; this server has"
                f" {', '.join(loaded) or NO_DRAFTER} (--spec-type sets it)",
            )
    return tuple(name for name in loaded if name in names)
