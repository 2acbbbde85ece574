"""The tokenizer against transformers' own, its refusals, and the comparison of vocabularies."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as HFTokenizer
from transformers import AutoTokenizer

from slipstream.engine.errors import InvalidRequest, LoadError, TextTooLong
from slipstream.engine.text.tokenizer import Tokenizer, same_vocabulary
from tests.checkpoints import write_tokenizer

ROOT = Path(__file__).parents[2]
TEXTS = ("", " ", "hello world", "def add(left, right):", "Größe 漢字 😀\r\n\t", "a<|im_end|>b", "\x00\ufffd")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(made)
    (made / "config.json").write_text('{"eos_token_id": 0}')
    (made / "generation_config.json").write_text('{"eos_token_id": [1]}')
    return made


def changed(folder: Path, target: Path, added: list[AddedToken]) -> Tokenizer:
    """The tokenizer of a folder with more tokens."""
    shutil.copytree(folder, target)
    backend = HFTokenizer.from_file(str(target / "tokenizer.json"))
    backend.add_tokens(added)
    backend.save(str(target / "tokenizer.json"))
    return Tokenizer(target)


@pytest.mark.parametrize("text", TEXTS)
def test_encodes_and_decodes_as_transformers_does(folder: Path, text: str) -> None:
    ours, theirs = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.decode(ids, skip_special=False) == theirs.decode(ids)


def test_special_tokens_in_text_are_plain_text_if_asked(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    assert 2 in tokenizer.encode("a<|im_end|>b")
    ids = tokenizer.encode("a<|im_end|>b", parse_special=False)
    assert not set(ids) & set(tokenizer.control_ids.values())
    assert tokenizer.decode(ids) == "a<|im_end|>b"


def test_what_it_says_about_itself(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    assert tokenizer.vocab_size == 384
    assert tokenizer.eos_ids == {0, 1, 2}  # config, generation config and the tokenizer's own
    assert tokenizer.bos_id is None
    assert tokenizer.control_ids == {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    assert tokenizer.token(2) == "<|im_end|>"
    assert tokenizer.token(10**6) is None


HARD = (
    *TEXTS,
    *("<|im_start|><|im_end|>", "<|im_start|", "<|im_<|im_end|>end|>", " <|im_end|> \n<|im_start|>system\nx"),
    *(
        "e\u0301\u200d\u202e\ufeff",
        "a" * 5000,
        " " * 3000 + "\n" * 3000,
        "\u0000" * 50,
        "👩‍👩‍👧‍👦🏳️‍🌈" * 20,
        "１２３ ﬁ Ⅸ",
    ),
)


@pytest.mark.parametrize("parse_special", [True, False])
@pytest.mark.parametrize("add_special", [True, False])
@pytest.mark.parametrize("where", ["tests", "demo"])
def test_a_batch_is_tokenised_like_single_texts(
    folder: Path, where: str, parse_special: bool, add_special: bool
) -> None:
    tokenizer = Tokenizer(folder if where == "tests" else ROOT / "demo" / "target")
    single = tokenizer.backend if parse_special else tokenizer._literal
    expected = [single.encode(text, add_special_tokens=add_special).ids for text in HARD]
    kinds = {"add_special": add_special, "parse_special": parse_special}
    assert [tokenizer.encode(text, **kinds) for text in HARD] == expected
    assert tokenizer.encode_all(HARD, **kinds) == expected
    for ids in expected:
        assert tokenizer.decode(ids, skip_special=False) == tokenizer.backend.decode(
            ids, skip_special_tokens=False
        )


def test_tokenising_lets_other_threads_run(folder: Path) -> None:
    """Python code runs while a long text is tokenised, and made text again."""
    tokenizer = Tokenizer(folder)
    text, others = "def add(left, right): " * 100_000, []

    def worst(work: Callable[[], object]) -> float:
        ended, ticks = threading.Event(), [time.perf_counter()]

        def tick() -> None:
            while not ended.is_set():
                time.sleep(0.001)
                ticks.append(time.perf_counter())

        thread = threading.Thread(target=tick)
        thread.start()
        started = time.perf_counter()
        others.append(work())
        seconds = time.perf_counter() - started
        ended.set()
        thread.join()
        return max(after - before for before, after in pairwise(ticks)) / seconds

    assert worst(lambda: tokenizer.encode(text)) < 0.5
    assert worst(lambda: tokenizer.decode(others[0] * 4)) < 0.5


def test_what_no_context_holds_is_refused_by_its_bytes(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    vocabulary = range(tokenizer.vocab_size)
    longest = max(vocabulary, key=lambda i: len(tokenizer.token_bytes(i)))
    assert tokenizer.longest == len(tokenizer.token_bytes(longest))
    text = tokenizer.decode([longest], skip_special=False) * 10
    tokenizer.check_size("prompt", text, 10)
    for more in ("x", "é" * 5):
        with pytest.raises(
            TextTooLong, match=rf"prompt: .*{len((text + more).encode())} bytes, 10 tokens .*--ctx"
        ):
            tokenizer.check_size("prompt", text + more, 10)
    tokenizer.check_size("prompt", "\ud800", 10)  # `encode` refuses it


def test_lone_surrogate_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        Tokenizer(folder).encode("a\ud800b")


@pytest.mark.parametrize("content", [None, "{", "[]", "{}"])
def test_broken_files_are_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(LoadError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("value", ["x", -1, True, [1, None], 1.5])
def test_wrong_end_token_is_refused(folder: Path, tmp_path: Path, value: object) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(LoadError, match="eos_token_id"):
        Tokenizer(tmp_path)


def test_a_wrapper_for_several_media_says_what_ends_a_text_beside_its_text_model(
    tmp_path: Path,
) -> None:
    write_tokenizer(tmp_path)
    text = {"eos_token_id": [7, 8]}
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 6, "text_config": text}))
    assert Tokenizer(tmp_path).eos_ids == {2, 6, 7, 8}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": -7}}))
    with pytest.raises(LoadError, match="eos_token_id"):
        Tokenizer(tmp_path)


def test_vocabularies_are_the_same_as_far_as_both_go(folder: Path, tmp_path: Path) -> None:
    target = Tokenizer(folder)
    assert same_vocabulary(target, Tokenizer(folder))
    longer = changed(folder, tmp_path / "longer", [AddedToken("<think>", special=False)])
    assert same_vocabulary(target, longer)
    assert same_vocabulary(longer, target)
    other = changed(folder, tmp_path / "other", [AddedToken("<tool>", special=False)])
    assert not same_vocabulary(longer, other)
