"""A draft model with other token ids than its target's: ids are mapped, and tokens that only one has are suppressed.

Source: token-level vocabulary intersection (Timor et al., arXiv 2502.05202, and vLLM's heterogeneous drafting).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.engine.batch import Batch
from slipstream.engine.cache.need import Need
from slipstream.engine.cache.store import Store
from slipstream.engine.layers.decoder import Taps
from slipstream.engine.models.network import Network

_SPACES = {"\u2581": "\u0120"}  # SentencePiece's mark of a leading space, and byte-level BPE's


@dataclass(frozen=True, slots=True)
class TranslatedNetwork:
    """Reads and answers in the target's ids."""

    network: Network
    to_draft: Tensor  # [target vocab] int64; tokens that the draft lacks get a stand-in
    shared: Tensor  # [n_shared] int64: the target's ids that the draft has too
    shared_draft: Tensor  # [n_shared] int64: the same tokens' draft ids

    @property
    def dtype(self) -> torch.dtype:
        return self.network.dtype

    @property
    def device(self) -> torch.device:
        return self.network.device

    @property
    def needs(self) -> list[Need]:
        """What each layer needs from a `Store`."""
        return self.network.needs

    @property
    def vocab_size(self) -> int:
        """Of the target."""
        return self.to_draft.shape[0]

    def forward(self, batch: Batch, store: Store, taps: Taps | None = None) -> Tensor:
        """Logits of the batch's wanted rows, [n_logits, vocab_size] float32, -inf for tokens only the target has."""
        logits = self.network.forward(replace(batch, token_ids=self.to_draft[batch.token_ids]), store, taps)
        known = logits.index_select(1, self.shared_draft)  # [n_logits, n_shared]
        translated = known.new_full((len(logits), self.vocab_size), float("-inf"))
        return translated.index_copy_(1, self.shared, known)


def translate(
    network: Network, target: Mapping[int, str], draft: Mapping[int, str], vocab_size: int
) -> TranslatedNetwork:
    """The network in the target's ids. target, draft: the vocabularies, id -> token; vocab_size: the target's.

    Tokens are the same if their texts are, the mark of a leading space aside.
    """
    pairs = shared_tokens(target, draft)
    stand_in = min(pairs.values(), default=0)
    to_draft = torch.full((vocab_size,), stand_in, dtype=torch.int64)
    shared = torch.tensor(list(pairs), dtype=torch.int64)
    shared_draft = torch.tensor(list(pairs.values()), dtype=torch.int64)
    to_draft[shared] = shared_draft
    move = network.device
    return TranslatedNetwork(network, to_draft.to(move), shared.to(move), shared_draft.to(move))


def shared_tokens(target: Mapping[int, str], draft: Mapping[int, str]) -> dict[int, int]:
    """The target's id -> the draft's, of every token that both have."""
    ids = {_plain(token): token_id for token_id, token in draft.items()}
    return {
        token_id: ids[_plain(token)] for token_id, token in sorted(target.items()) if _plain(token) in ids
    }


def _plain(token: str) -> str:
    for mark, common in _SPACES.items():
        token = token.replace(mark, common)
    return token
