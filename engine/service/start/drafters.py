"""Which drafters a server loads, from its settings."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from slipstream.engine.errors import SettingError
from slipstream.engine.naming import ALL_DRAFTERS, NO_DRAFTER
from slipstream.engine.settings import Settings
from slipstream.engine.speculate.acceptance import is_synthetic
from slipstream.engine.speculate.registry import BY_NAME, DRAFTERS, Row, setting_names

log = logging.getLogger(__name__)
_DEFAULTS = Settings()
_OF_ANY = ("spec_order", "draft_max", "draft_min")  # settings that any drafter uses


def drafter_types(settings: Settings, network: str | None, *, overlaps: bool = False) -> tuple[str, ...]:
    """The drafters to load, in order. Raises `SettingError` for flags that could not take effect.

    network: the drafter whose network `--model-draft` or the target's own folder holds, if any. overlaps: whether
    passes are launched behind unread passes.
    """
    rows = _rows(settings, network, overlaps=overlaps)
    for row in rows:
        _check_needs(settings, row, network)
    names = tuple(row.name for row in rows)
    if settings.model_draft is not None and network not in names:
        raise SettingError("model_draft", settings.model_draft, f"has no use without {network} (--spec-type)")
    _check_uses(settings, names)
    if not names and (idle := _changed(settings, _OF_ANY)):
        # Not refused, as scripts for llama-server have them whatever is drafted.
        log.warning("without effect, as nothing is drafted (--spec-type): %s", ", ".join(idle))
    if settings.draft_min > settings.draft_max:
        raise SettingError("draft_min", settings.draft_min, f"is more than --draft-max {settings.draft_max}")
    if settings.draft_max or network not in names:
        return names
    # No request may draft more than the server: the network would take memory and never run.
    if settings.model_draft is not None:
        log.warning("not loaded, as nothing is drafted (--draft-max 0): --model-draft")
    return tuple(name for name in names if name != network)


@contextmanager
def compiling(types: Sequence[str]) -> Iterator[None]:
    """Compile what these drafters run, in another thread, while the body waits for processes and disks."""
    with ThreadPoolExecutor(1, thread_name_prefix="compiling") as beside:
        compiled = [beside.submit(BY_NAME[name].compile) for name in types]
        yield
        for one in compiled:
            one.result()


def _rows(settings: Settings, network: str | None, *, overlaps: bool) -> list[Row]:
    asked = [name.strip() for name in settings.spec_type.split(",")]
    if NO_DRAFTER in asked:
        return []
    if ALL_DRAFTERS in asked and is_synthetic(settings):
        # Every pass must verify a full draft, and drafters that read text do not always have one.
        asked = [network or "synthetic" if name == ALL_DRAFTERS else name for name in asked]
    is_auto = ALL_DRAFTERS in asked
    return [
        row
        for row in DRAFTERS
        if row.brought_by is not None
        or {row.name, *row.aliases} & {*asked}
        or (is_auto and (row.name == network or row.is_auto(settings, overlaps)))
    ]


def _check_needs(settings: Settings, row: Row, network: str | None) -> None:
    """Raise `SettingError` if a network or setting is missing that the drafter needs."""
    if row.network is not None and row.name != network:
        held = "nothing was given" if network is None else f"what was given is a {network}"
        reason = f"{row.name} needs a network of its kind (--model-draft); {held}"
        raise SettingError("spec_type", settings.spec_type, reason)
    if row.needs_one_of and all(getattr(settings, name) is None for name in row.needs_one_of):
        raise SettingError("spec_type", settings.spec_type, f"{row.name} needs {_flags(row.needs_one_of)}")


def _check_uses(settings: Settings, loaded: Sequence[str]) -> None:
    """Raise `SettingError` for a drafters' setting that has a value but no loaded drafter to use it."""
    for name in setting_names(*(prefix for row in DRAFTERS for prefix in row.settings)):
        users = [row.name for row in DRAFTERS if name.startswith(row.settings)]
        value = getattr(settings, name)
        if value != getattr(_DEFAULTS, name) and not {*users} & {*loaded}:
            raise SettingError(name, value, f"has no use without {' or '.join(users)} (--spec-type)")
    size = settings.spec_shared_history_size
    if settings.spec_shared_history == "off" and size != _DEFAULTS.spec_shared_history_size:
        raise SettingError("spec_shared_history_size", size, "has no use without --spec-shared-history")


def _changed(settings: Settings, names: Sequence[str]) -> list[str]:
    """The flags of those of these settings that have not their default."""
    return [_flags([name]) for name in names if getattr(settings, name) != getattr(_DEFAULTS, name)]


def _flags(names: Sequence[str]) -> str:
    return " or ".join(f"--{name.replace('_', '-')}" for name in names)
