"""The command `slipstream` and its subcommands. Settings come from flags, environment, TOML file and defaults, of which
the first that has a setting wins.

No other module of the server reads the environment or imports the engine's code, as opposed to its types.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

from slipstream.engine.api import AsyncEngine
from slipstream.engine.errors import LoadError, RequestError, SettingError
from slipstream.engine.settings import Settings, check
from slipstream.server import version
from slipstream.server.command import notify, standard_streams
from slipstream.server.command.flags import BY_NAME, OPTIONS, PREFIX, Option, merged
from slipstream.server.command.forecast_table import GPUS, memory_of, table
from slipstream.server.command.healthcheck import healthcheck
from slipstream.server.command.profile_table import prompts_of
from slipstream.server.command.profile_table import table as profile_table
from slipstream.server.command.serve import EXIT_CANNOT_LOAD, EXIT_FAILED, Load, run
from slipstream.server.http import limits
from slipstream.server.http.auth import keys_of
from slipstream.server.report import logs, tracing

CONFIG_ENV = PREFIX + "CONFIG"
METAVARS = {int: "N", int | None: "N", float: "X", float | None: "X"}
OTLP_ENV = "OTEL_EXPORTER_OTLP_ENDPOINT"  # OpenTelemetry's own name for --otlp-endpoint
EXIT_INTERRUPTED = 130
SWITCH_S = 0.0002  # a thread keeps the interpreter for this time while others wait; Python's own is 5 ms
# The settings that `plan` has flags for: those that decide what is held in memory.
PLANNED = (
    *("model", "model_draft", "dtype", "spec_type", "draft_max"),
    *("ctx_size", "cache_size", "kv_cache_dtype", "parallel", "batch_size"),
)

# The settings that `profile` has flags for: those that decide what a step computes, and on which device.
PROFILED = (
    *("model", "model_draft", "dtype", "device", "device_draft", "threads"),
    *("ctx_size", "cache_size", "kv_cache_dtype", "parallel"),
    *("batch_size", "spec_type", "spec_order", "spec_adaptive", "draft_max", "draft_min", "draft_p_min"),
    *("temperature", "top_k", "top_p", "min_p"),
)

# The settings that `healthcheck` has flags for: those that decide where the server listens.
ADDRESSED = ("host", "port", "api_prefix", "ssl_key_file", "ssl_cert_file")


def main() -> NoReturn:
    """The console command. Status: 0 stopped in order, 1 failed, 2 bad usage, 3 cannot load, 4 port taken."""
    standard_streams.hold()
    if sys.argv[1:2] == ["plan"]:
        sys.exit(plan(sys.argv[2:], os.environ))
    if sys.argv[1:2] == ["profile"]:
        sys.exit(profile(sys.argv[2:], os.environ))
    if sys.argv[1:2] == ["healthcheck"]:
        sys.exit(check_health(sys.argv[2:], os.environ))
    start(sys.argv[1:], load)


def start(arguments: Sequence[str], load: Load) -> NoReturn:
    settings = read_settings(arguments, os.environ)
    form = logs.form_of(settings.log_format, sys.stderr)
    colors = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    logs.configure(settings.log_level, form, colors=colors)
    try:
        code = run(settings, load, notify.over(os.environ.get("NOTIFY_SOCKET")))
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    logging.shutdown()
    standard_streams.let_go()
    if threading.active_count() > 1:
        # A load that was interrupted cannot be stopped and would keep the process alive. It holds nothing worth saving.
        os._exit(code)
    sys.exit(code)


def load(settings: Settings) -> AsyncEngine:
    """The engine. Imports torch, so it runs only after the port is open, and in a thread."""
    _be_considerate()
    from slipstream.engine.service.start.launch import launch

    engine = launch(settings)
    # What is loaded now stays until the end. Searching it for garbage would hold up all requests for a quarter second.
    gc.collect()
    gc.freeze()
    return engine


def _be_considerate() -> None:
    """Settings of the process that keep its threads from holding each other up. Call it before torch is imported."""
    # torch's OpenMP reads this when it is loaded. Spinning threads make small operations slow beside a busy process.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Whenever a kernel returns, the engine's thread needs the interpreter again. A thread that renders or parses a long
    # text may keep it for this time, and a pass has hundreds of kernels.
    sys.setswitchinterval(SWITCH_S)


def plan(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Print how much GPU memory a server with these settings takes. Status: 0 it fits, 3 it would not start.

    Settings that are not in `arguments` are read as for a server, from the environment too. Exits with status 2 on
    bad usage.
    """
    parser = _plan_parser()
    _refuse_joined(parser, arguments, [one for one in OPTIONS if one.name in PLANNED])
    flags = vars(parser.parse_args(arguments))
    as_json, memory = flags.pop("json"), flags.pop("memory", None)
    for name in ("model", "model_draft"):
        if (file := flags.pop(f"{name}_config", None)) is not None:
            if name in flags:
                parser.error(f"--{name.replace('_', '-')} and a config file: give one of them")
            flags[name] = file
    settings = _settings(parser, flags, environ)
    try:
        memory_bytes = None if memory is None else memory_of(memory)
    except ValueError as error:
        parser.error(str(error))
    from slipstream.engine.service.tools.forecast import forecast

    try:
        told = asdict(forecast(settings, memory_bytes))
    except LoadError as error:
        sys.stderr.write(f"slipstream plan: {error}\n")
        return EXIT_CANNOT_LOAD
    sys.stdout.write(json.dumps(told, indent=2) + "\n" if as_json else table(told))
    return 0 if told["refusal"] is None else EXIT_CANNOT_LOAD


def profile(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Load the engine, run requests, print where the time went. Status: 0 done, 1 a prompt is refused, 3 cannot load.

    Exits with status 2 on bad usage.
    """
    parser = _profile_parser()
    _refuse_joined(parser, arguments, [one for one in OPTIONS if one.name in PROFILED])
    flags = vars(parser.parse_args(arguments))
    n_tasks, n_tokens, file, trace = (flags.pop(name) for name in ("tasks", "tokens", "prompts", "trace"))
    as_json = flags.pop("json")
    settings = _settings(parser, flags, environ)
    try:
        prompts = None if file is None else prompts_of(Path(file))
    except (OSError, ValueError) as error:
        parser.error(f"--prompts {file}: {error}")
    if trace is not None and not os.access(Path(trace).parent, os.W_OK):
        parser.error(f"--trace {trace}: cannot be written")
    _be_considerate()
    from slipstream.engine.service.tools.profile import Order, profiled

    try:
        order = Order(prompts, n_tasks, n_tokens, None if trace is None else Path(trace))
        told = asdict(profiled(settings, order))
    except (LoadError, RequestError) as error:
        sys.stderr.write(f"slipstream profile: {error}\n")
        return EXIT_CANNOT_LOAD if isinstance(error, LoadError) else EXIT_FAILED
    sys.stdout.write(json.dumps(told, indent=2) + "\n" if as_json else profile_table(told))
    return 0


def read_settings(arguments: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """The server's settings, each from the first source that has it. Exits with status 2 if any is unknown or wrong."""
    parser = _parser()
    arguments = arguments[1:] if arguments[:1] == ["serve"] else arguments
    _refuse_joined(parser, arguments, OPTIONS)
    settings = _settings(parser, vars(parser.parse_args(arguments)), environ)
    try:
        keys_of(settings)
    except SettingError as error:
        parser.error(str(error))
    if settings.otlp_endpoint and (absent := tracing.missing()):
        parser.error(f"--otlp-endpoint needs {absent}: pip install 'slipstream[otel]'")
    return settings


def check_health(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Ask a running server whether it is ready, at `--url` or at these settings' address.

    Status: 0 it is ready, 1 it is not, 2 bad usage.
    """
    parser = argparse.ArgumentParser(
        prog="slipstream healthcheck",
        usage="slipstream healthcheck [--url URL] [options]",
        description="Asks a running server's /health; the status is 0 if it takes requests, else 1.",
        epilog="The address comes from --url, or from the settings that the server has, the environment too.",
        allow_abbrev=False,
    )
    parser.add_argument("--url", metavar="URL", help="address of the server, with its prefix if it has one")
    parser.add_argument("--config", metavar="FILE", help="the server's TOML file", default=argparse.SUPPRESS)
    for option in OPTIONS:
        if option.name in ADDRESSED:
            _add(parser, option)
    _refuse_joined(parser, arguments, [one for one in OPTIONS if one.name in ADDRESSED])
    flags = vars(parser.parse_args(arguments))
    url = flags.pop("url")
    status, told = healthcheck(_settings(parser, {"model": "any", **flags}, environ), url)
    sys.stdout.write(told + "\n")
    return status


def _settings(parser: argparse.ArgumentParser, flags: dict[str, Any], environ: Mapping[str, str]) -> Settings:
    """The settings of these flags and the other sources, checked. Exits with status 2 if any is unknown or wrong."""
    # Compose files pass unset variables on as empty strings.
    named = {name: text for name, text in environ.items() if name.startswith(PREFIX) and text}
    config = named.pop(CONFIG_ENV, None)
    config = flags.pop("config", config)
    if environ.get(OTLP_ENV):
        named.setdefault(BY_NAME["otlp_endpoint"].env, environ[OTLP_ENV])
    origins: dict[str, str] = {}
    try:
        settings = Settings(**merged(flags, named, config, origins))
        check(settings)
        limits.check(settings)
    except SettingError as error:
        parser.error(f"{error} (from {origins.get(error.setting, 'the defaults')})")
    except ValueError as error:
        parser.error(str(error))
    if not settings.model:
        parser.error("--model is needed: a GGUF file, a folder with a checkpoint, or a hub name org/name")
    return settings


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slipstream",
        usage="slipstream [serve] -m MODEL [options]\n       slipstream plan -m MODEL [options]"
        "\n       slipstream profile -m MODEL [options]"
        "\n       slipstream healthcheck [options]",
        description="An OpenAI-compatible server for language models with lossless speculative decoding.",
        epilog=f"Each setting can also be given as {PREFIX}NAME in the environment, or as name = value in a"
        " TOML file. A flag wins over the environment, the environment over the file.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"slipstream {version()}")
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings", default=argparse.SUPPRESS)
    for name, options in groupby(OPTIONS, key=lambda one: one.group):
        group = parser.add_argument_group(name.lower())
        for option in options:
            _add(group, option)
    return parser


def _plan_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slipstream plan",
        usage="slipstream plan (-m MODEL | --config FILE) [--memory GiB] [options]",
        description="What a server with these settings takes of a GPU's memory, from the model's config alone.",
        epilog="Other settings, and those not given here, come from the environment as for a server.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="figures for machines, in bytes")
    own = {
        "--memory": ("memory", "GiB", f"free GPU memory: a number, or one of {', '.join(GPUS)}"),
        "--config": ("model_config", "FILE", "the model's config.json, instead of -m"),
        "--draft-config": ("model_draft_config", "FILE", "a draft model's config.json, instead of -md"),
    }
    for flag, (name, metavar, told) in own.items():
        parser.add_argument(flag, dest=name, metavar=metavar, default=argparse.SUPPRESS, help=told)
    for option in OPTIONS:
        if option.name in PLANNED:
            _add(parser, option)
    return parser


def _profile_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slipstream profile",
        usage="slipstream profile (-m MODEL | --config FILE) [--tasks N] [--trace FILE] [options]",
        description="Plays requests without HTTP, plainly and with drafts, one at a time and one per slot, and tells"
        " where the time went: parts of a step, operators, passes.",
        epilog="Other settings, and those not given here, come from the environment as for a server.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="a server's TOML file", default=argparse.SUPPRESS)
    for flag, default, told in (
        ("--tasks", 8, "requests played in each way"),
        ("--tokens", 64, "most tokens of a reply"),
    ):
        parser.add_argument(
            flag, metavar="N", type=_count, default=default, help=f"{told} (default: {default})"
        )
    parser.add_argument(
        "--prompts", metavar="FILE", help="prompts, one a line; by default random words of the vocabulary"
    )
    parser.add_argument(
        "--trace", metavar="FILE", help="write a Chrome trace of one more playing, by torch's profiler"
    )
    parser.add_argument("--json", action="store_true", help="figures for machines, in seconds")
    for option in OPTIONS:
        if option.name in PROFILED:
            _add(parser, option)
    return parser


def _count(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number of at least 1")
    return int(text)


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


def _refuse_joined(
    parser: argparse.ArgumentParser, arguments: Sequence[str], options: Sequence[Option]
) -> None:
    """Exit with status 2 on an unknown flag such as `-ngl`, which argparse would read as `-n gl`."""
    known = {flag for option in options for flag in option.flags} | {"-h"}
    for word in arguments:
        if word[:1] == "-" and word[1:2].isalpha() and word.partition("=")[0] not in known:
            parser.error(f"unrecognized arguments: {word}")
