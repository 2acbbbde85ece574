"""`python -m tests.bench`: see `run.py`."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the server has it; read when torch loads
    from tests.bench.run import main

    sys.exit(main(sys.argv[1:]))
