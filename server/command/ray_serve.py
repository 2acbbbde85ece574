"""`slipstream ray-serve`: the server's settings become an application on a Ray cluster, which this process looks after.

Without a cluster one is started on this machine. Ray is imported only here and in `server/cluster/on_ray`.
"""

from __future__ import annotations

import importlib.util
import signal
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from slipstream.server.command.serve import EXIT_CANNOT_LOAD
from slipstream.server.command.starting import EXIT_INTERRUPTED, checked, configure_logs, preset
from slipstream.server.command.subcommand import Argument, Call, Subcommand, count, parsed
from slipstream.server.http.auth import keys_of
from slipstream.server.http.limits import is_loopback, unix_path
from slipstream.server.report.logs import logger

log = logger(__name__)

NAME = "slipstream"  # of the application

# Settings that mean nothing before replicas, each with what does instead.
_ELSEWHERE = {
    "ssl_key_file": "Ray's proxies speak plain HTTP; end TLS in front of them",
    "ssl_cert_file": "Ray's proxies speak plain HTTP; end TLS in front of them",
    "slot_save_path": "slots belong to replicas, and are not saved",
}

# Arguments that mean nothing in a file of Ray's, each with what does instead.
_OF_RAY = {
    "host": "http_options of the file say where Ray's proxies listen",
    "port": "http_options of the file say where Ray's proxies listen",
    "ray-address": "the file is for the cluster that it is given to",
    "dashboard": "the file is for a cluster that runs, with or without one",
}

# Ray reads these alone, in all its processes; on a cluster that runs already its own hold. Without them a request
# crosses some threads and a process more.
_FAST = {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1", "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0"}
# HAProxy in place of Ray's proxies, straight to the ingresses: a fifth more tokens/s. Then both listen on all
# interfaces, whatever the host, so not where a server without keys was meant for this machine alone.
_DIRECT = {"RAY_SERVE_ENABLE_HA_PROXY": "1"}


def _processors(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1e6:
        raise ValueError(f"{text}: must be a number of processors")
    return value


def _run(call: Call) -> int:
    settings = checked(call)
    refuse(call)
    if importlib.util.find_spec("ray") is None:
        call.refuse("needs Ray: pip install 'slipstream[ray]'")
    configure_logs(settings, call.environ)
    preset(_FAST)
    if keys_of(settings) or not is_loopback(settings.host):
        preset(_DIRECT)
    import ray
    from ray import serve
    from ray.serve.config import HTTPOptions

    from slipstream.server.cluster.on_ray.application import application_of

    stop = threading.Event()
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN  # nohup says that it does not
    # Inherited by Ray's processes, which a terminal that is closed would end.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    ray.init(address=call.own["ray_address"], log_to_driver=True, include_dashboard=call.own["dashboard"])
    # Only now, as Ray sets its own handlers, which end the process at once and all streams with it.
    _at_signals(signal.default_int_handler)
    if hangs_up:
        signal.signal(signal.SIGHUP, lambda *_: stop.set())
    try:
        serve.start(http_options=HTTPOptions(host=settings.host, port=settings.port, request_timeout_s=None))
        try:
            serve.run(application_of(settings, call.own), name=NAME, route_prefix="/")
        except RuntimeError as error:  # which does not say why a part of it did not start
            log.error("cannot_load", reason=_failure(serve.status().applications) or str(error))
            return EXIT_CANNOT_LOAD
        _at_signals(lambda *_: stop.set())
        log.info("ready", url=f"http://{settings.host}:{settings.port}", replicas=call.own["replicas"])
        stop.wait()
        _at_signals(signal.default_int_handler)  # a second one does not wait
        log.info("draining", timeout_s=settings.shutdown_timeout)
        serve.delete(NAME)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    finally:
        ray.shutdown()
    return 0


def _failure(applications: Mapping[str, Any]) -> str:
    """Why parts of ours did not start: the end of the traceback in what Ray tells of each."""
    parts = applications[NAME].deployments if NAME in applications else {}
    failed = {name: one.message for name, one in parts.items() if one.status == "DEPLOY_FAILED"}
    return "; ".join(
        f"{name}: {told.strip().splitlines()[-1]}" for name, told in failed.items() if told.strip()
    )


def _at_signals(handler: Callable[[int, FrameType | None], object]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)


def refuse(call: Call) -> None:
    """Exits with status 2 for settings that can have no effect here."""
    settings = call.settings
    for name, reason in _ELSEWHERE.items():
        if (value := getattr(settings, name)) is not None:
            call.refuse(f"--{name.replace('_', '-')} {value}: {reason}")
    if unix_path(settings.host) is not None:
        call.refuse(f"--host {settings.host}: Ray's proxies listen on TCP ports alone")
    most = call.own["max_replicas"]
    if most is not None and most < call.own["replicas"]:
        call.refuse(f"--max-replicas {most}: less than --replicas {call.own['replicas']}")


RAY_SERVE = Subcommand(
    name="ray-serve",
    usage="-m MODEL [--replicas N] [options]",
    summary="serve a model by several replicas, on a Ray cluster",
    about="Serves a model by several engines behind one address, as a Ray Serve application. A stream whose replica is"
    " lost goes on at another. Takes the settings of `serve`, each for every replica, and runs until a signal.",
    run=_run,
    arguments=(
        Argument(
            flag="--replicas",
            metavar="N",
            default=1,
            read=count,
            meaning="engines; with --max-replicas the fewest",
        ),
        Argument(
            flag="--max-replicas",
            metavar="N",
            read=count,
            meaning="the most engines: as many run as the requests fill the slots of",
        ),
        Argument(
            flag="--ingresses",
            metavar="N",
            default=1,
            read=count,
            meaning="HTTP applications before the engines; streams end with theirs",
        ),
        Argument(
            flag="--max-moves",
            metavar="N",
            default=3,
            read=count,
            meaning="times that a request may go on at another engine before it fails",
        ),
        Argument(
            flag="--replica-cpus",
            metavar="X",
            read=_processors,
            meaning="processors that Ray sets aside for an engine; --threads by default, or 1",
        ),
        Argument(
            flag="--ray-address",
            metavar="ADDRESS",
            meaning="a running cluster, or auto; by default RAY_ADDRESS, or a cluster of this machine alone",
        ),
        Argument(flag="--dashboard", meaning="start Ray's dashboard with a cluster of its own"),
    ),
    statuses="Exit status: 0 stopped in order, 2 bad usage, 3 replicas do not start.",
)


def call_of(arguments: Mapping[str, Any]) -> Call:
    """The call that named arguments mean, as in a file of Ray's; those without a value are left out. Raises ValueError.

    Its host is every interface: where Ray's proxies listen is not known here, so any host name may be theirs.
    """
    words = ["--host=0.0.0.0"]
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if flag in _OF_RAY:
            raise ValueError(f"args of the application: {name}: {_OF_RAY[flag]}")
        if isinstance(value, list | dict):
            raise ValueError(f"args of the application: {name}: must be text, a number, true or false")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            words.append(f"--{flag}={value}")
    try:
        call = parsed(RAY_SERVE, words, {})
        refuse(call)
    except SystemExit as error:
        raise ValueError(f"args of the application: {' '.join(words)}: see the line above") from error
    return call
