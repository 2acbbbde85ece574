"""Speculation in force for a request: what the server loaded, narrowed by what the request asks."""

from __future__ import annotations

from collections.abc import Sequence

from engine.api import Speculate
from engine.errors import InvalidRequest, Unsupported
from engine.settings import Settings
from engine.slot import SpeculateParams

NO_DRAFTER = "none"
ALL_DRAFTERS = "auto"
ALIASES = {"draft-simple": "draft-model"}


def resolve_speculate(settings: Settings, loaded: Sequence[str], asked: Speculate) -> SpeculateParams:
    """The request's speculation. `n_max` above the server's is lowered; everything else is honoured or refused.

    Raises `InvalidRequest` for values out of range and `Unsupported` for drafters that are not loaded.
    """
    types = tuple(loaded) if asked.types is None else _types(asked.types, loaded)
    n_max = settings.draft_max if asked.n_max is None else asked.n_max
    n_min = settings.draft_min if asked.n_min is None else asked.n_min
    p_min = settings.draft_p_min if asked.p_min is None else asked.p_min
    if n_max < 0:
        raise InvalidRequest("speculative.n_max", f"{n_max} is less than 0")
    if n_min < 0:
        raise InvalidRequest("speculative.n_min", f"{n_min} is less than 0")
    if not 0.0 <= p_min <= 1.0:
        raise InvalidRequest("speculative.p_min", f"{p_min} is not between 0 and 1")
    n_max = min(n_max, settings.draft_max)
    return SpeculateParams(types=types, n_max=n_max, n_min=min(n_min, n_max), p_min=p_min)


def _types(asked: Sequence[str], loaded: Sequence[str]) -> tuple[str, ...]:
    names = [ALIASES.get(name, name) for name in asked]
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
