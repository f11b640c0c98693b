"""The command `benchmark`: the paper's table on your own data, or on an example."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from napari_beerlanet.cli.common import (
    UsageError,
    echo,
    prepare_folder,
    print_message,
    raise_if_interrupted,
    whole_number,
)
from napari_beerlanet.cli.study import ConsoleOutput, JsonOutput, run_to_end

if TYPE_CHECKING:
    from napari_beerlanet.core.benchmark.benchmark import BenchmarkEntry, BenchmarkResult
    from napari_beerlanet.core.benchmark.estimate import BenchmarkEstimate
    from napari_beerlanet.core.common.jobs import JobProgress

HELP = "compare stain normalizers and BeerLaNet on your own data"
DESCRIPTION = (
    "Train and measure every method on every task with every seed of a benchmark.yaml, and write "
    "the paper's table of it: OUT/table.md, .tex and .csv, benchmark.html with pictures, classes "
    "and training curves, failures.csv, and a record per job. Jobs that are done are skipped and "
    "an interrupted training is resumed, so the same command resumes a run that was stopped. A "
    "file OUT/stop ends a run."
)
_EXAMPLE_FOLDER = "beerlanet-benchmark"


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = command.add_argument
    add(
        "file", nargs="?", type=Path, metavar="FILE", help="a benchmark.yaml: tasks, methods, seeds"
    )
    add("--out", type=Path, metavar="DIR", help="folder for the results")
    add(
        "--example",
        action="store_true",
        help="run an example instead: synthetic smears of two laboratories, all methods, small "
        f"networks; into {_EXAMPLE_FOLDER} unless --out is given",
    )
    add(
        "--workers",
        type=whole_number,
        default=1,
        metavar="N",
        help="jobs side by side on this machine (default 1)",
    )
    add(
        "--cluster",
        "--scheduler",
        dest="scheduler",
        metavar="ADDRESS",
        help="of a dask.distributed scheduler, to run on its workers",
    )
    add("--estimate", action="store_true", help="say how long it will take, and end")
    add("--no-estimate", action="store_true", help="start at once, without timing anything")
    add("--paper", action="store_true", help="show the paper's own table on the page, too")
    add("--json", action="store_true", help="print one JSON object per line instead of a bar")
    add("--quiet", action="store_true", help="print nothing but errors and the table")


def run(options: argparse.Namespace) -> int:
    """Run a benchmark; 0 if all went well, 1 if some jobs failed."""
    output = _JsonLines() if options.json else _Console(options.quiet, options.debug)

    def work() -> int:
        result = _run(options, output)
        if result is None:
            return 0
        output.finish_benchmark(result)
        return 1 if result.count("failed") or result.stopped else 0

    return run_to_end(work, output, "jobs")


def _run(options: argparse.Namespace, output: _Console | _JsonLines) -> BenchmarkResult | None:
    """The result; None where only the estimate was asked for."""
    from napari_beerlanet.core.benchmark.benchmark import (
        check_benchmark,
        read_settings,
        run_benchmark,
    )

    if options.example == (options.file is not None):
        raise UsageError("Give either a benchmark.yaml or --example.")
    if options.out is None and not options.example:
        raise UsageError("--out is needed: the folder for the results.")
    out = options.out or Path(_EXAMPLE_FOLDER)
    if options.example or not options.estimate:
        prepare_folder(out)
    file = options.file
    if options.example:
        from napari_beerlanet.core.benchmark.example import write_example

        file = write_example(out / "data", lambda progress: raise_if_interrupted())
    settings = read_settings(file)
    check_benchmark(settings)
    estimate = None
    if options.estimate or not (options.no_estimate or options.example):
        estimate = _estimate(settings, out, options, output)
        if options.estimate:
            return None
    return run_benchmark(
        settings,
        out,
        workers=options.workers,
        scheduler=options.scheduler,
        paper=options.paper,
        estimate=estimate,
        report=output.report,
        ended=output.on_job,
    )


def _estimate(
    settings: Any, out: Path, options: argparse.Namespace, output: _Console | _JsonLines
) -> BenchmarkEstimate:
    from napari_beerlanet.core.benchmark.benchmark import estimate_benchmark
    from napari_beerlanet.core.common.progress import Progress

    def report(progress: Progress) -> None:
        raise_if_interrupted()
        output.on_estimate_progress(progress)

    estimate = estimate_benchmark(settings, out, workers=options.workers, report=report)
    output.on_estimate(estimate)
    return estimate


class _Console(ConsoleOutput):
    """A progress bar, or in a log a line for each job; failures in any case; then the table."""

    noun = "jobs"
    _left = ""

    def report(self, progress: JobProgress) -> None:
        """Show the progress, and remember the time that is left for the lines of a log."""
        from napari_beerlanet.core.common.messages import format_duration

        super().report(progress)
        eta = progress.eta(time.monotonic() - self._started)
        self._left = "" if eta is None else f", about {format_duration(eta)} left"

    def on_estimate_progress(self, progress: Any) -> None:
        """Show what is timed."""
        self._bar.set_description_str("estimating", refresh=False)
        self._bar.set_postfix_str(progress.message)

    def on_estimate(self, estimate: BenchmarkEstimate) -> None:
        """Print it."""
        self._bar.clear()
        echo(estimate.sentence())

    def on_job(self, entry: BenchmarkEntry) -> None:
        """Print the outcome of a job."""
        from napari_beerlanet.core.common.messages import format_duration

        self._counts[entry.status] += 1
        if entry.status == "failed":
            self._bar.clear()
            if self._debug:
                for line in entry.traceback.splitlines():
                    echo(line, sys.stderr)
            if not entry.fatal:  # that is the reason why the run ends, printed last
                print_message(f"{entry.title}: {entry.error}")
        elif self._is_log:
            took = "done already, skipped" if entry.status == "skipped" else ""
            number = f"[{self._counts.total()}/{self._total}]"
            left = self._left if self._counts.total() < self._total else ""
            text = took or f"{_scores(entry)}, {format_duration(entry.seconds)}{left}"
            echo(f"{number} {entry.title}: {text}", sys.stderr)

    def finish_benchmark(self, result: BenchmarkResult) -> None:
        """Print the table."""
        self._bar.close()
        for line in result.table.markdown().splitlines():
            echo(line)
        echo(f"{self._count_text()}; {result.page}")
        for text in [*result.notes, *([result.stopped] if result.stopped else [])]:
            print_message(text)


class _JsonLines(JsonOutput):
    """One JSON object per line, of the event "estimating", "estimate", "progress" or "job".

    The last is "end", "failed" or "cancelled".
    """

    def on_estimate_progress(self, progress: Any) -> None:
        """Write what is timed."""
        facts = {"done": progress.done, "total": progress.total, "message": progress.message}
        self._write("estimating", **facts)

    def on_estimate(self, estimate: BenchmarkEstimate) -> None:
        """Write it."""
        self._write(
            "estimate",
            seconds=round(estimate.wall_seconds, 1),
            jobs=len(estimate.jobs),
            done=estimate.done,
            message=estimate.sentence(),
        )

    def on_job(self, entry: BenchmarkEntry) -> None:
        """Write the outcome of a job."""
        job = entry.job
        text = {"error": entry.error} if entry.error else {"message": _scores(entry)}
        named = {"task": job.task.name, "method": job.method.name, "seed": job.seed}
        self._write("job", **named, status=entry.status, **text)

    def finish_benchmark(self, result: BenchmarkResult) -> None:
        """Write the counts of all, and where the page is."""
        counts = {s: result.count(s) for s in ("done", "skipped", "failed", "waiting")}
        said = {"stopped": result.stopped, "notes": result.notes}
        self._write("end", **counts, **said, out=str(result.out), page=str(result.page))


def _scores(entry: BenchmarkEntry) -> str:
    """ "other lab: mAP50 93.1 %"."""
    from napari_beerlanet.core.benchmark.settings import METRIC_TITLES
    from napari_beerlanet.core.common.messages import format_score

    metric = entry.job.task.columns[0]
    results = entry.record.get("results", {})
    return ", ".join(
        f"{name}: {METRIC_TITLES[metric]} {format_score(found[metric])}"
        for name, found in results.items()
    )
