"""Something to be done when Qt deletes an object, out of reach of Python's garbage collector."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from qtpy.QtCore import QObject

_numbers = itertools.count()
_kept: dict[int, Callable[..., None]] = {}


def when_deleted(thing: QObject, call: Callable[[], object]) -> None:
    """Call this when Qt deletes the thing, to which `call` must not hold on.

    A function that only the connection knows may be emptied by the collector, together with a
    Python object in a cycle, before Qt calls it: a crash. So it is kept here until then.
    """
    number = next(_numbers)

    def last(*_: object) -> None:
        del _kept[number]
        call()

    _kept[number] = last
    thing.destroyed.connect(last)
