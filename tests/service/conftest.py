"""Engines that the tests launch in their own process are ready sooner."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slipstream.engine.core import engine
from tests.soon_ready import shortly


@pytest.fixture(autouse=True, scope="module")
def ready_sooner() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "warm_up", shortly)
        yield
