"""The command `detect`: detect objects in image files."""

from __future__ import annotations

import argparse

from napari_beerlanet.cli.common import (
    add_classifier_options,
    add_input_options,
    add_model_options,
    add_setting,
    classifier_settings,
    given_settings,
)

HELP = "detect cells in images"
DESCRIPTION = (
    "Detect cells in images or whole slides of any magnification. For each image NAME this writes "
    "NAME.detections.csv (boxes, scores, stain densities), NAME.detections.geojson (for QuPath), "
    "yolo/NAME.txt, NAME.overlay.png and NAME.detections.json (how they were detected). With "
    "--classify the cells have types, too. Images that are done are skipped."
)

_FORMATS = ("csv", "geojson", "yolo", "coco", "voc", "overlay")
_DEFAULT_FORMATS = ("csv", "geojson", "yolo", "overlay")


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    from napari_beerlanet.core.detection.settings import DetectSettings

    add_input_options(command)
    add_model_options(command)
    add_classifier_options(command)
    add_setting(command, DetectSettings, "confidence")
    add_setting(command, DetectSettings, "iou")
    add_setting(command, DetectSettings, "tile", metavar="PIXELS")
    add_setting(command, DetectSettings, "pixel_size", metavar="UM")
    command.add_argument(
        "--formats",
        nargs="+",
        choices=_FORMATS,
        default=_DEFAULT_FORMATS,
        metavar="FORMAT",
        help=f"of the results: {', '.join(_FORMATS)} (default {' '.join(_DEFAULT_FORMATS)})",
    )


def run(options: argparse.Namespace) -> int:
    """Detect objects in files; 0 if all went well, 1 if some failed."""
    from napari_beerlanet.cli.study import run_preset
    from napari_beerlanet.core.batch.settings import DETECT_PRESET
    from napari_beerlanet.core.detection.settings import DetectSettings

    settings = DETECT_PRESET | given_settings(options, DetectSettings)
    settings |= {"model": options.model, "device": options.device}
    settings |= classifier_settings(options)
    kinds = dict.fromkeys(options.formats)
    settings["formats"] = tuple(kind for kind in kinds if kind != "overlay")
    settings["previews"] = "overlay" in kinds
    return run_preset(options, settings)
