"""The commands `detect` and `evaluate`: their arguments, and what they do."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from napari_beerlanet.arguments import length, or_word, share, tile
from napari_beerlanet.commands import UsageError, made, run_files, say, stop_if_asked

if TYPE_CHECKING:
    from napari_beerlanet.core.detector import Detector
    from napari_beerlanet.core.inputs import Job
    from napari_beerlanet.core.progress import Progress, Report

Finish = Callable[[argparse.ArgumentParser, Any], None]

KINDS = ("csv", "geojson", "yolo", "coco", "voc", "overlay")
DEFAULT_KINDS = ("csv", "geojson", "yolo", "overlay")


def add_parsers(verbs: Any, finish: Finish) -> None:
    """Add both commands to a parser's verbs."""
    _add_detect(verbs, finish)
    _add_evaluate(verbs, finish)


def _add_detect(verbs: Any, finish: Finish) -> None:
    command = verbs.add_parser(
        "detect",
        help="find cells in images",
        description="Find cells in images of any magnification. For each image NAME this writes "
        "NAME.detections.csv (boxes, scores, stain densities), NAME.detections.geojson (for "
        "QuPath), yolo/NAME.txt, NAME.overlay.png and NAME.detections.json (how they were found). "
        "Images that are done are skipped.",
    )
    add = command.add_argument
    add("images", nargs="+", metavar="IMAGE", help="files, folders, or patterns such as '*.tif'")
    add("--out", required=True, type=Path, metavar="DIR", help="folder for the results")
    add_model(command)
    add("--confidence", type=share, default=0.25, metavar="P", help="least score (default 0.25)")
    add("--iou", type=share, default=0.7, metavar="P", help="overlap of doubles (default 0.7)")
    add(
        "--tile",
        type=or_word("auto", tile),
        default="auto",
        metavar="PIXELS",
        help="side of tiles (default auto)",
    )
    add(
        "--pixel-size", type=length, metavar="UM", help="micrometres per pixel, if files do not say"
    )
    add(
        "--formats",
        nargs="+",
        choices=KINDS,
        default=DEFAULT_KINDS,
        metavar="FORMAT",
        help=f"which results to write: {', '.join(KINDS)} (default {' '.join(DEFAULT_KINDS)})",
    )
    add("--recursive", action="store_true", help="look into the folders within folders, too")
    add("--overwrite", action="store_true", help="also redo what is done")
    add("--quiet", action="store_true", help="say nothing but errors and the summary")
    finish(command, detect)


def _add_evaluate(verbs: Any, finish: Finish) -> None:
    command = verbs.add_parser(
        "evaluate",
        help="measure a model against annotated images",
        description="Measure how well a model finds what is annotated: average precision, "
        "precision, recall and the best threshold per class, of what `detect` would give.",
    )
    add = command.add_argument
    add("--data", required=True, type=Path, metavar="DATA.yaml", help="images, labels and names")
    add("--split", default="val", choices=("train", "val", "test"), help="default val")
    add_model(command)
    add("--out", type=Path, metavar="FILE.json", help="write everything, with curves, to a file")
    add("--quiet", action="store_true", help="show no progress")
    finish(command, evaluate)


def add_model(command: argparse.ArgumentParser) -> None:
    """Add the arguments that say which model, for what size of objects, on which device."""
    add = command.add_argument
    add(
        "--model",
        default="blood-cells",
        metavar="MODEL",
        help="a packaged model's name (default blood-cells), or a checkpoint's path",
    )
    add(
        "--object-size",
        type=or_word("auto", length),
        default="auto",
        metavar="PIXELS",
        help="typical size of the objects in the images' pixels (default auto)",
    )
    add("--device", default="auto", help="auto (default), cpu, cuda:0, mps")


def detect(options: argparse.Namespace) -> int:
    """Find objects in files; 0 if all went well, 1 if some failed."""
    from napari_beerlanet.core.checkpoint import checkpoint_hash
    from napari_beerlanet.core.detectfiles import (
        DetectFolder,
        DetectSettings,
        detect_file,
        results_of,
    )
    from napari_beerlanet.core.inputs import find_images, name_jobs

    logging.getLogger("tifffile").addHandler(logging.NullHandler())
    folder = DetectFolder(made(options.out), tuple(dict.fromkeys(options.formats)))
    jobs = name_jobs(list(find_images(options.images, folder.path, options.recursive)))
    if not jobs:
        raise UsageError("all files given are results of an earlier run; name images.")
    names = ("confidence", "iou", "object_size", "tile", "pixel_size")
    given = {name: getattr(options, name) for name in names}
    try:
        settings = DetectSettings(**given, model=checkpoint_hash(options.model))
    except ValueError as error:
        raise UsageError(str(error)) from error
    done = not options.overwrite and all(results_of(job, folder, settings)[1] for job in jobs)
    model: Any = None if done else load(options)

    def work(job: Job, report: Report) -> tuple[str, str] | None:
        outcome = detect_file(job, folder, model, settings, options.overwrite, report)
        found = outcome.detections
        if found is None:
            return None
        for note in found.report["notes"]:
            say(f"{job.source}: {note}")
        counts = ", ".join(f"{name} {count}" for name, count in found.counts().items())
        size = found.report["object_size"]
        return outcome.name, counts + (f" (objects of {size:.0f} pixels)" if size else "")

    return run_files(jobs, folder.path, options, work)


def load(options: argparse.Namespace) -> Detector:
    """The model that is asked for, on the device that is asked for."""
    from napari_beerlanet.core.checkpoint import load_checkpoint

    try:
        model = load_checkpoint(options.model, options.device)
    except ValueError as error:
        raise UsageError(str(error)) from error
    for note in model.info.get("notes", []):
        say(note)
    return model


def evaluate(options: argparse.Namespace) -> int:
    """Measure a model and print a table."""
    from tqdm import tqdm

    from napari_beerlanet.core.evaluate import evaluate as measure

    model = load(options)
    with tqdm(total=1.0, disable=options.quiet or None, bar_format=_BAR) as bar:

        def report(progress: Progress) -> None:
            stop_if_asked()
            bar.update(max(progress.fraction - bar.n, 0))

        result = measure(
            model, options.data, options.split, object_size=options.object_size, report=report
        )
    print("\n".join(_table(result)), flush=True)
    if options.out:
        _write(options.out, result)
    return 0


_BAR = "{percentage:3.0f}%|{bar}| {elapsed}<{remaining}"


def _write(path: Path, result: dict[str, Any]) -> None:
    from napari_beerlanet.core.files import atomic_path

    made(path.parent)
    with atomic_path(path) as unfinished:
        unfinished.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _table(result: dict[str, Any]) -> list[str]:
    """Metrics per class as lines of text."""
    width = max(len(name) for name in ("all", *result["per_class"]))
    head = f"{'':<{width}}  count   AP50  AP50-95  precision  recall     F1  threshold"
    lines = [head]
    for name, row in result["per_class"].items():
        threshold = "-" if row["threshold"] is None else f"{row['threshold']:.2f}"
        lines.append(_row(name, width, row, threshold))
    total = sum(row["count"] for row in result["per_class"].values())
    means = {**result, "AP50": result["mAP50"], "AP50-95": result["mAP50-95"], "count": total}
    return [*lines, _row("all", width, means, "")]


def _row(name: str, width: int, row: dict[str, Any], threshold: str) -> str:
    return (
        f"{name:<{width}}  {row['count']:>5}  {row['AP50']:.3f}    {row['AP50-95']:.3f}      "
        f"{row['precision']:.3f}   {row['recall']:.3f}  {row['F1']:.3f}       {threshold:>4}"
    ).rstrip()
