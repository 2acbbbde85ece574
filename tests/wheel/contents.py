"""Builds the wheel from a copy of the repository and compares its files with the repository's.

The folders server, engine and kernels have to be in it below `slipstream/`, whole, with the files of the page that are
served, and nothing else: a second top-level name could be another project's, as `kernels` is Hugging Face's.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from slipstream.server.http.web_page import FILES
from tests.process import ROOT

PACKAGE = "slipstream"
FOLDERS = ("server", "engine", "kernels")
PAGE = [f"webui/{name}" for name, _ in FILES.values()]  # without what these are built from
STAYS = (".md",)  # notes and measurements are for readers of the repository
# Weights are large, and a folder left over from an earlier build would be packed again.
NOT_COPIED = (".*", "__pycache__", "node_modules", "build", "dist", "*.egg-info", "*.safetensors")
BUILD_S = 300


def build(folder: Path, *options: str) -> Path:
    """The wheel, in `folder`; `options` are pip's."""
    source = folder / "source"
    shutil.copytree(ROOT, source, symlinks=True, ignore=_not_copied)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*pip, "wheel", "--no-deps", *options, "--wheel-dir", str(folder), str(source)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BUILD_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    (wheel,) = folder.glob("*.whl")
    return wheel


def faults(wheel: Path) -> list[str]:
    """Files that the wheel lacks, and files that it should not have."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
    found = {name for name in names if not name.partition("/")[0].endswith(".dist-info")}
    wanted = {f"{PACKAGE}/__init__.py", *_files(), *(f"{PACKAGE}/{name}" for name in PAGE)}
    return sorted(
        [f"lacks {name}" for name in wanted - found] + [f"should not have {name}" for name in found - wanted]
    )


def _files() -> Iterator[str]:
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            inside = path.relative_to(ROOT)
            hidden = any(part.startswith(".") or part == "__pycache__" for part in inside.parts)
            if path.is_file() and not hidden and path.suffix not in STAYS:
                yield f"{PACKAGE}/{inside.as_posix()}"


def _not_copied(folder: str, names: list[str]) -> set[str]:
    environments = {name for name in names if (Path(folder) / name / "pyvenv.cfg").exists()}
    return environments | shutil.ignore_patterns(*NOT_COPIED)(folder, names)
