"""A run's training in this process, with what Ultralytics prints and sets kept in bounds."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .progress import Cancelled, Report, within
from .recipe import Recipe
from .runfiles import RunFolder

Event = dict[str, Any]
Tell = Callable[[Event], None]
_LOOKING = 0.02  # of the progress that is reported, for looking at the data


def train_here(
    folder: RunFolder,
    recipe: Recipe,
    state: dict[str, Any] | None,
    tell: Tell,
    report: Report | None = None,
) -> None:
    """Train as the recipe says, from `state` on if there is one."""
    from .preparing import prepare

    with _logged(tell), _same_environment():
        prepared = prepare(folder, recipe, within(report, 0.0, _LOOKING))
        for note in prepared.notes:
            tell({"event": "warning", "message": note})
        prepared.train(state, tell, within(report, _LOOKING, 1.0))


def explain(error: BaseException) -> str:
    """What went wrong, in one sentence."""
    text = " ".join(str(error).split())
    if "out of memory" in text.lower() or isinstance(error, MemoryError):
        return "Not enough memory: use a smaller batch or smaller images."
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'a file'}: {error.strerror.lower()}."
    if isinstance(error, (ValueError, Cancelled)) and text:
        return text
    return f"Unexpected {type(error).__name__}: {text}".removesuffix(": ")


@contextmanager
def _logged(tell: Tell) -> Iterator[None]:
    """Have Ultralytics' warnings told as events instead of printed on standard output."""
    from . import yolo  # noqa: F401 - it sets up the logger

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            tell({"event": "warning", "message": " ".join(record.getMessage().split())})

    logger = logging.getLogger("ultralytics")
    before = logger.handlers[:]
    logger.handlers[:] = [Handler(logging.WARNING)]
    try:
        yield
    finally:
        logger.handlers[:] = before


@contextmanager
def _same_environment() -> Iterator[None]:
    """Put back what Ultralytics sets for reproducible training."""
    names = ("CUBLAS_WORKSPACE_CONFIG", "PYTHONHASHSEED")
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
