"""Rules of the project that a machine can hold: imports, signatures, sizes, names, generated text."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from slipstream import kernels
from tests.conftest import BARE_NAMES

ROOT = Path(__file__).parents[1]
CODE = ("server", "engine", "kernels")
# The names that several files have: in which folders such a file may lie, and what it is everywhere. A name that is not
# here belongs to one file, so that it can be found, and spoken of, without its folder.
OPERATOR, DIALECT = "kernels/[^/]+", "server/(anthropic|native|openai|responses)"
CONVENTIONS = {
    "__init__": (".+", "what the folder is for"),
    "op": (OPERATOR, "signature and meaning"),
    "reference": (OPERATOR, "the definition in plain torch"),
    "cpu": (OPERATOR, "the version compiled by numba"),
    "cuda": (OPERATOR, "the launches of the version in CUDA C++"),
    "triton": (OPERATOR, "the version in Triton"),
    "panels": (OPERATOR, "products on CPUs with AVX2 or AVX-512"),
    "spans": (OPERATOR, "the ragged rows of a pass, as the operator sees them"),
    "state": (OPERATOR, "what is kept between passes"),
    "walk": (OPERATOR, "the loop over one span on the CPU"),
    "routes": (DIALECT, "the endpoints"),
    "wire": (DIALECT, "what clients may send"),
    "replies": (f"{DIALECT}|server/report", "what the endpoints answer"),
    "proof": (OPERATOR, "on what the operator proves itself"),
    "registry": ("engine/(models|speculate)", "a row for each family, for each drafter"),
}


def modules() -> Iterator[Path]:
    for folder in CODE:
        yield from sorted((ROOT / folder).rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(parsed(path)))


def imported_by(statement: str) -> set[str]:
    """Top-level modules in memory after a statement, in a fresh interpreter."""
    code = f"{statement}; import sys; print(' '.join({{name.split('.')[0] for name in sys.modules}}))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(run.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import slipstream.server.http.app",
        "import slipstream.engine.api, slipstream.engine.settings, slipstream.engine.errors",
    ],
)
def test_http_code_and_public_types_load_no_torch(statement: str) -> None:
    assert not {"torch", "numba", "transformers", "tokenizers"} & imported_by(statement)


def test_kernels_is_cheap_to_import() -> None:
    assert not {"torch", "numba"} & imported_by("import slipstream.kernels")


@pytest.mark.parametrize("name", BARE_NAMES)
def test_a_bare_name_does_not_import(name: str) -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(name)


def test_no_line_imports_a_bare_name() -> None:
    """ruff's ban does not reach tests, demo and the files that may read the environment."""
    bare = re.compile(rf"^\s*(?:import|from)\s+(?:{'|'.join(BARE_NAMES)})\b", re.MULTILINE)
    found = {
        str(path.relative_to(ROOT))
        for folder in (*CODE, "slipstream", "demo", "tests")
        for path in (ROOT / folder).rglob("*.py")
        if bare.search(path.read_text())
    }
    assert found == {"tests/wheel/probe.py"}  # runs where `kernels` is Hugging Face's


@pytest.mark.parametrize("folder", kernels.OPS)
def test_every_implementation_has_the_signature_of_its_op(folder: str) -> None:
    from slipstream.kernels.dispatch import Op

    op_module = importlib.import_module(f"slipstream.kernels.{folder}.op")
    ops = [value for value in vars(op_module).values() if isinstance(value, Op)]
    assert ops
    for op in ops:
        assert "reference" in op.implementations
        meant = list(inspect.signature(op.__wrapped__).parameters.values())
        for name in op.implementations:
            found = list(inspect.signature(op.load(name)).parameters.values())
            assert [(one.name, one.kind, one.default) for one in found] == [
                (one.name, one.kind, one.default) for one in meant
            ], f"{folder}.{name}"


def test_files_stay_small() -> None:
    long = {
        str(path.relative_to(ROOT)): n
        for path in modules()
        if (n := len(path.read_text().splitlines())) > 400
    }
    assert not long


def test_functions_stay_small() -> None:
    long = {}
    for path in modules():
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                n_lines = node.end_lineno - node.lineno + 1
                if n_lines > 60:
                    long[f"{path.relative_to(ROOT)}:{node.name}"] = n_lines
    assert not long


def test_no_module_hides_what_it_holds() -> None:
    vague = {"utils", "util", "helpers", "common", "manager", "base", "misc", "v2"}
    assert not [path for path in modules() if path.stem in vague]


def test_files_of_one_name_mean_one_thing() -> None:
    paths: dict[str, list[Path]] = {}
    for path in modules():
        paths.setdefault(path.stem, []).append(path.relative_to(ROOT))
    doubles = {stem: found for stem, found in paths.items() if len(found) > 1}
    assert set(doubles) == set(CONVENTIONS), "rename a new file, drop a convention out of use"
    for stem, found in doubles.items():
        where, meaning = CONVENTIONS[stem]
        outside = [path for path in found if not re.fullmatch(where, path.parent.as_posix())]
        assert not outside, f"{stem} is {meaning}, in {where}"


def test_the_page_says_who_may_import_whom() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    ladder = re.search(r"top to bottom:\n(.*?)\nengine ─►", page, flags=re.DOTALL)
    assert ladder is not None
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (one["layers"] for one in contracts if one["name"] == "the engine is a ladder")
    assert [" ".join(step.split()) for step in ladder[1].split("►")] == layers
    shared = re.search(r"^server ─► engine\.{(.*)} only", page, flags=re.MULTILINE)
    assert shared is not None
    told = {f"slipstream.engine.{name}" for name in shared[1].split(", ")}
    apart = {ROOT / "server" / name for name in ("vision", "cluster", "command")}
    plain = [
        path for path in modules() if path.is_relative_to(ROOT / "server") and not apart & {*path.parents}
    ]
    nodes = [node for path in plain for node in ast.walk(ast.parse(path.read_text()))]
    used = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {name for name in used if name.startswith("slipstream.engine")} == told


def test_every_module_says_what_it_is_for() -> None:
    assert not [
        str(path.relative_to(ROOT))
        for path in modules()
        if path.read_text().strip() and ast.get_docstring(parsed(path)) is None
    ]


# Where time comes from the engine's clock alone, which tests wind; see docs/architecture.md.
BY_THE_CLOCK = (
    "core",
    "speculate",
    "sample",
    "cache",
    "models",
    "layers",
    "service/run",
    "slot.py",
    "batch.py",
)


def test_the_step_reads_no_other_clock() -> None:
    files = [
        path
        for place in BY_THE_CLOCK
        for path in sorted((ROOT / "engine" / place).rglob("*.py")) or [ROOT / "engine" / place]
    ]
    assert len(files) > 80
    told = re.compile(r"\b(import time|from time|import datetime|from datetime)\b")
    assert not [str(path) for path in files if told.search(path.read_text(encoding="utf-8"))]


def test_nothing_is_ever_unpickled() -> None:
    for path in modules():
        for node in nodes(path):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                assert not {"pickle", "marshal", "shelve", "dill"} & set(names), path
            if isinstance(node, ast.Attribute) and node.attr == "load" and isinstance(node.value, ast.Name):
                assert node.value.id != "torch", path


def test_what_contributing_quotes_is_in_the_files() -> None:
    quoted = re.findall(r"```diff\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    assert quoted
    for change in quoted:
        for path, lines in re.findall(
            r"^\+\+\+ b/(\S+)\n((?:[+ ](?!\+\+ ).*\n|\+\n)+)", change, re.MULTILINE
        ):
            text = (ROOT / path).read_text()
            for run in re.findall(r"(?:^\+.*\n)+", lines, re.MULTILINE):
                assert re.sub(r"^\+", "", run, flags=re.MULTILINE) in text, f"{path}: {run}"


def test_weights_stay_small() -> None:
    assert sum(path.stat().st_size for path in (ROOT / "demo").rglob("*.safetensors")) <= 35 * 2**20
