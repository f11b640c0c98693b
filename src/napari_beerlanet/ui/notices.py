"""What goes wrong, told in one sentence where napari tells such things."""

from __future__ import annotations

import traceback

from napari.utils.notifications import show_error, show_info, show_warning

from napari_beerlanet.core import wording

__all__ = ["complain", "details", "sentence", "show_info", "show_warning"]


def sentence(error: BaseException) -> str:
    """The exception in one sentence, which begins with a capital letter."""
    text = wording.sentence(error)
    return text[:1].upper() + text[1:]


def complain(problem: BaseException | str) -> str:
    """Show the problem as a notification of napari's; the sentence is returned."""
    text = problem if isinstance(problem, str) else sentence(problem)
    show_error(text)
    return text


def details(error: BaseException) -> str:
    """Everything there is to know of an exception, for a report to the developers."""
    return "".join(traceback.format_exception(error))
