"""A real browser for the tests of the page. Needs Chromium and playwright's Python package; the browser that playwright
would download is not used.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PATIENCE_MS = 30_000  # a busy machine's
CHROMIUM = Path("/usr/bin/chromium")
# Chromium tells of every answer with an error status; the page tells of it too, which tests look at.
TOLD_BY_CHROMIUM = "Failed to load resource"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.browser)
            if not CHROMIUM.exists():
                item.add_marker(pytest.mark.skip(reason="Chromium is not installed"))


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    playwright.expect.set_options(timeout=PATIENCE_MS)
    with playwright.sync_playwright() as running:
        launched = running.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page of a fresh profile, which fails the test on errors, on anything said to the console, on anything its
    policy blocks, and on a request to any address but this machine's.
    """
    context = browser.new_context(
        viewport={"width": 1280, "height": 860}, permissions=["clipboard-read", "clipboard-write"]
    )
    opened = context.new_page()
    opened.set_default_timeout(PATIENCE_MS)
    problems: list[str] = []
    hosts: set[str] = set()
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on(
        "console", lambda line: problems.append(line.text) if TOLD_BY_CHROMIUM not in line.text else None
    )
    opened.on("request", lambda request: hosts.add(request.url.split("/")[2]))
    yield opened
    context.close()
    assert problems == []
    assert {host.split(":")[0] for host in hosts if host} <= {"127.0.0.1"}
