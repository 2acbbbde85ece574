"""A subcommand of `slipstream` as data, and how its command line is read."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, NoReturn

from slipstream.engine.errors import SettingError
from slipstream.engine.naming import did_you_mean
from slipstream.engine.settings import Settings
from slipstream.engine.settings_check import check
from slipstream.server import version
from slipstream.server.command.flags import BY_NAME, OPTIONS, PREFIX, Option, merged, variables
from slipstream.server.command.foreign_flags import Foreign
from slipstream.server.http import limits

CONFIG_ENV = PREFIX + "CONFIG"
# What people write behind a switch.
_TRUTHS = frozenset({"true", "false", "on", "off", "yes", "no", "1", "0"})
_METAVARS = {int: "N", int | None: "N", float: "X", float | None: "X"}
_SOURCES = (
    f"Each setting can also be given as {PREFIX}NAME in the environment, or as name = value in a TOML file (--config)."
    " A flag wins over the environment, the environment over the file."
)


def count(text: str) -> int:
    """A whole number of at least 1. Raises ValueError."""
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text}: must be a whole number of at least 1")
    return int(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """An option of a subcommand that is no setting."""

    flag: str
    meaning: str
    metavar: str | None = None  # None: a switch
    default: Any = None
    read: Callable[[str], Any] = str  # raises ValueError
    sets: str | None = None  # a setting that this is another way to give
    replaces_model: bool = False  # with it the subcommand wants no model

    @property
    def name(self) -> str:
        return self.flag.removeprefix("--").replace("-", "_")


CONFIG = Argument(flag="--config", metavar="FILE", meaning="TOML file with settings")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A command line that was read."""

    settings: Settings
    given: Mapping[str, str | bool]  # settings from the command line itself, as written
    own: Mapping[str, Any]  # the subcommand's arguments, by name
    idle: Mapping[str, str]  # flags that were accepted and have no effect, with the reason
    environ: Mapping[str, str]
    refuse: Callable[[str], NoReturn]  # prints usage and a reason; exits with status 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Subcommand:
    """A subcommand: what it is for, what it takes, and what it runs, which returns the exit status."""

    name: str
    usage: str
    summary: str  # a line in the list of all
    about: str
    run: Callable[[Call], int]
    settings: Sequence[str] = tuple(BY_NAME)
    arguments: Sequence[Argument] = ()
    foreign: Sequence[Foreign] = ()
    positional: tuple[str, Sequence[str]] | None = None  # a word that is needed: its name and what it may be
    needs_model: bool = True
    statuses: str = ""  # what exit statuses mean

    @property
    def options(self) -> list[Option]:
        return [one for one in OPTIONS if one.name in self.settings]

    @property
    def all_arguments(self) -> list[Argument]:
        """Its own, behind the file that settings may come from. Where a `--config` is its own, that is another file."""
        has_file = bool(self.settings) and all(one.flag != CONFIG.flag for one in self.arguments)
        return [*([CONFIG] if has_file else []), *self.arguments]

    @property
    def flags(self) -> dict[str, bool]:
        """All flags it takes, each with whether it is a switch, which takes no value."""
        own = {one.flag: one.metavar is None for one in self.all_arguments}
        settings = {flag: one.is_switch for one in self.options for flag in one.flags}
        opposites = {one.no_flag: True for one in self.options if one.is_switch}
        foreign = {flag: one.value is None for one in self.foreign for flag in one.flags}
        return {"--help": False, **own, **settings, **opposites, **foreign}


def parser_of(command: Subcommand) -> argparse.ArgumentParser:
    """The parser of a subcommand's line."""
    epilog = " ".join(filter(None, [_SOURCES if command.settings else "", command.statuses]))
    parser = argparse.ArgumentParser(
        prog=f"slipstream {command.name}",
        usage=f"slipstream {command.name} {command.usage}",
        description=command.about,
        epilog=epilog,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"slipstream {version()}")
    if command.positional is not None:
        word, choices = command.positional
        parser.add_argument(word, choices=choices)
    for one in command.all_arguments:
        _add_argument(parser, one)
    for name, options in groupby(command.options, key=lambda one: one.group):
        group = parser.add_argument_group(name.lower())
        for option in options:
            _add_option(group, option)
    if command.foreign:
        others = parser.add_argument_group("of llama-server")
        for foreign in command.foreign:
            _add_foreign(others, foreign)
    return parser


def _add_foreign(group: Any, one: Foreign) -> None:
    more: dict[str, Any] = {"action": "store_const", "const": ""}
    if one.value is not None:
        more = {"metavar": one.value} | ({"nargs": "?", "const": ""} if one.is_optional else {})
    group.add_argument(*one.flags, dest=one.flags[0], default=argparse.SUPPRESS, help=one.meaning, **more)


def _add_argument(parser: argparse.ArgumentParser, one: Argument) -> None:
    if one.metavar is None:
        parser.add_argument(one.flag, dest=one.name, action="store_true", help=one.meaning)
        return

    def read(text: str) -> Any:
        try:
            return one.read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    told = one.meaning if one.default is None else f"{one.meaning} (default: {one.default})"
    default = argparse.SUPPRESS if one.sets is not None else one.default
    parser.add_argument(one.flag, dest=one.name, metavar=one.metavar, type=read, default=default, help=told)


def _add_option(group: Any, option: Option) -> None:
    told = option.meta["meaning"].replace("%", "%%")
    if option.meta["choices"]:
        told += f": {', '.join(option.meta['choices'])}"
    if option.default not in (None, ""):
        told += f" (default: {option.default})"
    more: dict[str, Any] = {"metavar": _METAVARS.get(option.kind, "TEXT")}
    if option.is_switch:
        more = {"action": argparse.BooleanOptionalAction}
    group.add_argument(*option.flags, dest=option.name, default=argparse.SUPPRESS, help=told, **more)


def parsed(command: Subcommand, words: Sequence[str], environ: Mapping[str, str]) -> Call:
    """The call that a command line means. Exits with status 2 if anything in it or in its sources is wrong."""
    parser = parser_of(command)
    _refuse_unknown(parser, command, words)
    _refuse_values_of_switches(parser, command, words)
    found = vars(parser.parse_args(words))
    own = {one.name: found.pop(one.name) for one in command.all_arguments if one.sets is None}
    config = own.pop(CONFIG.name, None)
    if command.positional is not None:
        own[command.positional[0]] = found.pop(command.positional[0])
    for one in command.arguments:
        if one.sets is not None and one.name in found:
            if one.sets in found:
                parser.error(f"{BY_NAME[one.sets].flags[0]} and {one.flag}: give one of them")
            found[one.sets] = found.pop(one.name)
    idle = {one.flags[0]: one.reason for one in command.foreign if one.flags[0] in found and one.reason}
    found = _translated(parser, command, found)
    settings = _settings(parser, found, config, environ) if command.settings else Settings()
    does_without = any(one.replaces_model and own[one.name] is not None for one in command.arguments)
    if command.needs_model and not (settings.model or does_without):
        parser.error("--model is needed: a GGUF file, a folder with a checkpoint, or a hub name org/name")
    return Call(settings=settings, given=found, own=own, idle=idle, environ=environ, refuse=parser.error)


def _translated(
    parser: argparse.ArgumentParser, command: Subcommand, found: Mapping[str, Any]
) -> dict[str, Any]:
    """What was found, with other servers' flags as settings; flags of our own win over those."""
    names = {one.flags[0] for one in command.foreign}
    changes: dict[str, Any] = {}
    for one in command.foreign:
        if one.flags[0] in found:
            try:
                changes |= one.read(found[one.flags[0]])
            except ValueError as error:
                parser.error(f"{one.flags[0]} {error}")
    return changes | {name: value for name, value in found.items() if name not in names}


def _refuse_unknown(parser: argparse.ArgumentParser, command: Subcommand, words: Sequence[str]) -> None:
    """Exit with status 2 on a flag that is none, with the flag it may mean. argparse would read `-ngl` as `-n gl`."""
    known = {*command.flags, "-h", "--version"}
    for word in words:
        if word == "--":
            return
        flag = word.partition("=")[0]
        if (word[:2] == "--" or (word[:1] == "-" and word[1:2].isalpha())) and flag not in known:
            parser.error(f"unrecognized arguments: {word}{did_you_mean(flag, known)}")


def _refuse_values_of_switches(
    parser: argparse.ArgumentParser, command: Subcommand, words: Sequence[str]
) -> None:
    """Exit with status 2 on `--exact=true` and `--exact true`: argparse would not say what to write instead."""
    switches = {flag for flag, is_switch in command.flags.items() if is_switch}
    for word, after in pairwise([*words, ""]):
        if word == "--":
            return
        flag, sign, value = word.partition("=")
        if flag not in switches or not (sign or after.lower() in _TRUTHS):
            continue
        name = flag.removeprefix("--no-").removeprefix("--")
        other = f"--{name}" if flag == f"--no-{name}" else f"--no-{name}"
        hint = f", or {other} for the opposite" if other in switches else ""
        parser.error(f"{flag} {value if sign else after}: a switch takes no value; write {flag} alone{hint}")


def _settings(
    parser: argparse.ArgumentParser, flags: Mapping[str, Any], config: str | None, environ: Mapping[str, str]
) -> Settings:
    """The settings of these flags and the other sources, checked. Exits with status 2 if any is unknown or wrong."""
    named = variables(environ)
    in_environ = named.pop(CONFIG_ENV, None)
    origins: dict[str, str] = {}
    try:
        values = merged(flags, named, in_environ if config is None else config, origins)
        if values.get("ctx_size") == 0:  # llama.cpp's way to say: the model's
            del values["ctx_size"]
        settings = Settings(**values)
        check(settings)
        limits.check(settings)
    except SettingError as error:
        parser.error(f"{error} (from {origins.get(error.setting, 'the defaults')})")
    except ValueError as error:
        parser.error(str(error))
    return settings
