"""Show errors as one sentence in napari's notifications."""

from __future__ import annotations

import traceback

from napari.utils.notifications import show_error, show_info, show_warning

from napari_beerlanet.core.common.messages import error_message

__all__ = ["error_details", "notify_error", "show_info", "show_warning"]


def notify_error(problem: BaseException | str) -> str:
    """Show an error as a notification of napari's; returns the sentence."""
    text = problem if isinstance(problem, str) else error_message(problem)
    show_error(text)
    return text


def error_details(error: BaseException) -> str:
    """The traceback, for a report to the developers."""
    return "".join(traceback.format_exception(error))
