"""All that is text in a GGUF file's metadata: the tokenizer, its special tokens, the chat templates.

Format: ggml's docs/gguf.md, keys under `tokenizer.`; what that leaves open is read as in llama.cpp
(src/llama-vocab.cpp).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as HFTokenizer

from slipstream.engine.errors import LoadError
from slipstream.engine.text.gguf.key_values import KeyValues
from slipstream.engine.text.gguf.special_tokens import end_ids, end_texts, read_special_ids
from slipstream.engine.text.gguf.token_list import CONTROL, UNKNOWN, USER_DEFINED, TokenList, read_tokens
from slipstream.engine.text.gguf.vocabulary_kinds import Vocabulary, read_kind
from slipstream.engine.text.tokenizer_source import TokenizerSource

TEMPLATE = "tokenizer.chat_template"  # named ones follow a point: tokenizer.chat_template.tool_use


@dataclass(frozen=True, slots=True)
class _Parts:
    """A tokenizer before it is put together: backends share the vocabulary, which is the bulk of it."""

    tokens: TokenList
    special_ids: Mapping[str, int]
    vocabulary: Vocabulary
    around: tuple[str, ...]  # names of tokens before and behind a text, "$A" for the text
    where: str

    def assemble(self) -> HFTokenizer:
        """A backend of its own. Raises `LoadError`."""
        try:
            made = HFTokenizer(self.vocabulary.model)
            made.decoder = self.vocabulary.decoder
            if self.vocabulary.normalizer is not None:
                made.normalizer = self.vocabulary.normalizer
            if self.vocabulary.pre_tokenizer is not None:
                made.pre_tokenizer = self.vocabulary.pre_tokenizer
            if len(self.around) > 1:
                made.post_processor = self._post_processor()
            made.add_tokens(self._added())
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception for whatever it cannot take
            raise LoadError(f"{self.where}: not a usable tokenizer ({error})") from None
        return made

    def _post_processor(self) -> processors.TemplateProcessing:
        """What every text is given before and behind it."""
        added = []
        for name in self.around:
            if name != "$A":
                token_id = self.special_ids[name]
                added.append({"id": name, "ids": [token_id], "tokens": [self.tokens.texts[token_id]]})
        return processors.TemplateProcessing(single=list(self.around), special_tokens=added)

    def _added(self) -> list[AddedToken]:
        """Tokens that are cut out of a text as a whole, in the order of their ids."""
        ends = end_texts(self.tokens)
        special = {text for _, text in self.tokens.of_types(CONTROL, UNKNOWN)} | ends.keys()
        plain = {text for _, text in self.tokens.of_types(USER_DEFINED)}
        return [
            AddedToken(text, special=text in special, normalized=False)
            for text in self.tokens.ids
            if text in special or text in plain
        ]


def _read_parts(values: KeyValues) -> _Parts:
    kind = read_kind(values)
    tokens = read_tokens(values)
    special_ids = read_special_ids(values, tokens, kind.defaults)
    unknown = special_ids.get("unk_token")
    vocabulary = kind.read(values, tokens, None if unknown is None else tokens.texts[unknown])
    before = _added_around(values, special_ids, "bos_token", default=vocabulary.adds_bos)
    if kind.insists_on_bos and "bos_token" in special_ids:
        before = ("bos_token",)
    behind = _added_around(values, special_ids, "eos_token", default=False)
    return _Parts(tokens, special_ids, vocabulary, (*before, "$A", *behind), values.where)


def _added_around(
    values: KeyValues, special_ids: Mapping[str, int], name: str, *, default: bool
) -> tuple[str, ...]:
    """The name of a special token if texts are given it, by the file's word or by default."""
    key = f"tokenizer.ggml.add_{name}"
    asked = values.flag(key)
    if asked and name not in special_ids:
        raise values.refused(key, asked, f"there is no tokenizer.ggml.{name}_id")
    return (name,) if name in special_ids and (default if asked is None else asked) else ()


def read_tokenizer(metadata: Mapping[str, Any], where: str) -> HFTokenizer:
    """The tokenizer of a GGUF file.

    metadata: the file's key-values as plain values of Python; where: its name, for errors.
    Raises `UnsupportedModel` for a kind of vocabulary or a `tokenizer.ggml.pre` that is not known, `LoadError` for
    metadata that no tokenizer can be made of.
    """
    return _read_parts(KeyValues(metadata, where)).assemble()


def gguf_source(metadata: Mapping[str, Any], where: str) -> TokenizerSource:
    """What `Tokenizer` and `load_chat_template` need of a GGUF file. Raises as `read_tokenizer` does."""
    values = KeyValues(metadata, where)
    parts = _read_parts(values)
    return TokenizerSource(
        open=parts.assemble,
        special_tokens={name: parts.tokens.texts[i] for name, i in parts.special_ids.items()},
        eos_ids=end_ids(parts.tokens, parts.special_ids),
        read_templates=lambda: chat_templates(values),
        where=where,
    )


def chat_templates(values: KeyValues) -> dict[str, str]:
    """Chat templates by name, "default" among them; empty without any. Raises `LoadError`."""
    keys = {"default": TEMPLATE}
    keys |= {
        key.removeprefix(f"{TEMPLATE}."): key for key in values.metadata if key.startswith(f"{TEMPLATE}.")
    }
    found = {name: values.string(key) for name, key in keys.items()}
    return {name: text for name, text in found.items() if text}
