"""The settings as options of the command line: each option's flags, environment variable, TOML key and group, derived
from the fields of `engine.settings.Settings`; and the merging of values from these three sources.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from slipstream.engine.naming import closest, did_you_mean
from slipstream.engine.settings import Settings

PREFIX = "SLIPSTREAM_"
# The first setting of each group; the order is that of the dataclass.
GROUP_STARTS = {
    "model": "Model",
    "spec_type": "Speculation",
    "ctx_size": "Capacity",
    "seed": "Defaults of requests",
    "host": "Server",
}


@dataclass(frozen=True, slots=True)
class Option:
    """A setting with its names in every source."""

    name: str
    kind: Any  # the type, as annotated
    default: Any
    meta: Mapping[str, Any]
    group: str

    @property
    def flags(self) -> tuple[str, ...]:
        """The long name first, then llama.cpp's."""
        return (f"--{self.name.replace('_', '-')}", *self.meta["flags"])

    @property
    def no_flag(self) -> str:
        """What switches it off, if it is a switch."""
        return f"--no-{self.name.replace('_', '-')}"

    @property
    def env(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def is_switch(self) -> bool:
        return self.kind is bool

    def read(self, raw: object, *, typed: bool) -> Any:
        """The value of `raw`: text from a flag or variable, or (`typed`) a value from TOML. Raises ValueError."""
        try:
            return TypeAdapter(self.kind, config=ConfigDict(allow_inf_nan=False)).validate_python(
                raw, strict=typed
            )
        except ValidationError as error:
            raise ValueError(error.errors()[0]["msg"]) from None


def _options() -> tuple[Option, ...]:
    hints = get_type_hints(Settings)
    options, group = [], ""
    for one in dataclasses.fields(Settings):
        group = GROUP_STARTS.get(one.name, group)
        options.append(Option(one.name, hints[one.name], one.default, one.metadata, group))
    return tuple(options)


OPTIONS = _options()
BY_NAME = {one.name: one for one in OPTIONS}
BY_ENV = {one.env: one for one in OPTIONS}


def merged(
    flags: Mapping[str, Any], named: Mapping[str, str], config: str | None, origins: dict[str, str]
) -> dict[str, Any]:
    """The values of all sources: flags win over the environment, the environment over the file.

    `flags`: by setting; `named`: environment variables; `config`: the TOML file's path. Writes to `origins` where each
    value is from. Raises ValueError for an unknown name, and for a wrong value even where another source wins.
    """
    values: dict[str, Any] = {}

    def take(option: Option, raw: object, origin: str, *, typed: bool = False) -> None:
        origins[option.name] = origin
        try:
            values[option.name] = option.read(raw, typed=typed)
        except ValueError as error:
            raise ValueError(f"{option.flags[0]} (from {origin}): {error}") from None

    for key, value in _file(config).items():
        name = key.replace("-", "_")
        if name not in BY_NAME or name in values:
            hint = did_you_mean(name, BY_NAME)
            raise ValueError(
                f"{config}: " + (f"given twice: {key}" if name in BY_NAME else f"unknown key {key}{hint}")
            )
        take(BY_NAME[name], value, str(config), typed=True)
    for variable, text in named.items():
        if variable not in BY_ENV:
            found = closest(variable.removeprefix(PREFIX), BY_NAME)
            hint = "" if found is None else f"; did you mean {BY_NAME[found].env}?"
            raise ValueError(f"unknown environment variable {variable}{hint}")
        take(BY_ENV[variable], text, variable)
    for name, value in flags.items():
        take(BY_NAME[name], value, "the command line")
    return values


def _file(config: str | None) -> dict[str, Any]:
    if config is None:
        return {}
    try:
        return tomllib.loads(Path(config).read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{config}: {error}") from None
