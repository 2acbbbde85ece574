"""What tests of the page do with it again and again."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from threading import Event
from typing import Any

from slipstream.engine.api import Delta, Request
from slipstream.engine.errors import EngineFault
from tests.http.fake import Step, delta, done
from tests.http.serving import Served
from tests.process import ROOT

AXE = ROOT / "webui" / "node_modules" / "axe-core" / "axe.min.js"

ANSWER = ".answer:not(.writing)"


def opened(page: Any, server: Served, path: str = "/") -> None:
    """Go to the page and wait until it can be written to."""
    page.goto(server.url + path)
    page.wait_for_selector("#send:not([disabled])")


def say(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def ask(page: Any, text: str) -> None:
    """Send a message and wait for the end of its answer."""
    n = page.locator(ANSWER).count()
    say(page, text)
    page.locator(ANSWER).nth(n).locator(".figures span").first.wait_for()


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


def says(text: str, reason: str = "stop") -> Callable[[Request], Iterator[Step]]:
    """A script that says the text word by word, every second one from a drafter."""

    def script(request: Request) -> Iterator[Step]:
        words = re.findall(r"\s*\S+\s*$|\s*\S+", text)
        for i in range(0, len(words), 2):
            pair = tuple(words[i : i + 2])
            yield Delta(
                "".join(pair), tuple(range(10, 10 + len(pair))), ("draft-model", None)[: len(pair)], pair
            )
        yield done(request, len(words), reason)

    return script


class Held:
    """A script that says a word and then waits to be let go on."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.go = Event()

    def __call__(self, request: Request) -> Iterator[Step]:
        yield delta("begun ")
        while not self.go.is_set():
            yield 0.02
        if self.fails:
            raise EngineFault("broken")
        yield delta("ended")
        yield done(request, 2)


def prompts(server: Served) -> list[list[tuple[str, str]]]:
    """What the engine was asked: roles and texts."""
    return [
        [(one["role"], one["content"]) for one in request.prompt.messages]
        for request in server.engine.requests
    ]


def wait_for_paint(page: Any, *names: str) -> None:
    """Wait until text lies in these custom highlights: a busy browser says late what is in sight."""
    page.wait_for_function("names => names.every(name => CSS.highlights.get(name)?.size)", arg=[*names])


def painted(page: Any, name: str) -> str:
    """The text that lies in a custom highlight, once there is some."""
    wait_for_paint(page, name)
    return page.evaluate(
        """name => [...(CSS.highlights.get(name) ?? [])].map(
            one => one.startContainer.data.slice(one.startOffset, one.endOffset)).join('|')""",
        name,
    )


def as_tokens(page: Any) -> None:
    """Show the last answer token by token."""
    page.locator(".views button:text-is('Tokens')").last.click()
    page.wait_for_selector(".tokens .token")


def grave(page: Any) -> list[Any]:
    """What axe finds, if it is installed (`npm ci` in webui)."""
    if not AXE.exists():
        return []
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    assert len(found["passes"]) > 10  # it has looked
    return [
        (one["id"], one["help"], [node["html"][:120] for node in one["nodes"]])
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
    ]
