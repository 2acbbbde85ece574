"""Which replica has most of a prompt in its prefix cache, as far as that can be known from where prompts went before.

A conversation's next turn begins with its last one, so it belongs where that ran, unless it would wait for a slot there
and not so long elsewhere: computing the prompt again is cheaper than waiting. Prompts are compared as texts, in blocks,
by chained hashes: tokens are not known here, and a wrong guess costs time alone. What SGLang's router does with a radix
tree.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from slipstream.engine.api import Chat, Infill, Prompt, Request

_BLOCK = 128  # characters; a page of the prefix cache holds some 64 tokens
_MOST_BLOCKS = 1 << 18  # remembered: of 32 million characters, some 40 MB
_FIRST = 1024  # characters by which replicas that are equally good are told apart


def text_of(prompt: Prompt) -> str:
    """The prompt as one text, in the order in which a template writes it: two that begin alike do so here."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Chat):
        keys = iter([one.key.hex() for one in prompt.images])
        parts = [prompt.template_kwargs, *(_told(one, keys) for one in prompt.messages)]
        return "\n".join(json.dumps(part, sort_keys=True, default=str) for part in parts)
    if isinstance(prompt, Infill):
        return "\n".join(text for pair in (*prompt.extra, (prompt.prefix, prompt.suffix)) for text in pair)
    return " ".join(map(str, prompt))


def _told(message: Mapping[str, Any], keys: Iterator[str]) -> Mapping[str, Any]:
    """A message with what its images show, by their keys."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [{**one, "key": next(keys, "")} if one.get("type") == "image" else one for one in content]
    return {**message, "content": parts}


class Affinity:
    """Where prompts went. `choose` reads, `note` writes."""

    def __init__(self, n_slots: int) -> None:
        """n_slots: requests that run on a replica at once; more wait."""
        self._n_slots = n_slots
        # By the hash of a prompt's beginning: the replica that had it last, the oldest first.
        self._homes: OrderedDict[int, str] = OrderedDict()

    def choose(self, request: Request, loads: Mapping[str, int]) -> list[str]:
        """The replicas of `loads`, the best for the request first. loads: requests at each; at least one replica.

        Equally busy ones are ordered by the prompt's first characters, so that two routers that share nothing agree.
        """
        text = text_of(request.prompt)
        salt = blake2b(text[:_FIRST].encode(errors="surrogatepass"), digest_size=8).digest()
        names = sorted(loads, key=lambda name: (loads[name], _rank(salt, name)))
        home = self._home(list(_hashes(text, request.tenant)), loads)
        if home is not None and (loads[home] < self._n_slots or loads[home] == loads[names[0]]):
            names.remove(home)
            names.insert(0, home)
        return names

    def note(self, request: Request, name: str) -> None:
        """The request went to this replica."""
        for one in _hashes(text_of(request.prompt), request.tenant):
            self._homes[one] = name
            self._homes.move_to_end(one)
        while len(self._homes) > _MOST_BLOCKS:
            self._homes.popitem(last=False)

    def _home(self, hashes: Sequence[int], names: Mapping[str, int]) -> str | None:
        """The replica that has had most of the prompt."""
        for one in reversed(hashes):
            name = self._homes.get(one)
            if name in names:
                return name
        return None


def _hashes(text: str, tenant: str) -> Iterator[int]:
    """Of the text's beginnings by whole blocks, the shortest first. Tenants share no cache."""
    chained = hash(tenant)
    for start in range(0, len(text) - _BLOCK + 1, _BLOCK):
        chained = hash((chained, text[start : start + _BLOCK]))
        yield chained


def _rank(salt: bytes, name: str) -> bytes:
    """Rendezvous hashing (Thaler and Ravishankar, 1998): each salt has its own order of the replicas."""
    return blake2b(name.encode(), digest_size=8, salt=salt).digest()
