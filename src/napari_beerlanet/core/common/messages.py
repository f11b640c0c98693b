"""Messages for people: an exception as one sentence, durations, percentages, plurals, slugs."""

from __future__ import annotations

import re
import reprlib
import unicodedata
from collections.abc import Iterable
from typing import TYPE_CHECKING

from napari_beerlanet.core.common.progress import Cancelled

if TYPE_CHECKING:
    from pydantic import ValidationError


_MAX_QUOTED = 80  # characters of what is wrong
_LONG_QUOTE = re.compile(rf"""(['"])(?:(?!\1).){{{_MAX_QUOTED - 1},}}(?:\1|$)""")
_SHORT = reprlib.Repr()  # what is long is not written out before it is cut
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = _MAX_QUOTED


def error_message(error: BaseException, hint: str = "", memory_advice: str = "") -> str:
    """What went wrong, in one sentence on one line.

    `hint` is added where the error is unexpected, `memory_advice` where memory has run out.
    """
    text = one_line(error)
    if isinstance(error, MemoryError) or "out of memory" in text.lower():
        return f"Not enough memory{': ' if memory_advice else ''}{memory_advice}."
    if isinstance(error, OSError) and error.strerror:
        reason = system_reason(error)
        if error.filename is None:
            return f"{reason.capitalize()}."
        return f"{path_text(error.filename)}: {reason}."
    if isinstance(error, (ValueError, Cancelled)) and text:
        return text
    detail = error_detail(error, 300) if text else ""
    return f"Unexpected {type(error).__name__}{': ' if text else ''}{detail}{hint}."


GET_AGAIN = "copy or download it again"
"""What to do about a file that is damaged."""


def error_detail(error: BaseException, limit: int = 120) -> str:
    """The text of an exception for brackets: short, on one line and without the final stop.

    What a library quotes in it is cut, too.
    """
    text = _LONG_QUOTE.sub(
        lambda quote: f"{quote[0][: _MAX_QUOTED - 1]}…{quote[1]}", one_line(error)
    )
    return text.rstrip(".")[:limit] or type(error).__name__


def system_reason(error: OSError) -> str:
    """Why the system refused, in lower case: "no such file or directory"."""
    return (error.strerror or one_line(error)).lower()


def first_problem(error: ValidationError) -> str:
    """The first thing that pydantic found wrong: "x should be a valid integer, not 'a'"."""
    first = error.errors(include_url=False, include_context=False)[0]
    place = shortened(printable(".".join(map(str, first["loc"])))) or "it"
    if first["type"] == "missing":
        return f"{place} is missing"
    if first["type"] == "json_invalid":
        return first["msg"][0].lower() + first["msg"][1:]
    said = re.sub(r"^(Value error, |\w+ )", "", first["msg"]).split(",")[0]
    return f"{place} {said}, not {quoted(first['input'])}"


def quoted(value: object) -> str:
    """A value for a message, as Python writes it, at most 80 characters of it."""
    text = _SHORT.repr(value)
    return text if len(text) <= _MAX_QUOTED else f"{text[: _MAX_QUOTED - 1]}…"


def path_text(path: object) -> str:
    """A path for a message: in full, or shortened where it is longer than any file's."""
    text = str(path)
    possible = len(text) <= 4096 and max(map(len, re.split(r"[\\/]", text))) <= 255
    return text if possible else shortened(text)


def shortened(text: object) -> str:
    """A name or text for a message, on one line, at most 80 characters of it."""
    line = one_line(text)
    return line if len(line) <= _MAX_QUOTED else f"{line[: _MAX_QUOTED - 1]}…"


def name_list(names: Iterable[str]) -> str:
    """Names for a message, as many as fit into 80 characters, but at least one: "RBC, WBC",
    "a, b and 98 more"."""
    listed = list(names)
    text, count = "", 0
    for name in listed:
        longer = f"{text}, {one_line(name)}" if text else shortened(name)
        if len(longer) > _MAX_QUOTED:
            break
        text, count = longer, count + 1
    return f"{text} and {len(listed) - count:,} more" if count < len(listed) else text


def one_line(text: object) -> str:
    """Text without line breaks and repeated blanks."""
    return " ".join(str(text).split())


def printable(text: str) -> str:
    """Text on one line that a terminal shows and does not obey, line breaks and escapes written
    out: "\\x1b[2J"."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def format_duration(seconds: float) -> str:
    """A time for reading at a glance: "3 s", "2 min 05 s", "1 h 20 min"."""
    whole = max(round(seconds), 0)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min"


def format_percent(fraction: float) -> str:
    """A fraction as people write it: "62 %", "<1 %"."""
    return "<1 %" if 0 < fraction < 0.005 else f"{100 * fraction:z.0f} %"


def format_score(fraction: float) -> str:
    """A score from 0 to 1 as people read it, everywhere: "95.7 %"."""
    return f"{100 * fraction:z.1f} %"


def slug(name: str) -> str:
    """A name's letters and digits in plain ASCII, at most 40 of them."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore")
    return re.sub(r"[^A-Za-z0-9]+", "-", plain.decode()).strip("-")[:40].strip("-") or "image"


def count_of(number: int, one: str, many: str = "") -> str:
    """ "1 image", "3 images"; `many` where an s is not enough."""
    return f"1 {one}" if number == 1 else f"{number:,} {many or one + 's'}"
