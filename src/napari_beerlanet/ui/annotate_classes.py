"""The classes that are annotated: names, colours, and the one that new boxes get."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from psygnal import Signal

from napari_beerlanet.core.colours import class_colours, parse_colour

KEYS = 9
"""Classes that have a number key."""


class Classes:
    """Names in the order of their number keys, each with a colour "#rrggbb".

    `changed` tells of names and colours, `renamed` of an old name and the new one,
    `current_changed` of the class of new boxes.
    """

    changed = Signal()
    renamed = Signal(str, str)
    current_changed = Signal()

    def __init__(self) -> None:
        self.names: list[str] = []
        self._colours: dict[str, str] = {}
        self._current = 0

    def __len__(self) -> int:
        return len(self.names)

    @property
    def current(self) -> str | None:
        """The class of new boxes, None where there is no class yet."""
        return self.names[self._current] if self._current < len(self.names) else None

    @property
    def place(self) -> int:
        """Where the class of new boxes stands in the list."""
        return self._current

    def choose(self, place: int) -> bool:
        """Make the class at a place (from 0) that of new boxes; False where there is none."""
        if not 0 <= place < len(self.names):
            return False
        if place != self._current:
            self._current = place
            self.current_changed.emit()
        return True

    def add(self, names: Iterable[str], colours: Mapping[str, str] | None = None) -> list[str]:
        """Add those that are new behind the others; returns them."""
        cleaned = [" ".join(str(name).split()) for name in names]
        new = [name for name in dict.fromkeys(cleaned) if name and name not in self.names]
        given = {name: _colour(text) for name, text in (colours or {}).items()}
        self._colours |= {name: text for name, text in given.items() if text is not None}
        self.names += new
        if new or given:
            self.changed.emit()
        return new

    def lead_with(self, names: Sequence[str]) -> None:
        """Put these first, in their order, as a project numbers its classes."""
        chosen = self.current
        self.names = list(dict.fromkeys([*names, *self.names]))
        self._current = self.names.index(chosen) if chosen in self.names else 0
        self.changed.emit()
        self.current_changed.emit()

    def checked(self, new: str, old: str) -> str:
        """A new name for a class, cleaned of blanks, or a ValueError."""
        name = " ".join(new.split())
        if not name:
            raise ValueError("A class needs a name.")
        if name != old and name in self.names:
            raise ValueError(f"There is a class {name} already; names must differ.")
        return name

    def rename(self, old: str, new: str) -> None:
        """Call a class something else; it keeps its colour."""
        name = self.checked(new, old)
        self._colours[name] = self.colour(old)
        self.names = [name if known == old else known for known in self.names]
        self.renamed.emit(old, name)
        self.changed.emit()

    def remove(self, name: str) -> None:
        """Forget a class."""
        chosen = self.current
        self.names = [known for known in self.names if known != name]
        self._current = self.names.index(chosen) if chosen in self.names else 0
        self.changed.emit()
        self.current_changed.emit()

    def colour(self, name: str) -> str:
        """As "#rrggbb": the one given, or else by the class's place."""
        if name in self._colours:
            return self._colours[name]
        place = self.names.index(name) if name in self.names else len(self.names)
        return class_colours(place + 1)[place]

    def recolour(self, name: str, colour: str) -> None:
        """Give a class another colour."""
        parse_colour(colour)
        self._colours[name] = colour
        self.changed.emit()

    def rgba(self, names: Sequence[str]) -> npt.NDArray[np.float32]:
        """(n, 4) from 0 to 1, of each name."""
        table = {name: (*parse_colour(self.colour(name)), 255) for name in set(names)}
        values = [table[name] for name in names]
        return np.array(values, np.float32).reshape(-1, 4) / np.float32(255)


def of_model(model: Any) -> tuple[list[str], dict[str, str]]:
    """Classes of a loaded model and their colours, where it has any."""
    if model is None:
        return [], {}
    names, colours = list(model.classes), model.info.get("colours") or []
    return names, dict(zip(names, colours, strict=False))


def _colour(text: str) -> str | None:
    """The colour, None where it is not one: a model's header may hold anything."""
    try:
        parse_colour(text)
    except ValueError:
        return None
    return text
