"""A study's table over all images, and the list of those that failed."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .files import atomic_path, remove
from .manifest import Entry

SUMMARY, FAILURES = "summary", "failures.csv"
NO_PARQUET = (
    "summary.parquet was not written, as pyarrow is not installed: "
    'pip install "napari-beerlanet[cluster]".'
)


def write_summary(out: Path, rows: Sequence[Mapping[str, Any]]) -> list[Path]:
    """A row per image: CSV, and Parquet where pyarrow is there; which were written."""
    import pandas as pd

    frame = pd.DataFrame(list(rows))
    paths = [out / f"{SUMMARY}.csv"]
    with atomic_path(paths[0]) as unfinished:
        frame.to_csv(unfinished, index=False)
    parquet = out / f"{SUMMARY}.parquet"
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        remove(parquet)  # an earlier run's is of other images
        return paths
    with atomic_path(parquet) as unfinished:
        frame.to_parquet(unfinished, index=False)
    return [*paths, parquet]


def write_failures(out: Path, entries: Sequence[Entry]) -> None:
    """Path and sentence of each image that failed; no file where there is none."""
    failed = [e for e in entries if e.status == "failed"]
    if not failed:
        remove(out / FAILURES)
        return
    with (
        atomic_path(out / FAILURES) as unfinished,
        unfinished.open("w", newline="", encoding="utf-8") as file,
    ):
        writer = csv.writer(file)
        writer.writerow(["path", "error"])
        writer.writerows([str(e.job.source), e.error] for e in failed)
