"""The chat template that the settings give, in place of those in the model's files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from slipstream.engine.errors import SettingError
from slipstream.engine.settings import Settings
from slipstream.engine.text.named_templates import NAMED
from slipstream.engine.text.tokenizer_source import TokenizerSource


def with_given_template(source: TokenizerSource, settings: Settings) -> TokenizerSource:
    """`source` with the given template alone, if one is given. Raises `SettingError` for a file that has none."""
    where, text = "--chat-template", settings.chat_template
    if text is not None and text in NAMED:
        where, text = f"--chat-template {text}", NAMED[text].source
    if settings.chat_template_file is not None:
        where, text = settings.chat_template_file, _read(settings.chat_template_file)
    if text is None:
        return source
    return replace(source, read_templates=lambda: {"default": text}, where=where)


def _read(name: str) -> str:
    if not Path(name).is_file():
        raise SettingError("chat_template_file", name, "no such file")
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise SettingError("chat_template_file", name, f"cannot be read ({error})") from None
    if not text.strip():
        raise SettingError("chat_template_file", name, "is empty")
    return text
