"""Muon for the hidden matrices and AdamW for everything else.

Muon orthogonalises each update, which needs about half the tokens of AdamW at this size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

# Matrices with a row per token are left to AdamW.
VOCABULARY_MATRICES = ("embed", "lm_head", "markov")
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(update: Tensor, steps: int = 5) -> Tensor:
    """Push the singular values of [N, rows, columns] matrices towards one."""
    a, b, c = NEWTON_SCHULZ
    tall = update.shape[1] > update.shape[2]
    x = (update.mT if tall else update).bfloat16()
    x = x / (torch.linalg.vector_norm(x.float(), dim=(1, 2), keepdim=True) + 1e-7).bfloat16()
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = (x.mT if tall else x).float()
    return result


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalised updates; matrices of one shape are handled in one batch."""

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            shapes: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for weight in group["params"]:
                shapes[weight.shape].append(weight)
            for weights in shapes.values():
                self._step_batch(weights, group)

    def _step_batch(self, weights: list[nn.Parameter], group: dict[str, float]) -> None:
        updates = []
        for weight in weights:
            assert weight.grad is not None
            held = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
            held.lerp_(weight.grad, 1 - group["momentum"])
            updates.append(weight.grad.lerp(held, group["momentum"]))
        rows, columns = weights[0].shape
        scale = group["lr"] * max(1.0, rows / columns) ** 0.5
        for weight, update in zip(weights, orthogonalise(torch.stack(updates)), strict=True):
            weight.mul_(1 - group["lr"] * group["decay"]).sub_(update, alpha=scale)


def build(network: nn.Module, matrix_lr: float, other_lr: float) -> list[torch.optim.Optimizer]:
    """The two optimisers of a network; what needs no gradient is frozen."""

    def hidden(name: str, weight: Tensor) -> bool:
        return weight.ndim == 2 and not any(part in name for part in VOCABULARY_MATRICES)

    trained = [(name, weight) for name, weight in network.named_parameters() if weight.requires_grad]
    matrices = [weight for name, weight in trained if hidden(name, weight)]
    others = [weight for name, weight in trained if not hidden(name, weight)]
    return [
        Muon(matrices, matrix_lr, decay=0.1),
        torch.optim.AdamW(others, other_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def set_rate(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    """Scale every learning rate from its initial value."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
            group["lr"] = group["initial_lr"] * factor
