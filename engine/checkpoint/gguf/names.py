"""Under which names, and in which form, transformers knows the tensors of a GGUF file.

Converters rename them, stack experts, and rearrange some for ggml's operators (llama.cpp's `conversion/`).
`dialects.py` says what that is for each architecture, as rules by the names that a layer's tensors have in the file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from slipstream.engine.checkpoint.gguf.header import Stored
from slipstream.engine.checkpoint.gguf.keys import Keys
from slipstream.engine.checkpoint.gguf.matrices import Matrix, Undo, as_it_is
from slipstream.engine.errors import LoadError

LAYER = re.compile(r"blk\.(\d{1,9})\.(.+)")
ENDINGS = (".weight", ".bias")
MOST_EXPERTS = 10_000  # each is a tensor of its own


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a tensor is made of what is stored."""

    stored: tuple[Stored, ...]
    shape: tuple[int, ...]
    part: int | None = None  # of stacks of matrices: which
    make: Callable[..., Matrix] = as_it_is  # of what is stored, in that order


@dataclass(frozen=True, slots=True)
class Rule:
    """What a layer's tensor is called, and what undoes its change."""

    name: str  # below the layer; {}: the number of an expert, each of which is a tensor of its own
    undo: Undo = as_it_is
    shape: Callable[[tuple[int, ...]], tuple[int, ...]] = tuple  # of the stored shape


Rules = Mapping[str, tuple[Rule, ...]]  # by the name in the file, whole or without its ending


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How the tensors of an architecture are called and were changed."""

    rules: Callable[[Keys], Rules]  # of a layer
    ends: Rules  # of what is in no layer
    # Tensors made of several: (of one layer, by their names in the file) -> (name, recipe).
    merged: Callable[[Mapping[str, Stored]], Iterator[tuple[str, Recipe]]] = lambda layer: iter(())
    block: str = "model.layers.{n}."  # what the names of layer n begin with
    # MTP layers follow the model's. {n}: their number in the file; {k}: their number among them.
    nextn_block: str = "model.layers.{n}."
    nextn_beside: str = "model.layers.{n}."
    nextn: Rules = field(default_factory=dict)  # of what is beside their block


def recipes(keys: Keys, dialect: Dialect) -> dict[str, Recipe]:
    """The tensors of a file by transformers' names. Those that no rule knows keep their own, and are found unused."""
    rules, n_layers = dialect.rules(keys), keys.n_layers
    found: dict[str, Recipe] = {}
    layers: dict[int, dict[str, Stored]] = {}
    for name, stored in keys.tensors.items():
        if (match := LAYER.fullmatch(name)) is None:
            made = _named(name, stored, dialect.ends, "")
        else:
            number, rest = int(match[1]), match[2]
            layers.setdefault(number, {})[rest] = stored
            block, beside = _prefixes(dialect, number, n_layers)
            known = [(rules, block), (dialect.nextn, beside)]
            # An MTP layer may have other names for what the model's layers have too.
            for some, prefix in known if number < n_layers else known[::-1]:
                if (made := _named(rest, stored, some, prefix)) is not None:
                    break
        found |= {name: Recipe((stored,), stored.shape)} if made is None else made
    for number, layer in layers.items():
        for name, recipe in dialect.merged(layer):
            found[dialect.block.format(n=number) + name] = recipe
            for one in recipe.stored:
                found.pop(one.name, None)
    return found


def names_in_file(name: str, rules: Rules, dialect: Dialect) -> str:
    """What a file would call a tensor that transformers knows by this name; the name itself if no rule makes it.

    rules: of a layer.
    """
    found = re.fullmatch(re.escape(dialect.block).replace(r"\{n\}", r"(\d+)") + "(.*)", name)
    prefix, rest, known = ("", name, dialect.ends) if found is None else (f"blk.{found[1]}.", found[2], rules)
    made = [
        f"{prefix}{stored}{ending}"
        for stored, some in known.items()
        for rule in some
        for ending in ("", *ENDINGS)
        if re.fullmatch(re.escape(rule.name + ending).replace(r"\{\}", r"\d+"), rest)
    ]
    return " or ".join(made) or name


def _prefixes(dialect: Dialect, number: int, n_layers: int) -> tuple[str, str]:
    """What the names of a layer's block begin with, and those of what is beside it."""
    if number < n_layers:
        return (dialect.block.format(n=number),) * 2
    prefixes = dialect.nextn_block, dialect.nextn_beside
    block, beside = (one.format(n=number, k=number - n_layers) for one in prefixes)
    return block, beside


def _named(name: str, stored: Stored, rules: Rules, prefix: str) -> dict[str, Recipe] | None:
    """What the rules make of one tensor; None if they do not know it."""
    ending = next((one for one in ENDINGS if name.endswith(one)), "")
    if name in rules:
        known, ending = rules[name], ""
    elif (stem := name.removesuffix(ending)) in rules:
        known = rules[stem]
    else:
        return None
    found = {}
    for rule in known:
        if "{}" not in rule.name:
            found[f"{prefix}{rule.name}{ending}"] = Recipe(
                (stored,), rule.shape(stored.shape), None, rule.undo
            )
            continue
        if len(stored.shape) != 3 or stored.shape[0] > MOST_EXPERTS:
            raise LoadError(
                f"{stored.where} has shape {list(stored.shape)}, experts must have three dimensions,"
                f" the first at most {MOST_EXPERTS}"
            )
        for i in range(stored.shape[0]):
            new = f"{prefix}{rule.name.format(i)}{ending}"
            found[new] = Recipe((stored,), rule.shape(stored.shape[1:]), i, rule.undo)
    return found
