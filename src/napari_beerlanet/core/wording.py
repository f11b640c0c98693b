"""Words for people: what went wrong in one sentence, how long something takes."""

from __future__ import annotations


def sentence(error: BaseException, more: str = "") -> str:
    """What went wrong, in one line. `more` is added where it comes unexpected."""
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename is not None else ""
        return f"{where}{error.strerror.lower()}."
    if isinstance(error, ValueError) and str(error):
        return " ".join(str(error).split())
    if isinstance(error, MemoryError):
        return "not enough memory."
    what = " ".join(str(error).split())
    return f"unexpected {type(error).__name__}: {what}{more}."


def duration(seconds: float) -> str:
    """A time for reading at a glance: "3 s", "2 min 05 s", "1 h 20 min"."""
    whole = max(round(seconds), 0)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min"
