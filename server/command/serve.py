"""Runs the server from the open port to the exit status. The port is open before the model is loaded; a signal drains.

uvicorn by itself would close the port on SIGTERM, cut streams and die by the signal, so signals are handled here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NoReturn

import uvicorn

from slipstream.engine.api import AsyncEngine
from slipstream.engine.errors import DeviceLost, LoadError, SettingError
from slipstream.engine.settings import Settings
from slipstream.server.command import standard_streams, startup
from slipstream.server.command.notify import READY, STOPPING, notify
from slipstream.server.http.address import BACKLOG, bind, is_taken, mark_of, release, url_of
from slipstream.server.http.app import create_app
from slipstream.server.http.auth import keys_of, open_to_others
from slipstream.server.http.connection import Connection
from slipstream.server.http.gate import Gate
from slipstream.server.http.limits import is_loopback, unix_path
from slipstream.server.images.media_folder import check_folder
from slipstream.server.openai.formats.reading import Knowing, Known
from slipstream.server.report.logs import Form, form_of, logger
from slipstream.server.report.pulse import pulse
from slipstream.server.report.tracing import Tracing
from slipstream.server.responses.kept import KeptResponses

Load = Callable[[Settings], AsyncEngine]

log = logger(__name__)
EXIT_FAILED, EXIT_CANNOT_LOAD, EXIT_PORT_TAKEN = 1, 3, 4
FAREWELL_S = 30.0  # that a client may take to end TLS once the server has
FLUSH_S = 5  # for the last bytes of finished replies
WATCH_S = 0.5
LEAVE = "--exit-on-device-error"


class Listener(uvicorn.Server):
    """uvicorn without its signal handlers, on sockets that listen already, with a time limit for TLS handshakes.

    `traces` and `kept` are the application's; close them after it has ended.
    """

    traces: Tracing | None = None
    kept: KeptResponses | None = None
    timeout_s = 60.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, which leaves asyncio's limits as they are: 60 s for a handshake, 30 s for a farewell."""
        await self.lifespan.startup()
        config = self.config
        kind: Callable[..., asyncio.Protocol] = config.http_protocol_class
        handshake_s, farewell_s = self.timeout_s, min(self.timeout_s, FAREWELL_S)
        protocol = partial(
            kind,
            config=config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            timeout_s=self.timeout_s,
        )
        loop, is_secure = asyncio.get_running_loop(), config.ssl is not None
        self.servers = [
            await loop.create_server(
                protocol,
                sock=one,
                ssl=config.ssl,
                backlog=BACKLOG,
                ssl_handshake_timeout=handshake_s if is_secure else None,
                ssl_shutdown_timeout=farewell_s if is_secure else None,
            )
            for one in sockets or ()
        ]
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def listener(gate: Gate, settings: Settings, knowing: Knowing | None = None) -> Listener:
    app = create_app(gate, settings, knowing)
    config = uvicorn.Config(
        app,
        http=Connection,  # h11 refuses huge headers; httptools does not
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,  # longer than clients keep idle connections, so that they close first
        timeout_graceful_shutdown=FLUSH_S,
        ssl_keyfile=settings.ssl_key_file,
        ssl_certfile=settings.ssl_cert_file,
        reset_contextvars=True,  # request ids must not leak into other requests' tasks
    )
    server = Listener(config)
    server.traces, server.kept, server.timeout_s = app.state.traces, app.state.kept, settings.timeout
    return server


def run(settings: Settings, load: Load, supervisor: str | None = None) -> int:
    """Serve until a signal or a failure; returns the exit status.

    `load` makes the engine, in a thread; `supervisor`: systemd's socket, as in `notify`.
    """
    try:
        _check_certificate(settings)
        check_folder(settings.media_path)
        life = _Life(settings, supervisor)
    except SettingError as error:
        log.error("cannot_start", reason=str(error))
        return EXIT_PORT_TAKEN if is_taken(error) else EXIT_CANNOT_LOAD
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(life.run(load))


def _check_certificate(settings: Settings) -> None:
    """Raises `SettingError` for a wrong certificate. uvicorn would fail with a traceback, after the port is open."""
    if settings.ssl_cert_file is None or settings.ssl_key_file is None:
        return
    try:
        # Without the last argument OpenSSL asks on the terminal, and waits there.
        context = ssl.create_default_context()
        context.load_cert_chain(
            settings.ssl_cert_file, settings.ssl_key_file, partial(_refuse_locked, settings)
        )
    except OSError as error:
        reason = f"does not load together with --ssl-key-file: {error.strerror or error}"
        raise SettingError("ssl_cert_file", settings.ssl_cert_file, reason) from error


def _refuse_locked(settings: Settings) -> NoReturn:
    """What is asked for the password of a key."""
    reason = "the key is encrypted; write it without a password: openssl pkey -in FILE -out NEW_FILE"
    raise SettingError("ssl_key_file", settings.ssl_key_file, reason)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


class _Life:
    """A run of the server, from the open port to the exit status."""

    def __init__(self, settings: Settings, supervisor: str | None) -> None:
        """Make the application, then open the port. Raises `SettingError`; of the port's, as `bind` does."""
        self.settings = settings
        self.gate = Gate()
        self.knowing = Knowing(settings)
        self.server = listener(self.gate, settings, self.knowing)
        self.port = bind(settings)
        self.number = None if unix_path(settings.host) is not None else self.port.getsockname()[1]
        self.mark = mark_of(settings)
        self.url = url_of(settings, self.number)
        self.supervisor = supervisor
        self.form: Form = form_of(settings.log_format, sys.stderr)
        self.asked = asyncio.Event()
        self.is_stuck = False  # on a device that has failed

    async def run(self, load: Load) -> int:
        self._take_signals()
        server = self.server
        serving = asyncio.create_task(server.serve(sockets=[self.port]))
        log.info("listening", url=self.url)
        self._warn()
        work = asyncio.create_task(self._work(load))
        await asyncio.wait({work, serving}, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        if not work.done():
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            log.error("listener_ended")
        await serving
        release(self.settings, self.mark)
        if server.traces:
            await asyncio.to_thread(server.traces.close)
        # The engine is closed behind them: replies that are still being written read its events.
        if self.gate.engine:
            await self.gate.engine.close()
        if server.kept:  # the process may end by `os._exit`, which waits for nothing
            await asyncio.to_thread(server.kept.close)
        return EXIT_FAILED if work.cancelled() else work.result()

    async def _work(self, load: Load) -> int:
        started = time.perf_counter()
        engine = await self._load(load)
        if isinstance(engine, int):
            return engine
        known = await self.knowing.of(engine)  # imports the replies' parser, so that no request waits for it
        self.gate.engine = engine
        self._announce(engine, known, time.perf_counter() - started)
        notify(self.supervisor, READY)
        beat = asyncio.create_task(pulse(engine))
        try:
            return await self._until_stopped(engine)
        finally:
            beat.cancel()

    async def _load(self, load: Load) -> AsyncEngine | int:
        """The engine, or an exit status if it did not load or a signal came first."""
        pool = ThreadPoolExecutor(1, thread_name_prefix="load")
        loading = asyncio.get_running_loop().run_in_executor(pool, load, self.settings)
        asked = asyncio.create_task(self.asked.wait())
        waiting: set[asyncio.Future[Any]] = {loading, asked}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        pool.shutdown(wait=False)
        if not loading.done():
            return 0
        try:
            return loading.result()
        except LoadError as error:
            log.error("cannot_load", reason=str(error))
            return EXIT_CANNOT_LOAD
        except DeviceLost:
            log.exception("device_failed_while_loading")
            return EXIT_FAILED
        except Exception:
            log.exception("load_failed")
            return EXIT_FAILED

    async def _until_stopped(self, engine: AsyncEngine) -> int:
        while not self.asked.is_set():
            if engine.status == "failed" and self._leaves(engine):
                return EXIT_FAILED
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.asked.wait(), WATCH_S)
        log.info("draining", timeout_s=self.settings.shutdown_timeout)
        notify(self.supervisor, STOPPING)
        await engine.drain(self.settings.shutdown_timeout)
        log.info("drained")
        return 0

    def _leaves(self, engine: AsyncEngine) -> bool:
        """Whether the failed engine ends the process. Says so, or once why not."""
        if engine.device_loss is None or self.settings.exit_on_device_error:
            log.error("engine_failed")
            return True
        if not self.is_stuck:
            self.is_stuck = True
            log.error("device_failed", answers="503 to every request, until it is started again", see=LEAVE)
        return False

    def _take_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        # A terminal that is closed asks for a drain too, unless nohup says that it does not.
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            # Several may come, from terminal and shell, and only mean the same.
            loop.add_signal_handler(signal.SIGHUP, self.asked.set)

    def _on_signal(self, number: int) -> None:
        if self.asked.is_set():
            os._exit(128 + number)  # a second signal means: at once
        self.asked.set()

    def _warn(self) -> None:
        """Log warnings about settings that are allowed and dangerous."""
        settings = self.settings
        private = is_loopback(settings.host) or unix_path(settings.host) is not None
        if not private and not keys_of(settings):
            log.warning(
                f"ANYONE WHO CAN REACH PORT {self.number} OF {settings.host} MAY USE THIS SERVER: set --api-key"
            )
        if settings.api_key_file is not None and open_to_others(settings.api_key_file):
            log.warning("key_file_open_to_others", path=settings.api_key_file, wanted="mode 600")

    def _announce(self, engine: AsyncEngine, known: Known, load_s: float) -> None:
        told = startup.facts(engine.info, self.settings, self.number, known, load_s)
        standard_streams.show(startup.welcome(engine.info, self.settings, self.number, known))
        if self.form == "text":
            standard_streams.show(startup.table(told) + "\n")
        else:
            log.info("ready", **told)
