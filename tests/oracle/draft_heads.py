"""Draft heads for tests, loaded as a server loads them.

Of the demo's DSpark the repository holds one half in each of two folders; it is put together while it is loaded.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from demo import assemble_dspark
from slipstream.engine.models.heads.head_choices import NO_CHOICE
from slipstream.engine.models.network import Network
from slipstream.engine.speculate.registry import NETWORKS


def load_head(name: str, folder: Path, target: Network, n_ctx: int) -> Any:
    """The draft network of a folder; n_ctx: positions it covers, the last block included."""
    load = NETWORKS[name].load
    assert load is not None
    if folder != assemble_dspark.FOLDER / "dspark":
        return load(folder, target, n_ctx, NO_CHOICE)
    with tempfile.TemporaryDirectory(prefix="slipstream-") as scratch:
        return load(assemble_dspark.assemble(Path(scratch)), target, n_ctx, NO_CHOICE)
