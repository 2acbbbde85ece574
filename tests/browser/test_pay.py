"""Whether drafting paid: the figures are the server's, the plain run is the same request without drafts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.driving import ask, opened, prompts
from tests.browser.told import STEPS, Told, told
from tests.http.fake import FakeEngine, delta, done, words
from tests.http.serving import served

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect


def opened_figures(page: Any) -> None:
    page.click("text=Did it pay?")


def rows(page: Any) -> dict[str, list[str]]:
    """The table of drafters, by name."""
    cells = page.locator(".pay tbody tr").evaluate_all(
        "all => all.map(row => [...row.children].map(cell => cell.textContent.trim()))"
    )
    return {name.split()[-1]: row for name, *row in cells}


def test_figures_are_those_of_the_reply(page: Any) -> None:
    with served() as server:
        server.engine.script = told()
        opened(page, server)
        ask(page, "hello")
        opened_figures(page)
        assert rows(page) == {
            "draft-model": ["18%", "3", "2", "1", "2.2 ms"],
            "suffix": ["36%", "7", "4", "3", "2.2 ms"],
            "target": ["45%", "5 passes"],
        }
        plot = page.locator(".pay .plot").get_attribute("aria-label")
        assert "draft-model 100%, 100%, 0%" in plot
        assert "suffix 50%, 50%, 50%, 100%" in plot
        expect(page.locator(".pay .shares").first).to_contain_text("verify 70 ms 70%")
        expect(page.locator(".pay .reasons")).to_have_text("1 of 5: drafters had no guess")
        # What the page counts is what the server counted.
        drafted = sum(int(row[1]) for name, row in rows(page).items() if name != "target")
        assert drafted == sum(len(step.drafted) for step in STEPS)


def test_it_says_why_nothing_was_drafted(page: Any) -> None:
    with served() as server:
        server.engine.script = told([Told(None, (), 0, one, "rows_too_dear") for one in ("a", " b", " c")])
        opened(page, server)
        ask(page, "hello")
        expect(page.locator(".figures")).to_contain_text("nothing drafted")
        opened_figures(page)
        expect(page.locator(".reasons")).to_have_text("3 of 3: guesses promised less than their rows cost")


def test_the_planner_says_why_where_steps_do_not(page: Any) -> None:
    engine = FakeEngine(script=lambda request: [delta("word ", None), done(request, 1)])
    with served(engine) as server:
        opened(page, server)
        ask(page, "hello")
        opened_figures(page)
        expect(page.locator(".pay")).to_contain_text("Nothing drafted: the draft network promises less")
        page.fill("#n_max", "0")
        page.click("#new")
        ask(page, "hello")
        opened_figures(page)
        expect(page.locator(".pay")).to_contain_text(
            "Nothing drafted: the request, or --draft-max 0, asks for plain decoding."
        )


def test_the_plain_run_is_the_same_request_without_drafts(page: Any) -> None:
    with served() as server:
        opened(page, server)
        page.fill("#system", "Be brief.")
        page.fill("#temperature", "0.5")
        page.fill("#p_min", "0.25")
        ask(page, "hello")
        page.fill("#system", "Changed since.")
        page.fill("#temperature", "")
        opened_figures(page)
        page.click("text=Run plainly")
        expect(page.locator(".verdict")).to_contain_text("The texts are equal: 10 tokens.")
        expect(page.locator(".ratio")).to_contain_text("1.00 ×")
        first, plain = server.engine.requests
        assert plain.sampling.seed is not None
        assert plain.sampling.seed == first.sampling.seed  # the one that the server drew
        assert (plain.speculate.n_max, plain.speculate.p_min) == (0, 0.25)
        assert plain.sampling.temperature == first.sampling.temperature == 0.5
        assert prompts(server)[0] == prompts(server)[1]
        expect(page.locator("article")).to_have_count(2)  # it is no part of the conversation


def test_texts_that_differ_are_named(page: Any) -> None:
    with served() as server:
        opened(page, server)
        ask(page, "hello")
        server.engine.script = lambda request: [delta("w0 w1 x "), *list(words(request))[1:]]
        opened_figures(page)
        page.click("text=Run plainly")
        expect(page.locator(".verdict.differs")).to_contain_text("The texts differ from character 9 on")


def test_a_loss_is_told_as_one(page: Any) -> None:
    with served() as server:
        server.engine.script = told()
        opened(page, server)
        ask(page, "hello")
        server.engine.script = told(
            [Told(None, (), 0, piece) for step in STEPS for piece in step.kept], generation_s=0.08
        )
        opened_figures(page)
        page.click("text=Run plainly")
        expect(page.locator(".ratio")).to_have_text("0.80 × drafting cost more than it brought")


def test_a_plain_run_that_fails_says_so(page: Any) -> None:
    with served() as server:
        opened(page, server)
        ask(page, "hello")
        opened_figures(page)
        page.route("**/v1/chat/completions", lambda route: route.abort())
        page.click("text=Run plainly")
        expect(page.locator(".plain-run .error")).to_contain_text("cannot be reached")
