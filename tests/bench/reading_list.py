"""What has to be read to follow one step with one draft: types, functions and files, counted while a request runs.

    python -m tests.bench.reading_list [--types auto] [--list]

A greedy request decodes in one slot of the demo model, once as on the CPU and once with passes launched behind unread
passes, as on a GPU. Counted is what the engine thread enters between a step's beginning and its end: functions defined
below engine/, the files they stand in, and the types defined below engine/ of what they are given and return.
Kernels are not counted: they are read by their signature. Comprehensions and lambdas belong to the function that holds
them.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from slipstream import engine as package
from slipstream.engine.api import Request, Sampling, Speculate
from slipstream.engine.core.engine import Engine
from slipstream.engine.service.run.thread import ThreadEngine
from slipstream.engine.service.start.launch import launch
from slipstream.engine.settings import Settings
from slipstream.engine.slot import Slot

ROOT = Path(__file__).parents[2]
ENGINE = Path(package.__file__).resolve().parent
NAME = package.__name__
PROMPT = "def add(first, second):\n    return first + second\n\n" * 4
N_TOKENS = 96


class ReadingList:
    """Functions, files and types that a thread has met while `watch` was its profile function."""

    def __init__(self) -> None:
        self.functions: set[tuple[str, str]] = set()  # file, qualified name
        self.types: set[str] = set()
        self.n_calls = 0
        self._known: dict[CodeType, str | None] = {}  # None: not below engine/

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.functions}

    def watch(self, frame: FrameType, event: str, value: Any) -> None:
        """As `sys.setprofile` calls it."""
        if event not in ("call", "return"):
            return
        file = self._file(frame.f_code)
        if file is None:
            return
        if event == "return":
            self._meet(value)
            return
        self.n_calls += 1
        self.functions.add((file, frame.f_code.co_qualname.split(".<locals>")[0]))
        for one in list(frame.f_locals.values()):
            self._meet(one)

    def _file(self, code: CodeType) -> str | None:
        if code not in self._known:
            path = Path(code.co_filename).resolve()
            is_ours = path.is_relative_to(ENGINE)
            self._known[code] = str(path.relative_to(ENGINE)) if is_ours else None
        return self._known[code]

    def _meet(self, value: Any) -> None:
        kind = value if isinstance(value, type) else type(value)
        if kind.__module__.split(".")[: NAME.count(".") + 1] == NAME.split("."):
            self.types.add(f"{kind.__module__}.{kind.__qualname__}")
        elif kind in (list, tuple) and value:
            self._meet(value[0])


def play(engine: ThreadEngine, types: tuple[str, ...], found: ReadingList) -> None:
    """One request, alone, step by step on the engine's thread."""
    core = engine._engine
    request = Request(
        id="reader",
        prompt=PROMPT,
        sampling=Sampling(temperature=0.0),
        speculate=Speculate(types=types),
        max_tokens=N_TOKENS,
    )
    prepared, _ = asyncio.run(engine._preparing.prepared(request, core.now()))
    slot = engine._slots.resolve(request, prepared)
    engine.on_thread(lambda: steps(core, slot, found))


def overlap(core: Engine) -> None:
    """From now on passes are launched behind unread passes, as on a GPU."""
    core.capacity = replace(core.capacity, overlaps=True)


@torch.inference_mode()
def steps(core: Engine, slot: Slot, found: ReadingList) -> None:
    core.add(slot)
    while core.busy:
        sys.setprofile(found.watch)
        try:
            core.step()
        finally:
            sys.setprofile(None)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--types", default="auto")
    parser.add_argument("--list", action="store_true", help="name them")
    options = parser.parse_args(arguments)
    engine = launch(
        Settings(
            model=str(ROOT / "demo" / "target"),
            model_draft=str(ROOT / "demo" / "draft"),
            parallel=1,
            spec_type=options.types,
        )
    )
    found = ReadingList()
    for prepare in (lambda core: None, overlap):
        prepare(engine._engine)
        play(engine, tuple(options.types.split(",")), found)
    asyncio.run(engine.close())
    print(f"{len(found.types)} types, {len(found.functions)} functions, {len(found.files)} files")
    if options.list:
        print("\n".join(["", *sorted(found.types), "", *(" ".join(one) for one in sorted(found.functions))]))


if __name__ == "__main__":
    main(sys.argv[1:])
