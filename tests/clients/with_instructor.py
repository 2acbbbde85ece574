"""`instructor`: models as answers, by tool, by schema and by JSON, whole and in parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import instructor
import openai
import pytest
from conftest import MAX_JSON_TOKENS, MAX_TOKENS, Finding

MODES = [instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA]


@pytest.fixture(scope="module")
def plain(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as one:
        yield one


@pytest.mark.parametrize("mode", MODES)
def test_a_model_as_the_answer(plain: Any, question: Any, mode: Any) -> None:
    client = instructor.from_openai(plain, mode=mode)
    found, raw = client.chat.completions.create_with_completion(
        model="demo",
        response_model=Finding,
        messages=question,
        max_tokens=MAX_JSON_TOKENS,
        max_retries=0,
        seed=2,
    )
    assert isinstance(found, Finding)
    assert raw.usage.completion_tokens > 0


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA])
def test_in_parts(plain: Any, question: Any, mode: Any) -> None:
    client = instructor.from_openai(plain, mode=mode)
    parts = list(
        client.chat.completions.create_partial(
            model="demo", response_model=Finding, messages=question, max_tokens=MAX_JSON_TOKENS, seed=2
        )
    )
    Finding.model_validate(parts[-1].model_dump())
    assert len(parts) > 1


def test_plain_chat(plain: Any, question: Any) -> None:
    client = instructor.from_openai(plain)
    reply = client.chat.completions.create(
        model="demo", response_model=None, messages=question, max_tokens=MAX_TOKENS
    )
    assert reply.choices[0].message.content
