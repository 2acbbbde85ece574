"""Draft heads for tests, by the name of the drafter that uses them: what loads a folder of each kind.

Of the demo's DSpark the repository holds one half in each of two folders; it is put together while it is loaded.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from demo import assemble_dspark
from slipstream.engine.models.heads.dflash import load_dflash
from slipstream.engine.models.heads.dspark import load_dspark
from slipstream.engine.models.heads.eagle3 import load_eagle3
from slipstream.engine.models.heads.mtp import load_mtp
from slipstream.engine.models.network import Network

LOADERS: Mapping[str, Callable[..., Any]] = {
    "draft-eagle3": load_eagle3,
    "draft-mtp": load_mtp,
    "draft-dflash": load_dflash,
    "draft-dspark": load_dspark,
}


def load_head(name: str, folder: Path, target: Network, n_ctx: int) -> Any:
    """The draft network of a folder; n_ctx: positions it covers, the last block included."""
    if folder != assemble_dspark.FOLDER / "dspark":
        return LOADERS[name](folder, target, n_ctx)
    with tempfile.TemporaryDirectory(prefix="slipstream-") as scratch:
        return LOADERS[name](assemble_dspark.assemble(Path(scratch)), target, n_ctx)
