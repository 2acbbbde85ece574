"""What the server prints once it is ready: where the chat page and the API are, what drafts, how to stop and a first
request to copy; then version, model and limits, on a terminal as a table, else as one event in the log.
"""

from __future__ import annotations

import platform
from typing import Any

from slipstream.engine.api import ModelInfo
from slipstream.engine.settings import Settings
from slipstream.server import version
from slipstream.server.http.address import url_of
from slipstream.server.http.auth import keys_of
from slipstream.server.http.limits import most_body, unix_path
from slipstream.server.openai.formats.format import Format
from slipstream.server.openai.formats.known import can_call
from slipstream.server.openai.formats.reading import Known

UNLIMITED = "none"


def facts(
    info: ModelInfo, settings: Settings, port: int | None, known: Known, load_s: float
) -> dict[str, Any]:
    """Facts about the server by name, in the order in which they are shown. `port`: None for a unix socket."""
    page_tokens = info.n_pages * info.page_size
    return {
        "version": version(),
        "python": platform.python_version(),
        "url": url_of(settings, port),
        "api_keys": len(keys_of(settings)),
        "model": info.name,
        "path": info.path,
        "architecture": info.architecture,
        "n_params": info.n_params,
        "weight_bytes": info.weight_bytes,
        "dtype": info.dtype,
        "activations": "8 bits in products" if settings.round_activations else info.dtype,
        "device": info.device,
        "fingerprint": info.fingerprint,
        "n_ctx": info.n_ctx,
        "n_slots": info.n_slots,
        "n_pages": info.n_pages,
        "page_size": info.page_size,
        "cache_tokens": page_tokens,
        "batch_size": info.batch_size,
        "drafters": ",".join(info.drafters) or UNLIMITED,
        "draft_max": settings.draft_max,
        "chat_template": _template_from(info, settings),
        "chat_format": known.format.name,
        "max_queue": settings.max_queue,
        "max_body_mib": most_body(info, settings),
        "max_queue_wait_s": settings.max_queue_wait or UNLIMITED,
        "request_timeout_s": settings.request_timeout or UNLIMITED,
        "timeout_s": settings.timeout,
        "load_s": round(load_s, 1),
    }


def _template_from(info: ModelInfo, settings: Settings) -> str:
    if settings.chat_template is not None:
        return "the given one"
    return settings.chat_template_file or ("the model's" if info.chat_template else UNLIMITED)


def table(told: dict[str, Any]) -> str:
    """The facts as a table, one a line."""
    width = max(len(name) for name in told)
    return "".join(f"  {name.replace('_', ' '):<{width}}  {_shown(value)}\n" for name, value in told.items())


def _shown(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def welcome(info: ModelInfo, settings: Settings, port: int | None, known: Known) -> str:
    """What a user needs now: where the page and the API are, what drafts, how to stop; and a first request."""
    path, url = unix_path(settings.host), url_of(settings, port)
    address = f"--unix-socket {path} http://localhost{settings.api_prefix}" if path is not None else url
    key = " -H 'authorization: Bearer YOUR_KEY'" if keys_of(settings) else ""
    lines = {
        "chat page": f"{url}/" if path is None and settings.webui else None,
        "API": f"{url}/v1" if path is None else address,
        "chat format": _format_line(info, known.format),
        "speculation": _drafting_line(info, settings),
        "operators": "; ".join(info.replaced_operators) or None,
        "rank sums": info.inexact_sums,
        "to stop": f"Ctrl-C, and running requests may end within {settings.shutdown_timeout:g} s; twice: at once",
    }
    shown = "".join(f"  {name:<11}  {told}\n" for name, told in lines.items() if told is not None)
    return (
        f"{info.name} is ready on {url}\n\n{shown}\n"
        f"  curl {address}/v1/chat/completions -H 'content-type: application/json'{key} \\\n"
        '    -d \'{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64}\'\n\n'
    )


def _format_line(info: ModelInfo, format_: Format) -> str:
    if not info.chat_template:
        return "the model has no chat template: /v1/completions only"
    tools = "tools" if can_call(format_) else "no tool calls"
    if format_.instructs:
        tools = "tools by a system message, as the template has no place for them or its calls cannot be read"
    return f"{format_.name}: {tools}{' and thinking' if format_.reasoning or format_.channels else ''}"


def _drafting_line(info: ModelInfo, settings: Settings) -> str:
    if not info.drafters or not settings.draft_max:
        return "off"
    lengths = "as long as they pay" if settings.spec_adaptive else "always"
    return f"{', '.join(info.drafters)}; up to {settings.draft_max} tokens a step, {lengths}"
