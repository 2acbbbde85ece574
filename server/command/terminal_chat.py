"""`slipstream chat`: a conversation in a terminal, with a running server or with one of its own.

Tokens are tinted by the drafter that guessed them, as on the page. Everything goes through the HTTP interface.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import httpx

from slipstream.engine.naming import as_text
from slipstream.engine.settings import Settings
from slipstream.server.command.client import client_of
from slipstream.server.command.flags import BY_NAME, OPTIONS, PREFIX
from slipstream.server.command.serve import EXIT_CANNOT_LOAD, EXIT_FAILED
from slipstream.server.command.subcommand import Argument, Call, Subcommand, count
from slipstream.server.http.auth import keys_of

_SAMPLING = (
    *("seed", "temperature", "top_k", "top_p", "min_p"),
    *("repeat_penalty", "repeat_last_n", "presence_penalty", "frequency_penalty"),
)
_LISTENING = (
    *("host", "port", "api_prefix", "api_key", "api_key_file", "ssl_key_file", "ssl_cert_file"),
    "cors_origins",
)
_COLOURS = (36, 35, 33, 32, 34, 96, 95, 93, 92, 94)  # of drafters, in the server's order
_DIM, _RESET = "\033[2m", "\033[0m"
_HELP = "/new starts over, /exit ends, Ctrl-C stops a reply; a line that ends with \\ goes on in the next.\n"
_CONNECT_S, _READ_S = 5.0, 600.0
_POLL_S = 0.1
_REAP_S = 0.5  # from the end of a connection to that of its process
_PR_SET_PDEATHSIG = 1  # of prctl(2)


class ServerFailed(Exception):
    """The server does not answer as it should."""


class Terminal:
    """Where text goes. Without colours where they are not wanted."""

    def __init__(self, write: Callable[[str], object], drafters: Sequence[str], *, colours: bool) -> None:
        self.write = write
        self._colours = colours
        self._codes = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(drafters)}

    def tinted(self, text: str, source: str | None) -> str:
        """The text in the colour of the drafter that guessed it; None: the target wrote it itself."""
        code = self._codes.get(source or "")
        return f"\033[{code}m{text}{_RESET}" if self._colours and code is not None else text

    def dim(self, text: str) -> str:
        return f"{_DIM}{text}{_RESET}" if self._colours else text


class Conversation:
    """Messages so far, and a server that answers them."""

    def __init__(
        self, client: httpx.Client, terminal: Terminal, body: Mapping[str, Any], system: str | None
    ) -> None:
        """body: what every request brings beside its messages."""
        self._client = client
        self._terminal = terminal
        self._body = {**body, "stream": True, "spec_detail": True, "stream_options": {"include_usage": True}}
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, str]] = [*self._first]

    def restart(self) -> None:
        self.messages = [*self._first]

    def say(self, text: str) -> None:
        """Send a message and write the reply as it comes. Ctrl-C ends the reply. Raises `ServerFailed`."""
        asked = {"role": "user", "content": text}
        content: list[str] = []
        sources: Counter[str | None] = Counter()
        last: Mapping[str, Any] = {}
        try:
            for chunk in self._chunks([*self.messages, asked]):
                last = chunk
                self._show(chunk, content, sources)
        except KeyboardInterrupt:
            self._terminal.write(self._terminal.dim(" [stopped]"))
        parts = [*map(self._terminal.dim, _figures(last)), *self._legend(sources)]
        self._terminal.write("\n" + " · ".join(parts) + "\n\n")
        self.messages += [asked, {"role": "assistant", "content": "".join(content)}]

    def _chunks(self, messages: Sequence[Mapping[str, str]]) -> Generator[Mapping[str, Any], None, None]:
        body = {**self._body, "messages": messages}
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise ServerFailed(_reason(response))
                yield from _events(response.iter_lines())
        except httpx.HTTPError as error:
            raise ServerFailed(f"the connection ended: {error}") from error

    def _show(self, chunk: Mapping[str, Any], content: list[str], sources: Counter[str | None]) -> None:
        delta = chunk["choices"][0]["delta"] if chunk["choices"] else {}
        text = delta.get("content") or ""
        content.append(text)
        if thought := delta.get("reasoning_content"):
            self._terminal.write(self._terminal.dim(thought))
        spec = chunk.get("spec") or {}
        guessed = spec.get("sources") or []
        sources.update(guessed)
        # Pieces are a chunk's tokens; where a format holds text back, or a marker is none, they are not its content.
        pieces = spec.get("pieces") or []
        tinted = [self._terminal.tinted(*pair) for pair in zip(pieces, guessed, strict=True)]
        self._terminal.write("".join(tinted) if "".join(pieces) == text else text)

    def _legend(self, sources: Mapping[str | None, int]) -> list[str]:
        """How many tokens each drafter guessed, in its colour."""
        named = sorted(((n, name) for name, n in sources.items() if name is not None), reverse=True)
        return [f"{self._terminal.tinted(name, name)} {n}" for n, name in named]


def _events(lines: Iterator[str]) -> Generator[Mapping[str, Any], None, None]:
    """The chunks of a stream. Raises `ServerFailed` for an error in it, or if it breaks off."""
    for line in lines:
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise ServerFailed(chunk["error"]["message"])
            yield chunk
    raise ServerFailed("the reply broke off")


def _figures(last: Mapping[str, Any]) -> list[str]:
    """Of the last chunk: tokens, tokens per second and per pass."""
    timings = last.get("timings")
    if timings is None:
        return []
    run = (last.get("metrics") or {}).get("speculative_decoding") or {}
    parts = [f"{timings['predicted_n']} tokens", f"{timings['predicted_per_second']:.1f} tokens/s"]
    if run.get("num_draft_tokens"):
        parts.append(f"{run['mean_acceptance_length']:.2f} tokens a pass")
    return parts


def _reason(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {response.status_code}"


def _chat(call: Call) -> int:
    settings = call.settings
    is_own = "model" in call.given
    if not is_own:
        _refuse_idle(call)
    elif call.own["url"] is not None:
        call.refuse("--model and --url: give one of them")
    try:
        with contextlib.ExitStack() as stack:
            if is_own:
                client, has_ended = stack.enter_context(_own_server(settings, call.environ))
            else:
                client, has_ended = stack.enter_context(_client(settings, call.own["url"])), lambda: False
            return _converse(client, call, has_ended)
    except ServerFailed as error:
        sys.stderr.write(f"slipstream chat: {error}\n")
        return EXIT_FAILED
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        return 0


def _refuse_idle(call: Call) -> None:
    """Exit with status 2 on a setting of a server where one that runs already is asked."""
    for name in call.given:
        if name not in (*_LISTENING, *_SAMPLING, "n_predict"):
            call.refuse(f"{BY_NAME[name].flags[0]} has no use with a server that runs already; -m starts one")


def _body(call: Call) -> dict[str, Any]:
    """What the command line says of every request."""
    body = {name: getattr(call.settings, name) for name in _SAMPLING if name in call.given}
    if call.settings.n_predict >= 0 and "n_predict" in call.given:
        body["max_tokens"] = call.settings.n_predict
    return body


def _converse(client: httpx.Client, call: Call, has_ended: Callable[[], bool]) -> int:
    """Read messages and show replies until the input ends, or the server for good."""
    terminal, model = _terminal(client, colours=sys.stdout.isatty() and not call.environ.get("NO_COLOR"))
    talk = Conversation(client, terminal, _body(call), call.own["system"])
    is_terminal = sys.stdin.isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a request holds UTF-8, and files may be in another encoding
    if is_terminal:
        import readline  # noqa: F401  lines can be edited and found again

        terminal.write(terminal.dim(f"{model} · {_HELP}") + "\n")
    for text in _messages("> " if is_terminal else ""):
        if text == "/exit":
            break
        if text == "/new":
            talk.restart()
        elif text == "/help":
            terminal.write(_HELP)
        elif text:
            try:
                talk.say(text)
            except ServerFailed as error:
                terminal.write(f"slipstream chat: {error}\n")
                if not is_terminal or has_ended():
                    return EXIT_FAILED
    return 0


def _terminal(client: httpx.Client, *, colours: bool) -> tuple[Terminal, str]:
    """Standard output with the server's drafters as colours, and the model's name. Raises `ServerFailed`."""
    try:
        answer = client.get("/props")
    except httpx.HTTPError as error:
        raise ServerFailed(f"no server at {client.base_url}: {error}") from error
    if answer.status_code != 200:
        raise ServerFailed(_reason(answer))
    props = answer.json()

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    return Terminal(write, props["speculation"]["drafters"], colours=colours), props["model_alias"]


def _messages(prompt: str) -> Iterator[str]:
    """What is typed, message by message."""
    lines: list[str] = []
    while True:
        try:
            line = input("" if lines else prompt)
        except EOFError:
            if lines:
                yield "\n".join(lines)
            return
        lines.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            yield "\n".join(lines).strip()
            lines = []


def _client(settings: Settings, url: str | None) -> httpx.Client:
    """A client of the server, with an API key that the settings have."""
    keys = sorted(keys_of(settings))
    headers = {b"authorization": os.fsencode(f"Bearer {keys[0]}")} if keys else {}
    return client_of(settings, url, headers=headers, timeout=httpx.Timeout(_READ_S, connect=_CONNECT_S))


@contextlib.contextmanager
def _own_server(
    settings: Settings, environ: Mapping[str, str]
) -> Generator[tuple[httpx.Client, Callable[[], bool]], None, None]:
    """A client of a server with these settings on a socket of its own, and whether that has ended before its time."""
    with _temporary_folder() as folder:
        path = str(Path(folder) / "server.sock")
        _leave_in_order()
        # A session of its own: Ctrl-C is for the reply, and not for the server.
        process = subprocess.Popen(
            [sys.executable, "-m", "slipstream.server", "serve", *_words(settings, path)],
            env={name: value for name, value in environ.items() if not name.startswith(PREFIX)},
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        try:
            with _client(Settings(host=path), None) as client:
                _wait_for(client, process)
                yield client, partial(_has_ended, process)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Raises `ServerFailed`."""
    try:
        return tempfile.TemporaryDirectory(prefix="slipstream-chat-")
    except OSError as error:
        raise ServerFailed(
            f"no folder for the server's socket: {error.strerror}; TMPDIR may name one that can be written to"
        ) from error


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether it has, or does within a moment: its connections are closed shortly before."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_REAP_S)
    return process.returncode is not None


def _end_with_parent() -> None:
    """In a new process on Linux: get SIGTERM when the parent ends, be it by SIGKILL, which nothing can handle."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _leave_in_order() -> None:
    """Let a closed terminal and SIGTERM unwind: else the server, in its session, would outlive its conversation."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        signal.signal(signal.SIGHUP, leave)


def _words(settings: Settings, path: str) -> list[str]:
    """The command line of a server with these settings, but for where it listens and who may ask: at that path, us."""
    values = {
        option.name: getattr(settings, option.name) for option in OPTIONS if option.name not in _LISTENING
    }
    changed = {name: value for name, value in values.items() if value != BY_NAME[name].default}
    return [_word(name, value) for name, value in {"log_level": "warning", **changed, "host": path}.items()]


def _word(name: str, value: object) -> str:
    """The word of a command line that gives a setting this value."""
    option = BY_NAME[name]
    if option.is_switch:
        return option.flags[0] if value else option.no_flag
    return f"{option.flags[0]}={value}"


def _wait_for(client: httpx.Client, process: subprocess.Popen[bytes]) -> None:
    """Return when the server is ready. Raises `ServerFailed` if it ends before."""
    while process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if client.get("/health").status_code == 200:
                return
        time.sleep(_POLL_S)
    reason = "could not load the model" if process.returncode == EXIT_CANNOT_LOAD else "ended"
    raise ServerFailed(f"the server {reason} (exit status {process.returncode})")


CHAT = Subcommand(
    name="chat",
    usage="[-m MODEL | --url URL] [options]",
    summary="talk to a model in the terminal",
    about="A conversation in the terminal, tinted by drafter: with a server of its own if -m is given here, else with"
    " the one at --url, or at the address that the settings mean.",
    run=_chat,
    arguments=(
        Argument(flag="--url", metavar="URL", meaning="address of a running server, without /v1"),
        Argument(flag="--system", metavar="TEXT", read=as_text, meaning="what the conversation begins with"),
        Argument(
            flag="--max-tokens",
            metavar="N",
            read=count,
            meaning="most tokens of a reply; as many as fit by default",
            sets="n_predict",
        ),
    ),
    needs_model=False,
    statuses="Exit status: 0 ended, 1 the server failed, 2 bad usage.",
)
