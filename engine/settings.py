"""Every setting of the server: type, default, bounds, flags, one line of meaning.

One frozen dataclass, so that the engine runs without pydantic. `server/command/subcommand.py` derives the flags, the
environment variables (`SLIPSTREAM_CTX_SIZE`), the TOML keys (`ctx_size`) and docs/settings.md from the
metadata below. A default is written nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from slipstream.engine.model_settings import ModelSettings
from slipstream.engine.naming import CHAT_FORMATS
from slipstream.engine.ranges import INT32
from slipstream.engine.setting import sampled, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(ModelSettings):
    """All settings with their defaults. None means: worked out at start, logged, shown in `/props`."""

    # speculation
    spec_type: str = setting(
        "auto",
        "comma list of drafters: forced and prediction (in every list), ngram-simple, ngram-map-k, ngram-map-k4v,"
        " ngram-mod, ngram-cache, suffix, draft-model, draft-eagle3, draft-mtp, draft-assistant, draft-dflash,"
        " draft-dspark, ngram-device;"
        " none: plain decoding; auto: suffix, ngram-device on a GPU, ngram-cache where -lcs or -lcd is given, and the"
        " network given or in the model's own folder",
    )
    spec_order: str = setting(
        "value",
        "which draft wins: of the greatest expected gain, or of the first drafter in the list above that has one",
        choices=("value", "fixed"),
    )
    draft_max: int = setting(
        16,
        "most tokens drafted for a slot in a step; 0 is plain decoding",
        "--spec-draft-n-max",
        "--draft",
        "--draft-n",
        least=0,
        most=64,
    )
    draft_min: int = setting(
        0, "drafts shorter than this are thrown away", "--spec-draft-n-min", "--draft-n-min", least=0, most=64
    )
    draft_context: int = setting(
        512,
        "tokens before a guess that a draft network is fed, at least, where it has not been fed all along (a prompt, a"
        " stretch that others drafted); 0: all of them",
        least=0,
    )
    draft_taps: str | None = setting(
        None,
        "comma list of the target's hidden states that a draft head reads (0: before the first layer), where its files"
        " say it wrong; acceptance near zero is the sign",
    )
    draft_recycled: str = setting(
        "auto",
        "what MTP layers read beside tokens for guesses behind the first: the state that the layer before left, after"
        " that one's norm or before, or the target's; auto: as the family's reference does",
        choices=("auto", "normed", "raw", "target"),
    )
    draft_position: str = setting(
        "newest",
        "the position by which an assistant's queries turn: the newest token's, or the one before",
        choices=("newest", "before"),
    )
    draft_p_min: float = setting(
        0.0,
        "a model drafter stops where its own probability is below this",
        "--spec-draft-p-min",
        least=0.0,
        most=1.0,
    )
    spec_adaptive: bool = setting(default=True, meaning="fit draft lengths to measured acceptance and cost")
    spec_ngram_simple_size_n: int = setting(
        12,
        "ngram-simple: tokens that must match",
        "--ngram-size-n",
        "--spec-ngram-size-n",
        least=1,
        most=1024,
    )
    spec_ngram_simple_size_m: int = setting(
        48,
        "ngram-simple: most tokens copied after a match",
        "--ngram-size-m",
        "--spec-ngram-size-m",
        least=1,
        most=1024,
    )
    spec_ngram_simple_min_hits: int = setting(
        1,
        "ngram-simple: earlier occurrences a match must have",
        "--ngram-min-hits",
        "--spec-ngram-min-hits",
        least=1,
        most=1024,
    )
    spec_ngram_map_k_size_n: int = setting(12, "ngram-map-k: tokens that must match", least=1, most=1024)
    spec_ngram_map_k_size_m: int = setting(
        48, "ngram-map-k: most tokens copied after a match", least=1, most=1024
    )
    spec_ngram_map_k_min_hits: int = setting(
        1, "ngram-map-k: earlier occurrences a match must have", least=1, most=1024
    )
    spec_ngram_map_k4v_size_n: int = setting(12, "ngram-map-k4v: tokens that must match", least=1, most=1024)
    spec_ngram_map_k4v_size_m: int = setting(
        48, "ngram-map-k4v: most tokens copied after a match", least=1, most=1024
    )
    spec_ngram_map_k4v_min_hits: int = setting(
        1, "ngram-map-k4v: earlier occurrences a match must have", least=1, most=1024
    )
    spec_ngram_mod_n_match: int = setting(24, "ngram-mod: tokens that must match", least=1, most=1024)
    spec_ngram_mod_n_min: int = setting(
        48, "ngram-mod: shorter drafts are thrown away; never more than --draft-max asks", least=0, most=1024
    )
    spec_ngram_mod_n_max: int = setting(64, "ngram-mod: most tokens of a draft", least=0, most=1024)
    lookup_cache_static: str | None = setting(
        None,
        "ngram-cache: file of counted n-grams, read at start (any file of --lookup-cache-dynamic)",
        "-lcs",
    )
    lookup_cache_dynamic: str | None = setting(
        None,
        "ngram-cache: file of counted n-grams, read at start if it exists; every ended request's counts are added,"
        " of any API key, and written at shutdown",
        "-lcd",
    )
    spec_shared_history: str = setting(
        "off",
        "suffix: draft from finished outputs too: off, those of the same API key, or all (text of one caller"
        " then shows in another's timing)",
        choices=("off", "tenant", "all"),
    )
    spec_shared_history_size: int = setting(
        262144,
        "suffix: most tokens of finished outputs kept; when full, the half used longest ago is forgotten, which takes"
        " about 0.1 ms per 1,000 tokens",
        least=1024,
        most=2**20,
    )
    spec_synth_len: float | None = setting(
        None,
        "benchmarks: accept drafts at random so that a pass yields this many tokens on average; the text is senseless."
        " Drafts have --draft-max tokens and are verified in full; auto is then the network alone, or made-up tokens",
        least=1,
        most=65,
    )
    spec_synth_rates: str | None = setting(
        None,
        "benchmarks: comma list; the i-th is the probability that the first i drafts of a pass are all accepted",
    )

    # capacity
    ctx_size: int | None = setting(
        None,
        "most tokens of one sequence; 0 and by default: the model's limit or what fits",
        "-c",
        "--max-model-len",
        least=8,
    )
    cache_size: int | None = setting(None, "MiB for cached keys and values, shared by all slots", least=1)
    kv_cache_dtype: str = setting(
        "auto",
        "type in which keys and values are cached; fp8 (e4m3, scale 1) halves their memory and changes the text",
        choices=("auto", "fp8", "fp8_e4m3"),
    )
    cache_ram: int | None = setting(
        None, "MiB of host memory for states that prefixes of recurrent models resume from", "-cram", least=0
    )
    parallel: int = setting(4, "slots: requests computed at the same time", "-np", least=1, most=256)
    batch_size: int | None = setting(
        None,
        "rows of one pass: by default 2048 on CUDA; on CPU 128 if a stream decodes in it, else up to 256",
        "-b",
        least=1,
        most=65536,
    )
    max_queue: int = setting(
        64,
        "requests that may wait for a slot; more are answered 429, sooner those of a key that has most of them",
        least=0,
        most=100000,
    )

    # defaults of requests' fields: None falls back to the checkpoint's generation_config, then to OpenAI's values
    seed: int | None = sampled("seed", "seed of requests that bring none; drawn at random by default", "-s")
    temperature: float | None = sampled("temperature", "default temperature", "--temp")
    top_k: int | None = sampled("top_k", "default top_k; 0 is off")
    top_p: float | None = sampled("top_p", "default top_p; 1 is off")
    min_p: float | None = sampled("min_p", "default min_p; 0 is off")
    repeat_penalty: float | None = sampled("repeat_penalty", "default repeat_penalty; 1 is off")
    repeat_last_n: int | None = sampled("repeat_last_n", "default window of the repeat penalty, in tokens")
    presence_penalty: float | None = sampled("presence_penalty", "default presence_penalty; 0 is off")
    frequency_penalty: float | None = sampled("frequency_penalty", "default frequency_penalty; 0 is off")
    n_predict: int = setting(
        -1, "default max_tokens; -1: up to the context's end", "-n", "--predict", least=-1, most=INT32
    )
    reasoning: str = setting(
        "auto",
        "default of thinking: off and on are what templates get as enable_thinking; auto: theirs",
        "-rea",
        choices=("auto", "on", "off"),
    )
    reasoning_budget: int = setting(
        -1,
        "most tokens of a reply's thinking, whose end is then written for the model; -1: no limit; 0 is also "
        "--reasoning off",
        least=-1,
        most=INT32,
    )
    reasoning_budget_message: str = setting("", "what is written before that end")
    chat_template_kwargs: str | None = setting(
        None, "JSON object of values for the chat template; those of a request's chat_template_kwargs win"
    )

    # server
    host: str = setting(
        "127.0.0.1", "address to listen on; a path that ends in .sock, or unix:PATH, is a unix socket"
    )
    port: int = setting(8080, "port to listen on; 0 takes a free one", least=0, most=65535)
    api_prefix: str = setting("", "path in front of every route, as in /llm")
    api_key: str | None = setting(None, "comma list of accepted keys; none means no check")
    api_key_file: str | None = setting(
        None, "file of further accepted keys, one a line; lines that begin with # are comments"
    )
    ssl_key_file: str | None = setting(None, "private key for https, PEM")
    ssl_cert_file: str | None = setting(None, "certificate for https, PEM, with its chain")
    cors_origins: str | None = setting(
        None,
        "comma list of origins whose pages may use the server, as in https://my.example; localhost stands for pages of"
        " this machine at any port; none by default",
    )
    max_body: int | None = setting(
        None,
        "MiB a request body may have; a million tokens take 4 to 7, photographs a third more than their files. 8 by"
        " default, 48 where the model sees images",
        least=1,
        most=1024,
    )
    max_queue_wait: float = setting(
        0.0, "seconds a request may wait for a slot, else 429; 0 is no limit", least=0, most=86400
    )
    request_timeout: float = setting(
        0.0, "seconds a request may take from its arrival, else 504; 0 is no limit", least=0, most=86400
    )
    step_timeout: float = setting(
        300.0,
        "seconds a step of the engine may take before it counts as hanging: requests fail, /live answers 503 and the"
        " process ends with 1; 0 is no limit",
        least=0,
        most=86400,
    )
    exit_on_device_error: bool = setting(
        default=False,
        meaning="end the process with 1 once the device has failed, so that what supervises it starts another; without"
        " it the server stays and answers 503, as /live and /health do. The container image sets it",
    )
    timeout: float = setting(
        60.0,
        "seconds a client may take to send its request, or leave its reply unread, before it is cut off",
        "-to",
        least=0.1,
        most=86400,
    )
    shutdown_timeout: float = setting(
        30.0, "seconds running requests may take after SIGTERM, SIGINT or SIGHUP", least=0, most=3600
    )
    slot_save_path: str | None = setting(
        None, "folder for slots saved to files (POST /slots/ID?action=save); they hold the texts' tokens"
    )
    responses_store: str = setting(
        "memory",
        "where /v1/responses keeps what it answered: memory, or a file (SQLite) that outlives the server",
    )
    responses_kept: int = setting(
        1000,
        "responses kept for each API key, of 64 MiB in all; those not used for longest make room; 0 keeps none",
        least=0,
        most=1000000,
    )
    chat_format: str = setting(
        "auto",
        "how the model writes thinking and tool calls; auto: found out from its chat template; template: read from it "
        "even if a family fits; generic: by a system message; none: all is content",
        choices=CHAT_FORMATS,
    )
    reasoning_field: str = setting(
        "reasoning_content",
        "field of a reply that holds the thinking; none: it stays in the content",
        choices=("reasoning_content", "reasoning", "both", "none"),
    )
    slots: bool = setting(default=True, meaning="answer GET /slots, where each key sees its own requests")
    webui: bool = setting(default=True, meaning="serve the chat page at /")
    strict_api: bool = setting(default=False, meaning="answer 400 to request fields that are not known")
    log_level: str = setting("info", "how much to log", choices=("debug", "info", "warning", "error"))
    log_format: str = setting(
        "auto",
        "lines of JSON or readable text; auto: text on a terminal, else JSON",
        choices=("auto", "json", "text"),
    )
    log_file: str | None = setting(
        None, "file to which the log is written too; lines are added at its end, its owner alone may read it"
    )
    otlp_endpoint: str | None = setting(
        None,
        "OpenTelemetry collector (OTLP over http, as in http://localhost:4318) that is sent one span per request;"
        " OTEL_EXPORTER_OTLP_ENDPOINT is read too; needs the extra [otel]",
    )

    @property
    def names(self) -> tuple[str, ...]:
        """The model's names in `alias`, the one shown first; empty without any."""
        return tuple(name for part in (self.alias or "").split(",") if (name := part.strip()))


_BY_NAME = {one.name: one.metadata for one in fields(Settings)}


def range_of(name: str) -> tuple[float, float]:
    """(least, most) of a setting that has both."""
    return _BY_NAME[name]["least"], _BY_NAME[name]["most"]


# (least, most) of the fields of `api.Speculate`. What is above the server's is lowered to that (`resolve_speculate`).
SPECULATE_RANGES: Mapping[str, tuple[float, float]] = {
    "n_max": (0, INT32),
    "n_min": (0, INT32),
    "p_min": range_of("draft_p_min"),
    "ngram_size_n": range_of("spec_ngram_simple_size_n"),
    "ngram_size_m": range_of("spec_ngram_simple_size_m"),
    "ngram_min_hits": range_of("spec_ngram_simple_min_hits"),
}
