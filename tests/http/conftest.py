"""One server per test module; a test that needs other settings starts its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.http.fake import FakeEngine, words
from tests.http.serving import Served, served


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    with served() as one:
        yield one


@pytest.fixture
def server(shared: Served) -> Iterator[Served]:
    """The shared server with its engine as new."""
    engine: FakeEngine = shared.engine
    yield shared
    engine.script, engine.refusal, engine.render_error, engine.status = words, None, None, "ready"
    engine.max_running = 1000
    engine.requests.clear()
    engine.streams.clear()
    engine.running.clear()
    engine.last.clear()
    engine.files.clear()


@pytest.fixture
def client(server: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as one:
        yield one
