"""Who wrote a token: tints, letters, marks of steps, rejected drafts, details, and that all of it can be read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from slipstream.engine.api import Delta, Request
from tests.browser.driving import as_tokens, ask, opened, painted, says, wait_for_paint
from tests.browser.told import STEPS, told
from tests.http.fake import FakeEngine, Step, done
from tests.http.serving import served

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect

PIECES = [piece for step in STEPS for piece in step.kept]


@pytest.fixture
def asked(page: Any, request: pytest.FixtureRequest) -> Any:
    """The page with a reply whose every step is known."""
    with served() as server:
        server.engine.script = told(n_merged=getattr(request, "param", 1))
        opened(page, server)
        ask(page, "hello")
        yield page


@pytest.mark.parametrize("asked", [1, 2, 9], indirect=True)
def test_the_tokens_are_exact(asked: Any) -> None:
    """However many steps a chunk holds."""
    as_tokens(asked)
    tokens = asked.locator(".token").evaluate_all(
        "all => all.map(one => [one.dataset.source, one.lastChild.data, one.classList.contains('first')])"
    )
    sources = [one for step in STEPS for one in [step.drafter] * step.n_accepted + ["target"]]
    firsts = [i == 0 for step in STEPS for i, _ in enumerate(step.kept)]
    assert tokens == [
        [*one] for one in zip(sources, [piece.replace("\n", "↵\n") for piece in PIECES], firsts, strict=True)
    ]
    letters = asked.locator(".token sup").all_inner_texts()
    assert letters == ["D", "S"]


def test_rejected_drafts_stand_before_what_the_target_chose(asked: Any) -> None:
    as_tokens(asked)
    rejected = asked.locator("del").evaluate_all(
        """all => all.map(one => [one.lastChild.data, one.className,
            one.nextElementSibling.matches('.token') ? one.nextElementSibling.lastChild.data : null])"""
    )
    assert rejected == [["items", "", "values"], ["1", "", None], ["]", "later", None], ["↵", "later", "]"]]
    # As many as the reply's figures say.
    assert len(rejected) == sum(len(step.drafted) - step.n_accepted for step in STEPS)


def test_the_tints_of_the_text_are_the_tokens_sources(asked: Any) -> None:
    assert painted(asked, "ink-draft-model") == " first("
    assert painted(asked, "ink-suffix") == "):\n|    return items"


def details(page: Any, *texts: str) -> None:
    """Wait until the details of a token say all of this."""
    for text in texts:
        expect(page.locator(".inspector.shown")).to_contain_text(text)


def is_at(page: Any, number: int) -> None:
    """Wait until the details are those of this token."""
    expect(page.locator(".inspector.shown .muted").first).to_have_text(f"token {number}")


def test_a_token_is_explained_under_the_pointer_and_at_a_tap(asked: Any) -> None:
    wait_for_paint(asked, "ink-draft-model")
    box = asked.evaluate(
        """() => { const [one] = CSS.highlights.get('ink-draft-model'), range = document.createRange();
            range.setStart(one.startContainer, one.startOffset + 2);
            range.setEnd(one.startContainer, one.startOffset + 3);
            const { x, y, width, height } = range.getBoundingClientRect(); return [x + width / 2, y + height / 2]; }"""
    )
    asked.mouse.move(*box)
    details(
        asked,
        "·first",
        "guessed by draft-model, token 1 of 3 drafted",
        "draft-model drafted 3, 2 accepted. Rejected: “items”; the target chose “values”.",
    )
    asked.mouse.move(5, 5)
    expect(asked.locator(".inspector.shown")).to_have_count(0)
    as_tokens(asked)
    asked.locator(".token").nth(9).click()
    details(asked, "written by the target itself", "Nothing drafted: drafters had no guess.")


@pytest.mark.parametrize("view", ["Text", "Tokens"])
def test_arrow_keys_go_through_the_tokens(asked: Any, view: str) -> None:
    if view == "Tokens":
        as_tokens(asked)  # waits for them: what a click has just put there hears no keys yet
    asked.locator(".answer .body, .answer .tokens").focus()
    asked.keyboard.press("ArrowRight")
    is_at(asked, 1)
    asked.keyboard.press("ArrowRight")
    details(asked, "guessed by draft-model")
    asked.keyboard.press("End")
    is_at(asked, len(PIECES))
    asked.keyboard.press("ArrowLeft")
    details(asked, "no guess")
    asked.keyboard.press("Escape")
    expect(asked.locator(".inspector.shown")).to_have_count(0)


def test_end_comes_to_the_last_token_that_has_a_text(page: Any) -> None:
    def ends(request: Request) -> Iterator[Step]:
        yield Delta("one two", (10, 11, 2), (None, None, None), ("one", " two", ""))
        yield done(request, 3)

    with served(FakeEngine(script=ends)) as server:
        opened(page, server)
        ask(page, "hello")
        expect(page.locator(".answer .body")).to_have_text("one two")
        page.press(".answer .body", "End")
        is_at(page, 2)


def test_a_server_that_tells_no_steps(page: Any) -> None:
    """Tokens that came together are taken for a step."""
    with served(FakeEngine(script=says("one two three four"))) as server:
        opened(page, server)
        ask(page, "hello")
        as_tokens(page)
        marks = page.locator(".token").evaluate_all("all => all.map(one => one.classList.contains('first'))")
        assert marks == [True, False, True, False]
        page.locator(".token").first.hover()
        expect(page.locator(".inspector.shown")).to_have_text(re.compile("guessed by draft-model$"))


CONTRASTS = """() => {
    const context = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
    const probe = document.body.appendChild(document.createElement('i'));
    const light = name => {
        probe.style.color = `var(--${name})`;
        context.fillStyle = getComputedStyle(probe).color;
        context.fillRect(0, 0, 1, 1);
        const parts = [...context.getImageData(0, 0, 1, 1).data].slice(0, 3).map(one => one / 255);
        const [r, g, b] = parts.map(one => one <= .04045 ? one / 12.92 : ((one + .055) / 1.055) ** 2.4);
        return .2126 * r + .7152 * g + .0722 * b;
    };
    const all = [...document.styleSheets].flatMap(sheet => [...sheet.cssRules]).map(rule => rule.cssText).join(' ');
    const inks = [...new Set([...all.matchAll(/highlight\\(ink-([\\w-]+)\\)/g)].map(one => one[1]))]
        .filter(one => one !== 'current');
    const texts = ['text', ...new Set([...all.matchAll(/--(code-[\\w]+):/g)].map(one => one[1]))];
    const found = [];
    const pairs = [...inks, 'page', 'card', 'sunk'].flatMap(back =>
        [...texts, ...(inks.includes(back) ? [] : ['muted'])].map(text => [back, text]));
    for (const [back, text] of pairs) {
        const [low, high] = [light(back), light(text)].sort((a, b) => a - b);
        found.push([back, text, (high + .05) / (low + .05)]);
    }
    probe.remove();
    return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_on_every_tint(page: Any, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    with served() as server:
        opened(page, server)
        found = page.evaluate(CONTRASTS)
        assert len({back for back, _, _ in found}) >= 18
        assert [one for one in found if one[2] < 4.5] == []


def test_forced_colours_leave_letters_and_lines(asked: Any) -> None:
    asked.emulate_media(forced_colors="active")
    expect(asked.locator("#legend i")).to_have_text(["", "P", "D", "N"])
    # Text is the system's on the system's, not as if it were selected, and lines differ by drafter.
    told = asked.evaluate(
        """() => ['draft-model', 'suffix'].map(one => {
            const style = getComputedStyle(document.querySelector('.answer .body'), `::highlight(ink-${one})`);
            const canvas = getComputedStyle(document.body);
            return [style.backgroundColor === canvas.backgroundColor, style.textDecorationStyle];
        })"""
    )
    assert told == [[True, "double"], [True, "solid"]]
    as_tokens(asked)
    assert asked.locator(".token sup").first.is_visible()
    lines = asked.locator(".token").evaluate_all(
        """all => all.map(one => [one.dataset.source, getComputedStyle(one).borderBottomStyle,
            getComputedStyle(one).borderBottomColor !== 'rgba(0, 0, 0, 0)'].join())"""
    )
    assert set(lines) == {"target,solid,false", "draft-model,double,true", "suffix,solid,true"}
