"""What ranks say to each other, and which part of a tensor each has."""

from __future__ import annotations

import random
from multiprocessing import Pipe

import pytest
import torch

from slipstream.engine.cache.messages import Message
from slipstream.engine.cache.spread import Others
from slipstream.engine.errors import RankLost, SettingError
from slipstream.engine.ranks import Joint, Ranks, cut, cut_of, joined, share, share_or_repeat
from tests.ranks import together

DTYPES = (
    torch.int64,
    torch.int32,
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.uint8,
    torch.bool,
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_message_arrives_as_it_was_said(dtype: torch.dtype) -> None:
    tensors = [
        torch.arange(30).reshape(5, 6).to(dtype),
        torch.ones(1).to(dtype).expand(3),
        torch.arange(12).reshape(3, 4).to(dtype).t(),
        torch.zeros(0, 7).to(dtype),
        torch.tensor(3).to(dtype),
        torch.zeros(2, 0).to(dtype),
    ]
    said = Message("set_pages", ("full", [3, 1, 2]), tensors)
    heard = Message.decode(said.encode())
    assert (heard.verb, heard.arguments) == ("set_pages", ["full", [3, 1, 2]])
    for arrived, one in zip(heard.tensors, tensors, strict=True):
        assert arrived.dtype == dtype
        assert arrived.shape == one.shape
        assert torch.equal(arrived.float(), one.float())


@pytest.mark.parametrize("seed", range(20))
def test_parts_joined_are_the_whole(seed: int) -> None:
    """Parts of several matrices in one dimension; fewer parts than ranks."""
    rng = random.Random(seed)
    n, dim = rng.choice([2, 4, 8]), rng.randrange(3)
    times = rng.choice([one for one in (1, 2, 4, 8) if one <= n])  # distinct parts
    own = [rng.randint(1, 4) for _ in range(rng.choice([1, 3]))]
    shape = [rng.randint(1, 5) for _ in range(3)]
    shape[dim] = times * sum(own)
    whole, joint = torch.rand(shape), Joint(dim, own)
    asked = [sum(own) if i == dim else size for i, size in enumerate(shape)]
    parts = []
    for rank in range(n):
        runs = cut_of(Ranks(rank, n), shape, asked, joint)
        assert runs is not None
        parts.append(cut(whole, runs))
        assert list(parts[-1].shape) == asked
    assert torch.equal(joined(parts, shape, joint), whole)
    if times > 1 and len(own) > 1:  # each of the matrices is divided for itself
        first = whole.narrow(dim, 0, times * own[0])
        assert torch.equal(parts[0].narrow(dim, 0, own[0]), first.narrow(dim, 0, own[0]))
        assert torch.equal(parts[-1].narrow(dim, 0, own[0]), first.narrow(dim, (times - 1) * own[0], own[0]))


@pytest.mark.parametrize(("stored", "asked"), [([6, 4], [4, 4]), ([4], [4, 1]), ([12], [4]), ([4], [8])])
def test_what_is_no_part(stored: list[int], asked: list[int]) -> None:
    assert cut_of(Ranks(0, 2), stored, asked, None) is None


def test_shares() -> None:
    assert [share(8, "heads", 2), share_or_repeat(8, "heads", 4), share_or_repeat(2, "heads", 4)] == [4, 2, 1]
    with pytest.raises(SettingError, match="--tensor-parallel-size 4: must divide the model's 6 heads"):
        share(6, "heads", 4)
    with pytest.raises(SettingError, match="must divide the model's 3 heads"):
        share_or_repeat(3, "heads", 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_are_made_by_rank(dtype: torch.dtype) -> None:
    """The same bits on every rank and for every number of rows, in float32 and rounded once."""
    parts = [torch.randn(5, 8).mul(10.0**i).to(dtype) for i in range(3)]
    meant = ((parts[0].float() + parts[1].float()) + parts[2].float()).to(dtype)
    for rows in (slice(0, 5), slice(2, 3)):
        sums = together(3, lambda ranks, rows=rows: ranks.add(parts[ranks.rank][rows]))  # type: ignore[misc]
        assert all(torch.equal(one, meant[rows]) for one in sums)
    side_by_side = together(3, lambda ranks: ranks.join(parts[ranks.rank]))
    assert all(torch.equal(one, torch.cat(parts, 1)) for one in side_by_side)


def test_a_rank_that_has_ended_is_noticed_when_it_is_spoken_to() -> None:
    ours, its = Pipe()
    its.close()
    with pytest.raises(RankLost, match="rank 1 has ended"):
        Others([ours]).say(Message("reset", (0,)))
