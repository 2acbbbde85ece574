"""Where byte-level vocabularies cut a text before they merge: one entry for every known `tokenizer.ggml.pre`.

GGUF files do not hold the expressions, only a name for them. What a name stands for are the expressions of the
tokenizer.json of the checkpoints that it was given to; llama.cpp (src/llama-vocab.cpp) has the list, in places
rewritten for its own engine. Here they are as the tokenizer.json files have them. A name that is not listed is refused:
with the wrong cuts a model answers, but worse.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.engine.errors import UnsupportedModel
from slipstream.engine.text.gguf.key_values import KeyValues
from slipstream.engine.text.tiktoken_file import PIECES as _KIMI

PRE = "tokenizer.ggml.pre"


@dataclass(frozen=True, slots=True)
class Splits:
    """Expressions that cut a text one after the other; each match is a piece, and so is what lies between two."""

    expressions: tuple[str, ...]
    ignore_merges: bool = False  # a piece that is a token is that token, even if merges do not lead to it
    adds_bos: bool = False  # unless tokenizer.ggml.add_bos_token says otherwise


def _chars(ranges: str) -> str:
    """The inside of a character class, of hexadecimal code points."""
    return "".join("-".join(f"\\x{{{code}}}" for code in one.split("-")) for one in ranges.split())


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_SIGNS}|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_SEED = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"

_LEAD = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}|{_PATHS}|{_SPACES}"
_GPT4O = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}?|{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}|{_PATHS}|{_SPACES}"
)

# Letters with case, as DeepSeek's first tokenizers list them.
_CASED = _chars("""
    41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386
    388-38A 38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA
    1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59
    1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC
    1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139
    213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B
    A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F
    104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943
""")
_MARKS = _chars("21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002")
_EAST_ASIAN = _chars("4E00-9FA5 800-4E00 AC00-D7FF")
_DEEPSEEK_LLM = (r"[\r\n]", rf"\s?[{_CASED}]+", rf"\s?[{_MARKS}]+", r"\s+$", rf"[{_EAST_ASIAN}]+", r"\p{N}")
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", rf"[{_EAST_ASIAN}]+", r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    rf"[{_chars('4E00-9FA5 3040-309F 30A0-30FF')}]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)

SPLITS: dict[str, Splits] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "mellum", "a.x-4.0"), Splits((_GPT2,))),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "minerva-7b"), Splits((r"\p{N}", _GPT2))),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3"), Splits((_LLAMA3,), ignore_merges=True, adds_bos=True)
    ),
    **dict.fromkeys(("smaug-bpe", "dbrx", "chatglm-bpe"), Splits((_LLAMA3,))),
    **dict.fromkeys(("glm4", "glm5"), Splits((_LLAMA3,), ignore_merges=True)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "hunyuan", "kormo"), Splits((_QWEN2,))),
    "kimi-k2": Splits((_KIMI,), ignore_merges=True),
    "qwen35": Splits((_QWEN35,)),
    "seed-coder": Splits((_SEED,)),
    "tekken": Splits((_TEKKEN,), ignore_merges=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), Splits((_GPT4O,))),
    "deepseek-llm": Splits(_DEEPSEEK_LLM),
    "deepseek-coder": Splits(_DEEPSEEK_CODER),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), Splits(_DEEPSEEK_V3)),
}


def read_splits(values: KeyValues) -> Splits:
    """The splits that the file names. Raises `UnsupportedModel` for an unknown name, and for a file that names none."""
    name = values.string(PRE)
    if name is None:
        raise UnsupportedModel(
            f"{values.where}: {PRE} is missing: the file was written by an old converter and does not say"
            " how its vocabulary cuts a text; convert the checkpoint again"
        )
    if name not in SPLITS:
        raise UnsupportedModel(
            f"{values.where}: {PRE} = {name!r} is not supported; known: {', '.join(sorted(SPLITS))}"
        )
    return SPLITS[name]
