"""Models of the replies of the status endpoints, for the OpenAPI document. A field with a default may be absent."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from slipstream.engine.drafting import Outcome, Treatment, WhyNot
from slipstream.server.describe.shape import Error, Shape, optional


class HealthProblem(Error):
    status: str | None = optional("the engine's; missing where only a slot is")


class Health(Shape):
    status: Literal["ok"]
    warnings: list[str] | None = optional("what works less well than it should")


class Life(Shape):
    status: Literal["ok", "failed"]
    step_age_s: float = Field(description="seconds since the engine's running step began; 0 between steps")
    reason: str | None = optional("why the engine failed, where that was its device")


class Version(Shape):
    version: str


class Load(Shape):
    server_load: int = Field(description="choices that have a slot or wait for one")


class Verbs(Shape):
    """A figure for each call the engine makes to a drafter."""

    begin: float
    draft: float
    accept: float


class DrafterFigures(Shape):
    draft_n: int = Field(description="tokens drafted")
    draft_n_accepted: int
    n_drafts: int = Field(description="verified drafts")
    n_drafts_accepted: int = Field(description="… of which at least one token was accepted")
    draft_n_per_position: list[int] = Field(description="[i]: tokens drafted at place i of their draft")
    draft_n_accepted_per_position: list[int]
    acceptance_rate_per_position: list[float] = Field(description="of all its drafts, however long")
    calls: Verbs
    ms: Verbs


class NextToken(Shape):
    has_next_token: bool
    n_remain: int = Field(description="-1: no limit but the context")
    n_decoded: int


class Slot(Shape):
    """A slot as llama-server shows it. One with another API key's request has `is_processing`, and figures of 0."""

    id: int
    n_ctx: int
    speculative: bool
    is_processing: bool = Field(description="whether it serves a request, of any API key")
    id_task: str | None = Field(
        description="id of the request; null if it is another API key's, or the slot idle"
    )
    n_prompt_tokens: int = Field(description="0, as all figures of a request, if it is another API key's")
    n_prompt_tokens_processed: int
    n_prompt_tokens_cache: int
    n_past: int
    next_token: list[NextToken]
    drafters: dict[str, DrafterFigures] = Field(description="of the running request")
    n_max: int = Field(description="most tokens of a draft; 0: the request does not draft")
    drafter: str | None = Field(
        description="who made most of the last draft; null: nothing was drafted so far"
    )
    recent: list[list[int]] = Field(
        description="of the request's last 64 steps, oldest first: tokens drafted, and how many of them were kept;"
        " empty if it is another API key's, for how well a text can be guessed tells of the text"
    )
    step_ms: dict[str, float] = Field(
        description="parts of a step of the engine, in which all busy slots move on: moving averages. On a GPU"
        " `forward` and `pick` are launches, and `wait` is for the device"
    )


class PassCost(Shape):
    rows: int
    ms: float = Field(description="what is reckoned with")
    measured_ms: float = Field(description="what was measured last, at the machine's pace today")
    age_s: float = Field(description="seconds of work since")
    relative_error: float = Field(description="standard error of `measured_ms`, as a share of it")


class AcceptanceByPlace(Shape):
    place: int = Field(description="in the guess, from 0; what is said holds up to the next place listed")
    acceptance: float = Field(description="believed share of right tokens, if those before them are right")
    n_judged: int = Field(
        description="tokens confirmed or refuted by the text since the start, verified or not"
    )


class DrafterReport(Shape):
    treatment: Treatment = Field(
        description="asked in most passes, tried now and then, left out (or not asked for by requests),"
        " or switched off after failures"
    )
    asked_share: float = Field(description="of the passes lately that could carry drafts")
    guess_ms: float = Field(
        description="of a network's position, of an ask of a text drafter; 0: not measured"
    )
    fed_row_ms: float = Field(description="of a row that a network is fed before it can guess")
    places: list[AcceptanceByPlace]


class SpeculationReport(Shape):
    """What drafting costs, promises and does. Lately: what was 256 passes ago counts half."""

    why_not: WhyNot | None = Field(description="why nothing is drafted; null while something is")
    explanation: str | None = Field(description="the same in words")
    drafted_share: float = Field(description="of the passes lately that could carry drafts")
    off_s: float = Field(
        description="seconds of work since the last draft token, while requests asked for drafts"
    )
    passes: list[PassCost]
    gap_ms: float = Field(description="the device's wait for the host between two passes; 0: not measured")
    drafters: dict[str, DrafterReport]
    lengths: list[float] = Field(description="[i]: slots' passes lately that verified i draft tokens")
    n_lengths: list[int] = Field(description="the same since the start")
    n_outcomes: dict[Outcome, int] = Field(
        description="passes since the start that could carry drafts, by what became of them"
    )


class GenerationSettings(Shape):
    params: dict[str, float] = Field(
        description="defaults of requests, as far as settings or files give them"
    )
    n_ctx: int


class Modalities(Shape):
    vision: bool
    video: bool
    audio: bool


class TemplateCaps(Shape):
    supports_tools: bool
    supports_tool_calls: bool = Field(description="whether calls can also be read from replies")
    supports_reasoning_effort: bool


class SpeculationState(Shape):
    drafters: list[str]
    disabled: list[str]
    n_max: int
    counts: dict[str, DrafterFigures]


class EngineState(Shape):
    n_waiting: int
    n_pages_free: int
    n_pages_cached: int
    n_pages_held: int
    n_steps: int
    n_prompt_tokens: int
    n_completion_tokens: int
    n_preempted: int


class Props(Shape):
    """llama-server's `/props`, and what was worked out at start."""

    default_generation_settings: GenerationSettings
    total_slots: int
    model_alias: str
    model_path: str
    modalities: Modalities
    endpoint_slots: bool
    endpoint_props: bool
    endpoint_metrics: bool
    webui: bool = Field(description="whether the chat page is served")
    cors_proxy_enabled: Literal[False]
    chat_template: str | None
    chat_template_tool_use: str | None = optional(
        "the template for conversations with tools, if it is another"
    )
    chat_template_caps: TemplateCaps
    chat_format: str = Field(
        description="how tool calls and reasoning are read: a family's way, `generic` or `none`"
    )
    bos_token: str | None
    eos_token: str | None
    build_info: str
    is_sleeping: bool
    status: str
    settings: dict[str, Any] = Field(
        description="every setting of the server but its keys; `max_body` as it holds"
    )
    model: dict[str, Any]
    speculation: SpeculationState
    engine: EngineState
