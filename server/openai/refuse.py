"""Request fields of OpenAI and other servers that this server does not honour.

Each is refused by name unless its value switches the feature off: ignoring it silently would change the reply. Fields
that only inform a provider are accepted and ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from slipstream.server.http.error_table import unsupported

# The reason, then field -> values that mean "off". null always means "off".
_GROUPS: tuple[tuple[str, Mapping[str, tuple[Any, ...]]], ...] = (
    (
        "functions are given as tools, and chosen by tool_choice",
        {"functions": ([],), "function_call": ("none",)},
    ),
    (
        "only log-probabilities of the model's own rows are supported",
        {
            "post_sampling_probs": (False,),
            "logprob_token_ids": ([],),
            "return_tokens_as_token_ids": (False,),
        },
    ),
    (
        "a grammar or a schema holds from the first character of the text",
        {
            "grammar_lazy": (False,),
            "grammar_triggers": ([],),
        },
    ),
    ("only text output is supported", {"modalities": (["text"],), "audio": ()}),
    (
        "this is not supported",
        {
            "web_search_options": (),
            "best_of": (1,),
            "use_beam_search": (False,),
            "length_penalty": (1,),
            "chat_template": (),
            "documents": ([],),
            "lora": ([],),
            "truncate_prompt_tokens": (),
            "return_tokens": (False,),
            "response_fields": ([],),
            "verbose": (False,),
            "n_indent": (0,),
            "t_max_predict_ms": (-1, 0),
            "stop_regex": ("", []),
            "n_cmpl": (1,),
            "add_special_tokens": (False,),
            "parse_tool_calls": (True,),
            "input_ids": (),
            "prompt_embeds": (),
            "lora_path": (),
            "mm_processor_kwargs": ({},),
            "media_io_kwargs": ({},),
            "logits_processors": ([],),
            "custom_logit_processor": (),
            "vllm_xargs": ({},),
            "kv_transfer_params": ({},),
            "session_params": ({},),
            "repetition_detection": (),
            "return_hidden_states": (False,),
            "return_prompt_text": (False,),
        },
    ),
    (
        "this sampler is not supported",
        {
            "dynatemp_range": (0,),
            "top_n_sigma": (-1, 0),
            "typical_p": (1,),
            "xtc_probability": (0,),
            "dry_multiplier": (0,),
            "mirostat": (0,),
            "adaptive_target": (-1,),
            "min_keep": (0,),
        },
    ),
)

REFUSED: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    name: (reason, off) for reason, group in _GROUPS for name, off in group.items()
}

# Known, and without influence on the text: not reported as unknown, not even under --strict-api. The last two lines
# only tune what the table above requires to be off.
IGNORED = frozenset(
    {
        *("user", "metadata", "store", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_options", "prompt_cache_retention", "client_metadata"),
        *("verbosity", "moderation", "priority", "request_id"),
        *("n_cache_reuse", "sse_ping_interval", "backend_sampling", "n_keep", "t_max_prompt_ms"),
        *(
            "guided_decoding_backend",
            "spaces_between_special_tokens",
            "stream_reasoning",
            "rid",
            "session_id",
        ),
        *("n_discard", "dynatemp_exponent", "xtc_threshold", "dry_base", "dry_allowed_length"),
        *("dry_penalty_last_n", "dry_sequence_breakers", "mirostat_tau", "mirostat_eta", "adaptive_decay"),
    }
)


def without_refused(
    data: Mapping[str, Any],
    known: Collection[str],
    refused: Mapping[str, tuple[str, tuple[Any, ...]]] = REFUSED,
    ignored: Collection[str] = IGNORED,
) -> dict[str, Any]:
    """`data` without the fields of these tables, but for those that the request's model has itself (`known`).

    Raises `Refused` for the first field that is not off.
    """
    made = {}
    for name, value in data.items():
        reason, off = ("", ()) if name in known else refused.get(name, ("", ()))
        if reason and value is not None and not any(_same(value, one) for one in off):
            raise unsupported(name, reason)
        if name in known or not (reason or name in ignored):
            made[name] = value
    return made


def _same(value: object, off: object) -> bool:
    """Equality that keeps true and 1 apart, as JSON does."""
    return isinstance(value, bool) == isinstance(off, bool) and value == off


def described() -> dict[str, dict[str, Any]]:
    """The fields of both tables as properties of a JSON schema, for the OpenAPI document."""
    ignored = {name: {"description": "Accepted, without influence."} for name in sorted(IGNORED)}
    return ignored | {
        name: {"enum": [*off, None], "description": f"Otherwise refused: {reason}."}
        for name, (reason, off) in REFUSED.items()
    }
