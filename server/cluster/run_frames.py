"""What replicas and ingresses send each other while requests run, as JSON. Nothing is unpickled.

A frame is about one run: a request at one replica. A message is a list of frames, with its length before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass

from slipstream.engine import errors
from slipstream.engine.api import Delta, Done, Echo, Event, Failed, Progress, Request
from slipstream.engine.errors import EngineError, EngineFault
from slipstream.engine.stats import EngineStats

_LENGTH = 4  # bytes of a message's length
_LONGEST = 1 << 30  # bytes of a message

_JSON = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64", ser_json_inf_nan="constants")


@dataclass(frozen=True, slots=True, config=_JSON)
class Assignment:
    """A request for one replica, and where its frames go. Travels with Ray's call."""

    run: str  # a name that no other run has, of this request or of another
    request: Request
    ingress: tuple[str, int]  # host and port
    word: str  # that the ingress knows its replicas by
    fingerprint: str = ""  # of the model that earlier runs had; "": any
    alone: bool = False  # nothing else may run there


@dataclass(frozen=True, slots=True, config=_JSON)
class Ending:
    """How a replica's part in a run ended."""

    replica: str
    # Busy: a request has it to itself. Another model: not that of the fingerprint.
    outcome: Literal["over", "busy", "another_model"]


@dataclass(frozen=True, slots=True, config=_JSON)
class Admitted:
    """The run has its prompt. The fields of `EventStream`."""

    prompt_ids: tuple[int, ...]
    prompt_tail: str


@dataclass(frozen=True, slots=True, config=_JSON)
class Problem:
    """An error of the engine: its class by name, its words and what else it holds."""

    kind: str
    words: str
    more: Mapping[str, Any]


@dataclass(frozen=True, slots=True, config=_JSON)
class Answer:
    """What a method of a replica's engine returned or raised. Travels with Ray's call."""

    value: Any = None
    problem: Problem | None = None


@dataclass(frozen=True, slots=True, config=_JSON)
class Frame:
    """From a replica: what has happened to a run, one thing a frame; or the replica's state."""

    run: str = ""
    begun: bool = False  # the engine has been given it: from here on its replica's death may be its doing
    admitted: Admitted | None = None
    echo: Echo | None = None
    progress: Progress | None = None
    delta: Delta | None = None
    done: Done | None = None
    failed: Problem | None = None
    left: bool = False  # the replica gives it up in good order: it goes on elsewhere
    stats: EngineStats | None = None

    @property
    def event(self) -> Event | None:
        """The engine's event in it, if that is what it brings."""
        if self.failed is not None:
            return Failed(error_of(self.failed))
        return self.echo or self.progress or self.delta or self.done


Verb = Literal["finish", "cancel", "trust"]


@dataclass(frozen=True, slots=True, config=_JSON)
class Order:
    """From an ingress: to end a run once there is enough, to end it now, or to let others run beside it."""

    verb: Verb
    run: str


@dataclass(frozen=True, slots=True, config=_JSON)
class Hello:
    """A replica's first words on a connection: which ingress it means to speak to, and who it is."""

    word: str
    replica: str


FRAMES: TypeAdapter[list[Frame]] = TypeAdapter(list[Frame])
ORDERS: TypeAdapter[list[Order]] = TypeAdapter(list[Order])
HELLO: TypeAdapter[Hello] = TypeAdapter(Hello)


def frame_of(run: str, event: Event) -> Frame:
    """The frame that brings an event of the engine."""
    match event:
        case Delta():
            return Frame(run, delta=event)
        case Done():
            return Frame(run, done=event)
        case Failed():
            return Frame(run, failed=problem_of(event.error))
        case Echo():
            return Frame(run, echo=event)
        case Progress():
            return Frame(run, progress=event)


def problem_of(error: EngineError) -> Problem:
    kind = type(error).__name__
    more = {name: value for name, value in vars(error).items() if isinstance(value, str | int | float)}
    return Problem(kind, str(error), more)


def error_of(problem: Problem) -> EngineError:
    """The error again, of its own class and with its words."""
    kind = getattr(errors, problem.kind, EngineFault)
    error: EngineError = kind.__new__(kind, problem.words)
    vars(error).update(problem.more)
    return error


def write(writer: asyncio.StreamWriter, message: bytes) -> None:
    writer.write(len(message).to_bytes(_LENGTH, "little") + message)


async def read(reader: asyncio.StreamReader) -> bytes:
    """The next message. Raises `EOFError` once the other side is gone, also in the middle of one."""
    try:
        n = int.from_bytes(await reader.readexactly(_LENGTH), "little")
        if n > _LONGEST:
            raise EOFError(f"a message of {n} bytes")
        return await reader.readexactly(n)
    except (asyncio.IncompleteReadError, OSError) as error:
        raise EOFError(str(error)) from error
