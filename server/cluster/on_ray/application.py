"""The Ray Serve application: deployments of replicas and of ingresses, from the server's settings and a few more."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.schema import LoggingConfig

from slipstream.engine.settings import Settings
from slipstream.server import version
from slipstream.server.cluster.on_ray.ingress import Ingress
from slipstream.server.cluster.on_ray.replica import Replica
from slipstream.server.cluster.on_ray.router import PrefixRouter
from slipstream.server.command.ray_serve import call_of

_STOP_S = 10.0  # between a replica's last moved stream and its end by force
_HEALTH_S, _UNHEALTHY_S = 5.0, 20.0  # between two looks at a replica, and that it may take to answer one
_MOST_STREAMS = 1000  # of an ingress
_LOGGING = LoggingConfig(enable_access_log=False)  # the ingress has lines of its own, with tokens and times


def application_of(settings: Settings, own: Mapping[str, Any]) -> Application:
    """To be run by `serve.run`. own: the arguments of `slipstream ray-serve` besides the settings, by name."""
    release = sha256(f"{version()} {settings}".encode()).hexdigest()
    replicas = serve.deployment(
        Replica,
        name="replica",
        max_ongoing_requests=settings.parallel + settings.max_queue,
        logging_config=_LOGGING,
        ray_actor_options=_resources(settings, own),
        health_check_period_s=_HEALTH_S,
        health_check_timeout_s=_UNHEALTHY_S,
        graceful_shutdown_timeout_s=settings.shutdown_timeout + _STOP_S,
        request_router_config=RequestRouterConfig(
            # By name: a class would reach the ingresses as a copy, with module globals of its own.
            request_router_class=f"{PrefixRouter.__module__}.{PrefixRouter.__qualname__}",
            request_router_kwargs={"n_slots": settings.parallel},
        ),
        **_number(settings, own),
    )
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name="ingress",
        num_replicas=own["ingresses"],
        max_ongoing_requests=_MOST_STREAMS,
        logging_config=_LOGGING,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=settings.shutdown_timeout + _STOP_S,
    )
    bound: Application = ingress.bind(settings, release, own["max_moves"], replicas.bind(settings, release))
    return bound


def _resources(settings: Settings, own: Mapping[str, Any]) -> dict[str, float]:
    """What Ray sets aside for a replica, on one machine."""
    has_gpus = settings.device.startswith("cuda") or (
        settings.device == "auto" and ray.cluster_resources().get("GPU", 0) > 0
    )
    cpus = own["replica_cpus"]
    return {
        "num_cpus": float(settings.threads or 1) if cpus is None else cpus,
        "num_gpus": settings.tensor_parallel_size if has_gpus else 0,
    }


def _number(settings: Settings, own: Mapping[str, Any]) -> dict[str, Any]:
    most = own["max_replicas"]
    if most is None:
        return {"num_replicas": own["replicas"]}
    # A replica's own queue counts: more are started once the slots of those there are taken.
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=own["replicas"],
            max_replicas=most,
            target_ongoing_requests=float(settings.parallel),
        )
    }


def application(arguments: dict[str, Any]) -> Application:
    """For Ray's configuration files: `args` are the arguments of `slipstream ray-serve`, as in `ctx_size: 4096`."""
    call = call_of(arguments)
    return application_of(call.settings, call.own)
