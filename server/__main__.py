"""The command `slipstream`, which `python -m slipstream.server` is too."""

from __future__ import annotations

import signal
import sys
from typing import NoReturn


def main() -> NoReturn:
    """As `cli.main`, whose imports take a second or more: a Ctrl-C in that time ends as quietly as later."""
    try:
        from slipstream.server.command import cli
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    cli.main()


if __name__ == "__main__":
    main()
