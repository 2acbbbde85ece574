"""The model as `/v1/models` lists it: OpenAI's entry with Anthropic's fields and llama-server's and vLLM's figures; and
Ollama's list of models.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from slipstream.engine.api import ModelInfo
from slipstream.engine.settings import Settings
from slipstream.server.openai.formats.reading import Known


def model_list(info: ModelInfo, settings: Settings, known: Known) -> dict[str, Any]:
    ends = {"has_more": False, "first_id": info.name, "last_id": info.name}
    return {"object": "list", "data": [card(info, settings)], **ends, "models": [_as_ollama(info, known)]}


def card(info: ModelInfo, settings: Settings) -> dict[str, Any]:
    """The entry of `data`."""
    return {
        "id": info.name,
        "object": "model",
        "type": "model",
        "display_name": info.name,
        "created": info.created,
        "created_at": _moment(info.created),
        "owned_by": "slipstream",
        "max_model_len": info.n_ctx,
        "architecture": {"input_modalities": list(info.modalities), "output_modalities": ["text"]},
        "aliases": names(info, settings),
        "tags": [one.strip() for one in (settings.tags or "").split(",") if one.strip()],
        "meta": {
            "architecture": info.architecture,
            "n_vocab": info.vocab_size,
            "n_ctx": info.n_ctx,
            "n_ctx_train": info.n_ctx_train,
            "n_embd": info.n_embd,
            "n_params": info.n_params,
            "size": info.weight_bytes,
        },
    }


def names(info: ModelInfo, settings: Settings) -> list[str]:
    """All names of the model, its `id` first."""
    return list(dict.fromkeys((info.name, *settings.names)))


def caps(info: ModelInfo, known: Known) -> dict[str, bool]:
    """What chats can have, as far as the chat template and the format say."""
    template = (info.chat_template or "") + (info.tool_template or "")
    return {
        "supports_tools": known.can_call,
        "supports_tool_calls": known.can_call,
        "supports_reasoning_effort": "reasoning_effort" in template,
    }


def _moment(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _sight(info: ModelInfo) -> list[str]:
    """Ollama's and llama-server's words for a model that sees images."""
    return ["vision", "multimodal"] if "image" in info.modalities else []


def _as_ollama(info: ModelInfo, known: Known) -> dict[str, Any]:
    return {
        "name": info.name,
        "model": info.name,
        "modified_at": _moment(info.created),
        "size": info.weight_bytes,
        "type": "model",
        "capabilities": ["completion", *(["tools"] if known.can_call else []), *_sight(info)],
        "details": {"family": info.architecture, "parameter_size": f"{info.n_params / 1e9:.3g}B"},
    }
