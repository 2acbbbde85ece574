"""Whether settings are within their bounds and choices; what depends on model or machine is checked at start."""

from __future__ import annotations

from dataclasses import fields

from slipstream.engine.errors import SettingError
from slipstream.engine.naming import (
    ALL_DRAFTERS,
    CHAT_TEMPLATES,
    DRAFTERS,
    NO_DRAFTER,
    TEST_DRAFTERS,
    as_text,
    did_you_mean,
)
from slipstream.engine.settings import Settings

# Settings that replies or prompts have in them; paths may have any bytes.
_WRITTEN = ("alias", "tags", "chat_template")


def check(settings: Settings) -> None:
    """Raises `SettingError` for the first value outside its bounds or choices."""
    for one in fields(settings):
        value = getattr(settings, one.name)
        meta = one.metadata
        if value is None:
            continue
        if meta["choices"] and value not in meta["choices"]:
            choices = meta["choices"]
            hint = did_you_mean(str(value), choices)
            raise SettingError(one.name, value, f"must be one of {', '.join(choices)}{hint}")
        if one.name == "spec_type":
            _check_drafters(value)
        if meta["least"] is not None and value < meta["least"]:
            raise SettingError(one.name, value, f"must be at least {meta['least']}")
        if meta["most"] is not None and value > meta["most"]:
            raise SettingError(one.name, value, f"must be at most {meta['most']}")
    _check_text(settings)
    _check_template(settings)


def _check_text(settings: Settings) -> None:
    """Raises `SettingError` for text with bytes that are not UTF-8: every reply with it would fail."""
    for name in _WRITTEN:
        value = getattr(settings, name) or ""
        if value != as_text(value):
            raise SettingError(name, as_text(value)[:64], "is not UTF-8")


def _check_template(settings: Settings) -> None:
    text = settings.chat_template
    if text is not None and "{" not in text and text not in CHAT_TEMPLATES:
        hint = did_you_mean(text, CHAT_TEMPLATES)
        reason = f"must be Jinja text or one of {', '.join(CHAT_TEMPLATES)}{hint}; --chat-template-file reads a file"
        raise SettingError("chat_template", text[:64] or "''", reason)
    if text is not None and settings.chat_template_file is not None:
        raise SettingError("chat_template_file", settings.chat_template_file, "--chat-template is given too")


def _check_drafters(names: str) -> None:
    """Raises `SettingError` for a name that is no drafter's, and for drafters beside none."""
    asked = [word.strip() for word in names.split(",")]
    if NO_DRAFTER in asked and len(asked) > 1:
        raise SettingError("spec_type", names, f"{NO_DRAFTER} must stand alone")
    for name in asked:
        if name not in (*DRAFTERS, *TEST_DRAFTERS, NO_DRAFTER, ALL_DRAFTERS):
            offered = ", ".join((*DRAFTERS, NO_DRAFTER, ALL_DRAFTERS))
            hint = did_you_mean(name, (*DRAFTERS, NO_DRAFTER, ALL_DRAFTERS))
            raise SettingError("spec_type", names, f"{name!r} is not a drafter{hint}; there are {offered}")
