"""The command `decompose`: decompose image files into stain spectra and densities."""

from __future__ import annotations

import argparse
from pathlib import Path

from napari_beerlanet.cli.common import (
    UsageError,
    add_device_option,
    add_input_options,
    add_setting,
    given_settings,
)

HELP = "decompose images into their stains"
DESCRIPTION = (
    "Decompose images or whole slides into background, stain spectra and stain densities. For "
    "each image NAME this writes NAME.densities.ome.tiff, NAME.spectra.json and NAME.preview.png. "
    "Images that are done are skipped."
)


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    from napari_beerlanet.core.stains.settings import DecomposeSettings

    add_input_options(command)
    add = command.add_argument
    add("--format", choices=("ome-tiff", "zarr"), default="ome-tiff", help="of the densities")
    add("--no-preview", action="store_true", help="write no preview pictures")
    solver = command.add_argument_group("solver")
    for name in ("components", "iterations", "lam", "gamma", "domain", "method"):
        add_setting(solver, DecomposeSettings, name)
    solver.add_argument(
        "--spectra", type=Path, metavar="FILE.json", help="start from the spectra of a result"
    )
    add_device_option(solver)


def run(options: argparse.Namespace) -> int:
    """Decompose files into a folder; 0 if all went well, 1 if some failed."""
    from napari_beerlanet.cli.study import run_preset
    from napari_beerlanet.core.batch.settings import DECOMPOSE_PRESET
    from napari_beerlanet.core.stains.settings import DecomposeSettings

    settings = DECOMPOSE_PRESET | given_settings(options, DecomposeSettings)
    settings |= {"density_maps": options.format, "previews": not options.no_preview}
    settings["device"] = options.device
    if options.spectra is not None:
        settings |= read_start_spectra(options.spectra)
    return run_preset(options, settings)


def read_start_spectra(path: Path) -> dict[str, object]:
    """The settings `spectra` and `components` from a file of a result."""
    from napari_beerlanet.core.stains.files import read_spectra

    try:
        spectra = read_spectra(path)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return {"spectra": spectra.tolist(), "components": spectra.shape[1]}
