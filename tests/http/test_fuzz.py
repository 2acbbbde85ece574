"""Whatever a client sends, the answer is a reply or a 4xx in OpenAI's shape, and the server goes on."""

from __future__ import annotations

from typing import Any

import orjson
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.server.openai.refuse import REFUSED
from slipstream.server.openai.wire import ChatRequest, CompletionRequest, Message, Speculative
from tests.http.serving import Served, chat

NAMES = sorted(
    {
        *ChatRequest.model_fields,
        *CompletionRequest.model_fields,
        *REFUSED,
        "unknown",
        "speculative.unknown",
        *(f"speculative.{name}" for name in Speculative.model_fields),
    }
)
NUMBERS = st.one_of(
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([0, 1, -1, 2**31, 2**32, 2**53, 0.5, -0.0, 1e308, 5e-324]),
)
WORDS = st.sampled_from(
    [
        "",
        "none",
        "auto",
        "user",
        "assistant",
        "text",
        "ngram-simple",
        "content",
        "x",
        "\0",
        "\u2028",
        "}{",
        "🙂",
        "a" * 300,
    ]
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, WORDS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(
                [*Message.model_fields, *Speculative.model_fields, "type", "text", "1", "include_usage"]
            ),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=8,
)
FIELDS = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4)


def ask(server: Served, path: str, body: dict[str, Any]) -> None:
    content = orjson.dumps(body)
    answer = server.http.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400), (answer.status_code, body)
    if answer.status_code == 400:
        assert set(answer.json()["error"]) >= {"message", "type", "param", "code"}
    elif body.get("stream"):
        assert answer.text.endswith("data: [DONE]\n\n")
        assert '"error"' not in answer.text
    else:
        assert answer.json()["choices"]


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=FIELDS)
def test_chat(server: Served, fields: dict[str, Any]) -> None:
    ask(server, "/v1/chat/completions", chat(**fields))


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=FIELDS)
def test_completions(server: Served, fields: dict[str, Any]) -> None:
    ask(server, "/v1/completions", {"prompt": "a b", **fields})
