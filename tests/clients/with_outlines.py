"""`outlines`: its backends for vLLM's and SGLang's servers, whole and streamed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Literal

import openai
import outlines
import pytest
from conftest import MAX_JSON_TOKENS, MAX_TOKENS, QUESTION, Finding
from outlines.types import CFG, Regex

GBNF = 'root ::= "yes" | "no"'


@pytest.fixture(scope="module", params=[outlines.from_vllm, outlines.from_sglang])
def model(request: pytest.FixtureRequest, url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as one:
        yield request.param(one, "demo")


def read(model: Any, kind: Any, n_tokens: int, *, stream: bool) -> str:
    asked = {"max_tokens": n_tokens, "seed": 2}
    if stream:
        return "".join(model.stream(QUESTION, kind, **asked))
    return str(model(QUESTION, kind, **asked))


@pytest.mark.filterwarnings("ignore:SGLang grammar-based")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("kind", "fits"),
    [
        (Literal["yes", "no"], lambda text: text in ("yes", "no")),
        (Regex("[0-9]{4}"), lambda text: re.fullmatch("[0-9]{4}", text)),
        (CFG(GBNF), lambda text: text in ("yes", "no")),
        (Finding, Finding.model_validate_json),
    ],
    ids=["choice", "regex", "grammar", "schema"],
)
def test_a_reply_of_one_kind(model: Any, kind: Any, fits: Callable[[str], Any], *, stream: bool) -> None:
    assert fits(read(model, kind, MAX_JSON_TOKENS, stream=stream))


def test_plain_chat(model: Any) -> None:
    assert read(model, None, MAX_TOKENS, stream=False) == read(model, None, MAX_TOKENS, stream=True)
