"""The replicas of a Ray deployment, as an ingress reaches them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle

from slipstream.engine.errors import Overloaded
from slipstream.server.cluster import run_frames
from slipstream.server.cluster.run_frames import Answer, Assignment, Ending

_RETRY_AFTER_S = 1.0

# Called with the names of the replicas that take requests, whenever they change. Ray makes its routers by itself, and
# from a copy of their module, so the ingress in whose process one is can give it nothing but here.
HEARERS: list[Callable[[frozenset[str]], None]] = []


class RayMembers:
    """Implements `placement.Members` by a handle of the replicas' deployment."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def run(self, assignment: Assignment, avoid: Collection[str]) -> Ending:
        try:
            ending: Ending = await self._handle.run.remote(assignment, avoid=sorted(avoid))
        except BackPressureError as error:
            raise Overloaded(str(error), _RETRY_AFTER_S) from error
        return ending

    async def ask(self, verb: str, *arguments: Any, **named: Any) -> Any:
        answer: Answer = await self._handle.ask.remote(verb, arguments, named)
        if answer.problem is not None:
            raise run_frames.error_of(answer.problem)
        return answer.value
