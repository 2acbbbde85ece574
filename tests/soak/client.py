"""A client of the soak: one connection, one API key, and what came of all it asked."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.fuzz.mutate import fault
from tests.soak import replies
from tests.soak.bodies import BODIES, Body, speculation
from tests.soak.replies import Choice, Different, Fault

SILENCE_S = 240.0  # without a byte that is awaited: by then a request is lost
N_KNOWN = 5  # requests of each kind whose text is known
KNOWN_SHARE = 0.6  # of the requests for text
MOST_NOTES = 20  # of each sort, in words

Known = dict[
    tuple[str, int], list[Choice]
]  # kind, number: what the reply said when the server did nothing else


@dataclass(slots=True)
class Tally:
    """How the operations ended, by kind, and what was wrong, in words."""

    ended: dict[str, Counter[str]] = field(default_factory=dict)
    n_compared: int = 0
    n_wrong: Counter[str] = field(default_factory=Counter)  # lost, different, fault
    notes: list[str] = field(default_factory=list)

    def end(self, kind: str, outcome: str) -> None:
        self.ended.setdefault(kind, Counter())[outcome] += 1

    def wrong(self, kind: str, error: Exception) -> None:
        """Count an operation that failed."""
        sort = {Different: "different", Fault: "fault"}.get(type(error), "lost")
        self.n_wrong[sort] += 1
        self.end(kind, sort)
        if self.n_wrong[sort] <= MOST_NOTES:
            self.notes.append(f"{sort} ({kind}): {type(error).__name__}: {error}")


@dataclass(slots=True)
class Site:
    """What all clients of a server know."""

    url: str
    drafters: list[str]
    n_slots: int
    n_known: int = N_KNOWN
    known: Known = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)


class Client:
    """Sends requests one after the other on one connection."""

    def __init__(self, site: Site, key: str, seed: str) -> None:
        self.site, self.key = site, key
        self.dice = random.Random(seed)
        self.http = self._opened()

    def _opened(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self.site.url,
            headers={"x-api-key": self.key},
            timeout=SILENCE_S,
            limits=httpx.Limits(max_connections=1),
        )

    async def aclose(self) -> None:
        await self.http.aclose()

    async def reopen(self) -> None:
        """Drop the connection; the next request makes a new one."""
        await self.http.aclose()
        self.http = self._opened()

    def draw(self, kind: str | None = None) -> tuple[str, int | None, str, Body]:
        """A request for text: its kind, its number if its text is known, path and body."""
        kind = kind or self.dice.choice(list(BODIES))
        number = self.dice.randrange(self.site.n_known) if self.dice.random() < KNOWN_SHARE else None
        path, body = request(kind, number) if number is not None else BODIES[kind](self.dice)
        return kind, number, path, body | speculation(self.dice, self.site.drafters)

    def compare(self, kind: str, number: int | None, said: list[Choice], body: Body) -> None:
        """Raises Different where the text is known, and is another."""
        if number is None:
            return
        self.site.tally.n_compared += 1
        if said != (before := self.site.known[kind, number]):
            raise Different(f"request {number}, {body.get('speculative')}: {said}; before: {before}")

    async def whole(self, path: str, body: Body) -> list[Choice]:
        """The choices of a reply in one piece."""
        return replies.whole(await self.post(path, body))

    @asynccontextmanager
    async def stream(self, path: str, body: Body) -> AsyncIterator[AsyncIterator[str]]:
        """The lines of a reply that is streamed."""
        asked = {**body, "stream": True, "stream_options": {"include_usage": self.dice.random() < 0.5}}
        async with self.http.stream("POST", path, json=asked) as answer:
            if answer.status_code != 200:
                raise Fault(f"{answer.status_code} {(await answer.aread())[:300]!r} to {path} {asked}")
            yield answer.aiter_lines()

    async def post(self, path: str, body: Mapping[str, Any], expected: int = 200) -> Any:
        """The JSON of an answer. Raises Fault for any other status than the one expected, or a broken answer."""
        answer = await self.http.post(path, json=body)
        if answer.status_code != expected or judged(answer) is not None:
            raise Fault(f"{answer.status_code} {answer.content[:300]!r} to {path} {str(body)[:600]}")
        return answer.json()

    async def get(self, path: str) -> Any:
        """The JSON of a status page, or its text."""
        answer = await self.http.get(path)
        if answer.status_code != 200:
            raise Fault(f"{answer.status_code} {answer.content[:300]!r} to {path}")
        is_json = answer.headers["content-type"].startswith("application/json")
        return answer.json() if is_json else answer.text


def judged(answer: httpx.Response) -> str | None:
    """What is wrong with an answer to a post, as `make fuzz` sees it."""
    try:
        return fault(answer.status_code, answer.headers.get("content-type", ""), answer.content)
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


def request(kind: str, number: int) -> tuple[str, Body]:
    """The known request of this kind and number; always the same."""
    return BODIES[kind](random.Random(f"{kind} {number}"))


async def learn(site: Site, key: str) -> None:
    """Ask for the texts that are known from now on, one after the other and without drafts."""
    client = Client(site, key, "known")
    async with aclosing(client):
        for kind in BODIES:
            for number in range(site.n_known):
                path, body = request(kind, number)
                site.known[kind, number] = await client.whole(path, body | {"speculative": {"types": "none"}})
