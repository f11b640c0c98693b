"""Numbers as arguments of commands: read and checked in one place, refused in one sentence."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any


def share(text: str) -> float:
    """A number from 0 to 1."""
    return _number(text, 0.0, 1.0, "a number from 0 to 1")


def length(text: str) -> float:
    """A number above 0."""
    return _number(text, 1e-9, 1e9, "a number above 0")


def penalty(text: str) -> float:
    """A number of at least 0."""
    return _number(text, 0.0, 1e300, "a number of at least 0")


def whole(text: str, least: int = 0) -> int:
    """A whole number."""
    value = int(text) if text.isdecimal() else -1
    if value < least:
        raise _refused(f"a whole number of at least {least}", text)
    return value


def count(text: str) -> int:
    """A whole number of at least 1."""
    return whole(text, 1)


def tile(text: str) -> int:
    """The side of a tile in pixels."""
    return whole(text, 128)


def or_word(word: str, parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """A parser that also takes a word such as "auto"."""

    def either(text: str) -> Any:
        if text == word:
            return text
        try:
            return parse(text)
        except argparse.ArgumentTypeError as error:
            what, _, rest = str(error).partition(" is needed")
            raise argparse.ArgumentTypeError(f"{what} or {word} is needed{rest}") from None

    return either


def _number(text: str, least: float, most: float, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        raise _refused(what, text)
    return value


def _refused(what: str, text: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"{what} is needed, not {text!r}")
