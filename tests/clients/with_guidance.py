"""`guidance`: its backends for vLLM's and SGLang's servers, which send the grammar of what an assistant is to say."""

from __future__ import annotations

import re
from typing import Any

import pytest
from conftest import MAX_TOKENS, QUESTION, Finding
from guidance import assistant, gen, json, select, user
from guidance.models.experimental import SglangModel, VLLMModel


@pytest.fixture(params=[VLLMModel, SglangModel])
def asked(request: pytest.FixtureRequest, url: str) -> Any:
    model = request.param("demo", base_url=url, api_key="none", echo=False)
    with user():
        model += QUESTION
    return model


def said(asked: Any, what: Any) -> str:
    with assistant():
        asked += what
    return str(asked["said"])


def test_a_choice(asked: Any) -> None:
    assert said(asked, "It is: " + select(["yes", "no"], name="said")) in ("yes", "no")


def test_a_pattern(asked: Any) -> None:
    assert re.fullmatch("[0-9]{3}", said(asked, gen("said", regex="[0-9]{3}")))


def test_a_model(asked: Any) -> None:
    Finding.model_validate_json(said(asked, json("said", schema=Finding)))


def test_plain_chat(asked: Any) -> None:
    assert said(asked, gen("said", max_tokens=MAX_TOKENS))
