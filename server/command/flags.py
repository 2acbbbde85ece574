"""The settings as options of the command line: each option's flags, environment variable, TOML key and group, derived
from the fields of `engine.settings.Settings`; and the merging of values from these three sources.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from slipstream.engine.naming import closest, did_you_mean
from slipstream.engine.settings import Settings
from slipstream.server.report.logs import printable

PREFIX = "SLIPSTREAM_"
# The ends of names of variables by which Kubernetes tells containers of a Service.
_OF_SERVICE = re.compile(r"SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_[A-Z]+(_(ADDR|PORT|PROTO))?")
_SECRETS = frozenset({"api_key"})
_SHOWN = 64  # characters of a wrong value
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
OTLP_ENV = "OTEL_EXPORTER_OTLP_ENDPOINT"  # OpenTelemetry's own name for --otlp-endpoint
BY_ENV = {OTLP_ENV: BY_NAME["otlp_endpoint"]} | {one.env: one for one in OPTIONS}


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
            value = "" if option.name in _SECRETS else f" {_shown(raw, typed=typed)}"
            raise ValueError(f"{option.flags[0]}{value} (from {origin}): {error}") from None

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


def _shown(raw: object, *, typed: bool) -> str:
    """A wrong value in a message, cut short: a flag's or a variable's text, or (`typed`) what a file has, as JSON."""
    text = json.dumps(raw, ensure_ascii=False, default=str) if typed else str(raw)
    return printable(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…") or "''"


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of the environment that are meant for settings, known or not.

    Without those that Kubernetes sets wherever a Service is called slipstream, or slipstream-NAME.
    """
    # Compose files pass unset variables on as empty strings.
    named = {name: text for name, text in environ.items() if name.startswith(PREFIX) and text}
    host = "SERVICE_HOST"
    services = [name.removesuffix(host) for name in named if name.endswith(f"_{host}")]
    # First, so that our own name of the same setting wins.
    others = {name: text for name in (OTLP_ENV,) if (text := environ.get(name))}
    return others | {
        name: text
        for name, text in named.items()
        if not any(name.startswith(one) and _tells(name.removeprefix(one), text) for one in services)
    }


def _tells(end: str, text: str) -> bool:
    """Whether this end of a variable's name, with this value, tells of a Service. PORT may be a setting, too."""
    return bool(_OF_SERVICE.fullmatch(end)) or (end == "PORT" and "://" in text)


def _file(config: str | None) -> dict[str, Any]:
    if config is None:
        return {}
    try:
        return tomllib.loads(Path(config).read_text(encoding="utf-8-sig"))  # Windows' editors write a BOM
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{config}: {error}") from None
