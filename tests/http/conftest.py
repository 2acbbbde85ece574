"""One server per test module; a test that needs other settings starts its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

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
