"""The command `malaria`: from photographs of a thin smear to its parasitaemia, by stage."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from napari_beerlanet.cli.common import (
    add_device_option,
    add_input_options,
    add_setting,
    echo,
    given_settings,
    print_message,
)

if TYPE_CHECKING:
    from napari_beerlanet.core.batch.counts import StudyCounts

HELP = "count infected red cells in fields of a thin blood smear"
DESCRIPTION = (
    "Find the cells of images, which are taken as fields of one thin blood smear, classify the red "
    "cells, and count them: infected cells by stage, parasitaemia with its 95 % interval, "
    "parasites per 100 white cells. For each image NAME this writes NAME.detections.csv and "
    ".geojson, NAME.overlay.png and NAME.report.html; summary.csv has a line for each. Images that "
    "are done are skipped, so the same command resumes a run that was stopped. For research only."
)


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    from napari_beerlanet.core.batch.settings import MALARIA_PRESET, StudySettings

    add_input_options(command)
    for name, flag, what in (
        ("model", "--model", "the detector of the cells"),
        ("classifier", "--classify", "the classifier of the red cells"),
    ):
        text = f"{what}: a name, or a path (default {MALARIA_PRESET[name]})"
        add_setting(command, StudySettings, name, flag, metavar="MODEL", help=text)
    for name in ("confidence", "iou", "object_size", "tile", "pixel_size"):
        add_setting(command, StudySettings, name, preset=MALARIA_PRESET)
    add_setting(command, StudySettings, "reports", "--no-reports", help="write no HTML reports")
    add_device_option(command)


def run(options: argparse.Namespace) -> int:
    """Count; 0 if all went well, 1 if some images failed."""
    from napari_beerlanet.cli.study import ConsoleOutput, run_files
    from napari_beerlanet.core.batch.counts import StudyCounts
    from napari_beerlanet.core.batch.settings import MALARIA_PRESET, StudySettings

    settings = MALARIA_PRESET | given_settings(options, StudySettings)
    status = run_files(
        options.images,
        options.out,
        settings,
        ConsoleOutput(options.quiet, options.debug),
        workers=0,
        recursive=options.recursive,
        overwrite=options.overwrite,
    )
    counts = StudyCounts.read(options.out)
    if counts is not None and counts.counted:
        _print_counts(counts)
    return status


def _print_counts(counts: StudyCounts) -> None:
    infected = counts.sum.parasitaemia
    if infected is None:
        echo("No red cells were found.")
    else:
        width = max(len(name) for name, _ in infected.rows())
        for name, value in infected.rows():
            echo(f"{name:{width}}  {value}")
    for text in counts.reservations():
        print_message(text)
