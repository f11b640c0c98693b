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
"""From so many fields on they take the parent's place: its batch statistics and its weights."""

_STEPS, _GROWTH = 36, 0.35  # for n fields 36 n^0.35, so 5: 63, 50: 142
_MOST_OF_ONE = 20  # times the number of fields: what a field does not show is forgotten with it
_FEWER_OF_MANY = 0.55  # many fields need fewer for each to be seen some times
_MOST_STEPS = 600
_STEPS_PER_EPOCH = 6  # at least: after each epoch come validation and writing
# AdamW moves every weight alike, by little or much evidence, and wins most; what it would destroy
# is kept by staying between parent and result. In the head alone SGD loses less.
_FEW = {"all": ("AdamW", 3e-4), "head": ("SGD", 2e-3), "stain": ("AdamW", 2e-3)}
_MANY = {"all": ("AdamW", 6e-4), "head": ("AdamW", 1.5e-3), "stain": ("AdamW", 6e-3)}
_SHARE = 0.5  # farther from the parent than this, fields that were not shown gain no more
# A parent knows objects of other sizes and places; few fields, shown much too large or as pieces of
# mosaics only, would unteach how whole fields look at the size that they are detected at.
_NEAR = {"scale": 0.2, "translate": 0.05, "mosaic": 0.5}


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
    few = fields < MANY
    normal = _STEPS * fields**_GROWTH * (1 if few else _FEWER_OF_MANY)
    steps = round(min(normal, _MOST_OF_ONE * fields, _MOST_STEPS) * LENGTHS[length])
    repeats = -(-_STEPS_PER_EPOCH * batch // fields) if fields < _STEPS_PER_EPOCH * batch else 1
    epochs = max(round(steps / -(-fields * repeats // batch)), 2 if length == "quick" else 3)
    optimizer, rate = (_FEW if few else _MANY)[scope]
    gentle = {"cos_lr": True, "lrf": 0.05, "nbs": batch, "warmup_epochs": 1}
    return Plan(
        epochs,
        repeats,
        rate,
        optimizer,
        keep_statistics=few,
        average=max(steps // (3 if few else 5), 2),
        share=_SHARE if few else 1.0,
        stops_early=True,
        advanced=gentle | (_NEAR if few else {}),
    )
