"""The chat: Markdown, thinking, calls, branches, history, files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from slipstream.engine.api import Request
from tests.browser.driving import ANSWER, Held, ask, opened, prompts, say, says, wait_for_paint
from tests.http.fake import INFO, FakeEngine, Step, delta, done, words
from tests.http.serving import served
from tests.http.test_tools import CALL, TEMPLATE, THOUGHT, WEATHER

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect

MARKDOWN = """# Title

Some **bold**, *slanted* and `code` with a [link](https://example.com/there) and [bad](javascript:alert(1)).

1. first
2. second
   - nested

| a | b |
|---|--:|
| 1 | 2 |

```python
def f(x):
    return x  # done
```

![picture](https://example.com/picture.png) and <b onclick="alert(1)">raw</b> &amp; so on
"""
BODY = ".answer .body"


def test_markdown_is_rendered_and_harmless(page: Any) -> None:
    with served(FakeEngine(script=says(MARKDOWN))) as server:
        opened(page, server)
        ask(page, "hello")
        whole(page, 1)
        for part, text in (
            ("h3", "Title"),
            ("strong", "bold"),
            ("em", "slanted"),
            ("p > code", "code"),
            ("ol > li > ul > li", "nested"),
            ("td", "1"),
            (".code pre", "def f(x):\n    return x  # done\n"),
        ):
            assert page.locator(f"{BODY} {part}").first.inner_text().strip() == text.strip(), part
        links = page.locator(f"{BODY} a").evaluate_all("all => all.map(one => one.getAttribute('href'))")
        assert links == ["https://example.com/there", "https://example.com/picture.png"]
        assert page.locator(f"{BODY} img").count() == 0
        assert "<b onclick" in page.locator(BODY).inner_text()
        assert "& so on" in page.locator(BODY).inner_text()
        wait_for_paint(page, "code-keyword", "code-comment")


def whole(page: Any, n: int) -> None:
    """Wait until the last frame has brought the end of n times the text."""
    expect(page.locator(f"{BODY} h3")).to_have_count(n)
    expect(page.locator(f"{BODY} > :last-child")).to_contain_text("so on")


@pytest.mark.parametrize("text", [">" * 4000, "> - " * 1400], ids=["quotes", "lists"])
def test_quotes_too_deep_for_the_stack_are_shown_as_they_are(page: Any, text: str) -> None:
    def repeats(request: Request) -> Iterator[Step]:
        yield delta(text)
        yield delta("\n\n**the end**\n")
        yield done(request, 2)

    with served(FakeEngine(script=repeats)) as server:
        opened(page, server)
        ask(page, "hello")
        expect(page.locator(f"{BODY} p").first).to_have_text(text.strip())
        expect(page.locator(f"{BODY} strong")).to_have_text("the end")


# How far from its element's left edge, in parts of its width, each of these begins.
BEGINNINGS = """all => all.map(one => {
    const range = document.createRange()
    const text = document.createTreeWalker(one, NodeFilter.SHOW_TEXT).nextNode()
    range.setStart(text, 0)
    range.setEnd(text, 1)
    const [first, whole] = [range.getBoundingClientRect(), one.getBoundingClientRect()]
    return (first.left - whole.left) / whole.width
})"""


def test_texts_begin_on_the_side_of_their_script(page: Any) -> None:
    with served(FakeEngine(script=says("שלום (1).\n\n- שלום\n\n| שלום | a |\n|-|-|\n\nplain"))) as server:
        opened(page, server)
        ask(page, "שלום (2).")
        expect(page.locator(f"{BODY} p").last).to_have_text("plain")
        sides = page.locator(".question > pre, .prose :is(p, li, th)").evaluate_all(BEGINNINGS)
        assert [round(one) for one in sides] == [1, 1, 1, 1, 0, 0]
        assert page.locator(".answer ul").evaluate("one => getComputedStyle(one).direction") == "rtl"


def test_a_growing_reply_looks_as_a_finished_one(page: Any) -> None:
    """The blocks that were made while it came are those that a reload makes of the whole text."""
    with served(FakeEngine(script=says(MARKDOWN * 3))) as server:
        opened(page, server)
        ask(page, "hello")
        whole(page, 3)
        written = page.locator(BODY).inner_html()
        expect(page.locator("#chats a")).to_have_count(1)
        page.reload()
        whole(page, 3)
        assert page.locator(BODY).inner_html() == written


def test_code_and_replies_are_copied_as_they_are(page: Any) -> None:
    with served(FakeEngine(script=says(MARKDOWN))) as server:
        opened(page, server)
        ask(page, "hello")
        page.click(".code button")
        expect(page.locator(".code button")).to_have_text("Copied")
        assert page.evaluate("navigator.clipboard.readText()") == "def f(x):\n    return x  # done\n"
        page.click(".answer .actions .copy")
        expect(page.locator(".answer .actions .copy")).to_have_text("Copied")
        assert page.evaluate("navigator.clipboard.readText()").strip() == MARKDOWN.strip()


@pytest.mark.parametrize("settings", [{}, {"reasoning_field": "none"}], ids=["told", "raw"])
def test_thinking_is_folded(page: Any, settings: dict[str, Any]) -> None:
    engine = FakeEngine(script=says(THOUGHT + "The answer."))
    engine.info = replace(INFO, chat_template=TEMPLATE)
    with served(engine, **settings) as server:
        opened(page, server)
        ask(page, "hello")
        expect(page.locator(BODY).last).to_have_text("The answer.")
        expect(page.locator(".thinking summary")).to_contain_text("Thought")
        assert not page.locator(".thinking .body").is_visible()
        page.click(".thinking summary")
        expect(page.locator(".thinking .body")).to_contain_text("think.")
        assert "<think>" not in page.locator(".answer").inner_text()


def test_calls_are_shown_as_such(page: Any) -> None:
    engine = FakeEngine(script=says("Let me see. " + CALL))
    engine.info = replace(INFO, chat_template=TEMPLATE)
    with served(engine) as server:
        opened(page, server)
        page.fill("#tools", json.dumps([WEATHER]))
        ask(page, "hello")
        expect(page.locator(".call strong")).to_have_text("get_weather")
        assert page.locator(".call pre").inner_text() == '{\n  "city": "Oslo é"\n}'
        expect(page.locator(BODY)).to_have_text("Let me see.")
        page.fill("#tools", "[{]")
        expect(page.locator("#settings .error")).to_contain_text("Not sent")


def test_json_is_shown_as_code(page: Any) -> None:
    with served(FakeEngine(script=says('{"city": "Oslo", "n": [1, 2]}'))) as server:
        opened(page, server)
        ask(page, "hello")
        expect(page.locator(".answer .code pre")).to_have_text('{"city": "Oslo", "n": [1, 2]}')


BARE = """def f(x):

    return x
"""


def test_code_without_a_fence_keeps_its_lines(page: Any) -> None:
    with served(FakeEngine(script=says(BARE))) as server:
        opened(page, server)
        ask(page, "hello")
        expect(page.locator(".answer .code pre")).to_have_text(BARE)
        assert page.locator(".answer .code pre").inner_text() == BARE
        server.engine.script = says(f"{BARE}```\nmore\n```\n\nand **words**\nin lines")
        ask(page, "again")
        expect(page.locator(BODY).last.locator("p")).to_have_text("and words in lines")
        assert page.locator(".answer .code pre").all_inner_texts()[1:] == [BARE, "more\n"]
        assert page.locator(BODY).last.locator("p").inner_text() == "and words\nin lines"
        assert page.locator(BODY).last.locator("p strong").inner_text() == "words"


def test_edit_and_regenerate_branch(page: Any) -> None:
    with served() as server:
        opened(page, server)
        ask(page, "one")
        ask(page, "two")
        page.locator(".question .edit").first.click()
        page.fill(".editing textarea", "uno")
        page.click(".editing button[type=submit]")
        expect(page.locator(".question > pre")).to_have_text(["uno"])
        expect(page.locator(f"{ANSWER} .figures")).to_contain_text("tokens")
        page.click("text=Regenerate")
        expect(page.locator(".answer .branches")).to_have_text("‹2 / 2›")
        assert [one[-1] for one in prompts(server)] == [
            ("user", text) for text in ("one", "two", "uno", "uno")
        ]
        page.locator(".question .branches button").first.click()
        expect(page.locator(".question > pre")).to_have_text(["one", "two"])


def test_what_was_cut_goes_on(page: Any) -> None:
    with served(FakeEngine(script=says("The first half", "length"))) as server:
        opened(page, server)
        ask(page, "hello")
        server.engine.script = says(" and the second.")
        page.click("text=Continue")
        expect(page.locator(BODY)).to_have_text("The first half and the second.")
        expect(page.locator(".figures")).to_contain_text("6 tokens")
        request = server.engine.requests[1]
        assert request.prompt.continue_final_message
        assert request.prompt.messages[-1]["content"] == "The first half"
        ask(page, "more")
        assert prompts(server)[2][1] == ("assistant", "The first half and the second.")


def test_a_call_that_was_cut_does_not_go_on(page: Any) -> None:
    """It would be made anew behind its text, and written into the first one."""
    engine = FakeEngine(script=says("Let me see. " + CALL.removesuffix("</tool_call>"), "length"))
    engine.info = replace(INFO, chat_template=TEMPLATE)
    with served(engine) as server:
        opened(page, server)
        page.fill("#tools", json.dumps([WEATHER]))
        ask(page, "hello")
        expect(page.locator(".call strong")).to_have_text("get_weather")
        expect(page.locator(".figures")).to_contain_text("cut at the limit")
        assert page.locator("text=Continue").count() == 0


def test_what_was_stopped_goes_on_and_is_counted(page: Any) -> None:
    """The server tells nothing of the part that was stopped, whose tokens are none of the next part's rate."""
    gate = Event()

    def goes_on(request: Request) -> Iterator[Step]:
        yield 0.5  # longer than the page waits with a rate
        yield delta("and ")
        while not gate.is_set():
            yield 0.02
        yield delta("on")
        yield done(request, 2)

    with served(FakeEngine(script=Held())) as server:
        opened(page, server)
        say(page, "hello")
        expect(page.locator(BODY)).to_have_text("begun")
        page.click("#send")
        expect(page.locator(".figures")).to_have_text("stopped")
        server.engine.script = goes_on
        page.click("text=Continue")
        expect(page.locator(BODY)).to_have_text("begun and")
        page.wait_for_timeout(100)
        assert page.locator(".figures").inner_text() == ""  # one token has no rate
        gate.set()
        expect(page.locator(".figures")).to_contain_text("3 tokens")


def test_chats_are_kept_found_and_deleted(page: Any) -> None:
    with served() as server:
        opened(page, server)
        ask(page, "about apples")
        page.click("#new")
        ask(page, "about pears")
        expect(page.locator("#chats a")).to_have_text(["about pears", "about apples"])
        page.fill("#search", "w0 APPLES")
        expect(page.locator("#chats a")).to_have_text(["about apples"])
        page.click("#chats a")
        expect(page.locator(".question > pre")).to_have_text(["about apples"])
        page.reload()
        expect(page.locator(".question > pre")).to_have_text(["about apples"])
        expect(page.locator(BODY)).to_contain_text("w0 w1")
        page.click("[aria-label='Delete about apples']")
        expect(page.locator("#chats a")).to_have_text(["about pears"])
        assert page.locator("article").count() == 0


def test_chats_are_exported_and_imported(page: Any, tmp_path: Path) -> None:
    with served() as server:
        opened(page, server)
        ask(page, "keep me")
        expect(page.locator("#chats a")).to_have_text(["keep me"])
        with page.expect_download() as saving:
            page.click("#export")
        file = tmp_path / "chats.json"
        saving.value.save_as(file)
        page.click("#delete-all")
        page.click("#delete-all")
        expect(page.locator("#chats a")).to_have_count(0)
        page.set_input_files("#import-file", file)
        expect(page.locator("#history [role=status]")).to_have_text("1 conversation imported.")
        page.click("#chats a")
        expect(page.locator(BODY)).to_contain_text("w0 w1")
        file.write_text('{"format": "other"}')
        page.set_input_files("#import-file", file)
        expect(page.locator("#history [role=status]")).to_contain_text("no exported conversations")


QUESTION = {"id": "q", "parent": None, "kind": "question", "text": "hello", "files": []}


@pytest.mark.parametrize(
    "broken",
    [
        {"parent": "q"},
        {"text": 1},
        {"files": None},
        {"files": [{"name": "no text"}]},
        {"pictures": 5},
        {"kind": "answer", "reply": {"text": "", "trail": {"pieces": []}}},
    ],
    ids=lambda one: ",".join(one),
)
def test_broken_chats_are_not_imported(page: Any, tmp_path: Path, broken: dict[str, Any]) -> None:
    """Opened, they took the page with them, again after every reload."""
    file = tmp_path / "chats.json"
    chat = {"id": "c", "title": "whole", "changed": 5, "leaf": "q"}
    chats = [chat | {"nodes": [QUESTION]}, chat | {"id": "b", "nodes": [QUESTION | broken]}]
    file.write_text(json.dumps({"format": "slipstream-conversations", "version": 1, "conversations": chats}))
    with served() as server:
        opened(page, server)
        page.set_input_files("#import-file", file)
        expect(page.locator("#history [role=status]")).to_have_text("1 conversation imported.")
        page.click("#chats a")
        expect(page.locator(".question > pre")).to_have_text("hello")


# What is put is taken back as the transaction ends, as on a full disk.
TAKEN_BACK = """() => {
    const { put } = IDBObjectStore.prototype
    IDBObjectStore.prototype.put = function (value) {
        const request = put.call(this, value)
        this.add(value)
        return request
    }
}"""


def test_an_import_that_is_not_kept_says_so(page: Any, tmp_path: Path) -> None:
    file = tmp_path / "chats.json"
    chat = {"id": "c", "title": "whole", "changed": 5, "leaf": "q", "nodes": [QUESTION]}
    file.write_text(json.dumps({"format": "slipstream-conversations", "version": 1, "conversations": [chat]}))
    with served() as server:
        opened(page, server)
        page.evaluate(TAKEN_BACK)
        page.set_input_files("#import-file", file)
        expect(page.locator("#history [role=status]")).to_contain_text("Key already exists")


def test_a_title_ends_with_a_whole_character(page: Any) -> None:
    with served() as server:
        opened(page, server)
        ask(page, "a" * 58 + "😀" * 3)
        expect(page.locator("#chats a")).to_have_text("a" * 58 + "😀…")


def test_text_files_are_attached_and_others_refused(page: Any, tmp_path: Path) -> None:
    text, picture = tmp_path / "notes.py", tmp_path / "picture.png"
    text.write_text("x = 1\n```\n")
    picture.write_bytes(b"\x89PNG\r\n\x00\xff")
    with served() as server:
        opened(page, server)
        page.set_input_files("#files", [text, picture])
        expect(page.locator(".attachments")).to_contain_text("notes.py")
        expect(page.locator("#composer .error")).to_contain_text("picture.png is an image")
        ask(page, "Look")
        assert prompts(server)[0][0][1] == "File notes.py:\n````\nx = 1\n```\n\n````\n\nLook"
        expect(page.locator(".question .file summary")).to_contain_text("notes.py")


def test_the_context_is_gauged(page: Any) -> None:
    with served() as server:
        opened(page, server)
        ask(page, "one two three")
        expect(page.locator(".gauge")).to_contain_text("14 of 512 tokens")


def test_a_new_chat_leaves_a_running_reply_behind(page: Any) -> None:
    with served(FakeEngine(script=lambda request: words(request, delay_s=0.2))) as server:
        opened(page, server)
        say(page, "hello")
        expect(page.locator(BODY)).to_contain_text("w0")
        page.click("#new")
        expect(page.locator("article")).to_have_count(0)
        server.engine.script = words
        ask(page, "again")
        assert prompts(server)[1] == [("user", "again")]
        expect(page.locator("#chats a")).to_have_text(["again", "hello"])


def test_answers_are_announced(page: Any) -> None:
    with served() as server:
        opened(page, server)
        ask(page, "hello")
        expect(page.locator("[aria-live=polite]")).to_contain_text("Answer finished: w0 w1")
