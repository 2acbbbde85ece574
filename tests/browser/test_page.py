"""The frame of the page: status, settings, key, tints, and that nothing of a model runs in it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.browser.driving import ANSWER, Held, ask, code, opened, painted, say, says
from tests.http.fake import FakeEngine, delta, done
from tests.http.serving import served, until

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect

NGRAMS = ("simple", "map-k", "map-k4v", "mod", "cache")
HEADS = ("eagle3", "mtp", "assistant", "dflash", "dspark")
HOSTILE = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>&amp;"


def test_a_message_streams_with_tinted_tokens(page: Any, tmp_path: Path) -> None:
    with served(FakeEngine(script=code)) as server:
        page.goto(server.url)
        expect(page.locator("#status")).to_have_text("ready")
        expect(page.locator("#model")).to_have_text("fake/model")
        expect(page.locator("#legend li span")).to_have_text(
            ["target", "prediction", "draft-model", "ngram-simple"]
        )
        page.screenshot(path=tmp_path / "welcome.png")
        say(page, "Rename x to y")
        figures = page.locator(f"{ANSWER} .figures")
        expect(figures).to_contain_text("tokens per pass")
        expect(figures).to_contain_text("42 tokens")
        assert page.locator(".question > pre").inner_text() == "Rename x to y"
        expect(page.locator(".answer .body code")).to_contain_text("return groups")
        assert page.locator(".answer .body code").inner_text().startswith("def group_by(entries, key):")
        assert painted(page, "ink-draft-model").startswith("def group_by(entries, ke|")
        assert "Collect entries" in painted(page, "ink-ngram-simple")
        assert "groups = {}" not in painted(page, "ink-draft-model") + painted(page, "ink-ngram-simple")
        page.screenshot(path=tmp_path / "answer.png")
        asked = server.engine.requests[0]
        # Nothing was set, so everything is the server's.
        assert (asked.sampling.temperature, asked.max_tokens, asked.speculate.n_max) == (None, None, None)


def test_tinting_can_be_switched_off(page: Any) -> None:
    with served(FakeEngine(script=code)) as server:
        opened(page, server)
        ask(page, "hello")
        assert painted(page, "ink-draft-model")
        page.uncheck("#ink")
        assert not page.evaluate("CSS.highlights.has('ink-draft-model')")
        page.check("#ink")
        assert painted(page, "ink-draft-model")


def test_every_drafter_has_a_tint_and_a_letter_of_its_own(page: Any) -> None:
    drafters = [
        *("forced", "suffix", "prediction", "draft-model"),
        *(f"ngram-{one}" for one in NGRAMS),
        *(f"draft-{one}" for one in HEADS),
        "not-known-yet",
    ]
    engine = FakeEngine(
        script=lambda request: [*(delta(f"{one} ", one) for one in drafters), done(request, len(drafters))]
    )
    engine.info = replace(engine.info, drafters=tuple(drafters))
    with served(engine) as server:
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            opened(page, server)
            expect(page.locator("#legend li span")).to_have_text(["target", *drafters])
            letters = page.locator("#legend li i").all_inner_texts()
            assert len(set(letters)) == len(drafters) + 1
            ask(page, "hello")
            for part in ("#legend li:not(:first-child) i", ".bar i"):
                tints = page.evaluate(
                    """part => [...document.querySelectorAll(part)].map(
                        one => getComputedStyle(one).backgroundColor)""",
                    part,
                )
                assert len(set(tints)) == len(drafters), (scheme, part, tints)
            page.wait_for_function(
                """n => [...CSS.highlights].filter(
                    ([name, one]) => name.startsWith("ink-") && one.size).length === n""",
                arg=len(drafters),
            )


def test_settings_reach_the_request_and_are_kept(page: Any) -> None:
    with served() as server:
        opened(page, server)
        for name, value in (("temperature", "0.7"), ("seed", "5"), ("max_tokens", "9"), ("n_max", "3")):
            page.locator(f"#{name}").fill(value)
        page.fill("#system", "Be brief.")
        page.reload()
        page.locator("#examples button").first.click()
        expect(page.locator(f"{ANSWER} .figures")).to_contain_text("cut at the limit")
        expect(page.locator(".answer .figures")).to_contain_text("seed 5")
        request = server.engine.requests[0]
        assert (request.sampling.temperature, request.sampling.seed) == (0.7, 5)
        assert (request.max_tokens, request.speculate.n_max) == (9, 3)
        assert request.prompt.messages[0] == {"role": "system", "content": "Be brief."}


def test_empty_fields_show_the_servers_defaults(page: Any) -> None:
    with served(n_predict=77, draft_max=5) as server:
        opened(page, server)
        for name, value in (("temperature", "1"), ("max_tokens", "77"), ("n_max", "5"), ("seed", "random")):
            expect(page.locator(f"#{name}")).to_have_attribute("placeholder", value)
            assert page.locator(f"#{name}").input_value() == ""


def test_stop_cancels(page: Any) -> None:
    with served(FakeEngine(script=Held())) as server:
        opened(page, server)
        say(page, "hello")
        expect(page.locator(".answer .body")).to_have_text("begun")
        page.click("#send")
        expect(page.locator(".figures")).to_contain_text("stopped")
        until(lambda: server.engine.streams[0].closed)
        expect(page.locator("#send")).to_have_text("Send")


def test_markup_of_the_model_stays_text(page: Any) -> None:
    with served(FakeEngine(script=says(HOSTILE))) as server:
        opened(page, server)
        ask(page, HOSTILE)
        assert page.locator(".question pre").inner_text() == HOSTILE
        expect(page.locator(".answer .body")).to_contain_text("<img src=x onerror=")
        assert page.title() != "broken"
        assert page.locator("article img, article script").count() == 0


def test_the_page_waits_for_the_model(page: Any) -> None:
    with served(loaded=False) as server:
        page.goto(server.url)
        expect(page.locator("#status")).to_have_text("loading the model…")
        assert page.locator("#send").is_disabled()
        server.gate.engine = FakeEngine()
        expect(page.locator("#status")).to_have_text("ready")
        assert page.locator("#send").is_enabled()


def test_a_key_is_asked_for_and_forgotten_with_the_tab(page: Any) -> None:
    with served(api_key="letmein") as server:
        page.goto(server.url)
        expect(page.locator("#status")).to_have_text("needs an API key")
        page.fill("#key", "letmein")
        page.press("#key", "Tab")
        expect(page.locator("#model")).to_have_text("fake/model")
        ask(page, "hello")
        page.reload()
        expect(page.locator("#model")).to_have_text("fake/model")
        assert page.evaluate("Object.values(localStorage).includes('letmein')") is False
        other = page.context.new_page()
        other.goto(server.url)
        expect(other.locator("#status")).to_have_text("needs an API key")


def test_a_refusal_that_comes_late_is_of_the_old_key(page: Any) -> None:
    """Answers need not come in the order of their requests."""
    asked: list[Any] = []

    def first_is_held(route: Any) -> None:
        asked.append(route)
        if len(asked) > 1:
            route.continue_()

    with served(api_key="letmein") as server:
        page.route("**/props", first_is_held)
        page.goto(server.url)
        page.wait_for_selector("#prompt:enabled")  # is asked for without a key
        page.fill("#key", "letmein")
        page.press("#key", "Tab")
        expect(page.locator("#model")).to_have_text("fake/model")
        with page.expect_event("requestfinished", lambda one: one.url.endswith("/props")):
            asked[0].continue_()
        # By then the page has read the refusal.
        page.evaluate("fetch('health').then(one => one.json())")
        expect(page.locator("#status")).to_have_text("ready")


def test_it_works_below_a_prefix(page: Any) -> None:
    with served(api_prefix="/llm") as server:
        opened(page, server, "/llm/")
        ask(page, "hello")
        expect(page.locator(".answer .body")).to_contain_text("w0 w1")
