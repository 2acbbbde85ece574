"""Whatever fails, the message that was typed is there again, and no failed reply enters a later prompt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from slipstream.engine.api import Request
from slipstream.engine.errors import EngineFault, Overloaded
from tests.browser.driving import ANSWER, Held, ask, opened, prompts, say
from tests.http.fake import FakeEngine, Step, delta, words
from tests.http.serving import served

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect


def breaks(request: Request) -> Iterator[Step]:
    yield delta("half of an ")
    yield 0.2
    yield EngineFault("broken")


def failed(page: Any, sentence: str, *, has_id: bool = True) -> None:
    """The page says so, and has the message again."""
    expect(page.locator(".trouble")).to_contain_text(sentence)
    expect(page.locator("#prompt")).to_have_value("my long message")
    assert page.locator(".trouble code").count() == has_id


def test_a_full_queue(page: Any) -> None:
    with served() as server:
        opened(page, server)
        server.engine.refusal = Overloaded("many wait", 7.0)
        say(page, "my long message")
        failed(page, "Try again in 7 s.")
        server.engine.refusal = None
        page.click("#retry")
        expect(page.locator(f"{ANSWER} .figures")).to_contain_text("10 tokens")
        expect(page.locator("#prompt")).to_have_value("")
        expect(page.locator(".question > pre")).to_have_text(["my long message"])
        assert prompts(server) == [[("user", "my long message")]]


def test_a_wrong_key(page: Any) -> None:
    with served(api_key="right") as server:
        page.goto(server.url)
        page.fill("#key", "right")
        page.press("#key", "Tab")
        expect(page.locator("#model")).to_have_text("fake/model")
        page.fill("#key", "wrong")
        say(page, "my long message")
        failed(page, "wants an API key")
        page.fill("#key", "right")
        page.click("#retry")
        expect(page.locator(f"{ANSWER} .figures")).to_contain_text("10 tokens")


def test_a_key_in_any_script(page: Any) -> None:
    with served(api_key="ключ") as server:
        page.goto(server.url)
        page.fill("#key", "ключ")
        page.press("#key", "Tab")
        expect(page.locator("#model")).to_have_text("fake/model")
        ask(page, "hello")


def test_a_conversation_that_is_too_long(page: Any) -> None:
    with served() as server:
        opened(page, server)
        say(page, "word " * 600)
        expect(page.locator(".trouble")).to_contain_text(
            "longer than the model’s context (601 tokens, of 512)"
        )
        expect(page.locator("#prompt")).to_have_value("word " * 600)


@pytest.mark.parametrize("again", ["#retry", "#send"])
def test_a_reply_that_fails_on_its_way(page: Any, again: str) -> None:
    with served(FakeEngine(script=breaks)) as server:
        opened(page, server)
        say(page, "my long message")
        failed(page, "failed while it wrote the reply")
        expect(page.locator(".answer.failed")).to_contain_text("half of an")
        expect(page.locator("#chats a")).to_have_count(0)
        server.engine.script = words
        page.wait_for_timeout(400)  # a click on Send right behind the end is taken for one on Stop
        page.click(again)
        expect(page.locator(f"{ANSWER} .figures")).to_contain_text("10 tokens")
        assert page.locator("article").count() == 2
        ask(page, "next")
        assert [role for role, _ in prompts(server)[2]] == ["user", "assistant", "user"]
        assert "half" not in str(prompts(server)[2])


def test_a_server_that_dies(page: Any) -> None:
    with served(FakeEngine(script=lambda request: words(request, delay_s=0.5))) as server:
        opened(page, server)
        page.route("**/v1/chat/completions", lambda route: route.abort())
        say(page, "my long message")
        failed(page, "cannot be reached", has_id=False)
        page.unroute("**/v1/chat/completions")
        # A poll that fails would take the button away.
        page.route("**/health", lambda route: route.fulfill(json={"status": "ok"}))
        page.context.set_offline(True)
        page.click("#retry")
        failed(page, "This computer is offline.", has_id=False)
        page.context.set_offline(False)


def test_a_connection_that_ends_early(page: Any) -> None:
    first = 'data: {"choices":[{"delta":{"content":"half of an"},"finish_reason":null}]}\n\n'
    with served() as server:
        opened(page, server)
        page.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(
                status=200, content_type="text/event-stream", headers={"x-request-id": "r1"}, body=first
            ),
        )
        say(page, "my long message")
        failed(page, "The connection ended before the reply did.")


def test_a_continuation_that_fails_leaves_the_reply_as_it_was(page: Any) -> None:
    with served() as server:
        opened(page, server)
        page.fill("#max_tokens", "6")
        ask(page, "hello")
        server.engine.script = breaks
        page.click("text=Continue")
        expect(page.locator(".trouble")).to_contain_text("failed while it wrote")
        expect(page.locator(".answer .body")).to_have_text("w0 w1 w2 w3 w4 w5")
        server.engine.script = words
        ask(page, "next")
        assert prompts(server)[-1][1] == ("assistant", "w0 w1 w2 w3 w4 w5 ")


def test_a_draft_outlives_a_reload(page: Any) -> None:
    with served() as server:
        opened(page, server)
        page.fill("#prompt", "not sent yet")
        page.reload()
        expect(page.locator("#prompt")).to_have_value("not sent yet")


REFUSED = "localStorage", "sessionStorage", "indexedDB"


def test_a_browser_that_keeps_nothing(page: Any) -> None:
    """As without cookies; a key and settings hold until the page is left."""
    page.add_init_script(
        f"""for (const name of {list(REFUSED)})
            Object.defineProperty(window, name, {{ get() {{ throw new DOMException("no", "SecurityError") }} }})"""
    )
    with served(api_key="mine") as server:
        page.goto(server.url)
        page.fill("#key", "mine")
        page.press("#key", "Tab")
        page.wait_for_selector("#send:not([disabled])")
        page.fill("#temperature", "0.5")
        ask(page, "hello")
        assert server.engine.requests[-1].sampling.temperature == 0.5
        expect(page.locator("#history .note").first).to_contain_text("keeps no chats")


def test_a_message_outlives_a_reload_while_it_is_answered(page: Any) -> None:
    with served(FakeEngine(script=Held())) as server:
        opened(page, server)
        say(page, "my long message")
        expect(page.locator(".answer .body")).to_have_text("begun")
        page.reload()
        expect(page.locator("#prompt")).to_have_value("my long message")
