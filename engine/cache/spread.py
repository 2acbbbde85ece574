"""Memory that is divided over ranks: the first says what it does with its own, the others do the same with theirs.

Pages, slots and parked rows have one numbering, which the first rank keeps; the others know of no sequence. A message
is a verb of `Part`, which a rank other than the first is. All ranks come to each gathering in the same order, for each
has one way to it, and the first takes part when it has spoken.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from slipstream.engine.batch import Batch, upload
from slipstream.engine.cache.held import Held, PageKind, Shape
from slipstream.engine.cache.messages import Message
from slipstream.engine.cache.need import Need, Sizes
from slipstream.engine.errors import RankLost
from slipstream.engine.frames import FrameSize
from slipstream.engine.ranks import Joint, Ranks, cut, cut_of, joined
from slipstream.kernels.gated_delta.spans import RecurrentRows

_META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class Others:
    """The way to the other ranks, as the first has it."""

    connections: Sequence[Connection]  # in order of rank, from 1 on

    def say(self, message: Message) -> None:
        """The same to all. Raises `RankLost`."""
        self._send([message.encode()] * len(self.connections))

    def say_each(self, messages: Iterable[Message]) -> None:
        """Something to each. Raises `RankLost`."""
        self._send([message.encode() for message in messages])

    def _send(self, messages: Sequence[bytes]) -> None:
        for i, (connection, message) in enumerate(zip(self.connections, messages, strict=True)):
            try:
                connection.send_bytes(message)
            except OSError as error:
                raise RankLost(f"rank {i + 1} has ended") from error


class Part(Held):
    """The memory of a rank other than the first, and what the first can ask of it."""

    def __init__(
        self, needs: Sequence[Need], sizes: Sizes, dtype: torch.dtype, device: torch.device, ranks: Ranks
    ) -> None:
        super().__init__(needs, sizes, dtype, device)
        self._device, self._ranks = device, ranks

    def follow(self, message: Message) -> None:
        """Do what the first rank has said. Raises `KeyError` for a verb that is none."""
        arguments, tensors = message.arguments, message.tensors
        verbs: Mapping[str, Callable[[], None]] = {
            "copy_page": lambda: self.copy_page(*arguments),
            "reset": lambda: self.reset(*arguments),
            "settle": lambda: self.settle(
                RecurrentRows(*upload([one.numpy() for one in tensors], self._device))
            ),
            "states": lambda: self._show(self.slot_views(*arguments)),
            "set_states": lambda: self.set_states(arguments[0], tensors),
            "pages": lambda: self._show(self.rows_of(*arguments)),
            "set_pages": lambda: self.set_pages(arguments[0], arguments[1], tensors),
        }
        verbs[message.verb]()

    def _show(self, tensors: Sequence[Tensor]) -> None:
        self._ranks.gathered(tensors)


class SpreadHeld(Held):
    """The first rank's memory. What is done to it is done to that of the others."""

    def __init__(
        self,
        needs: tuple[Sequence[Need], Sequence[Need]],
        sizes: Sizes,
        dtype: torch.dtype,
        device: torch.device,
        parts: tuple[Ranks, Others],
    ) -> None:
        """needs: of this rank, and of the network undivided. parts: this rank among all, and the way to the others."""
        own, whole = needs
        self._ranks, self._others = parts
        self._others.say(Message("allocate", [asdict(sizes)]))
        super().__init__(own, sizes, dtype, device)
        self._whole = Held(whole, sizes, dtype, _META)
        self._batch: Batch | None = None
        self._frame: FrameSize | None = None
        self._page_joints: dict[PageKind, list[Joint | None]] = {"full": [], "window": []}
        for need in (one for one in own if one.source is None):
            self._page_joints["full" if need.window is None else "window"] += need.page_joints
        self._slot_joints = [joint for need in own for joint in need.slot_joints]

    @contextmanager
    def together(self) -> Generator[None]:
        """All ranks run the noted batch. If it fails on one, the others wait for what never comes: it ends all."""
        assert self._batch is not None
        parts = self._batch.parts
        self._others.say(Message("run", (self._frame, list(parts)), list(parts.values())))
        try:
            yield
        except RankLost:
            raise
        except Exception as error:
            raise RankLost("its part of a pass has failed") from error

    def note(self, batch: Batch, frame: FrameSize | None) -> None:
        self._batch, self._frame = batch, frame

    def capture(self, sizes: Sequence[FrameSize], n_pages: int, n_drafts: int) -> None:
        self._others.say(Message("capture", (list(sizes), n_pages, n_drafts)))

    def copy_page(self, kind: PageKind, source: int, target: int) -> None:
        self._others.say(Message("copy_page", (kind, source, target)))
        super().copy_page(kind, source, target)

    def reset(self, slot: int) -> None:
        self._others.say(Message("reset", (slot,)))
        super().reset(slot)

    def settle(self, rows: RecurrentRows) -> None:
        self._others.say(Message("settle", (), [one.cpu() for one in rows.tensors]))
        super().settle(rows)

    def states(self, slot: int) -> list[Tensor]:
        self._others.say(Message("states", (slot,)))
        return self._joined(self.slot_views(slot), self._slot_joints, self._whole.slot_shapes)

    def set_states(self, slot: int, states: Sequence[Tensor]) -> None:
        divided = self._divided(states, self._slot_joints)
        self._others.say_each(Message("set_states", (slot,), own) for own in divided[1:])
        super().set_states(slot, divided[0])

    def pages(self, kind: PageKind, page_ids: Sequence[int]) -> list[Tensor]:
        self._others.say(Message("pages", (kind, list(page_ids))))
        whole = [((len(page_ids), *shape), dtype) for shape, dtype in self.page_shapes(kind)]
        return self._joined(self.rows_of(kind, page_ids), self._page_joints[kind], whole)

    def set_pages(self, kind: PageKind, page_ids: Sequence[int], rows: Sequence[Tensor]) -> None:
        divided = self._divided(rows, self._page_joints[kind])
        self._others.say_each(Message("set_pages", (kind, list(page_ids)), own) for own in divided[1:])
        super().set_pages(kind, page_ids, divided[0])

    def page_shapes(self, kind: PageKind) -> list[Shape]:
        return self._whole.page_shapes(kind)

    @property
    def slot_shapes(self) -> list[Shape]:
        return self._whole.slot_shapes

    def _joined(
        self, own: Sequence[Tensor], joints: Sequence[Joint | None], whole: Sequence[Shape]
    ) -> list[Tensor]:
        """Of the undivided network, in host memory."""
        return [
            joined([one.cpu() for one in parts], shape, joint)
            for parts, joint, (shape, _) in zip(self._ranks.gathered(own), joints, whole, strict=True)
        ]

    def _divided(self, whole: Sequence[Tensor], joints: Sequence[Joint | None]) -> list[list[Tensor]]:
        """Each rank's part of tensors of the undivided network, by rank."""
        n = self._ranks.n
        return [
            [_part(Ranks(rank, n), one, joint) for one, joint in zip(whole, joints, strict=True)]
            for rank in range(n)
        ]


def _part(ranks: Ranks, whole: Tensor, joint: Joint | None) -> Tensor:
    """What a rank has of a tensor."""
    if joint is None:
        return whole
    shape = list(whole.shape)
    shape[joint.dim] = sum(joint.sizes)
    runs = cut_of(ranks, whole.shape, shape, joint)
    assert runs is not None  # the network was divided so
    return cut(whole, runs).contiguous()
