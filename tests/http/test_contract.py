"""The fake engine keeps the contract that the real one is held to."""

from __future__ import annotations

import pytest

from tests.http import contract
from tests.http.fake import FakeEngine, words


@pytest.mark.parametrize("check", contract.CHECKS + contract.ENDINGS, ids=lambda check: check.__name__)
async def test_fake(check: contract.Check) -> None:
    await check(FakeEngine(script=lambda request: words(request, delay_s=0.01)))
