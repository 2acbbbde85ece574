"""Which drafters a server loads, from its settings, and how each is built. One line per drafter."""

from __future__ import annotations

from collections.abc import Mapping

from engine.cache.cache import Cache
from engine.core import forward
from engine.core.engine import Capacity
from engine.errors import SettingError
from engine.models.network import Network
from engine.settings import Settings
from engine.speculate.draft_model import STORE, DraftModel
from engine.speculate.drafter import Drafter
from engine.speculate.garbage import Garbage
from engine.speculate.ngram_simple import NgramSimple
from engine.speculate.resolve import ALIASES, ALL_DRAFTERS, NO_DRAFTER

KNOWN = (NgramSimple.name, DraftModel.name, Garbage.name)

# A setting, and the drafters without which it would have no effect.
_USED_BY = {
    "model_draft": (DraftModel.name,),
    "draft_p_min": (DraftModel.name,),
    "ngram_size_n": (NgramSimple.name,),
    "ngram_size_m": (NgramSimple.name,),
}


def drafter_types(settings: Settings) -> tuple[str, ...]:
    """The drafters to load, in order. Raises `SettingError` for flags that could not take effect."""
    names = _names(settings)
    if DraftModel.name in names and settings.model_draft is None:
        raise SettingError("spec_type", settings.spec_type, "draft-model needs a draft model (--model-draft)")
    for name, users in _USED_BY.items():
        value = getattr(settings, name)
        if value != getattr(Settings(), name) and not set(users) & set(names):
            raise SettingError(name, value, f"has no use without {', '.join(users)} (--spec-type)")
    if settings.device_draft is not None and settings.model_draft is None:
        raise SettingError("device_draft", settings.device_draft, "has no use without --model-draft")
    if settings.draft_min > settings.draft_max:
        raise SettingError("draft_min", settings.draft_min, f"is more than --draft-max {settings.draft_max}")
    return names


def _names(settings: Settings) -> tuple[str, ...]:
    names = [ALIASES.get(name.strip(), name.strip()) for name in settings.spec_type.split(",")]
    for name in names:
        if name not in (*KNOWN, NO_DRAFTER, ALL_DRAFTERS):
            raise SettingError(
                "spec_type", settings.spec_type, f"{name} is not a drafter; there are {', '.join(KNOWN)}"
            )
    if NO_DRAFTER in names:
        return ()
    if ALL_DRAFTERS in names:
        return (
            (NgramSimple.name, DraftModel.name) if settings.model_draft is not None else (NgramSimple.name,)
        )
    return tuple(dict.fromkeys(names))


def build(
    name: str, settings: Settings, networks: Mapping[str, Network], cache: Cache, capacity: Capacity
) -> Drafter:
    """The drafter of that name over loaded networks."""
    match name:
        case NgramSimple.name:
            return NgramSimple(settings.ngram_size_n, settings.ngram_size_m, capacity.n_slots)
        case DraftModel.name:
            return DraftModel(networks[STORE], cache, capacity.batch_size)
        case Garbage.name:
            return Garbage(networks[forward.STORE].vocab_size)
    raise SettingError("spec_type", name, "is not a drafter")
