"""Run a study from a command: a progress bar, log lines or JSON events, and the exit status."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from napari_beerlanet.cli.common import (
    Stopped,
    UsageError,
    echo,
    prepare_folder,
    print_message,
    raise_if_interrupted,
)

if TYPE_CHECKING:
    from napari_beerlanet.core.batch.manifest import Layout, StudyEntry
    from napari_beerlanet.core.batch.study import StudyResult
    from napari_beerlanet.core.common.jobs import JobProgress

_EVENT_INTERVAL_S = 0.5


def run_files(
    images: Sequence[str],
    out: Path,
    settings: Mapping[str, Any],
    output: ConsoleOutput | JsonOutput,
    *,
    layout: Layout = "study",
    **more: Any,
) -> int:
    """Run a study; 0 if all went well, 1 if some images failed. `more` as for `run_study`."""

    def work() -> int:
        study = _run_study(images, out, settings, output, layout, more)
        output.finish(study, layout)
        return 1 if study.count("failed") or study.stopped else 0

    return run_to_end(work, output, "results")


def run_to_end(work: Callable[[], int], output: ConsoleOutput | JsonOutput, saved: str) -> int:
    """The exit status of `work`; `output` is told where it ends early. `saved` is what then is."""
    from napari_beerlanet.core.common.messages import error_message
    from napari_beerlanet.core.common.progress import Cancelled

    try:
        return work()
    except Cancelled:
        output.abort("cancelled", "")
        print_message(f"stopped as requested; finished {saved} are saved.")
        return 1
    except (KeyboardInterrupt, Stopped):
        output.abort("cancelled", "")
        raise
    except (TypeError, ValueError) as error:
        output.abort("failed", str(error))
        raise UsageError(str(error)) from error
    except (OSError, MemoryError, RuntimeError, UsageError) as error:
        usage = isinstance(error, UsageError)
        output.abort("failed", str(error) if usage else error_message(error))
        raise


def _run_study(
    images: Sequence[str],
    out: Path,
    settings: Mapping[str, Any],
    output: ConsoleOutput | JsonOutput,
    layout: Layout,
    more: Mapping[str, Any],
) -> StudyResult:
    from napari_beerlanet.core.batch.settings import StudySettings
    from napari_beerlanet.core.batch.study import run_study

    # tifffile logs what it finds odd in a file; what matters comes as an exception.
    logging.getLogger("tifffile").addHandler(logging.NullHandler())
    chosen = StudySettings(**settings)
    if chosen.device != "auto" and not more.get("scheduler"):
        from napari_beerlanet.core.common.device import pick_device

        pick_device(chosen.device)
    return run_study(
        images,
        prepare_folder(out),
        chosen,
        report=output.report,
        ended=output.on_image,
        layout=layout,
        **more,
    )


class ConsoleOutput:
    """A progress bar, or in a log a line for each image; failures in any case."""

    noun = "images"

    def __init__(self, quiet: bool, debug: bool = False) -> None:
        from tqdm import tqdm

        self._quiet, self._debug = quiet, debug
        self._is_log = not quiet and not sys.stderr.isatty()
        silent = quiet or self._is_log
        shape = "{percentage:3.0f}%|{bar}| {desc} [{elapsed}{postfix}]"
        self._bar = tqdm(total=1.0, disable=silent, dynamic_ncols=True, bar_format=shape)
        self._started, self._total, self._noticed = time.monotonic(), 0, ""
        self._counts: Counter[str] = Counter()

    def report(self, progress: JobProgress) -> None:
        """Show the progress; stop where a signal has come."""
        from napari_beerlanet.core.common.messages import format_duration, printable

        raise_if_interrupted()
        if progress.notice and progress.notice != self._noticed:
            self._bar.clear()
            print_message(progress.notice)
        self._noticed = progress.notice
        self._total = progress.total
        eta = progress.eta(time.monotonic() - self._started)
        left = "" if eta is None else f"{format_duration(eta)} left, "
        self._bar.set_description_str(
            f"{progress.done} of {progress.total} {self.noun}", refresh=False
        )
        self._bar.set_postfix_str(printable(left + progress.message), refresh=False)
        self._bar.update(progress.fraction - self._bar.n)

    def on_image(self, entry: StudyEntry) -> None:
        """Print the outcome of an image."""
        self._counts[entry.status] += 1
        path = str(entry.job.source)
        if entry.status == "failed":
            self._bar.clear()
            if self._debug:
                for line in entry.traceback.splitlines():
                    echo(line, sys.stderr)
            if not entry.fatal:  # that is the reason why the run ends, printed last
                print_message(entry.error if path in entry.error else f"{path}: {entry.error}")
            return
        notes = " ".join(entry.record.get("notes", [])) if entry.status == "done" else ""
        if notes and not self._quiet:
            self._bar.clear()
            print_message(f"{path}: {notes}")
        if self._is_log:
            number = f"[{self._counts.total()}/{self._total}]"
            echo(f"{number} {path}: {_outcome_text(entry)}", file=sys.stderr)

    def finish(self, study: StudyResult, layout: str) -> None:
        """Print the counts of all."""
        self._bar.close()
        table = f"; {study.out / 'summary.csv'}" if layout == "study" else ""
        echo(self._count_text() + table)
        for text in [*study.notes, *([study.stopped] if study.stopped else [])]:
            print_message(text)

    def abort(self, event: str, message: str) -> None:
        """End without a result; the caller says why."""
        self._bar.close()
        if self._counts.total():
            echo(self._count_text())

    def _count_text(self) -> str:
        return ", ".join(f"{self._counts[s]} {s}" for s in ("done", "skipped", "failed"))


class MalariaOutput(ConsoleOutput):
    """A progress bar, then the parasitaemia."""

    def finish(self, study: StudyResult, layout: str) -> None:
        """Print the counts of images, and of red cells."""
        from napari_beerlanet.core.batch.counts import StudyCounts

        super().finish(study, layout)
        counts = StudyCounts.read(study.out)
        if counts is None or not counts.counted:
            return
        infected = counts.sum.parasitaemia
        rows = [("No red cells were found.", "")] if infected is None else infected.rows()
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            echo(f"{name:{width}}  {value}".rstrip())
        for text in counts.reservations():
            print_message(text)


class ReportOutput(ConsoleOutput):
    """A progress bar, then where the report is and what it counts."""

    def __init__(self, path: Path, debug: bool) -> None:
        super().__init__(quiet=False, debug=debug)
        self._path = path

    def finish(self, study: StudyResult, layout: str) -> None:
        """Print the path and the counts."""
        self._bar.close()
        for entry in study.entries:
            if entry.status in ("done", "skipped"):
                parts = [entry.record["counts"], entry.record.get("types") or {}]
                echo(f"{self._path}: {'; '.join(filter(None, map(counts_text, parts)))}.")
        for text in [*study.notes, *([study.stopped] if study.stopped else [])]:
            print_message(text)


class JsonOutput:
    """One JSON object per line: progress, image, and end, failed or cancelled at last."""

    def __init__(self) -> None:
        self._started, self._last = time.monotonic(), 0.0

    def report(self, progress: JobProgress) -> None:
        """Write the progress, now and then; stop where a signal has come."""
        raise_if_interrupted()
        now = time.monotonic()
        if now - self._last > _EVENT_INTERVAL_S or progress.done == progress.total:
            self._last = now
            eta = progress.eta(now - self._started)
            self._write(
                "progress",
                done=progress.done,
                total=progress.total,
                fraction=round(progress.fraction, 4),
                message=progress.message,
                eta_seconds=None if eta is None else round(eta, 1),
            )

    def on_image(self, entry: StudyEntry) -> None:
        """Write the outcome of an image."""
        text = {"error": entry.error} if entry.error else {"message": _result_text(entry)}
        self._write("image", path=str(entry.job.source), status=entry.status, **text)

    def finish(self, study: StudyResult, layout: str) -> None:
        """Write the counts of all."""
        counts = {s: study.count(s) for s in ("done", "skipped", "failed", "waiting")}
        said = {"stopped": study.stopped, "notes": study.notes, "limits": study.limits}
        self._write("end", **counts, **said, out=str(study.out))

    def abort(self, event: str, message: str) -> None:
        """End without a result."""
        self._write(event, message=message)

    def _write(self, event: str, **content: Any) -> None:
        with suppress(OSError):  # a full disk under the reader's file ends nothing
            print(json.dumps({"event": event, **content}), flush=True)


def _outcome_text(entry: StudyEntry) -> str:
    if entry.status == "skipped":
        return "done already, skipped"
    name = entry.record.get("name", "")
    renamed = f" as {name}" if name != entry.job.source.stem else ""
    return f"{_result_text(entry)}{renamed}, {entry.seconds:.1f} s"


def _result_text(entry: StudyEntry) -> str:
    from napari_beerlanet.core.common.messages import count_of

    row = entry.record.get("row", {})
    parts = [count_of(row["stains"], "stain")] if "stains" in row else []
    if "normalized" in row:
        parts.append("normalized" if row["normalized"] else "unchanged")
    if "objects" in row:
        size = f" (objects of {row['object_size']:.0f} pixels)" if row.get("object_size") else ""
        parts.append(counts_text(entry.record["counts"]) + size)
    types = counts_text(entry.record.get("types", {}))
    return ", ".join(parts) + (f"; {types}" if types else "")


def counts_text(counts: Mapping[str, int]) -> str:
    """ "RBC 90, WBC 3"."""
    return ", ".join(f"{name} {number}" for name, number in counts.items())
