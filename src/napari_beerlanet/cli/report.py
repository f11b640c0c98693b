"""The command `report`: detect the objects of an image and write an HTML report."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from napari_beerlanet.cli.common import (
    UsageError,
    add_classifier_options,
    add_model_options,
    add_setting,
    classifier_settings,
    echo,
    given_settings,
    print_message,
)
from napari_beerlanet.cli.study import ConsoleOutput, run_files

if TYPE_CHECKING:
    from napari_beerlanet.core.batch.study import StudyResult

HELP = "write a report on an image: counts, metrics, stains, examples"
DESCRIPTION = (
    "Detect the objects of an image or slide and write one self-contained HTML file with counts, "
    "the stains, examples of each class, the model's record, versions and hashes; with annotations "
    "also precision, recall, curves, the confusion matrix and likely label errors. With --classify "
    "also the types of the cells, and of infected red cells the parasitaemia. A report on the same "
    "files with the same settings that is there already is left as it is."
)


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    from napari_beerlanet.core.batch.settings import StudySettings
    from napari_beerlanet.core.detection.settings import DetectSettings

    add = command.add_argument
    add("image", type=Path, metavar="IMAGE", help="a colour image or a whole slide")
    add("--out", required=True, type=Path, metavar="REPORT.html", help="the file to write")
    add_model_options(command)
    add_classifier_options(command)
    add(
        "--detections",
        type=Path,
        metavar="FILE",
        help="take these (CSV, GeoJSON, COCO, VOC, YOLO), reviewed or not, instead of a model's",
    )
    add("--annotations", type=Path, metavar="FILE", help="ground truth, in any of these formats")
    add_setting(command, DetectSettings, "confidence")
    add_setting(
        command,
        DetectSettings,
        "iou",
        "--match-iou",
        dest="match_iou",
        help="minimum IoU of a detection with its annotation (default 0.5)",
    )
    add_setting(command, DetectSettings, "pixel_size", metavar="UM")
    add_setting(command, StudySettings, "one_page")
    add("--no-stains", action="store_true", help="do not decompose the stains")
    add("--overwrite", action="store_true", help="write a report again that is done")


def run(options: argparse.Namespace) -> int:
    """Write the report, unless it is there; prints where it is."""
    from napari_beerlanet.core.batch.settings import REPORT_PRESET
    from napari_beerlanet.core.common.storage import FileError
    from napari_beerlanet.core.detection.settings import DetectSettings

    if not options.image.exists():
        raise FileError(f"{options.image}: there is no such file.")
    if options.image.is_dir():
        raise UsageError(f"{options.image}: a folder; a report is on one image.")
    settings = REPORT_PRESET | given_settings(options, DetectSettings)
    settings |= {"decompose": not options.no_stains, "device": options.device}
    settings |= classifier_settings(options)
    settings |= {"one_page": True, "decompose": False} if "one_page" in options else {}
    if options.detections:
        settings["detections_file"] = _existing_file(options.detections)
    else:
        settings["model"] = options.model
    if options.annotations:
        settings["annotations_file"] = _existing_file(options.annotations)
        settings |= {"match_iou": options.match_iou} if "match_iou" in options else {}
    out = options.out.absolute()
    settings["report_file"] = out.name
    return run_files(
        [str(options.image)],
        out.parent,
        settings,
        ReportOutput(options.out, options.debug),
        layout="report",
        workers=0,
        overwrite=options.overwrite,
    )


def _existing_file(path: Path) -> str:
    if not path.is_file():
        raise UsageError(f"{path}: there is no such file.")
    return str(path.absolute())


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
                texts = [", ".join(f"{name} {n}" for name, n in part.items()) for part in parts]
                echo(f"{self._path}: {'; '.join(filter(None, texts))}.")
        for text in [*study.notes, *([study.stopped] if study.stopped else [])]:
            print_message(text)
