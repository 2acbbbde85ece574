"""`python -m tests.bench`: see `run.py`."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from slipstream.server.command.starting import be_considerate

    be_considerate()  # as the server
    from tests.bench.run import main

    sys.exit(main(sys.argv[1:]))
