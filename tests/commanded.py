"""The server as its command line starts it, for tests of settings and for programs with an engine of their own."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from slipstream.engine.settings import Settings
from slipstream.server.command import starting
from slipstream.server.command.serve import Load
from slipstream.server.command.subcommand import parsed


def read_settings(arguments: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """The server's settings, each from the first source that has it. Exits with status 2 if any is unknown or wrong."""
    words = arguments[1:] if arguments[:1] == [starting.SERVE.name] else arguments
    return starting.checked(parsed(starting.SERVE, words, environ))


def start(arguments: Sequence[str], load: Load) -> NoReturn:
    """Serve what `load` makes of the settings in these arguments and in the environment; ends the process."""
    settings = read_settings(arguments, os.environ)
    starting.configure_logs(settings, os.environ)
    sys.exit(starting._served(settings, load, os.environ))
