"""transformers on the same weights: its ways to decode, by its own streamer's clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.bench.models import MODELS, Sizes
from tests.bench.scene import Scene
from tests.bench.stage import Task
from tests.gpu.inflated import inflation_of, on

Rate = Callable[[Task], float]  # plays a task; tokens a second
N_LOOKUP = 16  # tokens that its prompt lookup drafts


def theirs(scene: Scene) -> dict[str, Rate]:
    """transformers' ways to decode. Only on CUDA does it compile, where the cache is static."""
    loaded: dict[str, nn.Module] = {}  # when the first task is played, so that a failure is the side's own

    def network(which: str) -> nn.Module:
        if which not in loaded:
            loaded[which] = loaded_by_transformers(scene, which)
        return loaded[which]

    def side(*, assisted: bool = False, **options: Any) -> Rate:
        def play(task: Task) -> float:
            more = {"assistant_model": network("draft")} if assisted else {}
            return generated(network("target"), task, **options, **more)

        return play

    sides = {
        "transformers": side(),
        "transformers, static cache": side(
            cache_implementation="static", disable_compile=not scene.setting.on_gpu
        ),
        "transformers, prompt lookup": side(prompt_lookup_num_tokens=N_LOOKUP),
    }
    if scene.lab.draft is not None:
        sides["transformers, assisted"] = side(assisted=True)
    return sides


def loaded_by_transformers(scene: Scene, which: str) -> nn.Module:
    """Target or draft as transformers has them; of a model without files, its tensors made once more."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model, target = MODELS.get(scene.name), scene.lab.target
    folder: Path = getattr(scene.lab.folders, which)
    if model is not None and model.in_memory:
        return in_device_memory(scene, folder, getattr(model, which))
    loaded: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=target.dtype).to(target.device)
    return loaded.eval()


def in_device_memory(scene: Scene, source: Path, sizes: Sizes) -> nn.Module:
    """An inflated checkpoint without files."""
    from transformers import AutoConfig, AutoModelForCausalLM

    target = scene.lab.target
    inflation = inflation_of(source, sizes, target.device)
    with on(target.device):
        model: nn.Module = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**inflation.new_config()), dtype=target.dtype
        )
        state = dict(model.named_parameters())
        for entry in inflation.entries():
            if entry.name in state:  # a head of the checkpoint's own is not
                state.pop(entry.name).data.copy_(entry.make())
    if state:
        raise ValueError(f"parameters that the checkpoint has no tensors for: {', '.join(state)}")
    return model.eval()


def generated(model: Any, task: Task, **options: Any) -> float:
    """Tokens a second of `generate`, by its own streamer."""
    clock = _Streamer()
    model.generation_config.eos_token_id = None  # nothing ends a reply, and nothing is banned
    prompt = torch.tensor([task.prompt], device=model.device)  # [1, n]
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=task.max_tokens,
        streamer=clock,
        **options,
    )
    (start, first), *rest = clock.told[1:]  # behind the prompt
    n_tokens = sum(n for _, n in rest)
    if first + n_tokens != task.max_tokens:
        raise ValueError(f"{first + n_tokens} tokens instead of {task.max_tokens}")
    if not rest:
        raise ValueError(f"all {first} tokens came at once")
    return n_tokens / (rest[-1][0] - start)


class _Streamer:
    """What `generate` tells tokens to as they come."""

    def __init__(self) -> None:
        self.told: list[tuple[float, int]] = []  # seconds, tokens

    def put(self, token_ids: torch.Tensor) -> None:
        self.told.append((time.perf_counter(), token_ids.numel()))

    def end(self) -> None:
        pass
