"""The command `batch`: run a study, described by options or by a file."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from napari_beerlanet.cli.common import (
    UsageError,
    add_classifier_options,
    add_setting,
    given_settings,
    whole_number,
)
from napari_beerlanet.cli.decompose import add_spectra_options, given_spectra

HELP = "decompose many images or whole slides and detect their cells"
DESCRIPTION = (
    "Run a study: decompose many images or whole slides, detect and measure their cells, and write "
    "a table over all. For each image NAME this writes NAME.spectra.json, NAME.preview.png, "
    "NAME.detections.csv and .geojson, NAME.overlay.png, NAME.report.html; over all of them "
    "summary.csv and .parquet, failures.csv and manifest.json. With --classify the cells have "
    "types, which are in all of these. Images that are done are skipped, "
    "so the same command resumes a run that was stopped. A file OUT/stop ends a run."
)

_CONFIG_SUFFIXES = (".yaml", ".yml", ".json")
_RUN_OPTIONS = ("images", "out", "recursive", "workers", "scheduler")  # no settings of images
_SOLVER = ("components", "iterations", "lam", "gamma", "domain", "method", "reference_pixels")
_DETECTION = ("confidence", "iou", "object_size", "tile", "pixel_size", "batch")
_FILES = ("detections_file", "annotations_file", "normalizer")


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    from napari_beerlanet.core.batch.settings import StudySettings

    add, absent = command.add_argument, argparse.SUPPRESS
    add(
        "images",
        nargs="+",
        metavar="CONFIG|IMAGE",
        help="files, folders, or patterns such as 'slides/*.svs'; or one YAML or JSON file with "
        "images, out, model and other settings, which options here override",
    )
    add("--out", default=absent, metavar="DIR", help="folder for the results")
    add_setting(command, StudySettings, "model", metavar="MODEL")
    add_classifier_options(command)
    add_setting(command, StudySettings, "classify_fit")
    for name in _FILES:
        add_setting(command, StudySettings, name, metavar="FILE")
    add("--recursive", action="store_true", default=absent, help="include subfolders")
    workers = "processes on this machine (default 1)"
    add("--workers", type=whole_number, default=absent, metavar="N", help=workers)
    add("--scheduler", default=absent, metavar="ADDRESS", help="of a dask.distributed cluster")
    add("--overwrite", action="store_true", help="process images again that are done")
    _add_output_options(command.add_argument_group("outputs"))
    _add_processing_options(command)
    add("--json", action="store_true", help="print one JSON object per line instead of a bar")
    add("--quiet", action="store_true", help="print nothing but errors and the summary")


def _add_output_options(group: Any) -> None:
    from napari_beerlanet.core.batch.settings import OFF_SWITCHES, StudySettings

    for name, text in (
        ("decompose", "detect cells only"),
        ("measure", "do not measure the stain densities in each cell"),
        ("reports", "write no HTML reports"),
        ("previews", "save no pictures"),
    ):
        field = "densities" if name == "measure" else name
        add_setting(group, StudySettings, field, OFF_SWITCHES[name], help=text)
    add_setting(
        group,
        StudySettings,
        "formats",
        nargs="*",
        help="of the detections (default csv geojson)",
    )
    add_setting(group, StudySettings, "density_maps")
    add_setting(group, StudySettings, "normalized_format")
    add_setting(group, StudySettings, "one_page")


def _add_processing_options(command: argparse.ArgumentParser) -> None:
    from napari_beerlanet.core.batch.settings import OFF_SWITCHES, StudySettings

    solver = command.add_argument_group("stains")
    for name in _SOLVER:
        add_setting(solver, StudySettings, name)
    add_setting(
        solver,
        StudySettings,
        "unit_spectra",
        OFF_SWITCHES["unit_spectra"],
        help="do not scale spectra to unit length",
    )
    add_spectra_options(solver)
    add_setting(
        solver,
        StudySettings,
        "leave_out",
        nargs="*",
        help="non-tissue that the stain fit shall not see (default pen border)",
    )
    detection = command.add_argument_group("detection")
    for name in _DETECTION:
        add_setting(detection, StudySettings, name)
    tiles = "also detect in tiles of a slide that show background only"
    add_setting(detection, StudySettings, "skip_glass", OFF_SWITCHES["skip_glass"], help=tiles)
    add_setting(detection, StudySettings, "match_iou")
    add_setting(detection, StudySettings, "device")
    add_setting(detection, StudySettings, "openvino")


def run(options: argparse.Namespace) -> int:
    """Run a study; 0 if all went well, 1 if some images failed."""
    from napari_beerlanet.cli.study import ConsoleOutput, JsonOutput, run_files

    output = JsonOutput() if options.json else ConsoleOutput(options.quiet, options.debug)
    try:
        where, settings = read_study(options)
        if not where.get("out"):
            raise UsageError("--out is needed: the folder for the results.")
    except UsageError as error:
        output.abort("failed", str(error))
        raise
    return run_files(
        where["images"],
        Path(where["out"]),
        settings,
        output,
        workers=where.get("workers", 1),
        scheduler=where.get("scheduler"),
        recursive=bool(where.get("recursive")),
        overwrite=options.overwrite,
    )


def read_study(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Where a study runs, and its settings: those of its file, overridden by the options."""
    from napari_beerlanet.core.batch.settings import StudySettings

    content: dict[str, Any] = {"images": options.images}
    first = Path(options.images[0])
    if first.suffix.lower() in _CONFIG_SUFFIXES:
        if len(options.images) > 1:
            raise UsageError(f"{first}: name one study file alone; it lists the images.")
        content = _read_config(first)
    given = given_settings(options, StudySettings)
    given |= _without_count(given_spectra(vars(options)))
    if "densities" in given:  # by its name in the file
        given["measure"] = given.pop("densities")
    where = {name: v for name, v in vars(options).items() if name in _RUN_OPTIONS[1:]}
    content |= where | given
    preset = content.pop("preset", None)
    if preset is not None and "spectra" not in given:
        content |= _without_count(given_spectra({"preset": preset}))
    return (
        {name: content.pop(name) for name in _RUN_OPTIONS if name in content},
        content,
    )


def _without_count(settings: dict[str, Any]) -> dict[str, Any]:
    """Spectra say how many components there are; studies do not repeat it."""
    return {name: value for name, value in settings.items() if name != "components"}


def _read_config(path: Path) -> dict[str, Any]:
    """A study file; paths in it are relative to it."""
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
    for name in ("out", "model", "classifier", "preset", *_FILES):
        beside = path.parent / str(content.get(name, ""))
        if content.get(name) and (name == "out" or os.path.exists(beside)):
            content[name] = str(beside)
    return content
