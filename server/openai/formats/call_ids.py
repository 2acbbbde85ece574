"""Ids of calls that name their function, for chat templates that show a call's id in place of its name (Kimi K2's).

What the model writes there is `functions.NAME:N` (Moonshot's guide to tool calling), where N counts the calls of the
conversation. Clients keep whatever id they were given, so earlier calls get theirs when a conversation is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def with_naming_ids(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with other ids of calls, and of results by the call before them that had their id."""
    named: dict[str, str] = {}
    n_calls = 0
    told = []
    for one in map(dict, messages):
        if calls := one.get("tool_calls"):
            ids = [f"functions.{call['function']['name']}:{n_calls + i}" for i, call in enumerate(calls)]
            named |= {call["id"]: new for call, new in zip(calls, ids, strict=True)}
            one["tool_calls"] = [{**call, "id": new} for call, new in zip(calls, ids, strict=True)]
            n_calls += len(calls)
        if (answered := one.get("tool_call_id")) in named:
            one["tool_call_id"] = named[answered]
        told.append(one)
    return told
