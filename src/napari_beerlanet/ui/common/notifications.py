"""napari's notifications: errors as one sentence, and nothing that a user cannot act on."""

from __future__ import annotations

import logging
import threading
import traceback
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

from napari.utils.notifications import notification_manager, show_error, show_info, show_warning

from napari_beerlanet.core.common.messages import error_message

__all__ = ["error_details", "hide_library_warnings", "notify_error", "show_info", "show_warning"]

WORKER_THREAD_NAME = "napari-beerlanet"
"""Of the threads in which tasks run."""

_PACKAGE_FOLDER = Path(__file__).parents[2]
_OWN_LIBRARIES = frozenset({"torch", "torchvision", "ultralytics", "numba"})
"""What comes with this plugin, and says nothing to someone at the window."""

_log = logging.getLogger("napari_beerlanet")


def notify_error(problem: BaseException | str) -> str:
    """Show an error as a notification of napari's; returns the sentence."""
    text = problem if isinstance(problem, str) else error_message(problem)
    show_error(text)
    return text


def error_details(error: BaseException) -> str:
    """The traceback, for a report to the developers."""
    return "".join(traceback.format_exception(error))


def hide_library_warnings() -> None:
    """Log what libraries warn of when they work for us, instead of showing it in the window.

    napari shows every Python warning as a notification. Filters of `warnings` would not do: they
    belong to the process, and whoever leaves a `catch_warnings` in another thread puts them back.
    Our own warnings, and those of anyone else, are shown as ever. A second call does nothing.
    """
    manager = notification_manager
    if "receive_warning" in vars(manager):
        return
    show = manager.receive_warning

    def receive_warning(
        message: Any, category: type[Warning], filename: str, lineno: int, *more: Any, **named: Any
    ) -> None:
        if _is_from_library(filename):
            _log.info(warnings.formatwarning(message, category, filename, lineno).strip())
        else:
            show(message, category, filename, lineno, *more, **named)

    # napari takes it from here when its event loop starts, which may be before or after this.
    vars(manager)["receive_warning"] = receive_warning
    if warnings.showwarning == show:
        warnings.showwarning = receive_warning


def _is_from_library(filename: str) -> bool:
    """Whether the code that warns is a library's at work for us."""
    path = Path(filename)
    if path.is_relative_to(_PACKAGE_FOLDER):
        return False
    if threading.current_thread().name == WORKER_THREAD_NAME:
        return True
    return any(
        folder in ("site-packages", "dist-packages") and library in _OWN_LIBRARIES
        for folder, library in pairwise(path.parts)
    )
