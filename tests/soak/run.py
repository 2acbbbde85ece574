"""The soak itself: texts learnt, clients at work, samples taken, and a look at what is left."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from tests.attack.neighbour import ARGUMENTS, ATTACKER, NEIGHBOUR
from tests.fuzz.mutate import aftermath
from tests.process import Running
from tests.soak.bodies import BODIES
from tests.soak.client import N_KNOWN, Client, Site, Tally, learn
from tests.soak.operations import OPERATIONS, operate, perform
from tests.soak.replies import Fault
from tests.soak.samples import Sample, Watch
from tests.soak.verdict import failures

N_CONSTANT = 4  # clients that go on while the others rest
N_SAMPLES, MOST_APART_S = 360, 5.0
SETTLE_S = 30.0
# Small in all that can run out: pages for hardly two whole contexts, so that prefixes are evicted and slots preempted.
LIMITS = ("--ctx-size", "1024", "--cache-size", "10", "--max-queue", "10000")
DRAFTERS = "suffix,ngram-simple,ngram-map-k,ngram-map-k4v,ngram-mod,ngram-cache,draft-model"


# What comes first, so that every worker thread is there before the load: they are started where others are busy.
AT_FIRST = (*BODIES, "tokens", "template", "slot files", "status", "refused")
N_AT_ONCE, LONG_TEXT = 32, "def " * 10_000


@dataclass(frozen=True, slots=True)
class Course:
    """What a run was."""

    tally: Tally
    before: Sample
    samples: Sequence[Sample]  # under load
    after: Sample
    seconds: float  # of load

    def failures(self) -> list[str]:
        return failures(self.tally, self.before, self.samples, self.after)


def arguments(n_slots: int, folder: str) -> tuple[str, ...]:
    """Arguments of the server; folder: for saved slots."""
    return (
        *(*ARGUMENTS, *LIMITS, "-np", str(n_slots), "--spec-type", DRAFTERS),
        *("--slot-save-path", folder),
    )


async def soak(
    server: Running,
    seconds: float,
    n_connections: int,
    kinds: Sequence[str] = tuple(OPERATIONS),
    n_known: int = N_KNOWN,
) -> Course:
    """Load a server for these seconds with operations of these kinds, and see what is left.

    n_known: requests of each kind of text whose replies are compared.
    """
    async with contextlib.aclosing(Watch(server)) as watch:
        site = await _site(server, watch, n_known)
        before = await _settled(server, watch, site.tally)
        watch.begin()
        started = time.monotonic()
        looking = asyncio.create_task(watch.go_on(min(MOST_APART_S, seconds / N_SAMPLES)))
        async with asyncio.TaskGroup() as clients:
            for number in range(n_connections):
                client = Client(site, (ATTACKER, NEIGHBOUR)[number % 2], str(number))
                clients.create_task(
                    operate(client, kinds, started + seconds, is_constant=number < N_CONSTANT)
                )
        seconds = time.monotonic() - started
        looking.cancel()
        for error in await asyncio.gather(looking, return_exceptions=True):
            if isinstance(error, Exception):
                site.tally.wrong("samples", error)
        under_load = list(watch.samples)
        after = await _settled(server, watch, site.tally, before)
    return Course(site.tally, before, under_load, after, seconds)


async def _site(server: Running, watch: Watch, n_known: int) -> Site:
    """The server with its texts learnt. By then it has started what it starts at first use: threads, a child."""
    props = await watch.get("/props")
    site = Site(server.url, props["speculation"]["drafters"], props["total_slots"], n_known)
    await learn(site, NEIGHBOUR)
    await watch.post("/slots/0?action=save", {"filename": "first"})  # all ran there, one after the other

    async def once(kind: str) -> None:
        async with contextlib.aclosing(Client(site, ATTACKER, kind)) as client:
            await perform(client, kind)

    async with asyncio.TaskGroup() as clients:
        for kind in AT_FIRST:
            clients.create_task(once(kind))
        for _ in range(N_AT_ONCE):
            clients.create_task(watch.get("/speculation"))
            clients.create_task(watch.post("/tokenize", {"content": LONG_TEXT}))
    return site


async def _settled(server: Running, watch: Watch, tally: Tally, like: Sample | None = None) -> Sample:
    """A look at the server at rest: once it holds no more than `like`, or after SETTLE_S."""
    end = time.monotonic() + SETTLE_S
    try:
        if (held := await asyncio.to_thread(aftermath, server.url, NEIGHBOUR, SETTLE_S)) is not None:
            tally.wrong("the end", Fault(held))
        sample = await _look(watch)
        while not _is_at_rest(sample, like) and time.monotonic() < end:
            await asyncio.sleep(0.5)
            before, sample = sample, await _look(watch)
            like = like or before
    except (httpx.HTTPError, http.client.HTTPException, OSError) as error:
        tally.wrong("the end", error)
    return watch.samples[-1]


async def _look(watch: Watch) -> Sample:
    """A sample, once AnyIO has ended threads that were idle for ten seconds: it does so when one has worked."""
    await watch.get("/openapi.json")
    return await watch.look()


def _is_at_rest(sample: Sample, like: Sample | None) -> bool:
    names = ("n_files", "n_threads", "n_children", "n_pages_held")
    return like is not None and all(getattr(sample, name) <= getattr(like, name) for name in names)
