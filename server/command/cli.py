"""The command `slipstream`: finds the subcommand that a line means, reads its settings and runs it.

Settings come from flags, environment, TOML file and defaults, of which the first that has a setting wins.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from slipstream.engine.naming import did_you_mean
from slipstream.server import version
from slipstream.server.command import standard_streams
from slipstream.server.command.starting import EXIT_INTERRUPTED, SERVE
from slipstream.server.command.subcommand import parsed
from slipstream.server.command.subcommands import SUBCOMMANDS

EXIT_USAGE = 2
EXIT_UNREAD = 128 + signal.SIGPIPE


def main() -> NoReturn:
    """The console command. Exit status: that of the subcommand (`slipstream SUBCOMMAND --help`)."""
    standard_streams.hold()
    try:
        status = dispatch(sys.argv[1:], os.environ)
    except BrokenPipeError:  # of standard output, as in `slipstream chat | head -1`
        status = EXIT_UNREAD
    except KeyboardInterrupt:
        status = EXIT_INTERRUPTED
    standard_streams.let_go()
    sys.exit(status)


def dispatch(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the subcommand that a command line names, `serve` if it names none. Returns the exit status.

    Exits with status 2 on bad usage.
    """
    first = words[0] if words else ""
    if first in SUBCOMMANDS:
        command = SUBCOMMANDS[first]
        return command.run(parsed(command, words[1:], environ))
    if first in ("help", "-h", "--help"):
        sys.stdout.write(overview())
        return 0
    if first and first[0] != "-":
        sys.stderr.write(f"slipstream: {_unknown(first)}\n")
        return EXIT_USAGE
    return SERVE.run(parsed(SERVE, words, environ))


def overview() -> str:
    """What `slipstream --help` prints."""
    width = max(map(len, SUBCOMMANDS))
    lines = [
        f"slipstream {version()}: an OpenAI-compatible server for language models with lossless speculative decoding.",
        "",
        "  slipstream -m MODEL -md DRAFT_MODEL     serve a model on http://127.0.0.1:8080",
        "",
        *(f"  {one.name:<{width}}  {one.summary}" for one in SUBCOMMANDS.values()),
        "",
        "slipstream SUBCOMMAND --help lists its flags, `slipstream serve --help` all settings.",
    ]
    return "\n".join(lines) + "\n"


def _unknown(word: str) -> str:
    if Path(word).exists() or "/" in word:
        return f"{word}: is no subcommand; a model is given as -m {word}"
    hint = did_you_mean(word, SUBCOMMANDS) or f"; there are {', '.join(SUBCOMMANDS)}"
    return f"{word}: no such subcommand{hint}"
