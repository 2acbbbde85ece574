"""The web page in a real browser, over a fake engine. Needs Chromium and playwright's Python package; the browser
that playwright would download is not used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.engine.api import Request
from tests.http.fake import FakeEngine, delta, done, words
from tests.http.serving import served

CHROMIUM = Path("/usr/bin/chromium")
playwright = pytest.importorskip("playwright.sync_api")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM.exists(), reason="Chromium is not installed"),
]

NGRAMS = ("simple", "map-k", "map-k4v", "mod", "cache")
HOSTILE = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>&amp;"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as running:
        launched = running.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page that fails the test on errors and on anything its policy blocks."""
    opened = browser.new_page(viewport={"width": 1280, "height": 860})
    opened.set_default_timeout(5000)
    problems: list[str] = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("console", lambda line: problems.append(line.text) if "Content Security" in line.text else None)
    yield opened
    opened.close()
    assert problems == []


def code(request: Request) -> Any:
    """A few lines of code, as a target with an n-gram drafter and a draft model would write them."""
    lines = [
        "def group_by(entries, key):\n",
        '    """Collect entries in lists."""\n',
        "    groups = {}\n",
        "    for item in entries:\n",
        "        groups.setdefault(key(item), []).append(item)\n",
        "    return groups\n",
    ]
    for i, line in enumerate(lines):
        source = ("draft-model", "ngram-simple", None)[i % 3]
        yield 0.02
        yield delta(line, *[source] * 6, None)
    yield done(request, 7 * len(lines))


def test_a_message_streams_with_tinted_tokens(page: Any, tmp_path: Path) -> None:
    with served(FakeEngine(script=code)) as server:
        page.goto(server.url)
        playwright.expect(page.locator("#status")).to_have_text("ready")
        playwright.expect(page.locator("#model")).to_have_text("fake/model")
        playwright.expect(page.locator("#legend li")).to_have_text(
            ["target", "prediction", "draft-model", "ngram-simple"]
        )
        page.screenshot(path=tmp_path / "welcome.png")
        page.fill("#prompt", "Rename x to y")
        page.press("#prompt", "Enter")
        figures = page.locator(".answer:not(.writing) .figures")
        playwright.expect(figures).to_contain_text("tokens per pass")
        playwright.expect(figures).to_contain_text("42 tokens")
        assert page.locator(".question").inner_text() == "Rename x to y"
        assert (
            page.locator(".answer pre").inner_text().startswith('def group_by(entries, key):\n    """Collect')
        )
        for source in ("draft-model", "ngram-simple", "target"):
            assert page.locator(f".token[data-source='{source}']").count() >= 6
        tints = page.evaluate("""() => ['draft-model', 'ngram-simple', 'target'].map(
            source => getComputedStyle(document.querySelector(`.token[data-source='${source}']`)).backgroundColor)""")
        assert len(set(tints)) == 3
        page.screenshot(path=tmp_path / "answer.png")
        asked = server.engine.requests[0]
        assert (asked.sampling.temperature, asked.max_tokens, asked.speculate.n_max) == (0.0, 512, 16)


def test_every_drafter_has_a_tint_of_its_own_and_a_legend_entry(page: Any) -> None:
    drafters = ["suffix", "prediction", "draft-model", *(f"ngram-{one}" for one in NGRAMS), "not-known-yet"]
    engine = FakeEngine(
        script=lambda request: [*(delta(f"{one} ", one) for one in drafters), done(request, len(drafters))]
    )
    engine.info = replace(engine.info, drafters=tuple(drafters))
    with served(engine) as server:
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            page.goto(server.url)
            playwright.expect(page.locator("#legend li")).to_have_text(["target", *drafters])
            page.fill("#prompt", "hello")
            page.press("#prompt", "Enter")
            playwright.expect(page.locator(".figures")).to_contain_text("tokens per pass")
            for part in ("#legend i", ".token", ".bar i"):
                tints = page.evaluate(
                    """([part, sources]) => sources.map(source => getComputedStyle(
                        document.querySelector(`${part}[data-source='${source}']`)).backgroundColor)""",
                    [part, drafters],
                )
                assert len(set(tints)) == len(drafters), (scheme, part, tints)


def test_settings_reach_the_request_and_are_kept(page: Any) -> None:
    with served() as server:
        page.goto(server.url)
        page.wait_for_selector("#send:not([disabled])")
        for name, value in (("temperature", "0.7"), ("seed", "5"), ("max_tokens", "9"), ("n_max", "3")):
            page.locator(f"#{name}").fill(value)
        page.reload()
        page.locator("#examples button").first.click()
        playwright.expect(page.locator(".answer .figures")).to_contain_text("cut at the limit")
        playwright.expect(page.locator(".answer .figures")).to_contain_text("seed 5")
        request = server.engine.requests[0]
        assert (request.sampling.temperature, request.sampling.seed) == (0.7, 5)
        assert (request.max_tokens, request.speculate.n_max) == (9, 3)


def test_stop_cancels(page: Any) -> None:
    with served(FakeEngine(script=lambda request: words(request, delay_s=0.3))) as server:
        page.goto(server.url)
        page.wait_for_selector("#send:not([disabled])")
        page.fill("#prompt", "hello")
        page.press("#prompt", "Enter")
        page.wait_for_selector(".token")
        page.click("#send")
        playwright.expect(page.locator(".figures")).to_contain_text("stopped")
        page.wait_for_timeout(100)
        assert server.engine.streams[0].closed
        playwright.expect(page.locator("#send")).to_have_text("Send")


def test_markup_of_the_model_stays_text(page: Any) -> None:
    with served(FakeEngine(script=lambda request: [delta(HOSTILE), done(request, 1)])) as server:
        page.goto(server.url)
        page.wait_for_selector("#send:not([disabled])")
        page.fill("#prompt", HOSTILE)
        page.press("#prompt", "Enter")
        playwright.expect(page.locator(".answer pre")).to_have_text(HOSTILE)
        assert page.locator(".question pre").inner_text() == HOSTILE
        assert page.title() == "Slipstream"
        assert page.locator("article img, article script").count() == 0


def test_the_page_waits_for_the_model(page: Any) -> None:
    with served(loaded=False) as server:
        page.goto(server.url)
        playwright.expect(page.locator("#status")).to_have_text("loading the model…")
        assert page.locator("#send").is_disabled()
        server.gate.open(FakeEngine())
        playwright.expect(page.locator("#status")).to_have_text("ready")
        assert page.locator("#send").is_enabled()


def test_a_key_is_asked_for(page: Any) -> None:
    with served(api_key="letmein") as server:
        page.goto(server.url)
        playwright.expect(page.locator("#status")).to_have_text("needs an API key")
        page.fill("#key", "letmein")
        page.press("#key", "Tab")
        playwright.expect(page.locator("#model")).to_have_text("fake/model")
        page.fill("#prompt", "hello")
        page.press("#prompt", "Enter")
        playwright.expect(page.locator(".figures")).to_contain_text("tokens")
