"""Something to be done when Qt deletes an object, out of reach of Python's garbage collector."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from qtpy.QtCore import QObject


def when_deleted(thing: QObject, call: Callable[[], object]) -> None:
    """Call this once when the thing goes; `call` must not hold on to it.

    A function that only the connection knows may be emptied by the collector, together with a
    Python object in a cycle, before Qt calls it: a crash. Finalizers are kept elsewhere, until they
    have run.
    """
    last = weakref.finalize(thing, call)
    last.atexit = False
    thing.destroyed.connect(last)
