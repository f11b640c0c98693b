"""Which file a result was made from, so that a later run knows whether it is done."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .inputs import Job, marked

HOPELESS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
"""Errors of writing that the next file would meet, too."""


def stamp(path: Path) -> dict[str, Any]:
    """Path, size and time of a file; {} where there is none."""
    try:
        status = path.stat()
    except OSError:
        return {}  # reading it will say what is wrong
    return {"path": os.path.abspath(path), "size": status.st_size, "mtime_ns": status.st_mtime_ns}


def earlier_result(
    job: Job, read: Callable[[str], dict[str, Any]]
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """What a job's results are called, the record of those that are there, and the file's stamp.

    `read` gives the record of the results of a name, {} if there are none.
    """
    source = stamp(job.source)
    name, record = job.name, read(job.name)
    if record and not same_file(record, source):
        name = marked(name, job.source)  # by an earlier run, from another file of that name
        record = read(name)
    return name, record, source


def same_file(record: dict[str, Any], source: dict[str, Any]) -> bool:
    """True for the same path, and for the same file that moved with its folder."""
    before = record.get("source")
    if not isinstance(before, dict) or not source:
        return False
    there, here = str(before.get("path")), source["path"]
    same_name = os.path.basename(there) == os.path.basename(here)
    return there == here or (same_name and unchanged(record, source))


def unchanged(record: dict[str, Any], source: dict[str, Any]) -> bool:
    """Whether a result's record names the file as it is now, wherever it lies."""
    before = record.get("source")
    return isinstance(before, dict) and {**before, "path": source.get("path")} == source
