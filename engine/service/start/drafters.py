"""Which drafters a server loads, from its settings, and how each is built. One line per drafter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from slipstream.engine.cache.cache import Cache
from slipstream.engine.core import forward
from slipstream.engine.core.engine import Capacity
from slipstream.engine.errors import SettingError
from slipstream.engine.settings import Settings
from slipstream.engine.speculate.bench.garbage import Garbage
from slipstream.engine.speculate.bench.synthetic import Synthetic
from slipstream.engine.speculate.drafter import Drafter
from slipstream.engine.speculate.network.draft_block import DraftBlock
from slipstream.engine.speculate.network.draft_hidden import DraftHidden
from slipstream.engine.speculate.network.draft_model import STORE, DraftModel
from slipstream.engine.speculate.ngram.ngram_cache import NgramCache
from slipstream.engine.speculate.ngram.ngram_map import NgramMapK, NgramMapK4V
from slipstream.engine.speculate.ngram.ngram_mod import NgramMod
from slipstream.engine.speculate.ngram.ngram_simple import NgramSimple
from slipstream.engine.speculate.resolve import ALIASES, ALL_DRAFTERS, NO_DRAFTER
from slipstream.engine.speculate.text.forced import Forced
from slipstream.engine.speculate.text.prediction import Prediction
from slipstream.engine.speculate.text.shared_history import SharedHistory
from slipstream.engine.speculate.text.suffix import Suffix


@dataclass(frozen=True, slots=True)
class Parts:
    """What drafters are built from."""

    settings: Settings
    networks: Mapping[str, Any]  # by store: the target, a draft model, or a head by its drafter's name
    cache: Cache
    capacity: Capacity

    @property
    def n_slots(self) -> int:
        return self.capacity.n_slots

    @property
    def vocab_size(self) -> int:
        n_words: int = self.networks[forward.STORE].vocab_size
        return n_words

    def ngram(self, prefix: str) -> tuple[int, int, int]:
        """(tokens that match, tokens copied, occurrences needed) of one n-gram drafter."""
        size_n, size_m, min_hits = (
            getattr(self.settings, prefix + one) for one in ("size_n", "size_m", "min_hits")
        )
        return size_n, size_m, min_hits


def _mod(parts: Parts) -> Drafter:
    n_match, n_min, n_max = (
        getattr(parts.settings, f"spec_ngram_mod_n_{one}") for one in ("match", "min", "max")
    )
    return NgramMod(n_match, n_min, n_max, parts.n_slots, parts.capacity.n_ctx)


def _cache(parts: Parts) -> Drafter:
    settings = parts.settings
    return NgramCache(
        parts.n_slots, settings.lookup_cache_static, settings.lookup_cache_dynamic, parts.vocab_size
    )


def _suffix(parts: Parts) -> Drafter:
    mode, size = parts.settings.spec_shared_history, parts.settings.spec_shared_history_size
    return Suffix(parts.n_slots, None if mode == "off" else SharedHistory(size, mode))


def _hidden(name: str, parts: Parts) -> Drafter:
    return DraftHidden(name, parts.networks[name], parts.cache)


def _block(name: str, parts: Parts) -> Drafter:
    return DraftBlock(name, parts.networks[name], parts.cache)


# In the order in which `--spec-order fixed` asks them.
_BUILDERS: Mapping[str, Callable[[Parts], Drafter]] = {
    Forced.name: lambda parts: Forced(),
    Prediction.name: lambda parts: Prediction(parts.n_slots),
    NgramSimple.name: lambda parts: NgramSimple(*parts.ngram("spec_ngram_simple_"), parts.n_slots),
    NgramMapK.name: lambda parts: NgramMapK(*parts.ngram("spec_ngram_map_k_"), parts.n_slots),
    NgramMapK4V.name: lambda parts: NgramMapK4V(*parts.ngram("spec_ngram_map_k4v_"), parts.n_slots),
    NgramMod.name: _mod,
    NgramCache.name: _cache,
    Suffix.name: _suffix,
    DraftModel.name: lambda parts: DraftModel(parts.networks[STORE], parts.cache, parts.capacity.batch_size),
    **{name: partial(_hidden, name) for name in ("draft-eagle3", "draft-mtp")},
    **{name: partial(_block, name) for name in ("draft-dflash", "draft-dspark")},
    Garbage.name: lambda parts: Garbage(parts.vocab_size),
    Synthetic.name: lambda parts: Synthetic(parts.vocab_size, parts.capacity.eos_ids),
}
KNOWN = tuple(_BUILDERS)
NETWORKS = (DraftModel.name, "draft-eagle3", "draft-mtp", "draft-dflash", "draft-dspark")

# Settings by the beginning of their names, and the drafter without which they would have no effect.
_USED_BY = {
    "spec_ngram_simple_": NgramSimple.name,
    "spec_ngram_map_k_": NgramMapK.name,
    "spec_ngram_map_k4v_": NgramMapK4V.name,
    "spec_ngram_mod_": NgramMod.name,
    "lookup_cache_": NgramCache.name,
    "spec_shared_history": Suffix.name,
}


def drafter_types(settings: Settings, network: str | None) -> tuple[str, ...]:
    """The drafters to load, in order. Raises `SettingError` for flags that could not take effect.

    network: the drafter whose network `--model-draft` or the target's own folder holds, if any.
    """
    names = _names(settings, network)
    _check_networks(settings, names, network)
    if Synthetic.name in names and settings.spec_synth_len is None and settings.spec_synth_rates is None:
        raise SettingError(
            "spec_type", settings.spec_type, "synthetic needs --spec-synth-len or --spec-synth-rates"
        )
    for prefix, user in _USED_BY.items():
        for name in (one.name for one in fields(settings) if one.name.startswith(prefix)):
            value = getattr(settings, name)
            if value != getattr(Settings(), name) and user not in names:
                raise SettingError(name, value, f"has no use without {user} (--spec-type)")
    if (
        settings.spec_shared_history == "off"
        and settings.spec_shared_history_size != Settings().spec_shared_history_size
    ):
        raise SettingError(
            "spec_shared_history_size",
            settings.spec_shared_history_size,
            "has no use without --spec-shared-history",
        )
    if settings.draft_min > settings.draft_max:
        raise SettingError("draft_min", settings.draft_min, f"is more than --draft-max {settings.draft_max}")
    return names


def _check_networks(settings: Settings, names: Sequence[str], network: str | None) -> None:
    for name in names:
        if name in NETWORKS and name != network:
            held = "nothing was given" if network is None else f"what was given is a {network}"
            raise SettingError(
                "spec_type", settings.spec_type, f"{name} needs a network of its kind (--model-draft); {held}"
            )
    if settings.model_draft is not None and network not in names:
        raise SettingError("model_draft", settings.model_draft, f"has no use without {network} (--spec-type)")
    if settings.draft_p_min and not set(names) & set(NETWORKS):
        raise SettingError("draft_p_min", settings.draft_p_min, "has no use without a draft network")
    if settings.device_draft is not None and DraftModel.name not in names:
        raise SettingError(
            "device_draft",
            settings.device_draft,
            "has no use without draft-model; heads run with their target",
        )
    if settings.draft_taps is not None and not set(names) & set(NETWORKS) - {DraftModel.name}:
        raise SettingError("draft_taps", settings.draft_taps, "has no use without a head (--model-draft)")


def _names(settings: Settings, network: str | None) -> tuple[str, ...]:
    asked = [ALIASES.get(name.strip(), name.strip()) for name in settings.spec_type.split(",")]
    for name in asked:
        if name not in (*KNOWN, NO_DRAFTER, ALL_DRAFTERS):
            raise SettingError(
                "spec_type", settings.spec_type, f"{name} is not a drafter; there are {', '.join(KNOWN)}"
            )
    if NO_DRAFTER in asked:
        return ()
    if ALL_DRAFTERS in asked:
        asked += _worth_their_time(settings, network)
    # Predictions and grammars cost nothing until a request brings one, so every server that drafts knows them.
    return tuple(name for name in KNOWN if name in (Forced.name, Prediction.name, *asked))


def _worth_their_time(settings: Settings, network: str | None) -> list[str]:
    """What `auto` loads: `suffix` finds whatever the other methods find in a text; the others need something given."""
    has_counts = settings.lookup_cache_static is not None or settings.lookup_cache_dynamic is not None
    return [
        Suffix.name,
        *([NgramCache.name] if has_counts else []),
        *([network] if network is not None else []),
    ]


def build(name: str, parts: Parts) -> Drafter:
    """The drafter of that name."""
    return _BUILDERS[name](parts)
