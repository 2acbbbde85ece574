"""Images in the page: attached in three ways, sent, shown, kept, and refused in words."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.browser.attached import file, picture, seeing
from tests.browser.driving import ANSWER, ask, grave, opened, prompts, say
from tests.http.fake import FakeEngine
from tests.http.serving import served, until

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect

DRAFTED = "#composer .thumbnails li"
SENT = ".question .thumbnails img"
# Files made in the page, handed to what listens there as the browser does when they are pasted or dropped.
HAND_OVER = """([kind, where, files, text]) => {
    const data = new DataTransfer();
    for (const [name, type, base64] of files)
        data.items.add(new File([Uint8Array.from(atob(base64), one => one.charCodeAt(0))], name, { type }));
    if (text) data.setData("text/plain", text);
    const given = { bubbles: true, cancelable: true };
    const event = kind === "paste" ? new ClipboardEvent(kind, { ...given, clipboardData: data })
        : new DragEvent(kind, { ...given, dataTransfer: data });
    return !document.querySelector(where).dispatchEvent(event);
}"""


def hand_over(page: Any, kind: str, where: str, *files: dict[str, Any], text: str = "") -> bool:
    """Whether the page took the event as its own."""
    given = [[one["name"], one["mimeType"], base64.b64encode(one["buffer"]).decode()] for one in files]
    return page.evaluate(HAND_OVER, [kind, where, given, text])


def address(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def bodies(page: Any) -> list[dict[str, Any]]:
    """The chat requests that the page makes from now on."""
    made: list[dict[str, Any]] = []
    page.on(
        "request",
        lambda one: made.append(json.loads(one.post_data)) if one.url.endswith("/chat/completions") else None,
    )
    return made


def shown(page: Any, *widths: int) -> None:
    """Wait until the browser has decoded just these images of messages."""
    page.wait_for_function(
        """([which, widths]) => [...document.querySelectorAll(which)].map(
            one => one.complete && one.naturalWidth).join() === widths.join()""",
        arg=[SENT, widths],
    )


def shown_part(data: bytes, kind: str = "image/png") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": address(data, kind)}}


KINDS = (("png", "image/png"), ("jpeg", "image/jpeg"), ("webp", "image/webp"), ("gif", "image/gif"))


def test_images_are_chosen_and_sent_before_the_text(page: Any) -> None:
    data = [picture(one) for one, _ in KINDS]
    with served(seeing()) as server:
        opened(page, server)
        sent = bodies(page)
        names = [f"a.{one}" for one, _ in KINDS]
        page.set_input_files(
            "#images", [file(*one) for one in zip(data, names, (kind for _, kind in KINDS), strict=True)]
        )
        expect(page.locator(DRAFTED)).to_have_count(4)
        page.set_input_files("#files", [file(b"x = 1", "notes.py", "text/plain")])
        ask(page, "Which is it?")
        assert sent[0]["messages"] == [
            {
                "role": "user",
                "content": [
                    *[shown_part(one, kind) for one, (_, kind) in zip(data, KINDS, strict=True)],
                    {"type": "text", "text": "File notes.py:\n```\nx = 1\n```\n\nWhich is it?"},
                ],
            }
        ]
        assert [(one.width, one.height) for one in server.engine.requests[0].prompt.images] == [
            (320, 200)
        ] * 4
        shown(page, 320, 320, 320, 320)
        expect(page.locator(DRAFTED)).to_have_count(0)
        page.click("#new")
        ask(page, "no image")
        assert sent[1]["messages"] == [{"role": "user", "content": "no image"}]


def test_an_image_needs_no_words(page: Any) -> None:
    with served(seeing()) as server:
        opened(page, server)
        sent = bodies(page)
        page.set_input_files("#images", [file(picture())])
        expect(page.locator(DRAFTED)).to_have_count(1)
        ask(page, "")
        assert sent[0]["messages"][0]["content"] == [shown_part(picture())]
        expect(page.locator("#chats a")).to_have_text("teal.png")


@pytest.mark.parametrize(("kind", "where"), [("paste", "#prompt"), ("paste", "body"), ("drop", "#welcome")])
def test_images_are_pasted_and_dropped(page: Any, kind: str, where: str) -> None:
    with served(seeing()) as server:
        opened(page, server)
        assert hand_over(page, kind, where, file(picture()), file(picture(colour="red"), "red.png"))
        expect(page.locator(DRAFTED)).to_have_count(2)
        page.click("[aria-label='Remove teal.png']")
        expect(page.locator("#prompt")).to_be_focused()
        sent = bodies(page)
        ask(page, "Look")
        assert sent[0]["messages"][0]["content"][0] == shown_part(picture(colour="red"))
        assert len(sent[0]["messages"][0]["content"]) == 2


def test_a_message_waits_for_its_images(page: Any) -> None:
    """An image whose file is slow to read, and a message sent before it is there."""
    with served(seeing()) as server:
        opened(page, server)
        page.evaluate(
            """() => {
                const read = Blob.prototype.arrayBuffer;
                Blob.prototype.arrayBuffer = async function () {
                    await new Promise((resolve) => { window.letGo = resolve; });
                    Blob.prototype.arrayBuffer = read;
                    return read.call(this);
                };
            }"""
        )
        assert hand_over(page, "paste", "#prompt", file(picture()))
        # As a function: the page's policy forbids the evaluation of a text, which a second look would be.
        page.wait_for_function("() => window.letGo !== undefined")
        sent = bodies(page)
        page.fill("#prompt", "Look")
        page.press("#prompt", "Enter")
        page.evaluate("window.letGo()")
        page.locator(ANSWER).first.locator(".figures span").first.wait_for()
        assert sent[0]["messages"][0]["content"][0] == shown_part(picture())


def test_what_is_pasted_with_a_text_is_that_text(page: Any) -> None:
    with served(seeing()) as server:
        opened(page, server)
        assert not hand_over(page, "paste", "#prompt", file(picture()), text="a cell")
        assert hand_over(page, "paste", "#prompt", file(picture(), "later.png"))
        expect(page.locator(DRAFTED)).to_have_count(1)
        assert page.locator("[aria-label='Remove later.png']").is_visible()


def test_a_model_without_eyes(page: Any) -> None:
    with served() as server:
        opened(page, server)
        expect(page.locator("#composer button:text-is('Attach')")).to_be_visible()
        assert page.locator("text=Add images").count() == page.locator("#images").count() == 0
        page.fill("#prompt", "my words")
        for kind in ("paste", "drop"):
            assert hand_over(page, kind, "#prompt", file(picture(), f"{kind}.png"))
            told = f"{kind}.png is an image, which this model does not take."
            expect(page.locator("#composer [role=alert]")).to_have_text(told)
        expect(page.locator(DRAFTED)).to_have_count(0)
        expect(page.locator("#prompt")).to_have_value("my words")


def test_what_cannot_be_sent_is_told_and_the_rest_stays(page: Any) -> None:
    wide = bytes(range(256)) * 4096  # 1 MiB; together with another above what a body may have
    with served(seeing(), max_body=2, image_limit=3) as server:
        opened(page, server)
        page.fill("#prompt", "my words")
        error = page.locator("#composer [role=alert]")
        for given, told in (
            (file(b"\0\1\2", "a.bmp", "image/bmp"), "a.bmp is not an image that can be sent"),
            (file(picture()[:60], "half.png"), "half.png is broken"),
            (file(b"\0\xff", "a.bin", "application/x"), "a.bin is not a text file or an image."),
            (
                file(picture() + 2 * wide, "big.png"),
                "big.png is too large: this server takes images up to 1.5 MiB.",
            ),
        ):
            page.set_input_files("#files", [file(b"fine", "fine.txt", "text/plain"), given])
            expect(error).to_contain_text(told)
        expect(page.locator(".attachments li")).to_have_count(4)
        page.set_input_files(
            "#images", [file(picture() + wide, "one.png"), file(picture() + wide, "two.png")]
        )
        expect(error).to_contain_text(
            "two.png is too large: beside the conversation’s other images there is room"
        )
        expect(page.locator(DRAFTED)).to_have_count(1)
        ask(page, "Look")
        page.set_input_files("#images", [file(picture(), f"{i}.png") for i in range(3)])
        expect(error).to_have_text("2.png is one too many: this server takes 3 images in a conversation.")
        expect(page.locator(DRAFTED)).to_have_count(2)


def test_the_limit_of_a_server_that_sees_is_told() -> None:
    for engine, most in ((FakeEngine(), 8), (seeing(), 48)):
        with served(engine) as server:
            assert server.http.get("/props").json()["settings"]["max_body"] == most


def test_an_image_is_kept_and_goes_with_every_request(page: Any) -> None:
    with served(seeing()) as server:
        opened(page, server)
        page.set_input_files("#images", [file(picture())])
        ask(page, "Look")
        expect(page.locator("#chats a")).to_have_count(1)
        page.reload()
        expect(page.locator(SENT)).to_have_count(1)
        expect(page.locator(f"{ANSWER} .figures")).to_contain_text("tokens")
        shown(page, 320)
        sent = bodies(page)
        page.click("text=Regenerate")
        expect(page.locator(".answer .branches")).to_have_text("‹2 / 2›")
        page.click(".question .edit")
        expect(page.locator(".editing .thumbnails img")).to_have_count(1)
        page.fill(".editing textarea", "Look again")
        page.click(".editing button[type=submit]")
        expect(page.locator(".question .branches")).to_have_text("‹2 / 2›")
        ask(page, "And now?")
        texts = [
            [part["text"] for part in one["messages"][0]["content"] if part["type"] == "text"] for one in sent
        ]
        assert texts == [["Look"], ["Look again"], ["Look again"]]
        assert all(one["messages"][0]["content"][0] == shown_part(picture()) for one in sent)
        assert sent[2]["messages"][2] == {"role": "user", "content": "And now?"}
        page.fill("#search", "look")
        expect(page.locator("#chats a")).to_have_text(["Look"])


READ_STORE = """([database, store]) => new Promise(then => {
    const asking = indexedDB.open(database);
    asking.onsuccess = () => {
        const reading = asking.result.transaction(store).objectStore(store).getAll();
        reading.onsuccess = () => { asking.result.close(); then(JSON.stringify(reading.result)); };
    };
})"""


def album(page: Any) -> list[str]:
    """The images that the browser keeps."""
    return json.loads(page.evaluate(READ_STORE, ["slipstream-images", "images"]))


def test_images_are_exported_imported_and_deleted(page: Any, tmp_path: Path) -> None:
    with served(seeing()) as server:
        opened(page, server)
        page.set_input_files("#images", [file(picture())])
        ask(page, "Look")
        expect(page.locator("#chats a")).to_have_count(1)
        assert album(page) == [address(picture())]
        assert "base64" not in page.evaluate(
            READ_STORE, ["slipstream", "conversations"]
        )  # lists and searches read it
        with page.expect_download() as saving:
            page.click("#export")
        saved = tmp_path / "chats.json"
        saving.value.save_as(saved)
        page.click("#chats button")
        expect(page.locator("#chats a")).to_have_count(0)
        until(lambda: not album(page))
        page.set_input_files("#import-file", saved)
        page.click("#chats a")
        expect(page.locator(SENT)).to_have_attribute("src", address(picture()))
        page.click("#delete-all")
        page.click("#delete-all")
        until(lambda: not album(page))
        expect(page.locator("#chats a")).to_have_count(0)
        # Of a file from elsewhere no address is taken that would load something.
        saved.write_text(saved.read_text().replace(address(picture()), "https://example.com/a.png"))
        page.set_input_files("#import-file", saved)
        page.click("#chats a")
        expect(page.locator(".question .lost")).to_have_text("teal.png was not kept and is not sent")


NO_ROOM = """const put = IDBObjectStore.prototype.put;
IDBObjectStore.prototype.put = function (...given) {
    const asked = put.apply(this, given);
    if (this.name === "images" && given[0].length > 2000) this.transaction.abort();
    return asked;
};"""


def test_a_chat_outlives_an_image_that_does_not_fit(page: Any) -> None:
    page.add_init_script(NO_ROOM)
    large = picture() + bytes(3000)
    with served(seeing()) as server:
        opened(page, server)
        page.set_input_files("#images", [file(large, "large.png"), file(picture())])
        ask(page, "Look")
        expect(page.locator(".question .note")).to_contain_text("no room for it: large.png. The rest")
        page.reload()
        expect(page.locator(".question .lost")).to_have_text("large.png was not kept and is not sent")
        shown(page, 320)
        expect(page.locator(".answer .body")).to_contain_text("w0 w1")
        sent = bodies(page)
        page.click("text=Regenerate")
        expect(page.locator(".answer .branches")).to_have_text("‹2 / 2›")
        assert sent[0]["messages"][0]["content"] == [shown_part(picture()), {"type": "text", "text": "Look"}]


def test_a_refused_image_comes_back_with_its_message(page: Any) -> None:
    """The server looks closer than the page: here at the number of pixels."""
    with served(seeing(), image_pixels=1) as server:
        opened(page, server)
        page.set_input_files("#images", [file(picture(size=(1200, 1000)), "wide.png")])
        expect(page.locator(DRAFTED)).to_have_count(1)
        say(page, "Look")
        expect(page.locator(".trouble")).to_contain_text("messages[0].content[0]")
        expect(page.locator("#prompt")).to_have_value("Look")
        page.click("[aria-label='Remove wide.png']")
        page.set_input_files("#images", [file(picture())])
        expect(page.locator(DRAFTED)).to_have_count(1)
        page.click("#retry")
        expect(page.locator(f"{ANSWER} .figures")).to_contain_text("10 tokens")
        assert len(prompts(server)) == 1
        shown(page, 320)


def enlarge(page: Any, press: Callable[[], None]) -> None:
    page.locator(".question .thumbnail").focus()
    page.keyboard.press("Enter")
    expect(page.locator("dialog img")).to_be_visible()
    press()
    expect(page.locator("dialog")).to_have_count(0)
    expect(page.locator(".question .thumbnail")).to_be_focused()


def test_images_are_for_everybody(page: Any) -> None:
    """By keyboard, in light, in dark, and on a telephone; a wide image makes nothing wider than the screen."""
    with served(seeing()) as server:
        opened(page, server)
        page.set_input_files("#images", [file(picture(size=(1600, 200)), "wide.png")])
        expect(page.locator(DRAFTED)).to_have_count(1)
        ask(page, "Look")
        enlarge(page, lambda: page.keyboard.press("Escape"))
        enlarge(page, lambda: page.keyboard.press("Enter"))
        page.set_input_files("#images", [file(picture(), f"{i}.png") for i in range(5)])
        expect(page.locator(DRAFTED)).to_have_count(5)
        page.locator("[aria-label='Remove 2.png']").focus()
        page.keyboard.press("Enter")
        expect(page.locator(DRAFTED)).to_have_count(4)
        fits = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
        for scheme, width in (("light", 1280), ("dark", 1280), ("dark", 360)):
            page.emulate_media(color_scheme=scheme)
            page.set_viewport_size({"width": width, "height": 860})
            assert grave(page) == [], (scheme, width)
            assert page.evaluate(fits), width
            page.click(".question .thumbnail")
            expect(page.locator(".enlarged")).to_be_visible()
            assert grave(page) == [], (scheme, width, "enlarged")
            assert page.evaluate(fits), width
            page.keyboard.press("Escape")
