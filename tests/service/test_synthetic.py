"""A chosen acceptance is what a server on the demo gives, with flags that say nothing else."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from slipstream.engine.api import Done, Request, Sampling
from slipstream.engine.service.start.launch import launch
from slipstream.engine.settings import Settings

ABOUT = ("engine/speculate/decide/*.py",)

DEMO = Path(__file__).parents[2] / "demo"


@pytest.mark.sampled(keep=2)
@pytest.mark.parametrize(
    ("flags", "asked"),
    [
        ({"spec_synth_len": 3.0}, 3.0),
        ({"spec_synth_len": 5.0, "model_draft": str(DEMO / "draft")}, 5.0),
        ({"spec_synth_rates": "0.9,0.5"}, 2.4),
    ],
)
async def test_tokens_a_pass(flags: dict[str, object], asked: float) -> None:
    engine = launch(Settings(model=str(DEMO / "target"), threads=1, ctx_size=512, **flags))  # type: ignore[arg-type]

    async def run(seed: int) -> Done:
        request = Request(
            id=str(seed),
            prompt="import os\n" * seed,
            sampling=Sampling(seed=seed, ignore_eos=True),
            max_tokens=200,
        )
        *_, end = [event async for event in await engine.submit(request)]
        assert isinstance(end, Done)
        return end

    ends = await asyncio.gather(*(run(seed) for seed in range(1, 5)))
    told = await engine.speculation()
    await engine.close()
    steps = sum(end.speculation.n_steps for end in ends)
    n_tokens = sum((1 + i) * n for end in ends for i, n in enumerate(end.speculation.histogram))
    assert n_tokens / steps == pytest.approx(asked, rel=0.05)
    assert told.why_not is None
    assert told.n_lengths[16] >= steps
