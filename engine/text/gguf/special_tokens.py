"""Which tokens of a GGUF file have a role: begin and end of a text, gaps to fill in, padding."""

from __future__ import annotations

from collections.abc import Mapping

from slipstream.engine.text.gguf.key_values import KeyValues
from slipstream.engine.text.gguf.token_list import CONTROL, TokenList

# Names as tokenizer_config.json and chat templates have them, with the keys of their ids; the first one counts.
_KEYS = {
    "bos_token": ("bos_token_id",),
    "eos_token": ("eos_token_id",),
    "eot_token": ("eot_token_id",),
    "eom_token": ("eom_token_id",),
    "unk_token": ("unknown_token_id",),
    "sep_token": ("seperator_token_id",),  # so misspelt in the format
    "pad_token": ("padding_token_id",),
    "mask_token": ("mask_token_id",),
    "cls_token": ("cls_token_id",),
    "fim_pre_token": ("fim_pre_token_id", "prefix_token_id"),  # the second ones are the format's older names
    "fim_suf_token": ("fim_suf_token_id", "suffix_token_id"),
    "fim_mid_token": ("fim_mid_token_id", "middle_token_id"),
    "fim_pad_token": ("fim_pad_token_id",),
    "fim_rep_token": ("fim_rep_token_id",),
    "fim_sep_token": ("fim_sep_token_id",),
}
_END_NAMES = ("eos_token", "eot_token", "eom_token", "fim_pad_token", "fim_rep_token", "fim_sep_token")

# Ends of a turn or text in the formats that checkpoints use. They count whatever their type, and become control tokens:
# converters of fine-tuned checkpoints often miss them.
_END_TEXTS = (
    *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>"),
    *("<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
    *("<end_of_turn>", "<turn|>", "<|tool_response>", "<end_of_utterance>", "<｜end▁of▁sentence｜>"),
)
# These are words as well (Gemma's </s> is a tag of HTML), so they count as control tokens only. Infilling of code ends
# with the last two lines, where the next file would begin.
_END_CONTROLS = (
    *("</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "[e~["),
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
)
# Where a reply has these ends, <|end|> only ends one of its messages (gpt-oss, solar-open).
_ENDS_OF_REPLIES = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})


def read_special_ids(values: KeyValues, tokens: TokenList, defaults: Mapping[str, int]) -> dict[str, int]:
    """Ids by name, as in "bos_token". Raises `LoadError` for an id that is no token's.

    defaults: for names without a key, where the vocabulary has such a token.
    """
    n_tokens = len(tokens.texts)
    found: dict[str, int] = {}
    for name, keys in _KEYS.items():
        for key in (f"tokenizer.ggml.{one}" for one in keys):
            token_id = values.token_id(key, n_tokens)
            if token_id is None:
                continue
            if tokens.texts[token_id] not in tokens.ids:
                raise values.refused(key, token_id, "there is no token of this id, only padding")
            found.setdefault(name, token_id)
    for name, token_id in defaults.items():
        if token_id in tokens.ids.values():
            found.setdefault(name, token_id)
    return found


def end_texts(tokens: TokenList) -> dict[str, int]:
    """Tokens that end a text by what they are called, with their ids.

    As llama.cpp has it (`special_eog_ids` in src/llama-vocab.cpp), for checkpoints whose files name one end only.
    Unlike there, a word such as </s> is an end only if it is a control token.
    """
    found = {text: tokens.ids[text] for text in _END_TEXTS if text in tokens.ids}
    for text in _END_CONTROLS:
        token_id = tokens.ids.get(text)
        if token_id is not None and tokens.types[token_id] == CONTROL:
            found[text] = token_id
    if any(ends <= found.keys() for ends in _ENDS_OF_REPLIES):
        found.pop("<|end|>", None)
    return found


def end_ids(tokens: TokenList, special_ids: Mapping[str, int]) -> frozenset[int]:
    """Ids that end a reply: those that the file names as such, and `end_texts`."""
    named = (special_ids[name] for name in _END_NAMES if name in special_ids)
    return frozenset(named) | frozenset(end_texts(tokens).values())
