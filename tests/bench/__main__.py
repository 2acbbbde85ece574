"""`python -m tests.bench`: see `run.py`."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # As the server has them; read when torch loads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    from tests.bench.run import main

    sys.exit(main(sys.argv[1:]))
