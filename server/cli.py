"""The command `slipstream`: settings from flags, environment, TOML file, defaults, in that order; then serve.

The only module that reads the environment and the only one that reaches the engine's code.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from typing import Any, NoReturn

from engine.api import AsyncEngine
from engine.errors import SettingError
from engine.settings import Settings, check
from server import logs
from server.flags import OPTIONS, PREFIX, Option, merged
from server.serve import Load, run

CONFIG_ENV = PREFIX + "CONFIG"
METAVARS = {int: "N", int | None: "N", float: "X", float | None: "X"}
EXIT_INTERRUPTED = 130


def main() -> NoReturn:
    """The console command. Status: 0 stopped in order, 1 failed, 2 bad usage, 3 cannot load, 4 port taken."""
    start(sys.argv[1:], load)


def start(arguments: Sequence[str], load: Load) -> NoReturn:
    settings = read_settings(arguments, os.environ)
    logs.configure(settings.log_level)
    try:
        code = run(settings, load)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    logging.shutdown()
    sys.stdout.flush()
    if threading.active_count() > 1:
        # A load that was interrupted cannot be stopped and would keep the process; nothing is lost with it.
        os._exit(code)
    sys.exit(code)


def load(settings: Settings) -> AsyncEngine:
    """The engine. Imports torch, so it runs only after the port is open, and in a thread."""
    # Read when torch loads. Spinning threads make small operations crawl beside a busy neighbour.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from engine.service.launch import launch

    return launch(settings)


def read_settings(arguments: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Each setting from the first source that has it. Exits with status 2 on anything unknown or wrong."""
    parser = _parser()
    arguments = arguments[1:] if arguments[:1] == ["serve"] else arguments
    _refuse_joined(parser, arguments)
    flags = vars(parser.parse_args(arguments))
    # Compose files pass unset variables on as empty strings.
    named = {name: text for name, text in environ.items() if name.startswith(PREFIX) and text}
    config = named.pop(CONFIG_ENV, None)
    config = flags.pop("config", config)
    origins: dict[str, str] = {}
    try:
        settings = Settings(**merged(flags, named, config, origins))
        check(settings)
    except SettingError as error:
        parser.error(f"{error} (from {origins.get(error.setting, 'the defaults')})")
    except ValueError as error:
        parser.error(str(error))
    if not settings.model:
        parser.error("--model is needed: a folder with a checkpoint, or a hub name org/name")
    if settings.api_key is not None and not settings.api_key.replace(",", "").strip():
        parser.error("--api-key: no key in it")
    return settings


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slipstream",
        usage="slipstream [serve] -m MODEL [options]",
        description="An OpenAI-compatible server for language models with lossless speculative decoding.",
        epilog=f"Each setting can also be given as {PREFIX}NAME in the environment, or as name = value in a"
        " TOML file. A flag wins over the environment, the environment over the file.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"slipstream {_version()}")
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings", default=argparse.SUPPRESS)
    for name, options in groupby(OPTIONS, key=lambda one: one.group):
        group = parser.add_argument_group(name.lower())
        for option in options:
            _add(group, option)
    return parser


def _add(group: Any, option: Option) -> None:
    told = option.meta["meaning"].replace("%", "%%")
    if option.meta["choices"]:
        told += f": {', '.join(option.meta['choices'])}"
    if option.default not in (None, ""):
        told += f" (default: {option.default})"
    more: dict[str, Any] = {"metavar": METAVARS.get(option.kind, "TEXT")}
    if option.is_switch:
        more = {"action": argparse.BooleanOptionalAction}
    group.add_argument(*option.flags, dest=option.name, default=argparse.SUPPRESS, help=told, **more)


def _refuse_joined(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """`-ngl 5` must be unknown, not `-n gl`: argparse would split any word after a one-letter flag."""
    known = {flag for option in OPTIONS for flag in option.flags} | {"-h"}
    for word in arguments:
        if word[:1] == "-" and word[1:2].isalpha() and word.partition("=")[0] not in known:
            parser.error(f"unrecognized arguments: {word}")


def _version() -> str:
    try:
        return version("slipstream")
    except PackageNotFoundError:
        return "(not installed)"
