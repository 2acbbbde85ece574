"""Softmax weights as integers, so that a sum over tokens is exact and does not depend on its order.

This file is the definition: other implementations agree bit for bit, so no multiply-add may be fused.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG2E = 1.4426950408889634
LEAST_LOG2 = -64.0  # exponents below are raised to it; far below the smallest mass
POWER_OF_2 = (
    0.00021612914861179888,
    0.0012467845808714628,
    0.009675451554358006,
    0.055485282093286514,
    0.2402293086051941,
    0.6931470632553101,
    1.0,
)  # 2**f for f in [0, 1), within 9e-8; highest power first
MASS_ONE = 2**34  # mass of weight 1; 2**18 tokens of it still sum exactly in float64


def weights(distance: Tensor) -> Tensor:
    """exp(distance) in float32 by exact operations in a fixed order.

    distance: float32 ≤ 0, any shape: logit minus the row's largest. exp(0) is exactly 1.
    """
    y = (distance * LOG2E).clamp(min=LEAST_LOG2)
    whole = y.floor()
    f = y - whole
    power = torch.full_like(f, POWER_OF_2[0])
    for coefficient in POWER_OF_2[1:]:
        power = power * f + coefficient
    scale = ((whole.to(torch.int32) + 127) << 23).view(torch.float32)
    return power * scale


def masses(distance: Tensor) -> Tensor:
    """floor(weight * MASS_ONE), int64: tokens more than about 23.6 below the largest logit weigh nothing."""
    return (weights(distance) * MASS_ONE).to(torch.int64)
