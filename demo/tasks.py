"""Chat tasks cut from the Python standard library's own source.

Pure Python and deterministic: the same interpreter version and seed give the same tasks.
"""

from __future__ import annotations

import ast
import builtins
import keyword
import random
import re
import sysconfig
import textwrap
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

Split = Literal["train", "heldout"]
Kind = Literal["rename", "continue", "docstring"]

# One module in sixteen is never trained on.
HELDOUT_SHARE = 16
MAX_LINE_CHARS = 100
MAX_LINES = 80
RESERVED = (
    frozenset(keyword.kwlist) | frozenset(keyword.softkwlist) | frozenset(dir(builtins)) | {"self", "cls"}
)
CONSONANTS = "bcdfghjklmnprstvwxz"
VOWELS = "aeiou"
WORD_LIST = """
account action age alpha amount answer array author base batch block body bound box branch bucket
buffer cache call cell chain chunk client code color column command config context copy core count
cursor data date day delta depth device digest domain edge element entry error event factor field
file filter flag folder format frame group handle head height host index info item job key kind
label layer left level limit line link list lock log loop map mark mask match member memory message
method mode model module month name node number offset option order output owner page pair parent
part path pattern peer phase pixel place point pool port prefix price process queue range rate
record region reply report request result right root round row rule sample scale score seed segment
sender shape shift side signal size slot socket source space speed stack stage start state step
stream string style suffix sum table tag target task temp text thread time title token total tree
type unit update user value vector version view weight width window word worker year zone
"""
WORDS = tuple(WORD_LIST.split())


@dataclass(frozen=True)
class Function:
    """A dedented function of the standard library, with what the tasks need to know about it."""

    module: str
    source: str
    # Local names and parameters whose every textual occurrence is that variable.
    renamable: tuple[str, ...]
    docstring: str | None
    # First and last line (from 1) of the docstring statement, or (0, 0).
    docstring_lines: tuple[int, int]

    @property
    def line_count(self) -> int:
        return self.source.count("\n") + 1


@dataclass(frozen=True)
class Task:
    """One chat prompt and the answer it expects."""

    kind: Kind
    prompt_messages: list[dict[str, str]]
    reference: str


def stdlib_files() -> list[Path]:
    """The library's modules in a stable order, without third-party packages."""
    root = Path(sysconfig.get_path("stdlib"))
    files = (path for path in root.rglob("*.py") if "site-packages" not in path.relative_to(root).parts)
    return sorted(files)


def module_split(module: str) -> Split:
    """Which side of the split a module is on; test modules are for training only."""
    parts = Path(module).parts
    if {"test", "tests", "idle_test"} & set(parts):
        return "train"
    return "heldout" if zlib.crc32(module.encode()) % HELDOUT_SHARE == 0 else "train"


def modules(split: Split) -> list[Path]:
    """The files of a split."""
    root = Path(sysconfig.get_path("stdlib"))
    return [path for path in stdlib_files() if module_split(path.relative_to(root).as_posix()) == split]


def module_sources(split: Split) -> Iterator[tuple[str, str]]:
    """Yield (relative path, text) of every readable ASCII module of a split."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in modules(split):
        try:
            text = path.read_text("ascii")
        except (UnicodeDecodeError, OSError):
            continue
        yield path.relative_to(root).as_posix(), text


@cache
def functions(split: Split) -> tuple[Function, ...]:
    """Every usable function of a split, without duplicates, in a stable order.

    A function that also appears in a training module is left out of the held-out split.
    """
    seen: set[str] = {function.source for function in functions("train")} if split == "heldout" else set()
    found: list[Function] = []
    for module, text in module_sources(split):
        for function in functions_of(module, text):
            if function.source not in seen:
                seen.add(function.source)
                found.append(function)
    return tuple(found)


def functions_of(module: str, text: str) -> Iterator[Function]:
    """The usable functions and methods of a module's text."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = text.split("\n")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
            function = _function_from(module, lines[node.lineno - 1 : node.end_lineno])
            if function is not None:
                yield function


def _function_from(module: str, lines: list[str]) -> Function | None:
    if not 2 <= len(lines) <= MAX_LINES or max(map(len, lines)) > MAX_LINE_CHARS:
        return None
    source = textwrap.dedent("\n".join(line.rstrip() for line in lines))
    if "\t" in source or not source.startswith("def "):
        return None
    try:
        node = ast.parse(source).body[0]
    except (SyntaxError, ValueError):
        return None
    if not isinstance(node, ast.FunctionDef):
        return None
    docstring = ast.get_docstring(node)
    first = node.body[0]
    span = (first.lineno, first.end_lineno or first.lineno) if docstring else (0, 0)
    return Function(module, source, _renamable(node, source), docstring, span)


def _renamable(node: ast.FunctionDef, source: str) -> tuple[str, ...]:
    """Variables for which replacing the whole word everywhere is a correct rename."""
    uses: dict[str, int] = {}
    bound: set[str] = set()
    for child in ast.walk(node):
        if isinstance(child, ast.Name):
            uses[child.id] = uses.get(child.id, 0) + 1
            if isinstance(child.ctx, ast.Store):
                bound.add(child.id)
        elif isinstance(child, ast.arg):
            uses[child.arg] = uses.get(child.arg, 0) + 1
            bound.add(child.arg)
        elif isinstance(child, ast.Global | ast.Nonlocal):
            return ()
    names = (name for name in sorted(bound - RESERVED) if uses[name] >= 2)
    return tuple(name for name in names if len(word(name).findall(source)) == uses[name])


def word(name: str) -> re.Pattern[str]:
    """A pattern of the identifier as a whole word."""
    return re.compile(rf"\b{re.escape(name)}\b")


def rename(source: str, old: str, new: str) -> str:
    """The source with every whole-word occurrence of an identifier replaced."""
    return word(old).sub(new, source)


def new_identifier(source: str, rng: random.Random) -> str:
    """A random identifier, half invented and half of known words, that the source does not contain."""
    while True:
        if rng.random() < 0.5:
            pairs = (rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(rng.randint(1, 4)))
            name = "".join(pairs) + rng.choice(("", rng.choice(CONSONANTS)))
        else:
            name = "_".join(rng.choice(WORDS) for _ in range(rng.randint(1, 2)))
        if name not in RESERVED and name not in source:
            return name


def rename_task(function: Function, rng: random.Random) -> Task:
    """Ask for the function with one of its variables renamed."""
    old = rng.choice(function.renamable)
    new = new_identifier(function.source, rng)
    return rename_text(function.source, old, new)


def rename_text(source: str, old: str, new: str) -> Task:
    """The rename task over any piece of code."""
    prompt = f"Rename `{old}` to `{new}` in this function:\n{source}"
    return _task("rename", prompt, rename(source, old, new))


def continue_task(function: Function, rng: random.Random) -> Task:
    """Show the first lines of the function and ask for the rest."""
    lines = function.source.split("\n")
    shown = rng.randint(1, max(1, 2 * len(lines) // 3))
    return _task("continue", "Continue this code:\n" + "\n".join(lines[:shown]), "\n".join(lines[shown:]))


def docstring_task(function: Function) -> Task:
    """Show the function without its docstring and ask for it."""
    if function.docstring is None:
        raise ValueError("the function has no docstring")
    first, last = function.docstring_lines
    lines = function.source.split("\n")
    prompt = "Write the docstring of this function:\n" + "\n".join(lines[: first - 1] + lines[last:])
    return _task("docstring", prompt, function.docstring)


def _task(kind: Kind, prompt: str, reference: str) -> Task:
    return Task(kind, [{"role": "user", "content": prompt}], reference)
