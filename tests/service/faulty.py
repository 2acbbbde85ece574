"""The server on the demo pair with an engine that breaks: `python -m tests.service.faulty [options]`.

The prompt `BREAK error` makes the engine's step raise, `BREAK exit` ends its thread by SystemExit, each after the
requests beside it have had a few steps; `BREAK hang` makes the step last for ever. `BREAK device` makes every pass
raise from then on, as a CUDA context does that an illegal access has spoiled.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from slipstream.engine.api import AsyncEngine
from slipstream.engine.settings import Settings
from tests.commanded import start

STEPS_BEFORE = 10
CAUSES: dict[str, Callable[[], BaseException]] = {
    "error": lambda: RuntimeError("a fault that was put in"),
    "exit": lambda: SystemExit(3),
    "hang": lambda: TimeoutError(time.sleep(600)),
    "device": lambda: RuntimeError("CUDA error: an illegal memory access was encountered"),
}


def load(settings: Settings) -> AsyncEngine:
    from slipstream.engine.core import forward
    from slipstream.engine.service.start.launch import launch

    served = launch(settings)
    engine: Any = served._engine
    step, add = engine.step, engine.add
    broken: list[Callable[[], BaseException]] = []
    n_since = 0

    def counting(slot: Any) -> None:
        add(slot)
        broken.extend(CAUSES[name] for name in CAUSES if slot.request.prompt == f"BREAK {name}")

    def breaking() -> Any:
        nonlocal n_since
        n_since += bool(broken)
        if n_since > STEPS_BEFORE and broken[0] is not CAUSES["device"]:
            raise broken[0]()
        return step()

    launch_pass = forward._launch

    def on_a_device(*arguments: Any) -> None:
        if n_since > STEPS_BEFORE and broken[0] is CAUSES["device"]:
            raise broken[0]()
        launch_pass(*arguments)

    forward._launch = on_a_device

    engine.step, engine.add = breaking, counting
    return served


if __name__ == "__main__":
    start(sys.argv[1:], load)
