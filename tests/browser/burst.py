"""How the page bears long replies: `python -m tests.browser.burst` streams 20,000 tokens at 500 a second and as fast as
they go, and tells the longest task, how long stopping takes, nodes, ranges and memory. Wants a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

from slipstream.engine.api import Delta, Request
from tests.browser.conftest import CHROMIUM
from tests.browser.driving import as_tokens, opened, say
from tests.http.fake import FakeEngine, Step, done
from tests.http.serving import served

SOURCES = ("suffix", "suffix", "draft-model", None)
WATCHED = """() => {
    window.tasks = [];
    new PerformanceObserver(seen => window.tasks.push(...seen.getEntries().map(one => one.duration)))
        .observe({ type: 'longtask', buffered: true });
}"""
WEIGHED = """() => ({
    nodes: document.querySelectorAll('*').length,
    ranges: [...CSS.highlights.values()].reduce((sum, one) => sum + one.size, 0),
    heap_mb: Math.round((performance.memory?.usedJSHeapSize ?? 0) / 1e5) / 10,
    tasks: window.tasks.length,
    longest_ms: Math.round(Math.max(0, ...window.tasks)),
})"""


def pieces(kind: str) -> Iterator[str]:
    """Tokens without end: prose with Markdown, one block of code, or one line."""
    if kind == "code":
        yield "```python\n"
    i = 0
    while True:
        i += 1
        if kind == "line" or i % 12:
            yield f" word{i % 97}"
        elif kind == "prose":
            yield "\n\n## Title " if i % 240 == 0 else "\n\n- **bold** `code`" if i % 36 == 0 else ".\n"
        else:
            yield " = 1  # done\n"


def long_reply(n: int, rate: float | None, kind: str) -> Callable[[Request], Iterator[Step]]:
    """A script of n tokens in steps of four, so many a second; None: as fast as they are taken."""

    def script(request: Request) -> Iterator[Step]:
        source = pieces(kind)
        for i in range(0, n, 4):
            some = tuple(next(source) for _ in range(4))
            if rate:
                yield 4 / rate
            yield Delta("".join(some), tuple(range(i % 900, i % 900 + 4)), SOURCES, some)
        yield done(request, n)

    return script


def stopped(page: Any) -> float:
    """Milliseconds from the click on Stop until the page takes the next message."""
    return page.evaluate(
        """() => new Promise(then => {
            const send = document.querySelector('#send'), start = performance.now();
            new MutationObserver(() => send.textContent === 'Send' && then(performance.now() - start))
                .observe(send, { characterData: true, childList: true, subtree: true });
            send.click();
        })"""
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--kinds", nargs="*", default=["prose", "code", "line"])
    parser.add_argument("--rate", type=float, default=500)
    given = parser.parse_args()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        for kind in given.kinds:
            for rate in (given.rate, None):
                for tokens in (False, True):
                    told = _measured(browser, given.tokens, rate, kind, tokens=tokens)
                    sys.stdout.write(json.dumps(told) + "\n")
                    sys.stdout.flush()
        browser.close()


def _measured(browser: Any, n: int, rate: float | None, kind: str, *, tokens: bool) -> dict[str, Any]:
    """A reply of which the last hundred tokens do not come: it is stopped."""
    script = long_reply(n, rate, kind)

    def endless(request: Request) -> Iterator[Step]:
        *steps, _ = script(request)
        yield from steps
        yield 60.0

    with served(FakeEngine(script=endless)) as server:
        page = browser.new_page(viewport={"width": 1280, "height": 860})
        opened(page, server)
        painted = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime")
        page.evaluate(WATCHED)
        tracing = Tracing(page)
        say(page, "hello")
        if tokens:
            page.wait_for_selector(".answer")
            as_tokens(page)
        shown = f"{n:,} tokens"
        page.wait_for_function(
            "shown => document.querySelector('.figures')?.textContent.startsWith(shown)",
            arg=shown,
            timeout=300_000,
        )
        page.wait_for_timeout(500)
        told = {
            "kind": kind,
            "rate": rate,
            "view": "tokens" if tokens else "text",
            "paint_ms": round(painted),
        }
        told |= {"stop_ms": round(stopped(page))}
        page.wait_for_timeout(1000)
        told |= _work(tracing.tasks_ms(page))
        page.context.new_cdp_session(page).send("HeapProfiler.collectGarbage")
        told |= page.evaluate(WEIGHED)
        page.close()
        return told


class Tracing:
    """Chromium's own record of the page's tasks, with the CPU time of each: what another program takes is not in it."""

    def __init__(self, page: Any) -> None:
        self._session = page.context.new_cdp_session(page)
        self._events: list[dict[str, Any]] = []
        self._is_over = False
        self._session.on("Tracing.dataCollected", lambda got: self._events.extend(got["value"]))
        self._session.on("Tracing.tracingComplete", lambda _: setattr(self, "_is_over", True))
        wanted = {"includedCategories": ["toplevel", "__metadata"], "recordMode": "recordContinuously"}
        self._session.send("Tracing.start", {"traceConfig": wanted, "transferMode": "ReportEvents"})

    def tasks_ms(self, page: Any) -> list[float]:
        """CPU milliseconds of every task of the page's main thread."""
        self._session.send("Tracing.end")
        while not self._is_over:
            page.wait_for_timeout(50)
        mains = {
            (one["pid"], one["tid"])
            for one in self._events
            if one["name"] == "thread_name" and one["args"]["name"] == "CrRendererMain"
        }
        return [
            one["tdur"] / 1000
            for one in self._events
            if one["name"].endswith("RunTask") and (one["pid"], one["tid"]) in mains and "tdur" in one
        ]


def _work(tasks: list[float]) -> dict[str, Any]:
    return {"cpu_longest_ms": round(max(tasks)), "cpu_over_50_ms": sum(one > 50 for one in tasks)}


if __name__ == "__main__":
    main()
