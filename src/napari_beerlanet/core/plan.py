"""How long and how gently to train a model further, by the number of annotated fields.

Few fields are the normal case, and there a parent is destroyed more easily than improved. The
numbers were chosen on fields of another laboratory, see docs/finetune.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

LENGTHS = {"quick": 0.4, "normal": 1.0, "thorough": 2.5}
"""Steps of training, as multiples of the normal number."""

MANY = 100
"""From so many fields on, their batch statistics take the parent's place, and AdamW that of SGD."""

_STEPS_OF_ONE, _GROWTH = 20, 0.35  # steps for n fields: 20 n^0.35, so 1: 20, 5: 35, 50: 79
_MOST_STEPS = 600
_STEPS_PER_EPOCH = 6  # at least: after each epoch come validation and writing
# AdamW moves every weight alike, by little or much evidence; SGD only those that few fields speak
# of. Stain parameters are few, and of very different sizes, which AdamW evens out.
_FEW = {"all": ("SGD", 1.5e-3), "head": ("SGD", 2e-3), "stain": ("AdamW", 2e-3)}
_MANY = {"all": ("AdamW", 6e-4), "head": ("AdamW", 1.5e-3), "stain": ("AdamW", 6e-3)}


@dataclass(frozen=True)
class Plan:
    """What holds where nobody says otherwise; names as in `Recipe`."""

    epochs: int = 50
    repeats: int = 1
    learning_rate: float | None = None
    optimizer: str = "AdamW"
    keep_statistics: bool = False
    average: int | None = None
    share: float = 1.0
    stops_early: bool = False
    advanced: dict[str, Any] = field(default_factory=dict)

    def steps(self, fields: int, batch: int = 8) -> int:
        """Optimizer steps of the whole run, if it does not stop early."""
        return self.epochs * -(-fields * self.repeats // batch)


def patience(epochs: int) -> int:
    """Epochs without a better one after which a run of so many ends."""
    return max(epochs // 2, 3)


def small_data_defaults(
    fields: int, scope: str = "all", length: str = "normal", batch: int = 8
) -> Plan:
    """How to train a trained model further on so many annotated fields."""
    steps = round(min(_STEPS_OF_ONE * fields**_GROWTH, _MOST_STEPS) * LENGTHS[length])
    repeats = -(-_STEPS_PER_EPOCH * batch // fields) if fields < _STEPS_PER_EPOCH * batch else 1
    epochs = max(round(steps / -(-fields * repeats // batch)), 2 if length == "quick" else 3)
    optimizer, rate = (_FEW if fields < MANY else _MANY)[scope]
    return Plan(
        epochs,
        repeats,
        rate,
        optimizer,
        keep_statistics=fields < MANY,
        average=steps if fields < MANY else max(steps // 5, 2),
        stops_early=True,
        advanced={"cos_lr": True, "lrf": 0.05, "nbs": batch, "warmup_epochs": 1},
    )
