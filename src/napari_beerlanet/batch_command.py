"""The command `batch`: a study of many images, its arguments and what it prints."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from napari_beerlanet.arguments import count, length, or_word, penalty, share, tile, whole
from napari_beerlanet.batch_output import Events, Lines
from napari_beerlanet.commands import Stopped, UsageError, made, say, sentence
from napari_beerlanet.core.progress import Cancelled

if TYPE_CHECKING:
    from napari_beerlanet.core.study import Study

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
        "NAME.preview.png, NAME.detections.csv and .geojson, NAME.overlay.png, NAME.report.html; "
        "over all of them summary.csv and .parquet, failures.csv and manifest.json. What is done "
        "is skipped, so a run that was stopped goes on with the same command. A file OUT/stop ends "
        "a run.",
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
    add("--workers", type=whole, metavar="N", help="processes on this machine (default 1)")
    add("--scheduler", metavar="ADDRESS", help="of a dask.distributed cluster, instead")
    add("--overwrite", action="store_true", help="also redo what is done")
    _add_what(command.add_argument_group("what to leave out, and formats"))
    _add_settings(command.add_argument_group("how"))
    add("--json", action="store_true", help="print one JSON object per line instead of a bar")
    add("--quiet", action="store_true", help="say nothing but errors and the summary")
    finish(command, batch)


def _add_what(group: Any) -> None:
    add = group.add_argument
    off: dict[str, Any] = {"action": "store_false", "default": None}
    add("--no-stains", dest="decompose", help="find cells only", **off)
    add("--no-measures", dest="measure", help="not how much stain is in each cell", **off)
    add("--no-reports", dest="reports", help="no HTML file on each image", **off)
    add("--no-previews", dest="previews", help="no pictures", **off)
    add("--formats", nargs="+", choices=("csv", "geojson", "coco", "voc"), help="of detections")


def _add_settings(group: Any) -> None:
    add = group.add_argument
    number: dict[str, Any] = {"metavar": "NUMBER"}
    auto = number | {"type": or_word("auto", penalty)}
    add("--components", type=or_word("auto", count), metavar="R", help="at most (default 8)")
    steps = "steps of the algorithm, or 'converge' (default)"
    add("--iterations", type=or_word("converge", count), metavar="K", help=steps)
    add("--lam", help="penalty on components (default auto)", **auto)
    add("--gamma", help="penalty on dense ones (default auto)", **auto)
    add("--spectra", type=Path, metavar="FILE.json", help="start from the spectra of a result")
    add(
        "--leave-out",
        nargs="*",
        choices=("glass", "pen", "border"),
        help="what the stain fit shall not see (default pen border)",
    )
    add("--confidence", type=share, help="least score of a cell (default 0.25)", **number)
    add("--iou", type=share, help="overlap of doubles (default 0.7)", **number)
    size = "typical size of cells in pixels (default auto)"
    add("--object-size", type=or_word("auto", length), help=size, **number)
    add("--tile", type=or_word("auto", tile), metavar="PIXELS", help="side of tiles (default auto)")
    pixel = "micrometres per pixel, if files do not say"
    add("--pixel-size", type=length, help=pixel, **number)
    add("--all-tiles", dest="skip_glass", action="store_false", default=None, help="glass, too")
    add("--device", help="auto (default), cpu, cuda:0, mps")


def batch(options: argparse.Namespace) -> int:
    """Run a study; 0 if all went well, 1 if some images failed."""
    told = Events() if options.json else Lines(options.quiet)
    try:
        study = _run(options, told)
    except Cancelled:
        told.fail("cancelled", "")
        say("stopped as asked; what was finished is kept.")
        return 1
    except (KeyboardInterrupt, Stopped):
        told.fail("cancelled", "")
        raise
    except (OSError, MemoryError, RuntimeError, ValueError, UsageError) as error:
        told.fail("failed", str(error) if isinstance(error, UsageError) else sentence(error))
        raise
    told.finish(study)
    return 1 if study.count("failed") or study.stopped else 0


def _run(options: argparse.Namespace, told: Lines | Events) -> Study:
    from napari_beerlanet.core.study import run_study
    from napari_beerlanet.core.studysettings import StudySettings

    logging.getLogger("tifffile").addHandler(logging.NullHandler())
    given = _settings(options)
    own = {name: given.pop(name) for name in _OWN if name in given}
    if not own.get("out"):
        raise UsageError("--out is needed: the folder for the results.")
    try:
        return run_study(
            own["images"],
            made(Path(own["out"])),
            StudySettings.of(given),
            workers=own.get("workers", 1),
            scheduler=own.get("scheduler"),
            recursive=bool(own.get("recursive")),
            overwrite=options.overwrite,
            report=told.report,
            ended=told.ended,
        )
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """What a file says, and what options say over that."""
    from napari_beerlanet.core.studysettings import StudySettings

    content: dict[str, Any] = {"images": options.images}
    first = Path(options.images[0])
    if first.suffix.lower() in _CONFIGS:
        if len(options.images) > 1:
            raise UsageError(f"{first}: name one file of settings alone; it lists the images.")
        content = _read(first)
    names = [f.name for f in fields(StudySettings) if f.name not in ("model_sha256", "spectra")]
    chosen = {name: getattr(options, name) for name in (*_OWN[1:], *names)}
    if options.spectra is not None:
        from napari_beerlanet.core.results import read_spectra

        chosen["spectra"] = read_spectra(options.spectra).tolist()
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
