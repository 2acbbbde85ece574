"""The command `slipstream`, which `python -m slipstream.server` is too."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import NoReturn


def main() -> NoReturn:
    """As `cli.main`, whose imports take a second or more: a Ctrl-C in that time ends as quietly as later."""
    later = signal.getsignal(signal.SIGINT)
    if later is signal.default_int_handler:  # and not ignored, as behind a shell's `&`
        # Libraries may swallow a KeyboardInterrupt while they are imported.
        signal.signal(signal.SIGINT, _leave)
    from slipstream.server.command import cli

    signal.signal(signal.SIGINT, later)
    cli.main()


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    os._exit(128 + number)


if __name__ == "__main__":
    main()
