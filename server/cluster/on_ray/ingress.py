"""An ingress: the HTTP application before the replicas, in an actor of Ray, behind Ray's HTTP proxies."""

from __future__ import annotations

import asyncio
from typing import cast

import ray
from ray.exceptions import TaskCancelledError
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.engine.api import ModelInfo
from slipstream.engine.settings import Settings
from slipstream.server.cluster.cluster_engine import ClusterEngine
from slipstream.server.cluster.on_ray import members
from slipstream.server.cluster.on_ray.members import RayMembers
from slipstream.server.cluster.placement import asked
from slipstream.server.cluster.runs import Runs
from slipstream.server.command.starting import configure_logs
from slipstream.server.http.app import create_app
from slipstream.server.http.connection import ReaderLimit
from slipstream.server.http.gate import Gate
from slipstream.server.openai.formats.reading import Knowing

_OTHERS_S = 0.5  # until a replica of this release may have taken the place of an older one


class Ingress:
    """The deployment's class, to be wrapped by `serve.ingress`. There may be several: they share nothing."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, settings: Settings, release: str, most_moves: int, handle: DeploymentHandle
    ) -> None:
        """Returns once a replica is ready. release: as for `Replica`; handle: of that deployment."""
        configure_logs(settings, {})
        replicas, runs = RayMembers(handle), Runs()
        await runs.open(ray.util.get_node_ip_address())
        self._engine = ClusterEngine(replicas, runs, settings, most_moves)
        self._loop = asyncio.get_running_loop()
        members.HEARERS.append(self._hear)
        self._engine.begin(await _info(replicas, release))
        knowing = Knowing(settings)
        await knowing.of(self._engine)  # so that no request waits for it
        self._app = create_app(Gate(self._engine), settings, knowing)
        self._timeout_s = settings.timeout

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return Leaving(ReaderLimit(self._app, self._timeout_s))

    def _hear(self, names: frozenset[str]) -> None:
        """The router may have a thread of its own."""
        self._loop.call_soon_threadsafe(self._engine.are_there, names)

    async def __del__(self) -> None:
        await self._engine.close()
        if self._app.state.traces:
            await asyncio.to_thread(self._app.state.traces.close)


class Leaving:
    """ASGI middleware: where a client has left, Ray's `receive` raises; the application waits for a message."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def received() -> Message:
            try:
                return await receive()
            except TaskCancelledError:
                return {"type": "http.disconnect"}

        await self.app(scope, received, send)


async def _info(replicas: RayMembers, release: str) -> ModelInfo:
    """What a replica of the same release has loaded; during an update there are others."""
    while True:
        found, info = await asked(replicas, "info")
        if found == release:
            return cast(ModelInfo, info)
        await asyncio.sleep(_OTHERS_S)
