"""The page for those who do not see it, do not see colours, have no mouse, or a small screen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from slipstream.engine.errors import Overloaded
from tests.browser.driving import as_tokens, ask, grave, opened, say
from tests.browser.told import told
from tests.http.serving import Served, served

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect


def welcome(page: Any, server: Served) -> None:
    opened(page, server)


def settings(page: Any, server: Served) -> None:
    opened(page, server)
    page.set_viewport_size({"width": 900, "height": 860})
    page.locator("header [aria-label=Settings]").click()


def text(page: Any, server: Served) -> None:
    server.engine.script = told()
    opened(page, server)
    ask(page, "hello")
    page.click("text=Did it pay?")
    page.click("text=Run plainly")
    expect(page.locator(".verdict")).to_be_visible()


def tokens(page: Any, server: Served) -> None:
    server.engine.script = told()
    opened(page, server)
    ask(page, "hello")
    as_tokens(page)
    page.locator(".token").nth(2).click()


def failure(page: Any, server: Served) -> None:
    opened(page, server)
    server.engine.refusal = Overloaded("many wait", 7.0)
    say(page, "hello")
    expect(page.locator(".trouble")).to_be_visible()


def race(page: Any, server: Served) -> None:
    page.goto(server.url + "/#/race")
    page.wait_for_selector("#start:not([disabled])")
    page.click("#start")
    expect(page.locator(".results .equal")).to_be_visible()
    page.click("text=As curl and Python")


def lanes(page: Any, server: Served) -> None:
    page.goto(server.url + "/#/lanes")
    expect(page.locator(".lane")).to_have_count(4)


def costs(page: Any, server: Served) -> None:
    page.goto(server.url + "/#/costs")
    expect(page.locator(".plot")).to_have_count(3)


VIEWS = (welcome, settings, text, tokens, failure, race, lanes, costs)


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
def test_every_view_is_for_everybody(page: Any, view: Callable[[Any, Served], None]) -> None:
    """axe finds nothing serious in light, in dark and on a telephone, where nothing is wider than the screen."""
    with served() as server:
        view(page, server)
        for scheme, width in (("light", 1280), ("dark", 1280), ("dark", 360)):
            page.emulate_media(color_scheme=scheme)
            page.set_viewport_size({"width": width, "height": 860})
            assert grave(page) == [], (scheme, width)
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def focused(page: Any) -> str:
    """What the focused control says."""
    return page.evaluate(
        """() => { const one = document.activeElement;
            return one.matches('a, button, input') ? one.ariaLabel || one.textContent : ''; }"""
    )


def tab_to(page: Any, name: str) -> None:
    for _ in range(80):
        if name == focused(page):
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"{name} is not reached by Tab")


def test_the_whole_flow_by_keyboard(page: Any) -> None:
    with served() as server:
        opened(page, server)
        expect(page.locator("#prompt")).to_be_focused()
        page.keyboard.type("one")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("two")
        page.keyboard.press("Enter")
        expect(page.locator(".answer .figures")).to_contain_text("10 tokens")
        assert page.locator(".question > pre").inner_text() == "one\ntwo"
        for name in ("New chat", "Edit", "Tokens", "Regenerate", "Did it pay?", "Attach"):
            tab_to(page, name)
        for _ in range(200):
            if focused(page) == "Did it pay?":
                break
            page.keyboard.press("Shift+Tab")
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid"  # where the focus is can be seen
        page.keyboard.press("Enter")
        expect(page.locator(".pay")).to_be_visible()


def test_panels_open_and_close_on_a_telephone(page: Any) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    with served() as server:
        opened(page, server)
        expect(page.locator("#temperature")).not_to_be_visible()
        page.locator("header [aria-label=Settings]").click()
        page.fill("#temperature", "0.5")
        page.keyboard.press("Escape")
        expect(page.locator("#temperature")).not_to_be_visible()
        page.locator("header [aria-label=Chats]").click()
        expect(page.locator("#new")).to_be_visible()
        page.click("#new")
        expect(page.locator("#new")).not_to_be_visible()
