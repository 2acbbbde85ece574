"""Lanes, costs and races."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from slipstream.engine.api import Request
from slipstream.engine.drafting import DrafterState, PlaceBelief, WidthCost
from tests.browser.driving import opened
from tests.http.fake import DRAFTING, FakeEngine, Step, words
from tests.http.serving import chat, send, served

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect


def waits(request: Request) -> Iterator[Step]:
    first, *rest = words(request)
    yield first
    yield 60.0  # longer than what is looked at meanwhile takes
    yield from rest


def test_lanes_follow_the_slots(page: Any) -> None:
    with served(FakeEngine(script=waits)) as server:
        page.goto(server.url + "/#/lanes")
        expect(page.locator(".lane")).to_have_count(4)
        expect(page.locator(".lane").first).to_contain_text("idle")
        expect(page.locator(".totals")).to_contain_text("0 of 4")
        with send(server, stream=True), send(server, stream=True):
            expect(page.locator(".totals")).to_contain_text("2 of 4")
            expect(page.locator(".lane").first).to_contain_text("writing")
            expect(page.locator(".lane").first).to_contain_text("2 written")
            expect(page.locator(".lane").first).to_contain_text("ngram-simple")
        expect(page.locator(".totals")).to_contain_text("6%")  # 4 of 64 pages


def test_of_other_keys_lanes_only_that_they_are_busy(page: Any) -> None:
    with served(FakeEngine(script=waits), api_key="mine,other") as server:
        page.goto(server.url)
        page.fill("#key", "mine")
        page.press("#key", "Tab")
        expect(page.locator("#model")).to_have_text("fake/model")
        body = json.dumps(chat(stream=True))
        with server.http.stream(
            "POST",
            "/v1/chat/completions",
            content=body,
            headers={"x-api-key": "other", "content-type": "application/json"},
        ):
            page.click("nav >> text=Lanes")
            expect(page.locator(".lane").first).to_contain_text("another key’s request")
            assert page.locator(".lane .track").count() == 0


def test_a_strip_shows_what_steps_drafted_and_kept(page: Any) -> None:
    with served() as server:
        recent = [[4, 2], [0, 0], [8, 8]]
        busy = {"is_processing": True, "id_task": "x", "n_max": 8, "drafter": "suffix", "recent": recent}
        slot = server.http.get("/slots").json()[0] | busy
        page.route("**/slots", lambda route: route.fulfill(json=[slot]))
        page.goto(server.url + "/#/lanes")
        strip = page.locator(".strip")
        expect(strip).to_contain_text("83% of 12 kept")
        assert strip.locator("svg").get_attribute("aria-label") == "Of the last 3 steps: 12 drafted, 10 kept"
        heights = [
            [
                round(float(one) / 38 * 8, 3)
                for one in strip.locator(f".{kind}").evaluate_all(
                    "all => all.map(one => one.getAttribute('height'))"
                )
            ]
            for kind in ("drafted", "kept")
        ]
        assert [list(pair) for pair in zip(*heights, strict=True)] == recent


def test_slots_that_are_switched_off(page: Any) -> None:
    with served(slots=False) as server:
        page.goto(server.url + "/#/lanes")
        expect(page.locator("#lanes .error")).to_contain_text("--no-slots")


def test_costs_are_the_planners(page: Any) -> None:
    engine = FakeEngine()
    told = replace(
        DRAFTING,
        why_not=None,
        drafted_share=0.5,
        widths=[WidthCost(1, 0.01, 0.01, 0.0, 0.1), WidthCost(5, 0.02, 0.02, 0.0, 0.1)],
        drafters={
            "suffix": DrafterState(
                "asked", 1.0, 0.0001, 0.0, [PlaceBelief(0, 0.5, 10), PlaceBelief(2, 0.25, 5)]
            )
        },
        lengths=[1.0, 0.0, 9.0],
        n_lengths=[1, 0, 9, 0, 0],
    )

    async def speculation() -> Any:
        return told

    engine.speculation = speculation  # type: ignore[method-assign]
    with served(engine) as server:
        page.goto(server.url + "/#/costs")
        expect(page.locator(".why")).to_have_text("50% of the passes lately carry drafts.")
        labels = page.locator(".plot").evaluate_all("all => all.map(one => one.getAttribute('aria-label'))")
        assert labels[0] == "Pass time by rows: 1 rows 10 ms, 5 rows 20 ms"
        # 1, then + 1/2, + 1/4, + 1/16, + 1/64
        assert labels[1] == "suffix: 1.00, 1.50, 1.75, 1.81, 1.83"
        rates = page.locator(".plots figure").nth(2).locator("circle title").all_text_contents()
        assert rates[2] == "suffix: 2, 117"  # 1.75 tokens in 15 ms
        expect(page.locator(".plots .mark text").first).to_have_text("mostly chosen")
        expect(page.locator(".lengths li").nth(2)).to_have_text("290%")
        told = replace(DRAFTING)
        expect(page.locator(".why")).to_contain_text("Nothing is drafted: the draft network promises less")


def test_a_race_is_one_prompt_and_seed_in_every_lane(page: Any) -> None:
    with served() as server:
        opened(page, server)
        page.fill("#temperature", "0.5")
        page.click("nav >> text=Race")
        page.fill("#race-prompt", "go 'fast'")
        page.click("text=Add a lane")
        page.locator(".entries li").nth(2).get_by_text("draft-model").first.click()
        page.locator(".entries li").nth(2).locator("input[type=number]").first.fill("2")
        page.click("#start")
        expect(page.locator(".results tbody tr")).to_have_count(3)
        expect(page.locator(".results .equal")).to_contain_text("The texts are equal")
        first, plain, third = server.engine.requests
        assert len({one.sampling.seed for one in (first, plain, third)}) == 1
        assert {one.sampling.temperature for one in (first, plain, third)} == {0.5}
        assert {one.prompt.messages[0]["content"] for one in (first, plain, third)} == {"go 'fast'"}
        assert (first.speculate.types, first.speculate.n_max) == (None, None)
        assert plain.speculate.n_max == 0
        assert (third.speculate.types, third.speculate.n_max) == (("draft-model",), 2)
        expect(page.locator(".results tbody tr").nth(2)).to_contain_text("draft-model, at most 2")
        exported(page, server)


def exported(page: Any, server: Any) -> None:
    """What the page exports asks for the same, run as it is."""
    asked = server.engine.requests[:]
    page.click("text=As curl and Python")
    for name, command in (("curl", ["bash", "-ec"]), ("python", [sys.executable, "-c"])):
        text = page.locator(f"#as-{name} code").inner_text()
        server.engine.requests.clear()
        run = subprocess.run([*command, text], capture_output=True, text=True, timeout=60, check=False)
        assert run.returncode == 0, run.stderr
        again = server.engine.requests
        assert [(one.prompt.messages, one.sampling, one.speculate) for one in again] == [
            (one.prompt.messages, one.sampling, one.speculate) for one in asked
        ]


def test_a_race_names_a_lane_whose_text_differs(page: Any) -> None:
    with served(
        FakeEngine(script=lambda request: words(replace(request, max_tokens=request.speculate.n_max)))
    ) as server:
        page.goto(server.url + "/#/race")
        page.wait_for_selector("#start:not([disabled])")
        page.locator(".entries li").first.locator("input[type=number]").first.fill("4")
        page.locator(".entries li").nth(1).locator("input[type=number]").first.fill("5")
        page.click("text=All at once")
        page.click("#start")
        expect(page.locator(".results .error")).to_contain_text("The texts differ")


def test_a_lane_that_is_refused_says_so(page: Any) -> None:
    with served() as server:
        page.goto(server.url + "/#/race")
        page.wait_for_selector("#start:not([disabled])")
        page.locator(".entries li").first.locator("input[type=number]").first.fill("-4")
        page.evaluate("document.querySelector('.setup').noValidate = true")
        page.click("#start")
        expect(page.locator(".sides .error")).to_contain_text(
            "The server refused the request: speculative.n_max"
        )
