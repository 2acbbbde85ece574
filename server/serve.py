"""A server's life: port first, then the model; signals drain; the exit status tells how it ended.

uvicorn by itself would close the port on SIGTERM, cut streams and die by the signal, so signals are ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import uvicorn

from engine.api import AsyncEngine
from engine.errors import LoadError, SettingError
from engine.settings import Settings
from server.app import create_app
from server.auth import keys_of
from server.gate import Gate
from server.limits import is_loopback

Load = Callable[[Settings], AsyncEngine]

log = logging.getLogger(__name__)
EXIT_FAILED, EXIT_CANNOT_LOAD, EXIT_PORT_TAKEN = 1, 3, 4
FLUSH_S = 5  # for the last bytes of finished replies
WATCH_S = 0.5


class Listener(uvicorn.Server):
    """uvicorn without its signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def listener(gate: Gate, settings: Settings) -> Listener:
    config = uvicorn.Config(
        create_app(gate, settings),
        http="h11",  # refuses huge headers, which httptools does not
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,  # longer than clients keep idle connections, so that they close first
        timeout_graceful_shutdown=FLUSH_S,
    )
    return Listener(config)


def run(settings: Settings, load: Load) -> int:
    """Serve until a signal or a failure; returns the exit status."""
    try:
        port = bind(settings)
    except SettingError as error:
        log.error("%s", error)
        return EXIT_PORT_TAKEN if _is_taken(error) else EXIT_CANNOT_LOAD
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_Life(settings, port).run(load))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def _is_taken(error: SettingError) -> bool:
    return isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE


def bind(settings: Settings) -> socket.socket:
    """A listening socket. Raises `SettingError`."""
    try:
        found = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        # `localhost` has two addresses, and clients try the older one at least as often.
        family, kind, protocol, _, address = sorted(found, key=lambda one: one[0] != socket.AF_INET)[0]
    except OSError as error:
        raise SettingError("host", settings.host, str(error)) from error
    port = socket.socket(family, kind, protocol)
    try:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind(address)
        port.listen(2048)
    except OSError as error:
        port.close()
        raise SettingError("port", settings.port, error.strerror or str(error)) from error
    return port


class _Life:
    """One run from the open port to the exit status."""

    def __init__(self, settings: Settings, port: socket.socket) -> None:
        self.settings = settings
        self.port = port
        self.url = _url(settings.host, port.getsockname()[1])
        self.gate = Gate()
        self.asked = asyncio.Event()

    async def run(self, load: Load) -> int:
        self._take_signals()
        server = listener(self.gate, self.settings)
        serving = asyncio.create_task(server.serve(sockets=[self.port]))
        log.info("event=listening url=%s", self.url)
        if not is_loopback(self.settings.host) and not keys_of(self.settings):
            log.warning("ANYONE WHO CAN REACH %s MAY USE THIS SERVER: set --api-key", self.url)
        work = asyncio.create_task(self._work(load))
        await asyncio.wait({work, serving}, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        if not work.done():
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            log.error("event=listener_ended")
        await serving
        # Only now: replies still being written read events the engine keeps for them.
        if self.gate.engine:
            await self.gate.engine.close()
        return EXIT_FAILED if work.cancelled() else work.result()

    async def _work(self, load: Load) -> int:
        engine = await self._load(load)
        if isinstance(engine, int):
            return engine
        self.gate.open(engine)
        self._announce(engine)
        return await self._until_stopped(engine)

    async def _load(self, load: Load) -> AsyncEngine | int:
        """The engine, or an exit status if it did not load or nobody waits for it any more."""
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
            log.error("%s", error)
            return EXIT_CANNOT_LOAD
        except Exception:
            log.exception("event=load_failed")
            return EXIT_FAILED

    async def _until_stopped(self, engine: AsyncEngine) -> int:
        while not self.asked.is_set():
            if engine.status == "failed":
                log.error("event=engine_failed")
                return EXIT_FAILED
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.asked.wait(), WATCH_S)
        log.info("event=draining timeout_s=%g", self.settings.shutdown_timeout)
        await engine.drain(self.settings.shutdown_timeout)
        log.info("event=drained")
        return 0

    def _take_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        if self.asked.is_set():
            os._exit(128 + number)  # the second one means now
        self.asked.set()

    def _announce(self, engine: AsyncEngine) -> None:
        key = " -H 'authorization: Bearer YOUR_KEY'" if keys_of(self.settings) else ""
        sys.stdout.write(
            f"{engine.info.name} is ready on {self.url}\n\n"
            f"  curl {self.url}/v1/chat/completions -H 'content-type: application/json'{key} \\\n"
            '    -d \'{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64}\'\n\n'
        )
        sys.stdout.flush()


def _url(host: str, port: int) -> str:
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"
