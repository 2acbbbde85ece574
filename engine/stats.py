"""What an engine has done and is doing, as counts for status pages, metrics and replies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DrafterCount:
    """What one drafter did, for a request or for all. Seconds of a call for many slots are shared among them."""

    n_drafts: int = 0  # verified drafts with tokens of this drafter
    n_drafts_accepted: int = 0  # … of which at least one was accepted
    n_drafted: int = 0  # tokens
    n_accepted: int = 0
    drafted_by_position: tuple[int, ...] = ()  # [i]: tokens at place i of their draft
    accepted_by_position: tuple[int, ...] = ()  # … that were accepted, up to the last place where any was
    n_begin_calls: int = 0
    n_draft_calls: int = 0
    n_accept_calls: int = 0
    begin_s: float = 0.0
    draft_s: float = 0.0
    accept_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SlotState:
    """One slot as `/slots` shows it."""

    id: int
    busy: bool
    request_id: str | None
    n_prompt: int
    n_past: int
    n_cached: int
    n_decoded: int
    n_remaining: int  # -1: no limit but the context
    drafters: Mapping[str, DrafterCount] = field(default_factory=dict)  # of the running request
    tenant: str = ""  # whose request it is
    n_max: int = 0  # most tokens of a draft; 0: the request does not draft
    drafter: str | None = None  # who made most of the last draft
    # Of the last steps, oldest first: tokens drafted, and how many of them were kept.
    recent: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A consistent picture of the engine between two steps."""

    slots: tuple[SlotState, ...]
    n_waiting: int
    n_pages_free: int
    n_pages_cached: int  # held by the prefix cache alone
    n_pages_held: int  # held by slots
    n_steps: int
    n_prompt_tokens: int
    n_completion_tokens: int
    drafters: Mapping[str, DrafterCount]
    n_preempted: int
    disabled_drafters: tuple[str, ...]  # switched off after repeated failures
    doubtful_drafters: tuple[str, ...] = ()  # networks whose guesses are hardly ever right
    step_s: Mapping[str, float] = field(default_factory=dict)  # time spent in each part of the steps
    step_average_s: Mapping[str, float] = field(default_factory=dict)  # of it in one step: moving averages
    # Of several, added up here: each one's own.
    replicas: Mapping[str, EngineStats] = field(default_factory=dict)
