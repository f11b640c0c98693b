"""The features of an annotation layer: class, status and id of each box, kept in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from napari_beerlanet.core.annotations import COPIED, DRAWN, STATUS
from napari_beerlanet.ui.annotate_classes import Classes

NEW = -1
"""The id of a box that has none yet."""

_FAINT = 0.18  # opacity of the inside of boxes that nobody has looked at


def empty() -> dict[str, npt.NDArray[Any]]:
    """The columns of a layer without shapes."""
    nothing = np.array([], dtype=object)
    return {"class": nothing, "status": nothing.copy(), "id": np.array([], np.int64)}


def defaults(classes: Classes) -> dict[str, Any]:
    """The row of a box that is about to be drawn."""
    return {"class": classes.current or "", "status": DRAWN, "id": NEW}


def tidied(table: Any, count: int, classes: Classes, last: int) -> pd.DataFrame:
    """The table with a class, a known status and an id of its own in each of `count` rows.

    Hands, pasting and other programs leave what they like. Ids go on after `last`; of several
    equal ones the first stays. A class that is new is added to the classes.
    """
    made = pd.DataFrame(table).reset_index(drop=True).reindex(range(count))
    filled = defaults(classes)
    for name, value in filled.items():
        if name not in made:
            made[name] = pd.Series([value] * count, dtype=np.int64 if name == "id" else object)
    names = [_named(value, str(filled["class"])) for value in made["class"]]
    classes.add(names)
    made["class"] = pd.Series(names, dtype=object)
    known = [value if value in STATUS else DRAWN for value in made["status"]]
    made["status"] = pd.Series(known, dtype=object)
    made["id"] = _ids(made["id"].tolist(), last)
    return made


def faces(classes: Classes, names: Sequence[str], status: Sequence[str]) -> npt.NDArray[np.float32]:
    """(n, 4) colours of the insides: faint where a copied box was not looked at, else none."""
    colours = classes.rgba(names)
    colours[:, 3] = np.where(np.array(status, object) == COPIED, _FAINT, 0)
    return colours


def same(a: Any, b: Any) -> bool:
    """Whether two tables say the same."""
    return list(a.columns) == list(b.columns) and len(a) == len(b) and bool(a.equals(b))


def _named(value: Any, current: str) -> str:
    name = " ".join(value.split()) if isinstance(value, str) else ""
    return name or current or "object"


def _ids(values: list[Any], last: int) -> npt.NDArray[np.int64]:
    taken: set[int] = set()
    numbers = []
    for value in values:
        number = int(value) if isinstance(value, (int, float)) and np.isfinite(value) else NEW
        if number < 0 or number in taken:
            last += 1
            number = last
        last = max(last, number)
        taken.add(number)
        numbers.append(number)
    return np.array(numbers, np.int64)
