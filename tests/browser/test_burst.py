"""Long replies: nothing is lost, and the page paints and shows only what is near. `burst.py` measures times."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.burst import WATCHED, WEIGHED, long_reply, pieces
from tests.browser.driving import as_tokens, opened, say
from tests.http.fake import FakeEngine
from tests.http.serving import served

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect

N = 4000
SHOWN = "() => document.querySelector('.answer:not(.writing) .figures span')?.textContent === '4,000 tokens'"


@pytest.mark.parametrize("kind", ["prose", "code", "line"])
def test_a_long_reply_is_whole_and_light(page: Any, kind: str) -> None:
    with served(FakeEngine(script=long_reply(N, None, kind))) as server:
        opened(page, server)
        page.evaluate(WATCHED)
        say(page, "hello")
        page.wait_for_function(SHOWN, timeout=60_000)
        source = pieces(kind)
        text = "".join(next(source) for _ in range(N))
        page.click(".answer .actions .copy")
        expect(page.locator(".answer .actions .copy")).to_have_text("Copied")
        assert page.evaluate("navigator.clipboard.readText()") == text
        weighed = page.evaluate(WEIGHED)
        print(kind, weighed)  # `-s` shows how many long tasks there were
        assert weighed["ranges"] < 1000  # of some 2000 runs: what is far away is not painted
        if kind != "prose":
            end = text.removeprefix("```python\n")[-4000:]
            page.wait_for_function(
                "end => document.querySelector('.answer .body').textContent.endsWith(end)", arg=end
            )
        as_tokens(page)
        page.wait_for_selector(".token")
        page.wait_for_timeout(200)
        assert page.locator(".token").count() < 2500  # of 4000
        page.locator(".tokens").focus()
        page.keyboard.press("End")
        expect(page.locator(".inspector.shown")).to_contain_text(f"token {N}")
