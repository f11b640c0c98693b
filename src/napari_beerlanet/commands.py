"""What the commands do, once their arguments are read; see `cli`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from napari_beerlanet.core import wording

if TYPE_CHECKING:
    from napari_beerlanet.core.batch import Settings
    from napari_beerlanet.core.inputs import Job
    from napari_beerlanet.core.progress import Progress, Report

PROGRAM = "napari-beerlanet"


class Stopped(BaseException):
    """A signal, its number the argument, asked to stop; raised where nothing is half-done."""


asked_to_stop: list[int] = []


def stop_if_asked() -> None:
    """Raise `Stopped` if a signal has come."""
    if asked_to_stop:
        raise Stopped(asked_to_stop[0])


class UsageError(Exception):
    """What was asked for makes no sense; the message is one sentence."""


def say(message: str) -> None:
    """One line to the person at the terminal, not into a pipe."""
    print(f"{PROGRAM}: {message}", file=sys.stderr, flush=True)


def sentence(error: Exception) -> str:
    """What went wrong, in one line."""
    return wording.sentence(error, " (--debug shows where)")


def decompose(options: argparse.Namespace) -> int:
    """Decompose files into a folder; 0 if all went well, 1 if some failed."""
    import logging

    from napari_beerlanet.core.batch import Folder, decompose_file
    from napari_beerlanet.core.inputs import find_images, name_jobs

    # tifffile logs what it finds odd in a file; what matters comes as an exception.
    logging.getLogger("tifffile").addHandler(logging.NullHandler())
    settings = _settings(options)
    folder = Folder(made(options.out), options.format, not options.no_preview)
    jobs = name_jobs(list(find_images(options.images, folder.path, options.recursive)))
    if not jobs:
        raise UsageError("all files given are results of an earlier run; name images.")

    def work(job: Job, report: Report) -> tuple[str, str] | None:
        done = decompose_file(job, folder, settings, options.device, options.overwrite, report)
        if done.stains is None:
            return None
        return done.name, "1 stain" if done.stains == 1 else f"{done.stains} stains"

    return run_files(jobs, folder.path, options, work)


def run_files(
    jobs: list[Job],
    folder: Path,
    options: argparse.Namespace,
    work: Callable[[Job, Report], tuple[str, str] | None],
) -> int:
    """Do the work on one file after the other; 0 if all went well, 1 if some failed.

    `work` returns the name of the results and a few words about them, None where all was done.
    """
    with _Loop(len(jobs), folder, options) as loop:
        for job in jobs:
            stop_if_asked()
            if not loop.do(job, work):
                break
    return 1 if loop.failed else 0


class _Loop:
    """Files done one after the other, with a progress bar or, in a log, a line for each."""

    def __init__(self, total: int, folder: Path, options: argparse.Namespace) -> None:
        from tqdm import tqdm

        self.folder, self.debug = folder, options.debug
        self.total, self.done, self.skipped, self.failed = total, 0, 0, 0
        self.lines = not options.quiet and not sys.stderr.isatty()
        silent = options.quiet or self.lines
        self.bar = tqdm(total=total, unit="image", disable=silent, dynamic_ncols=True)

    def __enter__(self) -> _Loop:
        return self

    def __exit__(self, *why: object) -> None:
        self.bar.close()
        if self.done + self.skipped + self.failed:
            print(f"{self.done} done, {self.skipped} skipped, {self.failed} failed", flush=True)

    def do(self, job: Job, work: Callable[[Job, Report], tuple[str, str] | None]) -> bool:
        """False where it makes no sense to go on."""
        from napari_beerlanet.core.stamps import HOPELESS

        def report(progress: Progress) -> None:
            stop_if_asked()
            self.bar.set_postfix_str(f"{job.source.name}: {progress.message}")

        begun = time.perf_counter()
        try:
            outcome = work(job, report)
        except Exception as error:
            self._fail(job, error)
            return not (isinstance(error, OSError) and error.errno in HOPELESS)
        if outcome is None:
            self.skipped += 1
            self._log(job, "done already, skipped")
        else:
            self.done += 1
            name, words = outcome
            other = f" as {name}" if name != job.source.stem else ""
            self._log(job, f"{words}{other}, {time.perf_counter() - begun:.1f} s")
        self.bar.update()
        return True

    def _log(self, job: Job, what: str) -> None:
        if self.lines:
            number = self.done + self.skipped + self.failed
            print(f"[{number}/{self.total}] {job.source}: {what}", file=sys.stderr, flush=True)

    def _fail(self, job: Job, error: Exception) -> None:
        from napari_beerlanet.core.stamps import HOPELESS

        self.failed += 1
        self.bar.clear()
        if self.debug:
            traceback.print_exception(error)
        text = sentence(error)
        if isinstance(error, OSError) and error.errno in HOPELESS:
            rest = self.total - self.done - self.skipped - self.failed
            problem = os.strerror(error.errno).lower()
            text = f"{problem} in {self.folder}; stopped with {rest} more to do."
        say(text if str(job.source) in text else f"{job.source}: {text}")
        self.bar.update()


def _settings(options: argparse.Namespace) -> Settings:
    """The settings as given, checked once here instead of once for every file."""
    from napari_beerlanet.core.batch import Settings

    names = ("components", "iterations", "lam", "gamma", "domain", "method")
    given: dict[str, Any] = {name: getattr(options, name) for name in names}
    try:
        if options.device != "auto":
            from napari_beerlanet.core.device import pick_device

            pick_device(options.device)
        if options.spectra:
            from napari_beerlanet.core.results import read_spectra

            spectra = read_spectra(options.spectra)
            given |= {"spectra": spectra.tolist(), "components": spectra.shape[1]}
    except ValueError as error:
        raise UsageError(str(error)) from error
    return Settings(**given)


def made(folder: Path) -> Path:
    """The folder, there and writable, before the first image costs time."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder}: not a folder, so no results can be written into it.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        reason = f"no results can be written into this folder ({error.strerror})"
        raise OSError(error.errno, reason, str(folder)) from error
