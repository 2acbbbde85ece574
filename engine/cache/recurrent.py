"""State of a recurrent layer: per slot a matrix per head and the last inputs of its convolution; parked rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.engine.cache.memory import zeros
from slipstream.engine.cache.need import LayerState, Need, Sizes
from slipstream.engine.ranks import Joint, share
from slipstream.kernels.gated_delta.op import DeltaState, settle
from slipstream.kernels.gated_delta.spans import RecurrentRows
from slipstream.kernels.short_conv.op import ConvState, settle_window


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrent(Need):
    """What a gated-delta layer needs from the cache, as data."""

    n_key_heads: int
    n_value_heads: int
    d_key: int
    d_value: int
    conv_width: int
    decays_by_key: bool = False  # every key dimension decays on its own (Kimi Delta Attention)

    @property
    def is_recurrent(self) -> bool:
        return True

    def split(self, n: int) -> Recurrent:
        """What each of n ranks needs. Raises `SettingError`."""
        return replace(
            self,
            n_key_heads=share(self.n_key_heads, "key heads of recurrent layers", n),
            n_value_heads=share(self.n_value_heads, "value heads of recurrent layers", n),
        )

    @property
    def channels(self) -> tuple[int, int, int]:
        """Channels of the convolution: of all queries, of all keys, of all values."""
        d_keys = self.n_key_heads * self.d_key
        return d_keys, d_keys, self.n_value_heads * self.d_value

    @property
    def n_channels(self) -> int:
        """All of them."""
        return sum(self.channels)

    def slot_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a slot's state, which is float32, and of its window."""
        state = self.n_value_heads * self.d_key * self.d_value * torch.float32.itemsize
        return state + (self.conv_width - 1) * self.n_channels * dtype.itemsize

    def parked_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one row's record: key, correction and decay in float32, and its convolution input."""
        n_decays = self.d_key if self.decays_by_key else 1
        record = self.n_key_heads * self.d_key + self.n_value_heads * (self.d_value + n_decays)
        return record * torch.float32.itemsize + self.n_channels * dtype.itemsize

    @property
    def slot_joints(self) -> Sequence[Joint]:
        return Joint(0, (self.n_value_heads,)), Joint(1, self.channels)

    def allocate(self, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> RecurrentLayer:
        wide = torch.promote_types(dtype, torch.float32)
        heads, n_parked = self.n_value_heads, sizes.n_parked

        def made(*shape: int, dtype: torch.dtype = wide) -> Tensor:
            return zeros(shape, dtype, device)

        return RecurrentLayer(
            delta=DeltaState(
                state=made(sizes.n_slots, heads, self.d_key, self.d_value),
                parked_keys=made(n_parked, self.n_key_heads, self.d_key),
                parked_deltas=made(n_parked, heads, self.d_value),
                parked_decays=made(n_parked, heads, *((self.d_key,) if self.decays_by_key else ())),
            ),
            conv=ConvState(
                window=made(sizes.n_slots, self.conv_width - 1, self.n_channels, dtype=dtype),
                parked=made(n_parked, self.n_channels, dtype=dtype),
            ),
        )


@dataclass(frozen=True, slots=True)
class RecurrentLayer(LayerState):
    """The memory of one recurrent layer."""

    delta: DeltaState
    conv: ConvState

    def settle(self, rows: RecurrentRows) -> None:
        settle(self.delta, rows)
        settle_window(self.conv, rows)

    def of_slot(self, slot: int) -> list[Tensor]:
        return [self.delta.state[slot], self.conv.window[slot]]
