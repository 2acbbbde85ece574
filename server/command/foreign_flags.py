"""Flags of llama-server and vLLM that name no setting here: what each means, or why it is refused.

A flag that acts is another way to give a setting. A flag about a mechanism that does not exist here is accepted, and
the log says so. What would change results or memory in a way that is not built is refused with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Changes = Mapping[str, str | bool]  # settings, as a command line would give them

_ALL_LAYERS = 99  # what people write for all of them
_WIDE_CACHE = ("f32", "f16", "bf16", "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A flag with its other names. `value`: what it takes in the usage, None for a switch; `read` raises ValueError."""

    flags: tuple[str, ...]
    meaning: str
    value: str | None = None
    is_optional: bool = False  # the value may be left out
    read: Callable[[str], Changes] = lambda text: {}  # of "" where there is no value
    reason: str | None = None  # why it changes nothing, for the log; None: it acts


def _layers(text: str) -> Changes:
    """0 is the CPU, all is a GPU if there is one; some of them on each is not built."""
    if text in ("auto", "all", "-1") or (text.isdecimal() and int(text) >= _ALL_LAYERS):
        return {}
    if text == "0":
        return {"device": "cpu"}
    raise ValueError(f"{text}: layers are on one device: 0 means the CPU, {_ALL_LAYERS} or all the GPU")


def _draft_layers(text: str) -> Changes:
    return {name.replace("device", "device_draft"): value for name, value in _layers(text).items()}


def _cache_type(text: str) -> Changes:
    if text in _WIDE_CACHE:
        return {}
    raise ValueError(f"{text}: keys and values are cached in the model's type, or with --kv-cache-dtype fp8")


def _reasoning(text: str) -> Changes:
    known = {"none": "none", "deepseek": "reasoning_content", "auto": "reasoning_content"}
    if text not in known:
        raise ValueError(f"{text}: must be one of {', '.join(known)}")
    return {"reasoning_field": known[text]}


def _verbosity(text: str) -> Changes:
    if not text.isdecimal():
        raise ValueError(f"{text}: must be a whole number")
    levels = ("error", "error", "warning", "info")
    return {"log_level": levels[int(text)] if int(text) < len(levels) else "debug"}


def _domains(text: str) -> Changes:
    """vLLM's list of hosts, which it takes as JSON too."""
    listed = json.loads(text) if text.startswith("[") else text.split(",")
    return {"allow_remote_images": True, "remote_image_hosts": ",".join(map(str, listed))}


def _image_limit(text: str) -> Changes:
    """`{"image": 4}`, `{"image": {"count": 4}}` or `image=4`. Other kinds of media do not exist here."""
    pairs = (one.partition("=")[::2] for one in text.split(","))
    limits = json.loads(text) if text.startswith("{") else dict(pairs)
    limit = limits.get("image")
    limit = limit.get("count") if isinstance(limit, dict) else limit
    if limit is None:
        return {}
    if not str(limit).isdecimal():
        raise ValueError(f"{text}: the number of images is no whole number")
    return {"image_limit": str(limit)}


def _short_for(changes: Changes, *flags: str) -> Foreign:
    """A switch that means one setting, with a text or switched off."""
    ((setting, value),) = changes.items()
    name = setting.replace("_", "-")
    meaning = f"--{name} {value}" if value else f"--no-{name}"
    return Foreign(flags=flags, meaning=meaning, read=lambda text: changes)


def _idle(reason: str, *flags: str, value: str | None = None, is_optional: bool = False) -> Foreign:
    meaning = f"accepted without effect: {reason}"
    return Foreign(flags=flags, meaning=meaning, value=value, is_optional=is_optional, reason=reason)


def _either(reason: str, on: Sequence[str], off: Sequence[str]) -> tuple[Foreign, Foreign]:
    """A switch that makes no difference: two flags, so that the log names the one that was given."""
    return _idle(reason, *on), _idle(reason, *off)


def _cached(*flags: str) -> Foreign:
    reason = "keys and values are cached in the model's type"
    meaning = f"{', '.join(_WIDE_CACHE)} are accepted without effect: {reason}; others are refused"
    return Foreign(flags=flags, meaning=meaning, value="TYPE", read=_cache_type, reason=reason)


def _refused(reason: str, *flags: str, value: str | None = None, off: Sequence[str] = ()) -> Foreign:
    """`off`: values that ask for nothing, and are accepted."""

    def read(text: str) -> Changes:
        if text in off:
            return {}
        raise ValueError(f"{text}: {reason}".removeprefix(": "))

    meaning = (
        f"refused: {reason}" if not off else f"{', '.join(off)} is accepted, others are refused: {reason}"
    )
    told = reason if off else None
    return Foreign(flags=flags, meaning=meaning, value=value, read=read, reason=told)


_FIELD = "give it with each request"
_NO_SAMPLER = "this sampler is not supported"
_POSITIONS = "positions are scaled as the model's files say"
_PLACED = "a model is on one device"
_SYSTEM = "threads run where the system puts them"
_OWN_TOWER = "what sees images is read from the model's own files"
_ONE_MODEL = "a server has one model, --model"
_HUB = "--model takes hub names (org/name, org/name:Q4_K_M, org/name/FILE.gguf)"
_NO_TOOLS = "tools run where the client is"

FOREIGN: Sequence[Foreign] = (
    # They act.
    Foreign(
        flags=("-ngl", "--n-gpu-layers", "--gpu-layers"), meaning="0: --device cpu", value="N", read=_layers
    ),
    Foreign(
        flags=("-ngld", "--n-gpu-layers-draft", "--gpu-layers-draft", "--spec-draft-ngl"),
        meaning="0: --device-draft cpu",
        value="N",
        read=_draft_layers,
    ),
    Foreign(flags=("--reasoning-format",), meaning="as --reasoning-field", value="FORMAT", read=_reasoning),
    _short_for({"chat_format": "none"}, "--skip-chat-parsing"),
    _short_for({"log_level": "debug"}, "-v", "--verbose", "--log-verbose"),
    Foreign(
        flags=("-lv", "--verbosity", "--log-verbosity"), meaning="as --log-level", value="N", read=_verbosity
    ),
    _short_for({"log_level": "error"}, "--log-disable"),
    _short_for({"log_format": "json"}, "--log-jsonl"),
    _short_for({"vision": False}, "--no-mmproj", "--no-mmproj-auto", "--language-model-only"),
    Foreign(
        flags=("--allowed-local-media-path",),
        meaning="as --media-path",
        value="FOLDER",
        read=lambda text: {"media_path": text},
    ),
    Foreign(
        flags=("--allowed-media-domains",),
        meaning="--allow-remote-images, and as --remote-image-hosts",
        value="HOSTS",
        read=_domains,
    ),
    Foreign(
        flags=("--limit-mm-per-prompt",),
        meaning='the number of images as --image-limit, as in image=4 or {"image": 4}',
        value="LIMITS",
        read=_image_limit,
    ),
    _short_for({"webui": False}, "--no-ui"),
    # About what does not exist here, or cannot be otherwise.
    _cached("-ctk", "--cache-type-k"),
    _cached("-ctv", "--cache-type-v"),
    _cached("-ctkd", "--cache-type-k-draft", "--spec-draft-type-k"),
    _cached("-ctvd", "--cache-type-v-draft", "--spec-draft-type-v"),
    *_either("templates are always rendered with jinja", ["--jinja"], ["--no-jinja"]),
    _idle("always there", "--metrics"),
    _idle("there is nothing that could be changed", "--props"),
    _idle("it is there by default", "--ui"),
    _idle("attention has one form", "-fa", "--flash-attn", value="on|off|auto", is_optional=True),
    *_either("files are mapped where that serves", ["--mmap"], ["--no-mmap"]),
    _idle("files are mapped where that serves", "-lm", "--load-mode", value="MODE"),
    _idle("nothing is locked in memory", "--mlock"),
    _idle("memory is where the system puts it", "--numa", value="TYPE"),
    *_either("weights are always laid out for the kernels", ["--repack"], ["-nr", "--no-repack"]),
    _idle("files are always checked as they are read", "--check-tensors"),
    _idle("prompts have the threads of replies", "-tb", "--threads-batch", value="N"),
    _idle("a draft model has the target's threads", "-td", "--threads-draft", value="N"),
    _idle("a draft model has the target's threads", "-tbd", "--threads-batch-draft", value="N"),
    _idle("one thread serves all connections", "--threads-http", value="N"),
    *(_idle(_SYSTEM, *flags, value="X") for flags in (("-C", "--cpu-mask"), ("-Cr", "--cpu-range"))),
    *(_idle(_SYSTEM, flag, value="N") for flag in ("--prio", "--poll", "--cpu-strict")),
    *_either("slots always share their pages", ["-kvu", "--kv-unified"], ["-no-kvu", "--no-kv-unified"]),
    *_either("always on", ["-cb", "--cont-batching"], ["-nocb", "--no-cont-batching"]),
    _idle("prompts are always cached", "--cache-prompt"),
    _idle("prefixes are found whole or not", "--cache-reuse", value="N"),
    _idle("all slots share what is cached", "-sps", "--slot-prompt-similarity", value="X"),
    *_either("what ended stays cached", ["--cache-idle-slots"], ["--no-cache-idle-slots"]),
    _idle("snapshots are where they pay", "-ctxcp", "--ctx-checkpoints", "--swa-checkpoints", value="N"),
    _idle("snapshots are where they pay", "-cms", "--checkpoint-min-step", value="N"),
    _idle("prefixes keep their windows anyway", "--swa-full"),
    _idle("a full context always ends a reply", "--no-context-shift"),
    _idle("a full context always ends a reply", "--keep", value="N"),
    _idle("passes are not cut any further", "-ub", "--ubatch-size", value="N"),
    _idle("the cache is never defragmented", "-dt", "--defrag-thold", value="X"),
    _idle("a draft has the target's context", "-cd", "--ctx-size-draft", value="N"),
    _idle("drafts are chains", "--draft-p-split", "--spec-draft-p-split", value="X"),
    _idle("--spec-type is auto by default", "--spec-default"),
    _idle("the pick is always on the device", "-bs", "--backend-sampling", "--spec-draft-backend-sampling"),
    _idle("what is not given is made to fit", "-fit", "--fit", value="on|off"),
    _idle("what is not given is made to fit", "-fitt", "--fit-target", value="MiB"),
    _idle("what is not given is made to fit", "-fitc", "--fit-ctx", value="N"),
    _idle("--tensor-parallel-size divides a model", "-sm", "--split-mode", value="MODE"),
    _idle("--tensor-parallel-size divides a model, evenly", "-ts", "--tensor-split", value="SHARES"),
    _idle("--device names it", "-mg", "--main-gpu", value="N"),
    _idle("the cache is where the model is", "-kvo", "--kv-offload"),
    *_either("operators run where the model is", ["--op-offload"], ["--no-op-offload"]),
    *_either("a start is always warm", ["--warmup"], ["--no-warmup"]),
    *_either("times are always measured", ["--perf"], ["--no-perf"]),
    _idle("every line has them", "--log-prefix", "--log-timestamps"),
    _idle("a terminal has them, NO_COLOR is for none", "--log-colors", value="WHEN", is_optional=True),
    _idle("comments are sent every 15 s", "--sse-ping-interval", value="N"),
    _idle("templates see the thinking of earlier turns", "--reasoning-preserve"),
    _idle("continue_final_message is how to ask for it", "--no-prefill-assistant"),
    _idle(_ONE_MODEL, "--no-models-autoload"),
    _idle("there are no cookies to allow", "--no-cors-credentials"),
    *_either("what sees images is where the model is", ["--mmproj-offload"], ["--no-mmproj-offload"]),
    _idle("--vision is on by default", "--mmproj-auto"),
    # What would change results, memory or access.
    _refused("continue_final_message is how to ask for it", "--prefill-assistant"),
    _refused("cache_prompt: false is a field of requests", "--no-cache-prompt"),
    _refused("a full context ends a reply", "--context-shift"),
    _refused("--ctx-size is of one sequence", "--kv-unified-per-slot", value="N"),
    _refused("the cache is where the model is", "-nkvo", "--no-kv-offload"),
    _refused(
        "--chat-template-kwargs '{\"reasoning_effort\": …}' is how to give it",
        "--reasoning-effort",
        value="X",
    ),
    _refused(_PLACED, "-ot", "--override-tensor", value="RULES"),
    _refused(_PLACED, "-cmoe", "--cpu-moe"),
    _refused(_PLACED, "-ncmoe", "--n-cpu-moe", value="N", off=("0",)),
    _refused(_PLACED, "--rpc", value="SERVERS"),
    _refused("values of the file are taken as they are", "--override-kv", value="RULES"),
    *(
        _refused(_POSITIONS, flag, value="X")
        for flag in (
            *("--rope-scaling", "--rope-scale", "--rope-freq-base", "--rope-freq-scale", "--yarn-orig-ctx"),
            *("--yarn-ext-factor", "--yarn-attn-factor", "--yarn-beta-slow", "--yarn-beta-fast"),
        )
    ),
    *(
        _refused(_NO_SAMPLER, *flags, value="X", off=off)
        for flags, off in (
            (("--top-nsigma", "--top-n-sigma"), ("-1", "-1.0", "0")),
            (("--xtc-probability",), ("0", "0.0")),
            (("--typical", "--typical-p"), ("1", "1.0")),
            (("--dry-multiplier",), ("0", "0.0")),
            (("--adaptive-target",), ("-1", "-1.0")),
            (("--dynatemp-range",), ("0", "0.0")),
            (("--mirostat",), ("0",)),
        )
    ),
    _refused("samplers have one order", "--samplers", value="LIST"),
    _refused("samplers have one order", "--sampler-seq", "--sampling-seq", value="LETTERS"),
    _refused(f"a stop string: {_FIELD} (stop)", "-r", "--reverse-prompt", value="TEXT"),
    _refused(f"{_FIELD} (skip_special_tokens: false)", "-sp", "--special"),
    _refused(f"{_FIELD} (ignore_eos)", "--ignore-eos"),
    _refused(f"{_FIELD} (logit_bias)", "-l", "--logit-bias", value="BIAS"),
    _refused(f"{_FIELD} (grammar)", "--grammar", value="TEXT"),
    _refused(f"{_FIELD} (grammar)", "--grammar-file", value="FILE"),
    _refused(f"{_FIELD} (json_schema)", "-j", "--json-schema", value="SCHEMA"),
    _refused(f"{_FIELD} (json_schema)", "-jf", "--json-schema-file", value="FILE"),
    _refused("embeddings are not supported", "--embedding", "--embeddings"),
    _refused("reranking is not supported", "--rerank", "--reranking"),
    _refused("embeddings are not supported", "--pooling", value="TYPE"),
    _refused(_OWN_TOWER, "-mm", "--mmproj", value="FILE"),
    _refused(_OWN_TOWER, "-mmu", "--mmproj-url", value="URL"),
    _refused("small images are scaled as the model's files say", "--image-min-tokens", value="N"),
    _refused("LoRA adapters are not supported", "--lora", value="FILE"),
    _refused("LoRA adapters are not supported", "--lora-scaled", value="FILE"),
    _refused("control vectors are not supported", "--control-vector", value="FILE"),
    _refused("a model stays loaded", "--sleep-idle-seconds", value="N", off=("-1",)),
    _refused(_ONE_MODEL, "--models-dir", value="FOLDER"),
    _refused(_ONE_MODEL, "--models-preset", value="FILE"),
    _refused(_ONE_MODEL, "--models-max", value="N"),
    _refused(_ONE_MODEL, "--models-autoload"),
    _refused(_HUB, "-mu", "--model-url", value="URL"),
    _refused(_HUB, "-hff", "--hf-file", value="FILE"),
    _refused("HF_TOKEN in the environment is read", "-hft", "--hf-token", value="TOKEN"),
    _refused("HF_HUB_OFFLINE=1 in the environment does it", "--offline"),
    _refused("a port is not shared", "--reuse-port"),
    _refused("no files but the chat page's are served", "--path", value="FOLDER"),
    _refused("methods and headers follow from what is served", "--cors-methods", value="LIST"),
    _refused("methods and headers follow from what is served", "--cors-headers", value="LIST"),
    _refused("there are no cookies to allow", "--cors-credentials"),
    _refused(_NO_TOOLS, "--tools", value="LIST"),
    _refused(_NO_TOOLS, "--ui-mcp-proxy", "--webui-mcp-proxy"),
    _refused("the chat page has no such file", "--ui-config", "--webui-config", value="JSON"),
    _refused("the chat page has no such file", "--ui-config-file", "--webui-config-file", value="FILE"),
    _refused("prompts are never written to files", "--log-prompts-dir", value="FOLDER"),
)
