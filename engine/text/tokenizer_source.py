"""Where a tokenizer and chat templates come from: one form for a checkpoint folder and for other files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HFTokenizer

from slipstream.engine.errors import LoadError
from slipstream.engine.text import tiktoken_file
from slipstream.engine.text.json_file import check_regular, read_object


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """What `Tokenizer` and `load_chat_template` are made of."""

    open: Callable[[], HFTokenizer]  # a backend of its own with every call; raises `LoadError`
    special_tokens: Mapping[str, str]  # name, as in "eos_token" -> text
    eos_ids: frozenset[int]  # ids that end a text, besides the "eos_token"
    read_templates: Callable[[], Mapping[str, str]]  # chat templates by name; raises `LoadError`
    where: str  # file or folder, for errors


def folder_source(folder: Path | str) -> TokenizerSource:
    """What a checkpoint folder in Hugging Face's layout has of text. Raises `LoadError`."""
    folder = Path(folder)
    return TokenizerSource(
        open=lambda: _open(folder),
        special_tokens=read_special_tokens(folder),
        eos_ids=stop_ids(folder / "config.json", folder / "generation_config.json"),
        read_templates=lambda: read_templates(folder),
        where=str(folder),
    )


def _open(folder: Path) -> HFTokenizer:
    path = folder / "tokenizer.json"
    if not path.exists():
        if (folder / tiktoken_file.FILE).exists():
            return tiktoken_file.open_tiktoken(folder)
        raise LoadError(
            f"{path}: no such file; transformers' AutoTokenizer.from_pretrained(folder)"
            ".save_pretrained(folder) writes it from older formats"
        )
    check_regular(path)
    try:
        tokenizer = HFTokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception for every fault of the file
        raise LoadError(f"{path}: not a readable tokenizer ({error})") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def stop_ids(*files: Path) -> frozenset[int]:
    """Ids that end a text: the union of the files' `eos_token_id`, config.json's and generation_config.json's.

    Wrappers for several media say it beside their text model's keys.
    """
    found: set[int] = set()
    for file in files:
        outer = read_object(file)
        inner = outer.get("text_config")
        for given in (outer, inner if isinstance(inner, dict) else {}):
            value = given.get("eos_token_id")
            ids = value if isinstance(value, list) else [] if value is None else [value]
            for one in ids:
                if isinstance(one, bool) or not isinstance(one, int) or one < 0:
                    raise LoadError(f"{file}: eos_token_id = {json.dumps(value)}: must be token ids")
                found.add(one)
    return frozenset(found)


def read_special_tokens(folder: Path) -> dict[str, str]:
    """Named special tokens of tokenizer_config.json, or of the older special_tokens_map.json."""
    found: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        for name, value in read_object(folder / file).items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                found[name] = text
    return found


def read_templates(folder: Path) -> dict[str, str]:
    """The chat templates in a checkpoint folder, by name.

    chat_template.jinja overrides tokenizer_config.json, which has one template or a list of named templates;
    additional_chat_templates/*.jinja are named by their files.
    """
    config = folder / "tokenizer_config.json"
    sources = named_sources(read_object(config).get("chat_template"), config)
    files = {"default": folder / "chat_template.jinja"}
    files |= {one.stem: one for one in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    for name, path in files.items():
        check_regular(path)
        try:
            sources[name] = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise LoadError(f"{path}: not readable ({error})") from None
    return sources


def named_sources(given: Any, path: Path) -> dict[str, str]:
    """Templates by name from tokenizer_config.json's `chat_template`."""
    if given is None:
        return {}
    if isinstance(given, str):
        return {"default": given}
    try:
        named = {one["name"]: one["template"] for one in given}
    except (TypeError, KeyError):
        named = {}
    if not named or not all(isinstance(text, str) for pair in named.items() for text in pair):
        raise LoadError(f"{path}: chat_template is neither a template nor a list of named ones")
    return named
