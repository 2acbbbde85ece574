"""The subcommands of `slipstream` besides `serve`, and the table of all of them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slipstream.engine.errors import EngineError, LoadError
from slipstream.server.command import profile_table
from slipstream.server.command.completion import SHELLS, script
from slipstream.server.command.flags import BY_NAME
from slipstream.server.command.forecast_table import GPUS, memory_of, table
from slipstream.server.command.healthcheck import healthcheck
from slipstream.server.command.ray_serve import RAY_SERVE
from slipstream.server.command.serve import EXIT_CANNOT_LOAD, EXIT_FAILED
from slipstream.server.command.starting import SERVE, be_considerate, load
from slipstream.server.command.subcommand import Argument, Call, Subcommand, count
from slipstream.server.command.terminal_chat import CHAT

AS_JSON = Argument(flag="--json", meaning="figures for machines: bytes, seconds")


def _write(told: Mapping[str, Any], as_table: Callable[[Mapping[str, Any]], str], *, as_json: bool) -> None:
    sys.stdout.write(json.dumps(told, indent=2) + "\n" if as_json else as_table(told))


def _plan(call: Call) -> int:
    from slipstream.engine.service.tools.forecast import forecast
    from slipstream.server.vision.opening import vision_bytes

    try:
        told = asdict(forecast(call.settings, call.own["memory"], vision_bytes))
    except LoadError as error:
        sys.stderr.write(f"slipstream plan: {error}\n")
        return EXIT_CANNOT_LOAD
    _write(told, table, as_json=call.own["json"])
    return 0 if told["refusal"] is None else EXIT_CANNOT_LOAD


def _config_file(text: str) -> str:
    if not Path(text).exists():
        raise ValueError(f"{text}: no such file")
    return text


PLAN = Subcommand(
    name="plan",
    usage="(-m MODEL | --config FILE) [--memory GiB] [options]",
    summary="tell how much GPU memory a server would take",
    about="What a server with these settings takes of a GPU's memory, from the model's config alone.",
    run=_plan,
    settings=(
        *("model", "model_draft", "vision", "dtype", "tensor_parallel_size", "spec_type", "draft_max"),
        *("ctx_size", "cache_size", "kv_cache_dtype", "parallel", "batch_size"),
    ),
    arguments=(
        AS_JSON,
        Argument(
            flag="--memory",
            metavar="GiB",
            meaning=f"free GPU memory: a number, or one of {', '.join(GPUS)}",
            read=memory_of,
        ),
        Argument(
            flag="--config",
            metavar="FILE",
            meaning="the model's config.json, instead of -m",
            read=_config_file,
            sets="model",
        ),
        Argument(
            flag="--draft-config",
            metavar="FILE",
            meaning="a draft model's config.json, instead of -md",
            read=_config_file,
            sets="model_draft",
        ),
    ),
    statuses="Exit status: 0 it fits, 2 bad usage, 3 it would not start.",
)


def _profile(call: Call) -> int:
    own = call.own
    try:
        prompts = None if own["prompts"] is None else profile_table.prompts_of(Path(own["prompts"]))
    except (OSError, ValueError) as error:
        call.refuse(f"--prompts {own['prompts']}: {error}")
    trace = None if own["trace"] is None else Path(own["trace"])
    if trace is not None and not _takes_a_file(trace):
        call.refuse(f"--trace {trace}: cannot be written")
    be_considerate()
    from slipstream.engine.service.tools.profile import Order, TraceNotWritten, profiled

    try:
        told = asdict(profiled(call.settings, Order(prompts, own["tasks"], own["tokens"], trace)))
    except EngineError as error:
        sys.stderr.write(f"slipstream profile: {error}\n")
        return EXIT_CANNOT_LOAD if isinstance(error, LoadError) else EXIT_FAILED
    except TraceNotWritten as error:
        sys.stderr.write(f"slipstream profile: --trace {error}\n")
        return EXIT_FAILED
    _write(told, profile_table.table, as_json=own["json"])
    return 0


def _takes_a_file(path: Path) -> bool:
    """Whether a file can be written under this path. A device such as /dev/null is no such path: where writing fails,
    what is there is removed.
    """
    if path.exists():
        return path.is_file() and os.access(path, os.W_OK)
    return os.access(path.parent, os.W_OK)


# The settings that decide what a step computes, and on which device.
_COMPUTED = (
    *("model", "model_draft", "dtype", "round_activations", "device", "device_draft", "threads"),
    *("tensor_parallel_size", "ctx_size", "cache_size", "kv_cache_dtype", "parallel"),
    *("batch_size", "spec_type", "spec_order", "spec_adaptive", "draft_max", "draft_min", "draft_p_min"),
)
PROFILE = Subcommand(
    name="profile",
    usage="-m MODEL [--tasks N] [--trace FILE] [options]",
    summary="measure where the time of a step goes",
    about="Plays requests without HTTP, plainly and with drafts, one at a time and one per slot, and tells where the"
    " time went: parts of a step, operators, passes.",
    run=_profile,
    settings=(*_COMPUTED, "temperature", "top_k", "top_p", "min_p"),
    arguments=(
        AS_JSON,
        Argument(flag="--tasks", metavar="N", default=8, read=count, meaning="requests played in each way"),
        Argument(flag="--tokens", metavar="N", default=64, read=count, meaning="most tokens of a reply"),
        Argument(
            flag="--prompts",
            metavar="FILE",
            meaning="prompts, one a line; by default random words of the vocabulary",
        ),
        Argument(
            flag="--trace",
            metavar="FILE",
            meaning="write a Chrome trace of one more playing, by torch's profiler; compressed if FILE ends in .gz",
        ),
    ),
    statuses="Exit status: 0 done, 1 a prompt was refused, a request failed or the trace could not be written,"
    " 2 bad usage, 3 cannot load.",
)


def _compile(call: Call) -> int:
    started = time.perf_counter()
    if call.own["arch"] is not None:
        return _compile_ahead(call)
    try:
        engine = load(call.settings)
    except LoadError as error:
        sys.stderr.write(f"slipstream compile: {error}\n")
        return EXIT_CANNOT_LOAD
    asyncio.run(engine.close())
    from slipstream.kernels.user_cache import unkept

    if unkept:
        sys.stderr.write(f"slipstream compile: {'; '.join(unkept.values())}\n")
        return EXIT_FAILED
    sys.stdout.write(f"{engine.info.name}: kernels are ready, {time.perf_counter() - started:.1f} s\n")
    return 0


def _compile_ahead(call: Call) -> int:
    """The CUDA C++ kernels for GPUs that need not be here."""
    from slipstream.kernels.cuda.ahead import compile_ahead
    from slipstream.kernels.cuda.nvrtc import ARCHITECTURES
    from slipstream.kernels.dispatch import CannotRunError

    for name in call.given:
        call.refuse(
            f"{BY_NAME[name].flags[0]} has no use with --arch, which compiles the same for all models"
        )
    names = [name.strip() for name in call.own["arch"].split(",")]
    if unknown := [name for name in names if name not in ARCHITECTURES]:
        call.refuse(f"--arch {unknown[0] or repr('')}: none of {', '.join(ARCHITECTURES)}")
    started = time.perf_counter()
    try:
        for told in compile_ahead(names, os.cpu_count() or 1):
            sys.stdout.write(f"{told}\n")
            sys.stdout.flush()
    except CannotRunError as error:
        sys.stderr.write(f"slipstream compile: {error}\n")
        return EXIT_CANNOT_LOAD
    sys.stdout.write(f"kernels are kept, {time.perf_counter() - started:.1f} s\n")
    return 0


COMPILE = Subcommand(
    name="compile",
    usage="(-m MODEL | --arch ARCH[,ARCH…]) [options]",
    summary="compile the kernels a model or a GPU needs, and end",
    about="Loads a model as a server would and ends, so that the kernels it needs are compiled and kept, and the next"
    " start does not wait for them: for images and after updates. With --arch, no model and no GPU: compiles the CUDA"
    " C++ kernels, which depend on neither; those in Triton are compiled by a model's first start.",
    run=_compile,
    settings=_COMPUTED,
    arguments=(
        Argument(
            flag="--arch",
            metavar="ARCH",
            meaning="GPU architectures, as in sm_90a,sm_100",
            replaces_model=True,
        ),
    ),
    statuses="Exit status: 0 done, 1 something could not be kept, 2 bad usage, 3 cannot load.",
)


def _check_health(call: Call) -> int:
    status, told = healthcheck(call.settings, call.own["url"])
    sys.stdout.write(told + "\n")
    return status


HEALTHCHECK = Subcommand(
    name="healthcheck",
    usage="[--url URL] [options]",
    summary="ask a running server whether it takes requests",
    about="Asks a running server's /health, at --url or at the address that these settings mean.",
    run=_check_health,
    settings=("host", "port", "api_prefix", "ssl_key_file", "ssl_cert_file"),
    arguments=(
        Argument(flag="--url", metavar="URL", meaning="address of the server, with its prefix if it has one"),
    ),
    needs_model=False,
    statuses="Exit status: 0 it takes requests, 1 it does not, 2 bad usage.",
)


def _complete(call: Call) -> int:
    sys.stdout.write(script(call.own["shell"], SUBCOMMANDS))
    return 0


COMPLETION = Subcommand(
    name="completion",
    usage=f"{{{','.join(SHELLS)}}}",
    summary="print a completion script for bash, zsh or fish",
    about="Prints a script with which a shell completes subcommands, flags and values: `source <(slipstream completion"
    " bash)`, or into a file where the shell looks for completions.",
    run=_complete,
    settings=(),
    positional=("shell", SHELLS),
    needs_model=False,
)

SUBCOMMANDS = {
    one.name: one for one in (SERVE, RAY_SERVE, CHAT, PLAN, PROFILE, COMPILE, HEALTHCHECK, COMPLETION)
}
