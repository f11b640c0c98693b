"""The command `batch`: a study of many images, its arguments and what it prints."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from napari_beerlanet.commands import UsageError, made, say, stop_if_asked

if TYPE_CHECKING:
    from napari_beerlanet.core.manifest import Entry
    from napari_beerlanet.core.progress import Progress

Finish = Callable[[argparse.ArgumentParser, Any], None]

_CONFIGS = (".yaml", ".yml", ".json")
_OWN = ("images", "out", "recursive", "workers", "scheduler")  # what is no setting of the numbers


def add_parser(verbs: Any, finish: Finish) -> None:
    """Add the command to a parser's verbs."""
    command = verbs.add_parser(
        "batch",
        help="decompose and find cells in many images or whole slides",
        description="A study: decompose many images or whole slides, find and measure their "
        "cells, and write a table over all. For each image NAME this writes NAME.spectra.json, "
        "NAME.preview.png, NAME.detections.csv and .geojson, NAME.overlay.png; over all of them "
        "summary.csv (and .parquet), failures.csv and manifest.json. What is done is skipped, so "
        "a run that was stopped goes on with the same command.",
    )
    add = command.add_argument
    add(
        "images",
        nargs="+",
        metavar="CONFIG|IMAGE",
        help="files, folders, or patterns such as 'slides/*.svs'; or one YAML or JSON file that "
        "says images, out, model and other settings, which options here override",
    )
    add("--out", type=Path, metavar="DIR", help="folder for the results")
    add("--model", metavar="MODEL", help="a packaged model's name, or a checkpoint's path")
    add("--recursive", action="store_true", default=None, help="look into folders in folders, too")
    add("--workers", type=_whole, metavar="N", help="processes on this machine (default 1)")
    add("--scheduler", metavar="ADDRESS", help="of a dask.distributed cluster, instead")
    add("--overwrite", action="store_true", help="also redo what is done")
    _add_settings(command.add_argument_group("how"))
    add("--quiet", action="store_true", help="say nothing but errors and the summary")
    finish(command, batch)


def _add_settings(group: Any) -> None:
    add = group.add_argument
    number = {"type": _number, "metavar": "NUMBER"}
    steps = "steps of the algorithm, or 'converge' (default)"
    add("--iterations", type=_number, metavar="K", help=steps)
    add("--confidence", help="least score of a cell (default 0.25)", **number)
    add("--object-size", help="typical size of cells in pixels (default auto)", **number)
    add("--pixel-size", help="micrometres per pixel, if files do not say", **number)
    add(
        "--leave-out",
        nargs="*",
        choices=("glass", "pen", "border"),
        help="what the stain fit shall not see (default pen border)",
    )
    add("--all-tiles", dest="skip_glass", action="store_false", default=None, help="glass, too")
    add("--formats", nargs="+", choices=("csv", "geojson", "coco", "voc"), help="of detections")
    add("--no-previews", dest="previews", action="store_false", default=None, help="no pictures")
    add("--device", help="auto (default), cpu, cuda:0, mps")


def batch(options: argparse.Namespace) -> int:
    """Run a study; 0 if all went well, 1 if some images failed."""
    from napari_beerlanet.core.study import StudySettings, run_study

    logging.getLogger("tifffile").addHandler(logging.NullHandler())
    given = _settings(options)
    own = {name: given.pop(name) for name in _OWN if name in given}
    if not own.get("out"):
        raise UsageError("--out is needed: the folder for the results.")
    try:
        settings = StudySettings.of(given)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    with _Lines(options.quiet) as lines:
        try:
            study = run_study(
                own["images"],
                made(Path(own["out"])),
                settings,
                workers=own.get("workers", 1),
                scheduler=own.get("scheduler"),
                recursive=bool(own.get("recursive")),
                overwrite=options.overwrite,
                report=lines.report,
                ended=lines.ended,
            )
        except ValueError as error:
            raise UsageError(str(error)) from error
    done, skipped, failed = (study.count(s) for s in ("done", "skipped", "failed"))
    print(
        f"{done} done, {skipped} skipped, {failed} failed; {study.out / 'summary.csv'}", flush=True
    )
    if study.stopped:
        say(study.stopped)
    return 1 if failed or study.stopped else 0


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """What a file says, and what options say over that."""
    content: dict[str, Any] = {"images": options.images}
    first = Path(options.images[0])
    if first.suffix.lower() in _CONFIGS:
        if len(options.images) > 1:
            raise UsageError(f"{first}: name one file of settings alone; it lists the images.")
        content = _read(first)
    names = ("out", "model", "recursive", "workers", "scheduler", "iterations", "confidence")
    names += ("object_size", "pixel_size", "leave_out", "skip_glass", "formats", "previews")
    chosen = {name: getattr(options, name) for name in (*names, "device")}
    return content | {name: value for name, value in chosen.items() if value is not None}


def _read(path: Path) -> dict[str, Any]:
    """A file of settings; paths in it are relative to it."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        what = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise UsageError(f"{path}: cannot be read as settings ({what[:160]}).") from error
    if not isinstance(content, dict) or not content.get("images"):
        raise UsageError(f"{path}: settings need at least `images`: files, folders or patterns.")
    listed = content["images"]
    listed = [listed] if isinstance(listed, str) else listed
    if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
        raise UsageError(f"{path}: `images` is a list of files, folders or patterns.")
    content["images"] = [str(path.parent / one) for one in listed]
    for name in ("out", "model"):
        beside = path.parent / str(content.get(name, ""))
        if content.get(name) and (name == "out" or beside.exists()):
            content[name] = str(beside)
    return content


class _Lines:
    """A progress bar, or in a log a line for each image; failures in any case."""

    def __init__(self, quiet: bool) -> None:
        from tqdm import tqdm

        self._lines = not quiet and not sys.stderr.isatty()
        self._bar = tqdm(unit="image", disable=quiet or self._lines, dynamic_ncols=True)
        self._begun, self._number = time.perf_counter(), 0

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *why: object) -> None:
        self._bar.close()

    def report(self, progress: Progress) -> None:
        """Show how far it is; stop where a signal has come."""
        stop_if_asked()
        self._bar.total = progress.total
        self._bar.set_postfix_str(progress.message, refresh=False)
        self._bar.update(progress.done - self._bar.n)

    def ended(self, entry: Entry) -> None:
        """Say what became of an image."""
        self._number += 1
        if entry.status == "failed":
            self._bar.clear()
            text = entry.error
            say(text if str(entry.job.source) in text else f"{entry.job.source}: {text}")
        elif self._lines and entry.status == "done":
            seconds = time.perf_counter() - self._begun
            row = entry.record.get("row", {})
            words = f"{row.get('stains')} stains"
            words += f", {row['objects']} objects" if "objects" in row else ""
            print(f"{entry.job.source}: {words}, {seconds:.0f} s", file=sys.stderr, flush=True)


def _number(text: str) -> float | int | str:
    if text in ("auto", "converge"):
        return text
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"a number of at least 0 is needed, not {text!r}")
    return int(value) if value == int(value) and "." not in text else value


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"a whole number of at least 0 is needed, not {text!r}")
    return int(text)
