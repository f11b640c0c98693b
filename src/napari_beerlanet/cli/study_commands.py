"""The commands that are studies: each is a preset, the settings that it offers, and an output."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from napari_beerlanet.cli import normalize
from napari_beerlanet.cli.common import Options, UsageError, add_settings, whole_number
from napari_beerlanet.cli.study import (
    ConsoleOutput,
    JsonOutput,
    MalariaOutput,
    ReportOutput,
    run_files,
)

if TYPE_CHECKING:
    from napari_beerlanet.core.batch.manifest import Layout

Order = dict[str, Any]
"""What `run_study` is given, settings and all else, by name."""

_RUN_OPTIONS = ("images", "out", "recursive", "workers", "scheduler", "overwrite")
_CONFIG_SUFFIXES = (".yaml", ".yml", ".json")
_DETECTED_FORMATS = ("csv", "geojson", "yolo", "coco", "voc", "overlay")


def add_inputs(command: Options) -> None:
    """Add the arguments that say which images, where results go, and what is left as it is."""
    add = command.add_argument
    add("images", nargs="+", metavar="IMAGE", help="files, folders, or patterns such as '*.tif'")
    add("--out", required=True, type=Path, metavar="DIR", help="folder for the results")
    add("--recursive", action="store_true", help="include subfolders")
    add("--overwrite", action="store_true", help="process images again that are done")
    add("--quiet", action="store_true", help="print nothing but errors and the summary")


def _as_it_is(options: argparse.Namespace, order: Order) -> Order:
    return order


def _console(options: argparse.Namespace) -> ConsoleOutput | JsonOutput:
    return ConsoleOutput(options.quiet, options.debug)


@dataclass(frozen=True)
class StudyCommand:
    """A command that runs a study.

    It offers the settings that are `fields`, by default all; `flags` are those that it spells in
    its own way. `complete` puts into the order what `add_more` has asked for.
    """

    HELP: str
    DESCRIPTION: str
    preset: str
    fields: tuple[str, ...] = ()
    flags: Mapping[str, str] = field(default_factory=dict)
    layout: Layout = "files"
    workers: int = 0
    add_inputs: Callable[[Options], None] = add_inputs
    add_more: Callable[[argparse.ArgumentParser], None] = lambda command: None
    complete: Callable[[argparse.Namespace, Order], Order] = _as_it_is
    output: Callable[[argparse.Namespace], ConsoleOutput | JsonOutput] = _console

    def add_options(self, command: argparse.ArgumentParser) -> None:
        """Add the command's options."""
        from napari_beerlanet.core.batch.settings import PRESETS, StudySettings

        self.add_inputs(command)
        self.add_more(command)
        if "spectra" in self._names:
            _add_spectra_options(command)
        add_settings(command, StudySettings, self._names, PRESETS[self.preset], self.flags)

    def run(self, options: argparse.Namespace) -> int:
        """Run the study; 0 if all went well, 1 if some images failed."""
        output = self.output(options)
        try:
            where, settings = self.read(options)
        except Exception as error:
            output.abort("failed", str(error))
            raise
        images, out = where.pop("images"), Path(where.pop("out"))
        return run_files(images, out, settings, output, layout=self.layout, **where)

    def read(self, options: argparse.Namespace) -> tuple[Order, Order]:
        """Where the study runs, and its settings."""
        from napari_beerlanet.core.batch.settings import PRESETS

        names = {*_RUN_OPTIONS, *self._names, "preset"}
        given = {name: value for name, value in vars(options).items() if name in names}
        order = PRESETS[self.preset] | {"workers": self.workers} | given
        order = _read_spectra(self.complete(options, order))
        if order.get("classify_only") and not order.get("classifier"):
            raise UsageError("--classify-only is for a classifier; give --classify, too.")
        return {name: order.pop(name) for name in _RUN_OPTIONS if name in order}, order

    @property
    def _names(self) -> tuple[str, ...]:
        from napari_beerlanet.core.batch.settings import StudySettings

        return self.fields or tuple(StudySettings.model_fields)


def _add_spectra_options(command: argparse.ArgumentParser) -> None:
    """Add the arguments that give spectra to start from, or to keep."""
    given = command.add_mutually_exclusive_group()
    given.add_argument(
        "--spectra",
        default=argparse.SUPPRESS,
        metavar="FILE.json",
        help="start from the spectra of a result or of a stain preset",
    )
    given.add_argument(
        "--preset",
        default=argparse.SUPPRESS,
        metavar="NAME|FILE.json",
        help="decompose with the fixed spectra of a stain preset: H&E, H-DAB, H&E-DAB, Giemsa, or "
        "a file",
    )


def _read_spectra(order: Order) -> Order:
    """The order with the spectra of its `preset`, or of the file that `spectra` names."""
    from napari_beerlanet.core.stains.presets import load_preset, read_start

    preset = order.pop("preset", None)
    try:
        if preset is not None:
            stains = load_preset(preset)
            spectra, names = stains.spectra, stains.names
            order["fixed_spectra"] = True
        elif isinstance(order.get("spectra"), str):
            spectra, names = read_start(order["spectra"])
        else:
            return order
    except ValueError as error:
        raise UsageError(str(error)) from error
    more = {"components": spectra.shape[1], "stain_names": names}
    return order | more | {"spectra": spectra.tolist()}


# --- detect --------------------------------------------------------------------------------------


def _add_formats(command: Options) -> None:
    usual = ("csv", "geojson", "yolo", "overlay")
    command.add_argument(
        "--formats",
        nargs="+",
        choices=_DETECTED_FORMATS,
        default=usual,
        metavar="FORMAT",
        help=f"of the results: {', '.join(_DETECTED_FORMATS)} (default {' '.join(usual)})",
    )


def _without_overlay(options: argparse.Namespace, order: Order) -> Order:
    """The picture of the boxes is a format here, and no format of boxes."""
    kinds = dict.fromkeys(options.formats)
    formats = tuple(kind for kind in kinds if kind != "overlay")
    return order | {"formats": formats, "previews": "overlay" in kinds}


# --- report --------------------------------------------------------------------------------------


def _add_one_image(command: Options) -> None:
    add = command.add_argument
    add("image", type=Path, metavar="IMAGE", help="a colour image or a whole slide")
    add("--out", required=True, type=Path, metavar="REPORT.html", help="the file to write")
    add("--overwrite", action="store_true", help="write a report again that is done")


def _one_report(options: argparse.Namespace, order: Order) -> Order:
    """The report is all that is written, and of files that are there."""
    from napari_beerlanet.core.common.storage import FileError

    if not options.image.exists():
        raise FileError(f"{options.image}: there is no such file.")
    if options.image.is_dir():
        raise UsageError(f"{options.image}: a folder; a report is on one image.")
    for name in ("detections_file", "annotations_file"):
        if name in order:
            order[name] = _existing_file(Path(order[name]))
    out = options.out.absolute()
    order |= {"images": [str(options.image)], "out": out.parent, "report_file": out.name}
    order |= {"model": ""} if "detections_file" in order else {}
    return order | ({"decompose": False} if "one_page" in order else {})


def _existing_file(path: Path) -> str:
    if not path.is_file():
        raise UsageError(f"{path}: there is no such file.")
    return str(path.absolute())


# --- batch ---------------------------------------------------------------------------------------


def _add_batch_inputs(command: Options) -> None:
    add, absent = command.add_argument, argparse.SUPPRESS
    add(
        "images",
        nargs="+",
        metavar="CONFIG|IMAGE",
        help="files, folders, or patterns such as 'slides/*.svs'; or one YAML or JSON file with "
        "images, out, model and other settings, which options here override",
    )
    add("--out", default=absent, metavar="DIR", help="folder for the results")
    add("--recursive", action="store_true", default=absent, help="include subfolders")
    workers = "processes on this machine (default 1)"
    add("--workers", type=whole_number, default=absent, metavar="N", help=workers)
    add("--scheduler", default=absent, metavar="ADDRESS", help="of a dask.distributed cluster")
    add("--overwrite", action="store_true", help="process images again that are done")
    add("--json", action="store_true", help="print one JSON object per line instead of a bar")
    add("--quiet", action="store_true", help="print nothing but errors and the summary")


def _with_study_file(options: argparse.Namespace, order: Order) -> Order:
    """The order, and where the first argument is a study file, what that says beyond it."""
    first = Path(options.images[0])
    if first.suffix.lower() in _CONFIG_SUFFIXES:
        if len(options.images) > 1:
            raise UsageError(f"{first}: name one study file alone; it lists the images.")
        content = _read_config(first)
        order = {name: value for name, value in order.items() if name in options}
        if "spectra" in order:
            content.pop("preset", None)
        order = content | order | {"images": content["images"]}
    if not order.get("out"):
        raise UsageError("--out is needed: the folder for the results.")
    return order


def _read_config(path: Path) -> Order:
    """A study file; paths in it are relative to it."""
    from napari_beerlanet.core.batch.settings import StudySettings
    from napari_beerlanet.core.common.storage import FileError, read_settings

    try:
        content = read_settings(path)
    except FileError as error:
        raise UsageError(str(error)) from error
    if not isinstance(content, dict) or not content.get("images"):
        raise UsageError(f"{path}: settings need at least `images`: files, folders or patterns.")
    listed = content["images"]
    listed = [listed] if isinstance(listed, str) else listed
    if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
        raise UsageError(f"{path}: `images` is a list of files, folders or patterns.")
    content["images"] = [str(path.parent / one) for one in listed]
    fields = StudySettings.model_fields
    paths = [name for name in fields if StudySettings.spec(name).option.value in ("FILE", "MODEL")]
    for name in ("out", "preset", *paths):
        beside = path.parent / str(content.get(name, ""))
        if content.get(name) and (name == "out" or os.path.exists(beside)):
            content[name] = str(beside)
    return content


_SOLVER = ("components", "iterations", "lam", "gamma", "domain", "method", "spectra")
_CLASSIFIER = ("classifier", "classify_only")

STUDY_COMMANDS = {
    "decompose": StudyCommand(
        "decompose images into their stains",
        "Decompose images or whole slides into background, stain spectra and stain densities. For "
        "each image NAME this writes NAME.densities.ome.tiff, NAME.spectra.json and "
        "NAME.preview.png. Images that are done are skipped.",
        "decompose",
        (*_SOLVER, "fixed_spectra", "density_maps", "previews", "device"),
        {"density_maps": "--format", "previews": "--no-preview"},
    ),
    "detect": StudyCommand(
        "detect cells in images",
        "Detect cells in images or whole slides of any magnification. For each image NAME this "
        "writes NAME.detections.csv (boxes, scores, stain densities), NAME.detections.geojson (for "
        "QuPath), yolo/NAME.txt, NAME.overlay.png and NAME.detections.json (how they were "
        "detected). With --classify the cells have types, too. Images that are done are skipped.",
        "detect",
        (
            *("model", "object_size", "device", "openvino", *_CLASSIFIER),
            *("confidence", "iou", "tile", "pixel_size"),
        ),
        add_more=_add_formats,
        complete=_without_overlay,
    ),
    "malaria": StudyCommand(
        "count infected red cells in fields of a thin blood smear",
        "Find the cells of images, which are taken as fields of one thin blood smear, classify the "
        "red cells, and count them: infected cells by stage, parasitaemia with its 95 % interval, "
        "parasites per 100 white cells. For each image NAME this writes NAME.detections.csv and "
        ".geojson, NAME.overlay.png and NAME.report.html; summary.csv has a line for each. Images "
        "that are done are skipped, so the same command resumes a run that was stopped. For "
        "research only.",
        "malaria",
        (
            *("model", "classifier", "confidence", "iou", "object_size", "tile", "pixel_size"),
            *("reports", "device"),
        ),
        layout="study",
        output=lambda options: MalariaOutput(options.quiet, options.debug),
    ),
    "normalize": StudyCommand(
        "give images the colours of a template",
        "Normalize the stains of images or whole slides: each takes the colours of a template. For "
        "each image NAME this writes NAME.normalized.ome.tiff (a slide with its pyramid) or "
        "NAME.normalized.png, and NAME.normalized.json, which says what was done. Images that are "
        "done are skipped. An image that a method can do nothing with, such as one of background "
        "alone, is written as it is, with a note.",
        "normalize",
        ("normalized_format",),
        {"normalized_format": "--format"},
        add_more=normalize.add_options,
        complete=lambda options, order: order | {"normalizer": str(normalize.fit(options))},
    ),
    "batch": StudyCommand(
        "decompose many images or whole slides and detect their cells",
        "Run a study: decompose many images or whole slides, detect and measure their cells, and "
        "write a table over all. For each image NAME this writes NAME.spectra.json, "
        "NAME.preview.png, NAME.detections.csv and .geojson, NAME.overlay.png, NAME.report.html; "
        "over all of them summary.csv and .parquet, failures.csv and manifest.json. With "
        "--classify the cells have types, which are in all of these. Images that are done are "
        "skipped, so the same command resumes a run that was stopped. A file OUT/stop ends a run.",
        "batch",
        layout="study",
        workers=1,
        add_inputs=_add_batch_inputs,
        complete=_with_study_file,
        output=lambda options: JsonOutput() if options.json else _console(options),
    ),
    "report": StudyCommand(
        "write a report on an image: counts, metrics, stains, examples",
        "Detect the objects of an image or slide and write one self-contained HTML file with "
        "counts, the stains, examples of each class, the model's record, versions and hashes; with "
        "annotations also precision, recall, curves, the confusion matrix and likely label errors. "
        "With --classify also the types of the cells, and of infected red cells the parasitaemia. "
        "A report on the same files with the same settings that is there already is left as it is.",
        "report",
        (
            *("model", "object_size", "device", "openvino", *_CLASSIFIER),
            *("detections_file", "annotations_file", "confidence", "match_iou", "pixel_size"),
            *("one_page", "decompose"),
        ),
        {"detections_file": "--detections", "annotations_file": "--annotations"},
        layout="report",
        add_inputs=_add_one_image,
        complete=_one_report,
        output=lambda options: ReportOutput(options.out, options.debug),
    ),
}
