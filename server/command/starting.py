"""`slipstream serve`: settings become a process that serves, and its exit status.

Beside `subcommands.py` no other module of the server imports the engine's code, as opposed to its types.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
from collections.abc import Mapping

from slipstream.engine.api import AsyncEngine
from slipstream.engine.errors import LoadError, SettingError
from slipstream.engine.naming import model_path
from slipstream.engine.settings import Settings
from slipstream.server.command import standard_streams
from slipstream.server.command.foreign_flags import FOREIGN
from slipstream.server.command.serve import EXIT_CANNOT_LOAD, Load, run
from slipstream.server.command.subcommand import Call, Subcommand
from slipstream.server.http.auth import keys_of
from slipstream.server.openai.readers import template_defaults
from slipstream.server.report import logs, tracing

EXIT_INTERRUPTED = 130
SWITCH_S = 0.0002  # a thread keeps the interpreter for this time while others wait; Python's own is 5 ms

log = logs.logger(__name__)


def serve(call: Call) -> int:
    """Serve until a signal or a failure. Returns the exit status."""
    settings = checked(call)
    try:
        configure_logs(settings, call.environ)
    except OSError as error:
        call.refuse(f"--log-file {settings.log_file}: cannot be written to ({error.strerror})")
    for flag, reason in call.idle.items():
        log.info("flag_without_effect", flag=flag, reason=reason)
    try:
        for name in (settings.model, settings.model_draft):
            if name is not None:
                model_path(name)
    except LoadError as error:
        log.error("cannot_load", reason=str(error))
        return EXIT_CANNOT_LOAD
    return _served(settings, load, call.environ)


SERVE = Subcommand(
    name="serve",
    usage="-m MODEL [options]",
    summary="serve a model over HTTP; may be left out",
    about="Serves a model over HTTP, with OpenAI's endpoints and a chat page. `serve` may be left out.",
    run=serve,
    foreign=FOREIGN,
    statuses="Exit status: 0 stopped in order, 1 failed, 2 bad usage, 3 cannot load, 4 port taken.",
)


def checked(call: Call) -> Settings:
    settings = call.settings
    try:
        keys_of(settings)
    except SettingError as error:
        call.refuse(str(error))
    try:
        template_defaults(settings)
    except ValueError as error:
        call.refuse(f"--chat-template-kwargs: {error}")
    if settings.otlp_endpoint and (absent := tracing.missing()):
        call.refuse(f"--otlp-endpoint needs {absent}: pip install 'slipstream[otel]'")
    return settings


def configure_logs(settings: Settings, environ: Mapping[str, str]) -> None:
    form = logs.form_of(settings.log_format, sys.stderr)
    colors = sys.stderr.isatty() and not environ.get("NO_COLOR")
    logs.configure(settings.log_level, form, colors=colors, file=settings.log_file)


def _served(settings: Settings, load: Load, environ: Mapping[str, str]) -> int:
    """The exit status; ends the process by itself where a load was interrupted, which cannot be stopped otherwise."""
    try:
        status = run(settings, load, environ.get("NOTIFY_SOCKET"))
    except KeyboardInterrupt:
        status = EXIT_INTERRUPTED
    logging.shutdown()
    standard_streams.let_go()
    if threading.active_count() > 1:
        os._exit(status)  # the load holds nothing worth saving
    return status


def load(settings: Settings) -> AsyncEngine:
    """The engine. Imports torch, so it runs only after the port is open, and in a thread."""
    be_considerate()
    # What is imported and loaded now stays until the end. Searching it for garbage takes a tenth of the start, and
    # would later hold up all requests for a quarter second.
    gc.disable()
    try:
        from slipstream.engine.service.start.launch import launch
        from slipstream.server.vision.opening import open_vision

        return launch(settings, open_vision)
    finally:
        gc.freeze()
        gc.enable()


def preset(variables: Mapping[str, str]) -> None:
    """Variables of the environment for libraries that read nothing else, where the user has not set them."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def be_considerate() -> None:
    """Settings of the process that keep its threads from holding each other up. Call it before torch is imported."""
    # torch's OpenMP reads these when it is loaded. A pass has hundreds of operations, microseconds apart, and
    # waking a thread for each would cost more than many of them; threads that wait longer leave their core to others.
    # Passive threads would sleep at once as soon as a process has more threads than cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "ACTIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # some 40 microseconds
    # Whenever a kernel returns, the engine's thread needs the interpreter again. A thread that renders or parses a long
    # text may keep it for this time, and a pass has hundreds of kernels.
    sys.setswitchinterval(SWITCH_S)
