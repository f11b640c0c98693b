"""What the command `batch` says while it runs: a bar, lines in a log, or JSON for a program."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from napari_beerlanet.commands import say, stop_if_asked

if TYPE_CHECKING:
    from napari_beerlanet.core.manifest import Entry
    from napari_beerlanet.core.study import Study

_EVERY = 0.5  # seconds between two events on how far it is


class Lines:
    """A progress bar, or in a log a line for each image; failures in any case."""

    def __init__(self, quiet: bool) -> None:
        from tqdm import tqdm

        self._lines = not quiet and not sys.stderr.isatty()
        silent = quiet or self._lines
        shape = "{percentage:3.0f}%|{bar}| {desc} [{elapsed}{postfix}]"
        self._bar = tqdm(total=1.0, disable=silent, dynamic_ncols=True, bar_format=shape)
        self._begun = time.monotonic()

    def report(self, progress: Any) -> None:
        """Show how far it is; stop where a signal has come."""
        from napari_beerlanet.core.wording import duration

        stop_if_asked()
        left = progress.left(time.monotonic() - self._begun)
        words = "" if left is None else f"{duration(left)} left, "
        counted = f"{progress.done} of {progress.total} images"
        self._bar.set_description_str(counted, refresh=False)
        self._bar.set_postfix_str(words + progress.message, refresh=False)
        self._bar.update(progress.fraction - self._bar.n)

    def ended(self, entry: Entry) -> None:
        """Say what became of an image."""
        if entry.status == "failed":
            self._bar.clear()
            text = entry.error
            say(text if str(entry.job.source) in text else f"{entry.job.source}: {text}")
        elif self._lines and entry.status == "done":
            seconds = time.monotonic() - self._begun
            print(f"{entry.job.source}: {_words(entry)}, {seconds:.0f} s", file=sys.stderr)

    def finish(self, study: Study) -> None:
        """Say what became of all."""
        self._bar.close()
        counts = ", ".join(f"{study.count(s)} {s}" for s in ("done", "skipped", "failed"))
        print(f"{counts}; {study.out / 'summary.csv'}", flush=True)
        for text in [*study.notes, *([study.stopped] if study.stopped else [])]:
            say(text)

    def fail(self, event: str, message: str) -> None:
        """It ends without a result; who called says why."""
        self._bar.close()


class Events:
    """One JSON object per line: start, progress, image, and end, failed or cancelled at last."""

    def __init__(self) -> None:
        self._begun, self._last = time.monotonic(), 0.0

    def report(self, progress: Any) -> None:
        """Tell how far it is, now and then; stop where a signal has come."""
        stop_if_asked()
        now = time.monotonic()
        if now - self._last > _EVERY or progress.done == progress.total:
            self._last = now
            left = progress.left(now - self._begun)
            self._tell(
                "progress",
                done=progress.done,
                total=progress.total,
                fraction=round(progress.fraction, 4),
                message=progress.message,
                eta_seconds=None if left is None else round(left, 1),
            )

    def ended(self, entry: Entry) -> None:
        """Tell what became of an image."""
        words = {"error": entry.error} if entry.error else {"message": _words(entry)}
        self._tell("image", path=str(entry.job.source), status=entry.status, **words)

    def finish(self, study: Study) -> None:
        """Tell what became of all."""
        counts = {s: study.count(s) for s in ("done", "skipped", "failed", "waiting")}
        self._tell("end", **counts, stopped=study.stopped, notes=study.notes, out=str(study.out))

    def fail(self, event: str, message: str) -> None:
        """It ends without a result."""
        self._tell(event, message=message)

    def _tell(self, event: str, **content: Any) -> None:
        with suppress(OSError):  # a full disk under the reader's file ends nothing
            print(json.dumps({"event": event, **content}), flush=True)


def _words(entry: Entry) -> str:
    row = entry.record.get("row", {})
    told = [f"{row['stains']} stains"] if "stains" in row else []
    told += [f"{row['objects']} objects"] if "objects" in row else []
    return ", ".join(told)
