"""A replica: an engine in an actor of Ray. With `--tensor-parallel-size` the actor's GPUs are all on one machine."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ray import serve

from slipstream.engine.errors import EngineError
from slipstream.engine.settings import Settings
from slipstream.server.cluster import run_frames
from slipstream.server.cluster.hosting import Host
from slipstream.server.cluster.run_frames import Answer, Assignment, Ending
from slipstream.server.command.starting import be_considerate, configure_logs, load

be_considerate()  # before anything loads torch


class Replica:
    """The deployment's class. Ray makes one an actor, on the actor's event loop."""

    def __init__(self, settings: Settings, release: str) -> None:
        """release: what the application's parts of one deployment have in common. Raises `LoadError`."""
        configure_logs(settings, {})
        self._release = release
        self._host = Host(load(settings), serve.get_replica_context().replica_id.unique_id)

    async def run(self, assignment: Assignment, *, avoid: Collection[str]) -> Ending:
        """As `Host.run`. avoid: is for the router."""
        return await self._host.run(assignment)

    async def ask(self, verb: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> Answer:
        """What a method of the engine returns, or the error that it raises."""
        engine = self._host.engine
        try:
            if verb == "info":
                return Answer((self._release, engine.info))
            return Answer(await getattr(engine, verb)(*arguments, **named))
        except EngineError as error:
            return Answer(problem=run_frames.problem_of(error))

    async def check_health(self) -> None:
        """Ray replaces the replica if this raises; it asks what `/live` tells."""
        if self._host.engine.status == "failed":
            raise RuntimeError(
                str(self._host.engine.device_loss or "the engine has failed; its log says why")
            )

    async def __del__(self) -> None:
        await self._host.close()
        await self._host.engine.close()
