"""The command line's server loop over a fake engine, for tests of signals and exit statuses.

`SLOW_LOAD` in the model's name delays loading, `BROKEN` makes it fail; streams take about a second,
or no time with `FAST`.
"""

from __future__ import annotations

import sys
import time

from slipstream.engine.api import AsyncEngine
from slipstream.engine.errors import UnsupportedModel
from slipstream.engine.settings import Settings
from slipstream.server.command import standard_streams
from slipstream.server.command.starting import start
from tests.http.fake import FakeEngine, words


def load(settings: Settings) -> AsyncEngine:
    if "SLOW_LOAD" in settings.model:
        time.sleep(20)
    if "BROKEN" in settings.model:
        raise UnsupportedModel(f"{settings.model}: no such architecture")
    if "CRASH" in settings.model:
        raise ZeroDivisionError("a fault of ours")
    delay_s = 0.0 if "FAST" in settings.model else 0.25
    engine = FakeEngine(script=lambda request: words(request, delay_s=delay_s))
    if "DYING" in settings.model:
        engine.status = "failed"
    return engine


if __name__ == "__main__":
    standard_streams.hold()
    start(sys.argv[1:], load)
