"""What a test file is about: itself, and what it names in its own imports.

Nearly every test of the engine runs nearly the whole engine, so what a test *runs* says little about which test a
change calls for. What it names does: the operator, the layer, the other test files that it takes its cases from. A test
that runs what it does not import says so: `ABOUT = ("kernels/**/*.cu",)`, patterns of files.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Folders whose files are one thing: a module of theirs stands for all, sources in other languages included.
UNIT = re.compile(r"kernels/[^/]+|tests/emulator")
SUFFIXES = (".py", ".cu", ".cuh", ".cpp", ".h")


def subjects(test: Path, root: Path = ROOT) -> list[Path]:
    """The files a test file is about, itself first, the others sorted. Both are absolute."""
    tree = ast.parse(test.read_text(encoding="utf-8"))
    found = {path for module in _imported(tree) for path in _sources(module, root)}
    found.update(path for pattern in _declared(tree) for path in root.glob(pattern))
    return [test, *sorted(found - {test})]


def digest(test: Path, root: Path = ROOT) -> str:
    """16 hex digits of the names and contents of what a test file is about."""
    made = hashlib.sha256()
    for path in subjects(test, root):
        made.update(f"{path.relative_to(root).as_posix()}\0{_digest(path)}\0".encode())
    return made.hexdigest()[:16]


@cache
def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _declared(tree: ast.Module) -> Iterator[str]:
    """The patterns of `ABOUT`."""
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="ABOUT")]):
                yield from ast.literal_eval(node.value)


def _imported(tree: ast.Module) -> Iterator[str]:
    """Names that are modules, or stand in one, wherever in the file they are imported."""
    for node in _statements(tree.body):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _statements(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Those of a body and of all bodies in it, expressions aside: with `ast.walk` this takes three times as long."""
    for node in body:
        yield node
        for inner in ("body", "orelse", "handlers", "finalbody", "cases"):
            if isinstance(part := getattr(node, inner, None), list):
                yield from _statements(part)


def _sources(name: str, root: Path) -> Iterator[Path]:
    """The file of a dotted name, or of the module it stands in; all files of its folder where that is one thing."""
    path = _file(name, root) or _file(name.rpartition(".")[0], root)
    if path is None:
        return
    if UNIT.fullmatch(path.parent.relative_to(root).as_posix()):
        yield from (one for one in path.parent.rglob("*") if one.suffix in SUFFIXES)
    else:
        yield path


def _file(name: str, root: Path) -> Path | None:
    """The file of a module or a package of the project's; None for others' and for names that are neither."""
    if name.partition(".")[0] not in ("slipstream", "tests"):
        return None
    # `slipstream/` holds links; the files lie beside it.
    place = root / name.removeprefix("slipstream.").replace(".", "/")
    for path in (place.with_name(f"{place.name}.py"), place / "__init__.py"):
        if path.is_file():
            return path
    return None
