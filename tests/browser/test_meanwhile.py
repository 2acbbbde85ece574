"""What a user does while a reply is written, or in another tab: nothing written is lost, nothing deleted comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.browser.attached import file, picture, seeing
from tests.browser.driving import Held, ask, opened, prompts, say
from tests.http.fake import words
from tests.http.serving import Served, served, until

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect

BODY = ".answer .body"
EDITED = ".editing textarea"


def is_writing(page: Any, server: Served, *, fails: bool = False) -> Held:
    """Send a message whose answer has begun and does not end by itself."""
    held = server.engine.script = Held(fails)
    say(page, "second")
    expect(page.locator(".answer.writing .body")).to_have_text("begun")
    return held


def test_an_edit_waits_for_the_reply_that_is_written(page: Any) -> None:
    with served() as server:
        opened(page, server)
        ask(page, "first")
        page.locator(".question .edit").first.click()
        page.fill(EDITED, "first, changed")
        held = is_writing(page, server)
        expect(page.locator(".editing [type=submit]")).to_be_disabled()
        held.go.set()
        page.click(".editing [type=submit]")
        expect(page.locator(".question > pre")).to_have_text(["first, changed"])
        expect(page.locator(BODY)).to_have_text(["begun ended"])  # the question is shown before it is sent
        assert prompts(server)[-1] == [("user", "first, changed")]


def test_escape_leaves_an_edit_and_not_the_reply(page: Any) -> None:
    with served() as server:
        opened(page, server)
        ask(page, "first")
        page.locator(".question .edit").first.click()
        held = is_writing(page, server)
        page.press(EDITED, "Escape")
        expect(page.locator(EDITED)).to_have_count(0)
        held.go.set()
        expect(page.locator(BODY).last).to_have_text("begun ended")


def test_files_that_were_attached_meanwhile_stay(page: Any, tmp_path: Path) -> None:
    for name in ("sent", "later"):
        (tmp_path / f"{name}.txt").write_text(name)
    with served() as server:
        opened(page, server)
        page.set_input_files("#files", tmp_path / "sent.txt")
        expect(page.locator(".attachments li")).to_have_count(1)
        held = is_writing(page, server, fails=True)
        page.set_input_files("#files", tmp_path / "later.txt")
        expect(page.locator(".attachments li")).to_contain_text(["later.txt"])
        held.go.set()
        expect(page.locator(".trouble")).to_be_visible()
        expect(page.locator(".attachments li")).to_contain_text(["sent.txt", "later.txt"])


def sent_early(page: Any, path: Path, data: bytes) -> None:
    """Send a message whose file is not read yet."""
    path.write_bytes(data)
    page.evaluate(SLOW_FILE)
    page.set_input_files("#files", path)
    page.wait_for_function("() => window.letGo !== undefined")
    say(page, "Look")


def test_a_message_stays_where_its_file_is_refused(page: Any, tmp_path: Path) -> None:
    with served() as server:
        opened(page, server)
        sent_early(page, tmp_path / "a.bin", b"\0\xff")
        page.evaluate("window.letGo()")
        expect(page.locator("#composer [role=alert]")).to_have_text("a.bin is not a text file.")
        expect(page.locator("#prompt")).to_have_value("Look")
        ask(page, "Look again")
        assert prompts(server) == [[("user", "Look again")]]


def test_a_refusal_outlasts_the_files_behind_it(page: Any, tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("x = 1")
    (tmp_path / "a.bin").write_bytes(b"\0\xff")
    with served() as server:
        opened(page, server)
        page.evaluate(SLOW_FILE)
        page.set_input_files("#files", tmp_path / "a.bin")
        page.wait_for_function("() => window.letGo !== undefined")
        page.set_input_files("#files", tmp_path / "b.txt")
        say(page, "Look")
        page.evaluate("window.letGo()")
        expect(page.locator(".attachments li")).to_contain_text(["b.txt"])
        expect(page.locator("#composer [role=alert]")).to_have_text("a.bin is not a text file.")
        expect(page.locator("#prompt")).to_have_value("Look")
        page.set_input_files("#files", tmp_path / "b.txt")  # another choice, made in knowledge of it
        expect(page.locator("#composer [role=alert]")).to_have_count(0)
        assert prompts(server) == []


def test_a_press_on_stop_sends_nothing(page: Any) -> None:
    """Where the reply ends under the pointer, before the button is let go."""
    with served() as server:
        opened(page, server)
        ask(page, "first")
        held = is_writing(page, server)
        page.fill("#prompt", "unfinished")
        page.hover("#send")
        page.mouse.down()
        held.go.set()
        expect(page.locator("#send")).to_have_text("Send")
        page.mouse.up()
        expect(page.locator("#prompt")).to_have_value("unfinished")
        page.press("#send", "Enter")  # no pointer is on it now
        expect(page.locator(".question > pre")).to_have_text(["first", "second", "unfinished"])


# A whole click of a pointer in the very moment at which the button becomes Send.
CLICK_AS_IT_ENDS = """() => {
  const button = document.querySelector("#send");
  new MutationObserver((_, observer) => {
    observer.disconnect();
    button.dispatchEvent(new PointerEvent("pointerdown", { bubbles: true }));
    button.dispatchEvent(new MouseEvent("click", { bubbles: true, cancelable: true, detail: 1 }));
    window.clicked = button.textContent;
  }).observe(button, { subtree: true, characterData: true, childList: true });
}"""


def test_a_click_that_was_meant_for_stop_sends_nothing(page: Any) -> None:
    """Where the reply has ended just before the pointer went down."""
    with served() as server:
        opened(page, server)
        ask(page, "first")
        held = is_writing(page, server)
        page.fill("#prompt", "unfinished")
        page.evaluate(CLICK_AS_IT_ENDS)
        held.go.set()
        page.wait_for_function("() => window.clicked === 'Send'")
        expect(page.locator("#prompt")).to_have_value("unfinished")
        page.wait_for_timeout(400)  # AIMED_MS is over: this one is meant
        page.click("#send")
        expect(page.locator(".question > pre")).to_have_text(["first", "second", "unfinished"])


@pytest.mark.parametrize("button", ["text=Regenerate", "#new"])
def test_a_message_stays_where_it_can_no_longer_be_sent(page: Any, tmp_path: Path, button: str) -> None:
    """Its file is read only when a reply is being written, or in another chat."""
    with served() as server:
        opened(page, server)
        ask(page, "first")
        sent_early(page, tmp_path / "a.txt", b"x = 1")
        held = server.engine.script = Held()
        page.click(button)
        page.evaluate("window.letGo()")
        expect(page.locator(".attachments li")).to_have_count(1)
        expect(page.locator("#prompt")).to_have_value("Look")
        held.go.set()
        expect(page.locator("#send")).to_have_text("Send")
        assert len(server.engine.requests) == (1 if button == "#new" else 2)


@pytest.mark.parametrize("buttons", [["[aria-label='Delete first']"], ["#delete-all", "#delete-all"]])
def test_a_chat_that_is_deleted_does_not_come_back(page: Any, buttons: list[str]) -> None:
    with served() as server:
        opened(page, server)
        ask(page, "first")
        is_writing(page, server)
        for button in buttons:
            page.click(button)
        expect(page.locator("article")).to_have_count(0)
        server.engine.script = words
        ask(page, "another")  # kept after all that was on its way
        expect(page.locator("#chats a")).to_have_text(["another"])
        page.reload()
        expect(page.locator(BODY)).to_contain_text("w0 w1")
        expect(page.locator("#chats a")).to_have_text(["another"])


def test_a_chat_that_is_deleted_as_its_images_are_kept_does_not_come_back(page: Any) -> None:
    with served(seeing()) as server:
        opened(page, server)
        ask(page, "first")
        page.set_input_files("#images", [file(picture(), one) for one in ("a.png", "b.png")])
        expect(page.locator("#composer .thumbnails li")).to_have_count(2)
        page.evaluate(SLOW_IMAGES)
        ask(page, "second")
        page.wait_for_function("() => window.isWritten === 1")
        page.click("#new")
        page.click("[aria-label='Delete first']")
        expect(page.locator("#chats a")).to_have_count(0)
        page.evaluate("window.letGo()")
        page.wait_for_function("() => window.isWritten === 2")
        page.evaluate("window.letGo()")
        until(lambda: page.evaluate(NO_IMAGE))
        ask(page, "another")
        expect(page.locator("#chats a")).to_have_text(["another"])


def test_two_tabs_add_to_one_chat(page: Any) -> None:
    with served() as server:
        opened(page, server)
        ask(page, "first")
        expect(page.locator("#chats a")).to_have_count(1)
        other = page.context.new_page()
        opened(other, server, f"/{page.evaluate('location.hash')}")
        expect(other.locator(".question > pre")).to_have_text(["first"])
        for tab, text in ((page, "from here"), (other, "from there")):
            ask(tab, text)
            until(lambda text=text: page.evaluate(KEPT, text))
        page.reload()
        expect(page.locator(".question .branches")).to_have_text("‹2 / 2›")
        expect(page.locator(".question > pre")).to_have_text(["first", "from there"])
        page.locator(".question .branches button").first.click()
        expect(page.locator(".question > pre")).to_have_text(["first", "from here"])


def test_a_tab_lists_what_another_keeps_and_deletes(page: Any) -> None:
    with served() as server:
        opened(page, server)
        other = page.context.new_page()
        opened(other, server)
        ask(other, "first")
        expect(page.locator("#chats a")).to_have_text(["first"])
        page.click("[aria-label='Delete first']")
        expect(other.locator("#chats a")).to_have_count(0)


def test_of_two_chats_the_one_chosen_last_is_shown(page: Any) -> None:
    with served() as server:
        opened(page, server)
        for text in ("first", "second", "third"):
            ask(page, text)
            page.click("#new")
        page.evaluate(SLOW)
        page.click("#chats a:text-is('first')")
        page.click("#chats a:text-is('second')")
        page.wait_for_function("() => window.isRead")
        expect(page.locator(".question > pre")).to_have_text(["second"])


def test_a_message_sent_before_its_chat_is_read_is_not_hidden(page: Any) -> None:
    with served() as server:
        opened(page, server)
        ask(page, "first")
        page.click("#new")
        ask(page, "second")
        page.evaluate(SLOW)
        page.click("#chats a:text-is('first')")
        is_begun = server.engine.script = Held()
        say(page, "third")
        page.wait_for_function("() => window.isRead")
        expect(page.locator(".question > pre")).to_have_text(["first"])
        expect(page.locator("#send")).to_have_text("Send")
        expect(page.locator("#chats a")).to_have_count(2)
        is_begun.go.set()


def test_a_reply_that_ends_as_a_chat_is_chosen_does_not_undo_it(page: Any) -> None:
    page.add_init_script(SLOW_ADDRESS)
    with served() as server:
        opened(page, server)
        ask(page, "first")
        page.click("#new")
        ask(page, "another")
        held = is_writing(page, server)
        page.evaluate("window.isHeld = true")
        page.click("#chats a:text-is('first')")
        page.wait_for_function("() => window.letGo !== undefined")
        held.go.set()
        expect(page.locator(BODY).last).to_have_text("begun ended")
        page.evaluate("window.letGo()")
        expect(page.locator(".question > pre")).to_have_text(["first"])
        chosen = page.locator("#chats a:text-is('first')").get_attribute("href")
        assert page.evaluate("location.hash") == chosen


def test_a_button_that_copies_has_its_own_label_again(page: Any) -> None:
    with served() as server:
        opened(page, server)
        ask(page, "first")
        button = page.locator(".answer .actions .copy")
        page.evaluate(NO_COPY)
        button.click()
        expect(button).to_have_text("Not allowed")
        button.click()
        expect(button).to_have_text("Copied")
        expect(button).to_have_text("Copy")


# Copying is allowed from the second time on.
NO_COPY = """() => {
    const clipboard = navigator.clipboard, { writeText } = clipboard
    clipboard.writeText = async () => {
        clipboard.writeText = writeText
        throw new Error("not allowed")
    }
}"""

# While `isHeld` is set, the page is told of a change of its address only when it is let go on.
SLOW_ADDRESS = """
    addEventListener("hashchange", event => {
        if (!window.isHeld) return
        event.stopImmediatePropagation()
        window.isHeld = false
        const { oldURL, newURL } = event
        window.letGo = () => dispatchEvent(new HashChangeEvent("hashchange", { oldURL, newURL }))
    })
"""

# Each image that is kept from now on is told of only when the page is let go on.
SLOW_IMAGES = """() => {
    const { put } = IDBObjectStore.prototype
    window.isWritten = 0
    IDBObjectStore.prototype.put = function (...given) {
        const hold = event => {
            event.stopImmediatePropagation()
            window.isWritten += 1
            window.letGo = () => event.target.dispatchEvent(new Event("complete"))
        }
        if (this.name === "images") this.transaction.addEventListener("complete", hold, { once: true })
        return put.apply(this, given)
    }
}"""

# Whether no image is in the database.
NO_IMAGE = """() => new Promise(found => {
    const opening = indexedDB.open("slipstream-images", 1)
    opening.onsuccess = () => {
        const count = opening.result.transaction("images").objectStore("images").count()
        count.onsuccess = () => {
            opening.result.close()
            found(count.result === 0)
        }
    }
})"""

# The next file that is read is there only when the page is let go on.
SLOW_FILE = """() => {
    const read = Blob.prototype.arrayBuffer
    Blob.prototype.arrayBuffer = async function () {
        await new Promise(resolve => { window.letGo = resolve })
        Blob.prototype.arrayBuffer = read
        return read.call(this)
    }
}"""

# The next chat that is read comes late.
SLOW = """() => {
    const { get } = IDBObjectStore.prototype
    IDBObjectStore.prototype.get = function (...given) {
        IDBObjectStore.prototype.get = get
        const complete = ({ target }) => setTimeout(() => {
            target.dispatchEvent(new Event("complete"))
            setTimeout(() => { window.isRead = true })
        }, 500)
        const hold = event => { event.stopImmediatePropagation(); complete(event) }
        this.transaction.addEventListener("complete", hold, { once: true })
        return get.apply(this, given)
    }
}"""

# Whether a message is in the database.
KEPT = """text => new Promise(found => {
    const opening = indexedDB.open("slipstream", 1)
    opening.onsuccess = () => {
        const all = opening.result.transaction("conversations").objectStore("conversations").getAll()
        all.onsuccess = () => {
            opening.result.close()
            found(all.result.some(one => one.nodes.some(node => node.text === text)))
        }
    }
})"""
