"""The operations of a soak, by kind. Each is what one client does next; it returns in a word how it ended.

One that raises has found something: `Lost`, `Fault`, `Different`, or an error of the connection, which is a loss.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial

import httpx

from tests.attack.cases import CASES, Target, request, unread
from tests.fuzz.mutate import Mutator
from tests.fuzz.requests import TURNS
from tests.soak import replies
from tests.soak.bodies import BODIES, CHAT, TEXT, Body, long
from tests.soak.client import Client, judged
from tests.soak.replies import Different, Fault, Lost

Work = Callable[[Client], Awaitable[str]]
STATUS_PATHS = (
    "/v1/models",
    "/props",
    "/health",
    "/live",
    "/ping",
    "/version",
    "/load",
    "/metrics",
    "/slots",
    "/speculation",
    "/openapi.json",
)
LULL_EVERY_S, LULL_S = 60.0, 6.0  # every so often slots are idle for a while, as most clients are
REST_S = 0.5  # of a client whose connection failed, lest a server that is gone is asked without end
N_FILES = 3  # of saved slots, per key
# Requests that are refused: path, body, status, code.
REFUSED: tuple[tuple[str, Body, int, str], ...] = (
    (TEXT, {"prompt": "x", "temperature": -1}, 400, "invalid_value"),
    (TEXT, {"prompt": "x", "mirostat": 2}, 400, "unsupported_value"),
    (TEXT, {"prompt": "x", "suffix": "y"}, 400, "unsupported_value"),  # the demo has no tokens for it
    (TEXT, {"prompt": "x" * 40_000}, 400, "context_length_exceeded"),
    (TEXT, {"prompt": [7] * 5000}, 400, "context_length_exceeded"),
    (TEXT, {"prompt": "x", "grammar": "root ::= ("}, 400, "invalid_value"),
    (TEXT, {"prompt": "x", "speculative": {"types": ["no-such"]}}, 400, "unsupported_value"),
    (TEXT, {"prompt": "x", "n": 1000}, 400, "invalid_value"),
    (CHAT, {"messages": []}, 400, "invalid_value"),
    ("/v1/embeddings", {"input": "x"}, 404, "not_supported"),
    ("/infill", {"input_prefix": "x", "input_suffix": "y"}, 400, "unsupported_value"),
)


async def text(client: Client, kind: str) -> str:
    """A reply of one kind, whole or streamed; its text is compared where it is known."""
    kind, number, path, body = client.draw(kind)
    if client.dice.random() < 0.5:
        said = await client.whole(path, body)
    else:
        async with client.stream(path, body) as lines:
            said = await replies.streamed(lines)
    client.compare(kind, number, said, body)
    return "whole"


async def slow_reader(client: Client) -> str:
    """A stream that is read with pauses."""
    kind, number, path, body = client.draw()

    async def slowly(lines: AsyncIterator[str]) -> AsyncIterator[str]:
        async for line in lines:
            yield line
            await asyncio.sleep(client.dice.choice((0, 0, 0.01, 0.1)))

    async with client.stream(path, body) as lines:
        said = await replies.streamed(slowly(lines))
    client.compare(kind, number, said, body)
    return "whole"


async def leave_stream(client: Client) -> str:
    """Read some chunks of a stream, then close the connection."""
    *_, path, body = client.draw()
    async with client.stream(path, body) as lines:
        n_left = client.dice.randint(1, 12)
        async for _ in lines:
            n_left -= 1
            if not n_left:
                break
    await client.reopen()
    return "whole" if n_left else "cancelled"


async def leave_early(client: Client) -> str:
    """Close the connection before the first byte of a reply: reset it, mostly while the request waits for a slot."""
    *_, path, body = client.draw()
    _, writer = await Target(client.site.url).connect()
    try:
        writer.write(request(path, json.dumps(body | {"stream": client.dice.random() < 0.5}).encode()))
        await writer.drain()
        await asyncio.sleep(client.dice.choice((0, 0.001, 0.05, 0.5)))
    finally:
        writer.transport.abort()
    return "cancelled"


async def leave_prompt(client: Client) -> str:
    """Close the connection after a moment, mostly while a long prompt is computed or waits."""
    path, body = long(client.dice)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(client.dice.uniform(0, 4)):
            await client.whole(path, body)
            return "whole"
    await client.reopen()
    return "cancelled"


async def unread_stream(client: Client) -> str:
    """Ask for streams, or for more than sockets hold, and read nothing for longer than the server waits."""
    target = Target(client.site.url)
    *_, path, body = client.draw()
    attack = client.dice.choice((CASES["unread replies"], unread(path, body | {"stream": True}, 3)))
    await attack(target)
    return next(iter(target.answers))


async def reconnect(client: Client) -> str:
    """A client that starts again: a new connection, then several in a row."""
    for _ in range(3):
        await client.reopen()
        await client.get("/health")
    return await text(client, "text")


async def tokens(client: Client) -> str:
    """Text to tokens and back."""
    asked = "".join(client.dice.choices(("def ", "é", "\n", "<|im_end|>", "x", "🙂", " "), k=50))
    told = await client.post("/tokenize", {"content": asked, "with_pieces": client.dice.random() < 0.2})
    ids = [one["id"] if isinstance(one, dict) else one for one in told["tokens"]]
    back = (await client.post("/detokenize", {"tokens": ids}))["content"]
    if back != asked:
        raise Fault(f"{asked!r} came back as {back!r}")
    return "whole"


async def template(client: Client) -> str:
    """A conversation as text, and its tokens counted."""
    prompt = (await client.post("/apply-template", {"messages": TURNS}))["prompt"]
    n_tokens = (await client.post(CHAT + "/input_tokens", {"messages": TURNS}))["input_tokens"]
    found = (await client.post("/tokenize", {"content": prompt, "parse_special": True}))["tokens"]
    if len(found) != n_tokens:
        raise Fault(f"{len(found)} tokens in the rendered prompt, {n_tokens} counted")
    return "whole"


async def slot_files(client: Client) -> str:
    """Save, restore or erase the first slot that can be: not while it is busy, nor with nothing cached."""
    action = client.dice.choice(("save", "save", "restore", "erase"))
    name = f"{client.key}-{client.dice.randrange(N_FILES)}"
    for slot in client.dice.sample(range(client.site.n_slots), client.site.n_slots):
        answer = await client.http.post(f"/slots/{slot}", params={"action": action}, json={"filename": name})
        if answer.status_code not in (200, 400) or judged(answer) is not None:
            raise Fault(f"{answer.status_code} {answer.content[:300]!r} to {action}")
        if answer.status_code == 200:
            return action
    return f"{action} refused"


async def status(client: Client) -> str:
    """A status page, and one that may say that no slot is idle."""
    await client.get(client.dice.choice(STATUS_PATHS))
    answer = await client.http.get("/slots", params={"fail_on_no_slot": "1"})
    if answer.status_code == 503 and answer.json()["error"]["code"] == "no_idle_slot":
        return "no idle slot"
    if answer.status_code != 200:
        raise Fault(f"{answer.status_code} {answer.content[:300]!r} to /slots")
    return "whole"


async def refused(client: Client) -> str:
    """A request that is wrong, or has a wrong key."""
    path, body, expected, code = client.dice.choice(REFUSED)
    key = client.key
    if client.dice.random() < 0.1:
        key, expected, code = "no-such", 401, "invalid_api_key"
    answer = await client.http.post(path, json=body, headers={"x-api-key": key})
    if answer.status_code != expected or judged(answer) or answer.json()["error"]["code"] != code:
        raise Fault(f"{answer.status_code} {answer.content[:300]!r} to {path} {str(body)[:200]}")
    return str(expected)


async def mutant(client: Client) -> str:
    """A damaged request of `make fuzz`."""
    path, data = Mutator(client.dice.randrange(2**32)).next()
    answer = await client.http.post(path, content=data, headers={"content-type": "application/json"})
    if (why := judged(answer)) is not None:
        raise Fault(f"{why}: {answer.status_code} {answer.content[:300]!r} to {path} {data[:300]!r}")
    return str(answer.status_code)


# Each with how often it is done, beside the others.
OPERATIONS: dict[str, tuple[Work, float]] = {
    **{kind: (partial(text, kind=kind), 4.0) for kind in BODIES},
    "slow reader": (slow_reader, 2.0),
    "left mid-stream": (leave_stream, 4.0),
    "left before the first byte": (leave_early, 3.0),
    "left during the prompt": (leave_prompt, 3.0),
    "unread": (unread_stream, 0.5),
    "reconnect": (reconnect, 1.0),
    "tokens": (tokens, 1.0),
    "template": (template, 1.0),
    "slot files": (slot_files, 2.0),
    "status": (status, 2.0),
    "refused": (refused, 3.0),
    "mutant": (mutant, 2.0),
}


async def perform(client: Client, kind: str) -> None:
    """One operation of a kind; how it ended is counted."""
    tally = client.site.tally
    try:
        tally.end(kind, await OPERATIONS[kind][0](client))
    except (Fault, Lost, Different) as error:
        tally.wrong(kind, error)
    except (httpx.HTTPError, OSError, ValueError, KeyError) as error:  # no answer, or one that cannot be read
        tally.wrong(kind, error)
        await client.reopen()
        await asyncio.sleep(REST_S)


async def operate(client: Client, kinds: Sequence[str], until_s: float, *, is_constant: bool) -> None:
    """Operations drawn at random until the clock (`time.monotonic`) says so; the last one is finished.

    is_constant: goes on while others rest.
    """
    weights = [OPERATIONS[kind][1] for kind in kinds]
    async with contextlib.aclosing(client):
        while (now := time.monotonic()) < until_s:
            if not is_constant and now % LULL_EVERY_S < LULL_S:
                await asyncio.sleep(REST_S)
                continue
            await perform(client, client.dice.choices(kinds, weights)[0])
