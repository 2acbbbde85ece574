"""Tokenizers and chat templates out of GGUF metadata: against transformers, sentencepiece's rule, and refusals."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
from llguidance import LLTokenizer
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import pre_tokenizers
from transformers import Qwen2Tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from slipstream.engine.api import Chat
from slipstream.engine.errors import LoadError, Unsupported, UnsupportedModel
from slipstream.engine.text.chat import load_chat_template
from slipstream.engine.text.gguf.gguf_text import gguf_source, read_tokenizer
from slipstream.engine.text.gguf.splits import SPLITS
from slipstream.engine.text.text_stream import TextStream
from slipstream.engine.text.tokenizer import Tokenizer
from tests.gguf_vocabularies import (
    CONTROL,
    NORMAL,
    PIECES,
    TEXTS,
    UNUSED,
    USER_DEFINED,
    byte_level,
    gemma4,
    sentencepiece,
)

TURN = (
    ("<|endoftext|>", CONTROL),
    ("<|im_start|>", CONTROL),
    ("<|im_end|>", CONTROL),
    ("<think>", USER_DEFINED),
)
KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    **{
        pre: lambda pre=pre: byte_level(pre, TURN) for pre in ("qwen2", "llama-bpe", "deepseek-llm", "gpt-4o")
    },
    "llama": lambda: sentencepiece(TURN),
    "llama without prefix": lambda: sentencepiece(TURN, add_space_prefix=False),
    "gemma4": lambda: gemma4(TURN),
}


def opened(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer(gguf_source(metadata, "some.gguf"))


def random_texts(n: int, alphabet: str, seed: int = 1) -> list[str]:
    dice = random.Random(seed)
    return ["".join(dice.choice(alphabet) for _ in range(dice.randrange(24))) for _ in range(n)]


def random_unicode(n: int, seed: int = 1) -> list[str]:
    """Texts of any characters; without U+2581, which sentencepiece takes for a space."""
    dice = random.Random(seed)
    alphabet = [chr(dice.choice((dice.randrange(0x300), dice.randrange(0x110000)))) for _ in range(4000)]
    return random_texts(n, "".join(c for c in alphabet if c != "▁" and not "\ud800" <= c <= "\udfff"))


# Ids of texts


def test_byte_level_ids_are_those_of_transformers() -> None:
    metadata = byte_level("qwen2")
    vocab = {text: i for i, text in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(line.split(" ")) for line in metadata["tokenizer.ggml.merges"]]
    ours, theirs = opened(metadata), Qwen2Tokenizer(vocab=vocab, merges=merges)
    texts = [*TEXTS, *random_texts(300, "the dog's 12 34=(),.\n\t"), *random_unicode(300)]
    normal = [
        theirs.backend_tokenizer.normalizer.normalize_str(text) for text in texts
    ]  # see vocabulary_kinds
    assert ours.encode_all(normal) == [theirs.encode(text) for text in normal]
    assert max(map(len, ours.encode_all(normal))) > 10


@pytest.mark.parametrize("name", sorted(SPLITS.keys() & GGUF_PRE_TOKENIZER_SPLITS.keys()))
def test_texts_are_cut_as_in_transformers(name: str) -> None:
    from tokenizers import Regex

    theirs = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[name]), behavior="isolated")
    (ours,) = [pre_tokenizers.Split(Regex(one), behavior="isolated") for one in SPLITS[name].expressions]
    for text in (*TEXTS, *random_texts(500, "aB'Ssé\u0301漢१1 \n\r\t/.-ſ"), *random_unicode(200)):
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)


CUTS = {
    "gpt-2": ["We", "'ve", "'", "D", " 1234", " x", "=", "\n", " a", "\u0301"],
    "smollm": ["We", "'ve", "'", "D", " ", "1", "2", "3", "4", " x", "=", "\n", " a", "\u0301"],
    "llama-bpe": ["We", "'ve", "'D", " ", "123", "4", " x", "=\n", " a", "\u0301"],
    "qwen2": ["We", "'ve", "'D", " ", "1", "2", "3", "4", " x", "=\n", " a", "\u0301"],
    "qwen35": ["We", "'ve", "'D", " ", "1", "2", "3", "4", " x", "=\n", " a\u0301"],
    "tekken": ["We", "'ve", "'D", " ", "1", "2", "3", "4", " x", "=\n", " a\u0301"],
    "gpt-4o": ["We've", "'D", " ", "123", "4", " x", "=\n", " a\u0301"],
    "seed-coder": ["We", "'ve", "'D", " ", "1", "2", "3", "4", " x", "=", "\n", " a", "\u0301"],
    "deepseek-llm": ["We", "'", "ve", "'", "D", " ", "1", "2", "3", "4", " x", "=", "\n", " a", "\u0301"],
    "deepseek-coder": ["We", "'", "ve", "'", "D", " ", "1", "2", "3", "4", " x", "=", "\n", " a", "\u0301"],
    "deepseek-v3": ["We", "'ve", "'D", " ", "123", "4", " x", "=\n", " a\u0301"],
}


@pytest.mark.parametrize("name", CUTS)
def test_where_texts_are_cut(name: str) -> None:
    """Read off the expressions by hand: contractions, digits, ends of lines, combining signs."""
    text = "We've'D 1234 x=\n a\u0301"
    backend = read_tokenizer(byte_level(name), "some.gguf")
    found = [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert found == CUTS[name]


def by_rule(text: str, scores: dict[str, float]) -> list[str]:
    """sentencepiece's rule: of all neighbours that make a piece, merge those of the highest score, leftmost first."""
    symbols = list(text)
    while True:
        found = [
            (-scores[both], i)
            for i in range(len(symbols) - 1)
            if (both := symbols[i] + symbols[i + 1]) in scores
        ]
        if not found:
            return symbols
        _, i = min(found)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


@pytest.mark.parametrize("seed", range(8))
def test_sentencepiece_merges_by_score(seed: int) -> None:
    metadata = sentencepiece(seed=seed)
    scores = dict(zip(PIECES, metadata["tokenizer.ggml.scores"][259:], strict=True))
    ours = opened(metadata)
    for text in random_texts(200, "abelhow rd=  ", seed):
        expected = by_rule("▁" + text.replace(" ", "▁"), scores) if text else []
        assert [ours.token(i) for i in ours.encode(text, add_special=False)] == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parse_special", [True, False])
def test_every_text_comes_back(kind: str, parse_special: bool) -> None:
    tokenizer = opened(KINDS[kind]())
    prefix = b" " if kind == "llama" else b""
    for text in (*TEXTS, *random_unicode(500)):
        ids = tokenizer.encode(text, add_special=False, parse_special=parse_special)
        assert tokenizer.decode(ids, skip_special=False) == text
        assert b"".join(map(tokenizer.token_bytes, ids)).removeprefix(prefix) == text.encode()
        assert "".join(TextStream(tokenizer, ()).pieces(ids)) == text
        assert max(ids, default=0) < tokenizer.vocab_size


def test_characters_without_a_token_are_bytes() -> None:
    tokenizer = opened(sentencepiece(add_space_prefix=False))
    assert [tokenizer.token(i) for i in tokenizer.encode("hé", add_special=False)] == [
        "h",
        "<0xC3>",
        "<0xA9>",
    ]
    literal = tokenizer.encode("<0xC3>", add_special=False)
    assert len(literal) == 6  # six characters, not the byte that they name


def test_a_piece_that_is_a_token_may_do_without_merges() -> None:
    added = [("Ġzq", NORMAL)]
    whole, merged = (opened(byte_level(pre, added)) for pre in ("llama-bpe", "gpt-2"))
    assert whole.encode(" zq", add_special=False) == [320]
    assert len(merged.encode(" zq", add_special=False)) > 1


@pytest.mark.parametrize(("prefix", "expected"), [(None, ["▁hello"]), (True, ["▁hello"]), (False, ["hello"])])
def test_space_before_a_text(prefix: bool | None, expected: list[str]) -> None:
    more = {} if prefix is None else {"add_space_prefix": prefix}
    metadata = sentencepiece((("<x>", CONTROL),), **more)
    metadata["tokenizer.ggml.scores"] = [-len(text) for text in metadata["tokenizer.ggml.tokens"]]
    for i, text in enumerate(metadata["tokenizer.ggml.tokens"]):
        metadata["tokenizer.ggml.scores"][i] = float(text in ("he", "ll", "hell", "hello", "▁hello"))
    tokenizer = opened(metadata)
    # Also behind an added token, where llama.cpp puts it.
    ids = tokenizer.encode("hello<x>hello", add_special=False)
    assert [tokenizer.token(i) for i in ids] == [*expected, "<x>", *expected]


# Tokens that are cut out of a text


def test_control_tokens_and_those_of_users() -> None:
    tokenizer = opened(byte_level("qwen2", TURN))
    text = "a<|im_start|>b<think>c"
    parsed, literal = tokenizer.encode(text), tokenizer.encode(text, parse_special=False)
    assert 321 in parsed
    assert 323 in parsed
    assert 321 not in literal
    assert 323 in literal  # these are no secret
    assert tokenizer.decode(parsed) == "ab<think>c"
    assert tokenizer.decode(parsed, skip_special=False) == tokenizer.decode(literal) == text
    assert tokenizer.control_ids == {"<|endoftext|>": 320, "<|im_start|>": 321, "<|im_end|>": 322}
    assert tokenizer.added_tokens == {**dict.fromkeys(tokenizer.control_ids, True), "<think>": False}


def test_added_tokens_that_look_like_bytes_stand_for_their_text() -> None:
    """DeepSeek's vocabularies have a token ü, and write the byte 0xFC as ü."""
    odd = "õ÷ÁýÀÿøúþüùöû"
    tokenizer = opened(byte_level("deepseek-coder", [(char, USER_DEFINED) for char in odd]))
    ids = tokenizer.encode("für é ÿ", add_special=False)
    assert tokenizer.backend.token_to_id("ü") in ids
    assert tokenizer.decode(ids) == "für é ÿ"
    assert b"".join(map(tokenizer.token_bytes, ids)) == "für é ÿ".encode()
    assert "".join(TextStream(tokenizer, ()).pieces(ids)) == "für é ÿ"


def test_user_defined_spaces_and_lines_are_whole_tokens() -> None:
    """As in Gemma 3, of which converters write the spaces of user-defined tokens as spaces."""
    added = [("\n\n", USER_DEFINED), ("  ", USER_DEFINED)]
    tokenizer = opened(sentencepiece(added, add_space_prefix=False))
    n = tokenizer.vocab_size
    assert tokenizer.encode("a\n\n  a", add_special=False)[1:3] == [n - 2, n - 1]
    assert tokenizer.decode(tokenizer.encode("a\n\n  a", add_special=False)) == "a\n\n  a"


def test_no_text_merges_to_a_control_token() -> None:
    """Its pieces are in the vocabulary, and its score is the highest."""
    metadata = sentencepiece([("hello==", CONTROL)], add_space_prefix=False)
    metadata["tokenizer.ggml.scores"] = [0.5] + [0.0] * 258 + [-1.0] * len(PIECES) + [9.0]
    metadata["tokenizer.ggml.scores"][-2] = -2.0
    tokenizer = opened(metadata)
    (control,) = tokenizer.encode("hello==", add_special=False)
    assert control not in tokenizer.encode("hello==", add_special=False, parse_special=False)
    assert control not in tokenizer.encode("<s>hello=", add_special=False)


def test_paddings_are_no_tokens() -> None:
    n = 320
    more = [("[PAD320]", USER_DEFINED), ("[PAD1]", UNUSED), ("", NORMAL), ("<x>", CONTROL)]
    tokenizer = opened(byte_level("qwen2", [*more, *((f"[PAD{n + i}]", UNUSED) for i in range(4, 9))]))
    assert tokenizer.vocab_size == n + 4
    assert [tokenizer.token(i) for i in range(n, n + 9)] == [None, None, None, "<x>", *[None] * 5]
    assert tokenizer.decode([n, n + 3], skip_special=False) == "<x>"
    assert tokenizer.token_bytes(n) == b""
    kept = opened(byte_level("qwen2", [("<unused0>", UNUSED), ("[PAD7]", NORMAL)]))
    assert kept.token(n) == "<unused0>"
    assert kept.token(n + 1) == "[PAD7]"


def test_backends_share_the_vocabulary_and_nothing_else() -> None:
    source = gguf_source(byte_level("qwen2", TURN), "some.gguf")
    first, second = source.open(), source.open()
    first.encode_special_tokens = True
    assert 322 not in first.encode("<|im_end|>").ids
    assert second.encode("<|im_end|>").ids == [322]
    texts = random_unicode(300)
    expected, wrong = [second.encode(text).ids for text in texts], []

    def check(backend: HFTokenizer) -> None:
        if [one.ids for one in backend.encode_batch_fast(texts)] != expected:
            wrong.append(backend)

    threads = [threading.Thread(target=check, args=(one,)) for one in (first, second) * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("kind", KINDS)
def test_grammars_see_the_same_bytes(kind: str) -> None:
    tokenizer = opened(KINDS[kind]())
    theirs = LLTokenizer(
        tokenizer.backend.to_str(), n_vocab=tokenizer.vocab_size, eos_token=[*tokenizer.eos_ids]
    )
    for token_id in set(range(tokenizer.vocab_size)) - {*tokenizer.control_ids.values()}:
        if tokenizer.token_bytes(token_id) != b"\xff":  # its own mark for control tokens
            assert theirs.decode_bytes([token_id]) == tokenizer.token_bytes(token_id)


# Begin and end


BOS, EOS = ("<bos>", CONTROL), ("<eos>", CONTROL)  # 320 and 321
AROUND: list[tuple[str, dict[str, Any], list[int], list[int]]] = [
    ("qwen2", {}, [], []),
    ("qwen2", {"add_bos_token": True}, [320], []),
    ("qwen2", {"add_bos_token": True, "add_eos_token": True}, [320], [321]),
    ("qwen2", {"add_eos_token": True}, [], [321]),
    ("llama-bpe", {}, [320], []),
    ("tekken", {}, [320], []),
    ("tekken", {"add_bos_token": False}, [], []),
    ("glm4", {}, [], []),
]


@pytest.mark.parametrize(("pre", "flags", "before", "behind"), AROUND)
def test_what_is_put_around_a_text(
    pre: str, flags: dict[str, Any], before: list[int], behind: list[int]
) -> None:
    tokenizer = opened(byte_level(pre, [BOS, EOS], bos_token_id=320, eos_token_id=321, **flags))
    inner = tokenizer.encode("x y", add_special=False)
    assert tokenizer.encode("x y") == [*before, *inner, *behind]
    assert tokenizer.encode("") == [*before, *behind]
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (320, {321})
    assert tokenizer.special_tokens == {"bos_token": "<bos>", "eos_token": "<eos>"}


def test_names_of_any_characters_can_be_put_around_a_text() -> None:
    tokenizer = opened(byte_level("llama-bpe", [("$A:0 <x>", CONTROL)], bos_token_id=320))
    assert tokenizer.encode("x")[0] == 320
    assert tokenizer.decode(tokenizer.encode("x")) == "x"


def test_defaults_of_sentencepiece_files() -> None:
    plain = opened(sentencepiece())
    assert (plain.bos_id, plain.eos_ids) == (1, {2})
    assert plain.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert plain.encode("a")[0] == 1
    bare = opened(sentencepiece(add_bos_token=False))
    assert bare.encode("a") == plain.encode("a", add_special=False)


def test_gemma4_begins_with_bos_whatever_the_file_says() -> None:
    for flags in ({}, {"add_bos_token": True}, {"add_bos_token": False}):
        assert opened(gemma4(**flags)).encode("he")[0] == 2


def test_gemma4_merges_lines_and_has_no_prefix() -> None:
    tokenizer = opened(gemma4())
    ids = tokenizer.encode("he he\n\n\n", add_special=False)
    assert [tokenizer.token(i) for i in ids] == ["he", "▁he", "\n\n", "\n"]


HARMONY = ("<|return|>", "<|call|>", "<|end|>", "<|channel|>")
ENDS: list[tuple[list[tuple[str, int]], dict[str, int], set[str]]] = [
    ([], {}, set()),
    ([("<x>", CONTROL)], {"eos_token_id": 320}, {"<x>"}),
    ([("<x>", CONTROL), ("<y>", CONTROL)], {"eot_token_id": 320, "eom_token_id": 321}, {"<x>", "<y>"}),
    ([("<x>", CONTROL), ("<|im_end|>", CONTROL)], {"eos_token_id": 320}, {"<x>", "<|im_end|>"}),
    ([("<|eot_id|>", NORMAL), ("<end_of_turn>", USER_DEFINED)], {}, {"<|eot_id|>", "<end_of_turn>"}),
    ([("</s>", USER_DEFINED)], {}, set()),  # Gemma's tag of HTML
    ([("</s>", CONTROL)], {}, {"</s>"}),
    ([(name, CONTROL) for name in HARMONY], {"eos_token_id": 320}, {"<|return|>", "<|call|>"}),
    ([("<|end|>", CONTROL), ("<|assistant|>", CONTROL)], {}, {"<|end|>"}),
    ([("<|file_sep|>", CONTROL), ("<|fim_pad|>", CONTROL)], {}, {"<|file_sep|>", "<|fim_pad|>"}),
    ([("<|file_sep|>", NORMAL), ("<r>", CONTROL)], {"fim_rep_token_id": 321}, {"<r>"}),
]


@pytest.mark.parametrize(("added", "ids", "expected"), ENDS)
def test_what_ends_a_reply(added: list[tuple[str, int]], ids: dict[str, int], expected: set[str]) -> None:
    tokenizer = opened(byte_level("qwen2", added, **ids))
    assert {tokenizer.token(i) for i in tokenizer.eos_ids} == expected
    assert tokenizer.control_ids.keys() >= expected  # so they are not part of the text


def test_infilling_by_the_files_own_names() -> None:
    marks = [("<pre>", CONTROL), ("<mid>", CONTROL), ("<suf>", CONTROL)]
    ids = {"prefix_token_id": 320, "fim_mid_token_id": 321, "fim_suf_token_id": 322}
    tokenizer = opened(byte_level("qwen2", marks, **ids))
    assert tokenizer.infill("", "") == [320, 322, 321]
    with pytest.raises(Unsupported, match="suffix"):
        opened(byte_level("qwen2", marks)).infill("", "")


# Templates


def test_templates_by_name() -> None:
    chat = Chat([{"role": "user", "content": "x"}])
    names = {"": "{{ bos_token }}plain", ".tool_use": "tools", ".rag": "rag"}
    templates = {f"tokenizer.chat_template{name}": text for name, text in names.items()}
    metadata = sentencepiece() | {**templates, "tokenizer.chat_templates": ["tool_use", "rag"]}
    source = gguf_source(metadata, "some.gguf")
    found = load_chat_template(source, Tokenizer(source))
    assert found is not None
    assert found.source == "{{ bos_token }}plain"
    assert found.render(chat) == "<s>plain"
    assert found.encode(chat)[0] == 1
    assert found.render(Chat(chat.messages, {"tools": [{}]})) == "tools"


@pytest.mark.parametrize("templates", [{}, {"tokenizer.chat_template": ""}])
def test_no_template(templates: dict[str, str]) -> None:
    source = gguf_source(sentencepiece() | templates, "some.gguf")
    assert load_chat_template(source, Tokenizer(source)) is None


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokenizer.chat_template", 3, "must be a string"),
        ("tokenizer.chat_template.rag", ["x"], "must be a string"),
        ("tokenizer.chat_template", "{% if %}", "does not compile"),
        ("tokenizer.chat_template.rag", "x", "no chat template is named default"),
    ],
)
def test_templates_that_are_refused(key: str, value: object, message: str) -> None:
    source = gguf_source(sentencepiece() | {key: value}, "some.gguf")
    with pytest.raises(LoadError, match=rf"^some\.gguf: .*{message}"):
        load_chat_template(source, Tokenizer(source))


# Refusals


NAN, INF = float("nan"), float("inf")
FAULTS: list[tuple[dict[str, Any], str, Any, str]] = [
    (byte_level("qwen2"), "model", None, r"tokenizer\.ggml\.model is missing"),
    (byte_level("qwen2"), "model", 3, r"model = 3: must be a string"),
    (byte_level("qwen2"), "model", "bert", r"model = 'bert' is not supported; known: gpt2, llama, gemma4"),
    (byte_level("qwen2"), "pre", None, r"pre is missing: .*convert the checkpoint again"),
    (byte_level("qwen2"), "pre", "nonesuch", r"pre = 'nonesuch' is not supported; known: .*qwen2.*tekken"),
    (byte_level("qwen2"), "pre", ["qwen2"], r"pre = \['qwen2'\]: must be a string"),
    (byte_level("qwen2"), "tokens", None, r"tokens is missing"),
    (byte_level("qwen2"), "tokens", [], r"token_type has 320 entries, the vocabulary 0 tokens"),
    (byte_level("qwen2"), "tokens", "abc", r"tokens = 'abc': must be a list"),
    (byte_level("qwen2"), "tokens", ["a", b"b"], r"tokens\[1\] = b'b': must be a string"),
    (byte_level("qwen2"), "tokens", ["a"] * 320, r"tokens\[1\] = 'a': is token 0 too"),
    (byte_level("qwen2"), "tokens", [""] * 320, r"tokens: the vocabulary is empty"),
    (
        byte_level("qwen2"),
        "tokens",
        ["a" * 2049] * 320,
        r"tokens\[0\] = 'a+': has 2049 characters, at most 2048",
    ),
    (
        byte_level("qwen2"),
        "tokens",
        [f"\ud800{i}" for i in range(320)],
        r"tokens\[0\] = '.ud8000': must be valid Unicode",
    ),
    (byte_level("qwen2"), "token_type", None, r"token_type is missing"),
    (byte_level("qwen2"), "token_type", [1] * 319, r"token_type has 319 entries, the vocabulary 320 tokens"),
    (byte_level("qwen2"), "token_type", [1] * 319 + [True], r"token_type\[319\] = True: must be an integer"),
    (byte_level("qwen2"), "token_type", [7] + [1] * 319, r"token_type\[0\] = 7: must be 0 to 6"),
    (byte_level("qwen2"), "merges", None, r"merges is missing"),
    (byte_level("qwen2"), "merges", ["ab"], r"merges\[0\] = 'ab': must be two tokens"),
    (byte_level("qwen2"), "merges", [" a"], r"merges\[0\] = ' a': must be two tokens"),
    (byte_level("qwen2"), "merges", ["a "], r"merges\[0\] = 'a ': must be two tokens"),
    (byte_level("qwen2"), "merges", ["q x"], r"merges: not a usable vocabulary .*qx"),
    (byte_level("qwen2"), "merges", ["nonesuch x"], r"merges: not a usable vocabulary .*nonesuch"),
    (byte_level("qwen2"), "merges", [1], r"merges\[0\] = 1: must be a string"),
    (byte_level("qwen2"), "bos_token_id", 320, r"bos_token_id = 320: must be a token id from 0 to 319"),
    (byte_level("qwen2"), "eos_token_id", -1, r"eos_token_id = -1: must be a token id"),
    (byte_level("qwen2"), "eot_token_id", True, r"eot_token_id = True: must be a token id"),
    (byte_level("qwen2"), "eom_token_id", 1.0, r"eom_token_id = 1\.0: must be a token id"),
    (byte_level("qwen2"), "unknown_token_id", "0", r"unknown_token_id = '0': must be a token id"),
    (byte_level("qwen2", [("[PAD320]", UNUSED)]), "eos_token_id", 320, r"eos_token_id = 320: .*only padding"),
    (byte_level("qwen2"), "add_bos_token", 1, r"add_bos_token = 1: must be true or false"),
    (byte_level("qwen2"), "add_bos_token", True, r"add_bos_token = True: .*no tokenizer\.ggml\.bos_token_id"),
    (byte_level("qwen2"), "add_eos_token", True, r"add_eos_token = True: .*no tokenizer\.ggml\.eos_token_id"),
    (sentencepiece(), "scores", None, r"scores is missing"),
    (sentencepiece(), "scores", [0.0], r"scores has 1 entries"),
    (sentencepiece(), "scores", [NAN] * 301, r"scores\[0\] = nan: must be a finite number"),
    (sentencepiece(), "scores", [0.0] * 300 + [-INF], r"scores\[300\] = -inf: must be a finite number"),
    (sentencepiece(), "scores", [-1000.0] * 301, r"scores: all tokens have the same score"),
    (sentencepiece(), "add_space_prefix", "yes", r"add_space_prefix = 'yes': must be true or false"),
    (gemma4(), "merges", None, r"merges is missing"),
]


@pytest.mark.parametrize(("metadata", "key", "value", "message"), FAULTS)
def test_what_is_refused(metadata: dict[str, Any], key: str, value: object, message: str) -> None:
    changed = {**metadata, f"tokenizer.ggml.{key}": value}
    if value is None:
        del changed[f"tokenizer.ggml.{key}"]
    with pytest.raises(LoadError, match=rf"^some\.gguf: (tokenizer\.ggml\.)?{message}") as caught:
        gguf_source(changed, "some.gguf").open()
    assert len(str(caught.value)) < 600
    assert isinstance(caught.value, UnsupportedModel) == ("supported" in message or "convert" in message)


ODD = [
    None,
    0,
    -1,
    10**30,
    True,
    1.5,
    NAN,
    "",
    "x" * 5000,
    "a b",
    b"",
    [],
    [[]],
    [None],
    ["x"],
    [1],
    {},
    {"a": 1},
]


@pytest.mark.parametrize("kind", ["qwen2", "llama", "gemma4"])
def test_odd_values_are_refused_or_taken(kind: str) -> None:
    metadata, messages = KINDS[kind](), []
    for key in metadata:
        for value in [*ODD, [*reversed(metadata[key])] if isinstance(metadata[key], list) else "y"]:
            try:
                Tokenizer(gguf_source({**metadata, key: value}, "some.gguf")).encode("hello")
            except LoadError as error:
                messages.append(str(error))
    assert len(messages) > 20
    assert all(one.startswith("some.gguf: tokenizer.ggml.") for one in messages)
