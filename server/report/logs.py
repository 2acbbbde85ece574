"""Logging: one event per line, as JSON or as readable text, through structlog's processors. That includes what the
engine and libraries log with the standard library.

Text from outside cannot forge an event: every character that does not print is escaped, and in the text form each line
of a traceback begins with a bar.
"""

from __future__ import annotations

import logging
import os
import sys
from functools import partial
from io import TextIOWrapper
from logging.handlers import WatchedFileHandler
from typing import Literal, TextIO

import orjson
import structlog
from structlog.typing import EventDict, Processor

Form = Literal["json", "text"]

BAR = "    | "
OURS = "slipstream"


def logger(name: str) -> structlog.stdlib.BoundLogger:
    """A logger whose calls are `log.info("event", key=value)`; keys whose value is None are left out."""
    found: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return found


def form_of(log_format: str, stream: TextIO) -> Form:
    """The form that `--log-format` means for this stream: "auto" is text on a terminal, else JSON."""
    if log_format == "auto":
        return "text" if stream.isatty() else "json"
    return "json" if log_format == "json" else "text"


def configure(level: str, form: Form, *, colors: bool = False, file: str | None = None) -> None:
    """Send all logs to stderr, and to `file` if there is one: our own from `level` on, those of libraries from
    warnings on. Called once, at start. Raises OSError for a file that cannot be written to.
    """
    to_stderr = logging.StreamHandler(sys.stderr)
    to_stderr.setFormatter(formatter(form, colors=colors))
    handlers: list[logging.Handler] = [to_stderr]
    if file is not None:
        handlers.append(LogFile(file, encoding="utf-8"))
        handlers[-1].setFormatter(formatter(form))
    logging.basicConfig(level=logging.WARNING, handlers=handlers, force=True)
    logging.getLogger(OURS).setLevel(level.upper())


class LogFile(WatchedFileHandler):
    """Adds lines to a file that its owner alone may read. A file that was moved away is followed by a new one.

    Lines that cannot be written are lost, as on a full disk. This is said once, on standard error.
    """

    _has_failed = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:
            # A new file cannot be opened. Raised from here, that would end the request that is logged.
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name is logging's
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._has_failed:
            self._has_failed = True  # first, as the warning comes here too
            log = logger(__name__)
            log.warning("log_file_incomplete", path=self.baseFilename, reason=error.strerror)

    def _open(self) -> TextIOWrapper:
        # Not blocking: to open a pipe that has no reader would take for ever.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
        return open(os.open(self.baseFilename, flags, 0o600), "a", encoding=self.encoding)


def formatter(form: Form, *, colors: bool = False) -> logging.Formatter:
    """A formatter that writes events of structlog and records of the standard library alike."""
    text = form == "text"
    render: Processor = structlog.dev.ConsoleRenderer(colors=colors, pad_event_to=0) if text else _as_json
    return structlog.stdlib.ProcessorFormatter(
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.format_exc_info,  # without local variables, which hold prompts
            partial(_escaped, bar=BAR if text else ""),
            render,
        ],
        foreign_pre_chain=_SHARED,
    )


def printable(text: str) -> str:
    """`text` with escapes for what does not print: line breaks, terminal codes, marks of writing direction."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def _escaped(_logger: object, _method: str, event: EventDict, *, bar: str) -> EventDict:
    def safe(one: object) -> object:
        if isinstance(one, list | tuple):
            return [safe(each) for each in one]
        return printable(one) if isinstance(one, str) else one

    told = {name: safe(one) for name, one in event.items()}
    if isinstance(trace := event.get("exception"), str):
        told["exception"] = "\n".join(bar + printable(line) for line in trace.splitlines())
    return told


def _tidied(_logger: object, _method: str, event: EventDict) -> EventDict:
    """The event without keys whose value is None, and with floats rounded to six places."""
    return {
        name: round(one, 6) if isinstance(one, float) else one
        for name, one in event.items()
        if one is not None
    }


def _as_json(_logger: object, _method: str, event: EventDict) -> str:
    try:
        return orjson.dumps(event, default=str).decode()
    except orjson.JSONEncodeError:  # a number of more than 64 bits, or invalid Unicode in a list
        return orjson.dumps({name: printable(str(one)) for name, one in event.items()}).decode()


_SHARED: tuple[Processor, ...] = (
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_logger_name,
    structlog.stdlib.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    _tidied,
)

# structlog passes events on as records of the standard library, so that its levels and handlers apply to them too.
structlog.configure(
    processors=[
        structlog.stdlib.filter_by_level,
        *_SHARED,
        structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
    ],
    logger_factory=structlog.stdlib.LoggerFactory(),
    wrapper_class=structlog.stdlib.BoundLogger,
    cache_logger_on_first_use=True,
)
