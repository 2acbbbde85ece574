"""A loaded network: a stateless forward pass over a batch and a store, and the facts that the engine reads of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.engine.batch import Batch
from slipstream.engine.cache.need import Need
from slipstream.engine.cache.store import Store
from slipstream.engine.layers.decoder import Decoder, DecoderSpec, Taps
from slipstream.engine.layers.embed import Head
from slipstream.engine.models.captured import Forward
from slipstream.engine.models.reading.config import ModelConfig
from slipstream.engine.ranks import ALONE, Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """One network with its weights on one device. It holds no state of any sequence."""

    config: ModelConfig
    spec: DecoderSpec  # what the network is made of, undivided
    decoder: Decoder  # runs this rank's part of a pass, for callers that have the other ranks run theirs
    n_params: int
    # On all ranks; of a tied matrix its rows, and what is packed of it, unless it stays in the file.
    weight_bytes: int
    dtype: torch.dtype
    device: torch.device
    n_ctx: int  # positions the rotary tables cover
    ranks: Ranks = ALONE  # whose part of it this is
    captured: Forward | None = None  # runs the decoder's passes where they are captured
    read_head: Callable[[], Head] | None = None  # reads the output matrix undivided; None: the decoder's is

    @property
    def vocab_size(self) -> int:
        """Width of the logits: the tokenizer's real vocabulary."""
        return self.decoder.head.vocab_size

    @property
    def needs(self) -> list[Need]:
        """What each layer needs from a `Store`."""
        return [block.mixer.need for block in self.decoder.blocks]

    @property
    def whole_needs(self) -> list[Need]:
        """The same of the network undivided."""
        return [block.mixer.need for block in self.spec.blocks]

    def whole_head(self) -> Head:
        """The output matrix undivided, for draft networks, which one rank runs alone."""
        return self.decoder.head if self.read_head is None else self.read_head()

    def forward(self, batch: Batch, store: Store, taps: Taps | None = None) -> Tensor:
        """Logits of the batch's wanted rows, [n_logits, vocab] float32. Writes all rows' keys and values.

        The caller runs it under `torch.inference_mode`; positions must be below `n_ctx`. taps: residual
        streams to keep of all rows, for draft networks that read them.
        """
        with store.held.together():
            return (self.captured or self.decoder)(batch, store, taps)
