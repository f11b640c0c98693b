"""Weights averaged over a training's steps, and held part of the way back to the parent.

A few fields tell much about what they show and nothing about all the rest. On the straight line
from the parent's weights to the learned ones, what is new comes before what was known goes.
"""

from __future__ import annotations

from typing import Any

import torch

from .repeatable import unwrapped
from .yolo import ModelEMA


class AnchoredAverage(ModelEMA):  # type: ignore[misc]
    """The average of p + share · (w − p): p are the weights at the beginning, w after each step.

    Parameters
    ----------
    share
        0 would be the parent, 1 is what was learned.
    steps
        Over which is averaged: a plain mean at first, p among it, then the last ones.
    """

    def __init__(self, model: Any, share: float, steps: int) -> None:
        super().__init__(model)
        self.share, self.steps = share, steps
        self.parent = {k: v.clone() for k, v in self._averaged().items()}

    def _averaged(self) -> dict[str, torch.Tensor]:
        held = self.ema.state_dict().items()
        return {name: value for name, value in held if value.dtype.is_floating_point}

    @torch.no_grad()
    def update(self, model: Any) -> None:
        """Take in the weights after a step."""
        self.updates += 1
        past = 1 - 1 / min(self.updates + 1, self.steps)
        back = (1 - past) * (1 - self.share)
        learned = (1 - past) * self.share / (1 - back)  # so that `past` stays of the average
        weights = unwrapped(model).state_dict()
        for name, value in self._averaged().items():
            value.lerp_(weights[name], learned).lerp_(self.parent[name], back)
