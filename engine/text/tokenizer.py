"""Text <-> token ids through the checkpoint's tokenizer.

Two copies of the tokenizer are held: whether special tokens in a text become control tokens is a switch of
the whole object, and requests are tokenised on several threads at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from slipstream.engine.errors import InvalidRequest, LoadError, TextTooLong, Unsupported
from slipstream.engine.text.byte_level import BYTE_OF, is_byte_level
from slipstream.engine.text.panics import without_panics
from slipstream.engine.text.tokenizer_source import TokenizerSource, folder_source

# Tokens around prefix and suffix when the text between them is asked for: Qwen, StarCoder, DeepSeek, CodeLlama.
INFILL = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4.5
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)
# Before each file of a repository: Qwen, StarCoder.
FILE_MARKS = ("<|file_sep|>", "<file_sep>")
_BYTE = re.compile("<0x[0-9A-F]{2}>")  # how sentencepiece vocabularies write a byte


class Tokenizer:
    """The tokenizer of one checkpoint. Safe to use from several threads."""

    def __init__(self, source: TokenizerSource | Path | str) -> None:
        """Open the tokenizer of a checkpoint folder, or of another source. Raises `LoadError`."""
        source = source if isinstance(source, TokenizerSource) else folder_source(source)
        self.backend = source.open()
        self._literal = source.open()
        self._literal.encode_special_tokens = True
        self.special_tokens = source.special_tokens  # name, as in "eos_token" -> text
        added = self.backend.get_added_tokens_decoder()
        self.control_ids: Mapping[str, int] = {one.content: i for i, one in added.items() if one.special}
        self._controls = frozenset(self.control_ids.values())
        self.added_tokens: Mapping[str, bool] = {one.content: one.special for one in added.values()}
        self._is_byte_level = is_byte_level(self.backend)
        ids = self.backend.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(ids, default=-1) + 1  # ids the tokenizer can produce are below it
        if self.vocab_size == 0:
            raise LoadError(f"{source.where}: the vocabulary of the tokenizer is empty")
        # Bytes of the longest token.
        self.longest = max(len(self.token_bytes(i)) for i in range(self.vocab_size))
        own = self.special_id("eos_token")
        self.eos_ids = source.eos_ids | (frozenset() if own is None else frozenset({own}))
        self.bos_id = self.special_id("bos_token")

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text.

        add_special: add what the tokenizer puts around every text, for instance the begin token.
        parse_special: whether special tokens written in the text become control tokens or stay plain text.
        Raises `InvalidRequest` for text that is not valid Unicode.
        """
        return self.encode_all([text], add_special=add_special, parse_special=parse_special)[0]

    @without_panics
    def encode_all(
        self, texts: Sequence[str], *, add_special: bool = True, parse_special: bool = True
    ) -> list[list[int]]:
        """Token ids of each of several texts, as `encode` makes them."""
        backend = self.backend if parse_special else self._literal
        try:
            # The calls for a single text keep the interpreter until it is tokenised, so that all other threads stand
            # still; those for a batch let it go. This one leaves out where the tokens lie in the text.
            made = backend.encode_batch_fast(list(texts), add_special_tokens=add_special)
        except (UnicodeEncodeError, TypeError):
            raise InvalidRequest(
                "prompt", "the text holds a lone surrogate and is not valid Unicode"
            ) from None
        return [one.ids for one in made]

    @without_panics
    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of token ids; ids past the vocabulary have none."""
        # As a batch, for the reason given above.
        texts: list[str] = self.backend.decode_batch([token_ids], skip_special_tokens=skip_special)
        return texts[0]

    def check_size(self, param: str, text: str, n_tokens: int) -> None:
        """Raises `TextTooLong` for a text that cannot be written with so many tokens: its tokens need no count.

        This holds where every byte of a text is part of a token. Where a normaliser drops much, or an unknown token
        stands for a whole run, texts of many times the usual length are refused although they would fit.
        """
        most = n_tokens * self.longest
        n_bytes = len(text.encode("utf-8", "surrogatepass"))
        if n_bytes > most:
            raise TextTooLong(param, n_bytes, most, n_tokens, "--ctx-size")

    def token(self, token_id: int) -> str | None:
        """How the vocabulary writes one token, or None if there is no such id."""
        return self.backend.id_to_token(token_id)

    def is_control(self, token_id: int) -> bool:
        """Whether it is a token that texts leave out unless asked for it."""
        return token_id in self._controls

    def token_bytes(self, token_id: int) -> bytes:
        """What one token writes: not always whole characters. Control tokens write their names."""
        token = self.token(token_id)
        if token is None:
            return b""
        if token in self.added_tokens:
            return token.encode()
        if self._is_byte_level:
            return b"".join(BYTE_OF.get(char) or char.encode() for char in token)
        if _BYTE.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()

    def infill(self, prefix: str, suffix: str, extra: Sequence[tuple[str, str]] = ()) -> list[int]:
        """A prompt that asks for the text between two others. Raises `Unsupported` if the vocabulary cannot say so.

        extra: other texts that it may refer to, each with a file's name: before the rest, under the tokens for files of
        a repository if the vocabulary has them.
        """
        own = tuple(self.special_tokens.get(f"fim_{part}_token", "") for part in ("pre", "suf", "mid"))
        for names in (own, *INFILL):
            marks = [i for name in names if (i := self.backend.token_to_id(name)) is not None]
            if len(marks) == len(names):
                before, middle, after = marks
                texts = [self.encode(one, add_special=False, parse_special=False) for one in (prefix, suffix)]
                files = self._files(extra)
                return [*self.encode(""), *files, before, *texts[0], middle, *texts[1], after]
        raise Unsupported("suffix", "this model's tokenizer has no tokens to fill in the middle")

    def _files(self, extra: Sequence[tuple[str, str]]) -> list[int]:
        """Texts of other files of a repository, as a prompt to fill in the middle begins with them."""
        mark = next((i for name in FILE_MARKS if (i := self.backend.token_to_id(name)) is not None), None)
        marks = [] if mark is None else [mark]
        texts = [f"{name}\n{text}\n" for name, text in extra]
        made = self.encode_all(texts, add_special=False, parse_special=False) if texts else []
        return [token_id for ids in made for token_id in (*marks, *ids)]

    def special_id(self, name: str) -> int | None:
        """The id of a named special token, as in "bos_token", or None."""
        text = self.special_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)


def same_vocabulary(target: Tokenizer, draft: Tokenizer) -> bool:
    """Whether every id means the same token in both, as far as both have it.

    Tokenizers are compared, not the padded sizes of the matrices.
    """
    ours, theirs = (by_id(one) for one in (target, draft))
    return all(theirs[token_id] == token for token_id, token in ours.items() if token_id in theirs)


def by_id(tokenizer: Tokenizer) -> dict[int, str]:
    """The whole vocabulary, id -> token."""
    return {i: token for token, i in tokenizer.backend.get_vocab(with_added_tokens=True).items()}
