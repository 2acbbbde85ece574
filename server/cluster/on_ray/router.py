"""Ray's choice of a replica for a request: where its prompt's beginning was computed, unless that is too busy."""

from __future__ import annotations

from ray.serve._private.common import ReplicaID
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from slipstream.server.cluster.affinity import Affinity
from slipstream.server.cluster.on_ray import members
from slipstream.server.cluster.run_frames import Assignment


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Implements Ray Serve's `RequestRouter`. In the process of each ingress; two share nothing."""

    def initialize_state(self, n_slots: int) -> None:
        """Ray calls it with the deployment's `request_router_kwargs`. n_slots: of each replica."""
        self._affinity = Affinity(n_slots)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ray takes a replica of the first rank in which one has a place."""
        assignment = _assignment_of(pending_request)
        if pending_request is None or assignment is None:
            return [candidate_replicas]
        avoided = set(pending_request.kwargs.get("avoid", ()))
        by_name = {one.replica_id.unique_id: one for one in candidate_replicas}
        allowed = {name: one for name, one in by_name.items() if name not in avoided} or by_name
        loads = {name: self._load(one.replica_id) for name, one in allowed.items()}
        return [[allowed[name]] for name in self._affinity.choose(assignment.request, loads)]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        assignment = _assignment_of(pending_request)
        if assignment is not None:
            self._affinity.note(assignment.request, replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        names = frozenset(one.unique_id for one in self.curr_replicas)
        for hear in members.HEARERS:
            hear(names)

    def _load(self, replica_id: ReplicaID) -> int:
        """Requests there, as far as is known: all of this ingress, and those of others when it last spoke."""
        return self.replica_queue_len_cache.get(replica_id) or 0


def _assignment_of(pending: PendingRequest | None) -> Assignment | None:
    found = pending.args[0] if pending is not None and pending.args else None
    return found if isinstance(found, Assignment) else None
