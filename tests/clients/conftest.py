"""What every client is given: the server's address, and questions whose answers end soon.

The demo model is small: it calls tools and writes JSON only where the grammar makes it, and what it writes into the
fields is senseless. So strings and numbers are bounded, and only their form is looked at.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
from pydantic import BaseModel, Field

QUESTION = "Write the docstring:\n\ndef add(a, b):\n    return a + b"
MAX_TOKENS = 24
MAX_JSON_TOKENS = 400
# A client that reaches out would hang or fail somewhere else; let it fail at once, and say where.
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Finding(BaseModel):
    """Something looked up."""

    name: str = Field(max_length=12, description="what it is called")
    count: int = Field(ge=0, le=99, description="how many there are")


@pytest.fixture(scope="session")
def url() -> str:
    """The server's address with `/v1`."""
    return os.environ["CLIENT_TEST_URL"] + "/v1"


@pytest.fixture(scope="session")
def thinking_url() -> str:
    """The address of a server whose model thinks "I need it.", then calls `look` where it is among the tools,
    in a namespace or not.

    Once the tool has answered it thinks the same, and says: "You said: " with what it finds of its first thinking.
    """
    return os.environ["CLIENT_TEST_THINKING_URL"] + "/v1"


@pytest.fixture(autouse=True)
def loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """No name but loopback's resolves."""
    resolve = socket.getaddrinfo

    def guarded(host: Any, *more: Any, **named: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        assert name in LOOPBACK, f"the client wants to reach {name}"
        return resolve(host, *more, **named)

    monkeypatch.setattr(socket, "getaddrinfo", guarded)


@pytest.fixture
def question() -> list[dict[str, str]]:
    return [{"role": "user", "content": QUESTION}]


@pytest.fixture
def tool() -> dict[str, Any]:
    """A function in OpenAI's form, with the arguments of `Finding`."""
    parameters = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "count": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["name", "count"],
        "additionalProperties": False,
    }
    return {
        "type": "function",
        "function": {"name": "look", "description": "looks it up", "parameters": parameters},
    }
