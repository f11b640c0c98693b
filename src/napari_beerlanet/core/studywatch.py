"""What is kept up to date while a study runs: what became of images, its manifest, its table."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .files import remove
from .manifest import Entry, find_record, write_manifest
from .progress import Cancelled, Progress, Report
from .stamps import stamp
from .studyimage import WORK
from .studysettings import StudySettings
from .studytables import NO_PARQUET, write_failures, write_summary

STOP = "stop"
"""A file in the folder of results, made by whoever wants the run to end."""

_EVERY = 2.0  # seconds between two writings of the manifest


@dataclass(frozen=True)
class StudyProgress(Progress):
    """Images that have ended, of all; `partly` is what is done of those under way, in images.

    `skipped` is how many had been done before, which says nothing on how long the others take.
    """

    partly: float = 0.0
    skipped: int = 0

    def left(self, elapsed: float) -> float | None:
        """Seconds still to go after so many, None while that would be no more than a guess."""
        begun = self.skipped / max(self.total, 1)
        done = self.fraction - begun
        enough = elapsed > 1 and done > 0.02 * (1 - begun)
        return elapsed * (1 - self.fraction) / done if enough else None

    @property
    def fraction(self) -> float:
        """Between 0 and 1, the parts of images under way included."""
        return min((self.done + self.partly) / self.total, 1.0) if self.total > 0 else 0.0


class StudyWatch:
    """Keeps the entries, the manifest and the table up to date."""

    def __init__(
        self,
        out: Path,
        entries: list[Entry],
        settings: StudySettings,
        report: Report | None,
        ended: Callable[[Entry], None] | None,
    ) -> None:
        self.out, self.entries, self.settings = out, entries, settings
        self.report, self.ended, self.stopped = report, ended, ""
        self.notes: list[str] = []
        self._partly: dict[int, float] = {}
        self._started = datetime.now(UTC).isoformat(timespec="seconds")
        self._written, self._told = 0.0, ""

    def skip_done(self, overwrite: bool) -> None:
        """Mark what an earlier run has done."""
        digest = self.settings.hash()
        for entry in self.entries if not overwrite else []:
            _, record = find_record(self.out, entry.job, digest)
            if record is not None:
                self._end(entry, {"status": "skipped", "record": record})
        self._write(at_once=True)

    def tasks(
        self, overwrite: bool, largest_first: bool = False
    ) -> list[tuple[int, dict[str, Any]]]:
        """What is left to do.

        The largest files first, so that workers side by side end at about the same time.
        """
        shared = {"out": str(self.out), "overwrite": overwrite, "settings": asdict(self.settings)}
        left = [(k, e.job) for k, e in enumerate(self.entries) if e.status == "waiting"]
        if largest_first:
            left.sort(key=lambda one: -stamp(one[1].source).get("size", 0))
        return [(k, {"source": str(job.source), "name": job.name, **shared}) for k, job in left]

    def take(self, number: int, outcome: Mapping[str, Any]) -> bool:
        """Note what became of an image; whether it makes no sense to go on."""
        entry = self.entries[number]
        self._partly.pop(number, None)
        self._end(entry, outcome)
        self._write()
        if outcome.get("hopeless"):
            left = sum(e.status == "waiting" for e in self.entries)
            self.stopped = f"{entry.error.rstrip('.')}; stopped with {left} more to do."
        self._told = entry.job.source.name
        self.beat()
        return bool(self.stopped)

    def hear(self, outcome: Mapping[str, Any]) -> None:
        """Take how far an image is, where that is told."""
        known = "image" in outcome
        if known and self.entries[outcome["image"]].status == "waiting":  # not a late word
            self._partly[outcome["image"]] = float(outcome["fraction"])
            self._told = f"{self.entries[outcome['image']].job.source.name}: {outcome['message']}"
        self.beat()

    def part(self, number: int) -> Report:
        """A report of one image that is done in this process."""
        return lambda p: self.hear({"image": number, "fraction": p.fraction, "message": p.message})

    def beat(self) -> None:
        """Tell how far it is, and let the caller, or a file, stop it."""
        if (self.out / STOP).exists():
            raise Cancelled("stopped as asked")
        if self.report is not None:
            done, skipped = (
                sum(e.status in which for e in self.entries)
                for which in (("done", "skipped", "failed"), ("skipped",))
            )
            partly = sum(self._partly.values())
            self.report(StudyProgress(done, len(self.entries), self._told, partly, skipped))

    def rows(self) -> list[dict[str, Any]]:
        return [e.record["row"] for e in self.entries if "row" in e.record]

    def finish(self) -> None:
        """Manifest, table and failures as things stand; a full disk must not hide why."""
        try:
            with suppress(OSError):
                remove(self.out / STOP)
            self._write(at_once=True)
            if len(write_summary(self.out, self.rows())) < 2:
                self.notes.append(NO_PARQUET)
            write_failures(self.out, self.entries)
            work = self.out / WORK
            if work.is_dir() and not any(work.iterdir()):
                remove(work)
        except OSError as error:
            if not self.stopped:
                self.stopped = f"{self.out}: {(error.strerror or str(error)).lower()}."

    def _end(self, entry: Entry, outcome: Mapping[str, Any]) -> None:
        entry.status = outcome["status"]
        entry.error, entry.record = outcome.get("error", ""), outcome.get("record", {})
        if self.ended is not None:
            self.ended(entry)

    def _write(self, at_once: bool = False) -> None:
        now = time.monotonic()
        if at_once or now - self._written > _EVERY:
            try:
                write_manifest(self.out, self.entries, asdict(self.settings), self._started)
            except OSError:
                if at_once:
                    raise
            self._written = now
