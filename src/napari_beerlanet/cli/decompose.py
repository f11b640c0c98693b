"""The command `decompose`: decompose image files into stain spectra and densities."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from napari_beerlanet.cli.common import (
    Options,
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
    add_spectra_options(solver)
    add_device_option(solver)


def run(options: argparse.Namespace) -> int:
    """Decompose files into a folder; 0 if all went well, 1 if some failed."""
    from napari_beerlanet.cli.study import run_preset
    from napari_beerlanet.core.batch.settings import DECOMPOSE_PRESET
    from napari_beerlanet.core.stains.settings import DecomposeSettings

    settings = DECOMPOSE_PRESET | given_settings(options, DecomposeSettings)
    settings |= {"density_maps": options.format, "previews": not options.no_preview}
    settings["device"] = options.device
    return run_preset(options, settings | given_spectra(vars(options)))


def add_spectra_options(options: Options) -> None:
    """Add the arguments that give spectra to start from, or to keep."""
    from napari_beerlanet.core.stains.settings import DecomposeSettings

    given = options.add_mutually_exclusive_group()
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
    add_setting(options, DecomposeSettings, "fixed_spectra")


def given_spectra(options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings `spectra`, `stain_names` and others for the options --spectra and --preset.

    Also for the entries `spectra` (a path) and `preset` of a study file; {} without either.
    """
    from napari_beerlanet.core.stains.presets import load_preset, read_start

    try:
        if "preset" in options:
            preset = load_preset(options["preset"])
            return {
                "spectra": preset.spectra.tolist(),
                "components": len(preset.stains),
                "stain_names": preset.names,
                "fixed_spectra": True,
            }
        if isinstance(options.get("spectra"), (str, Path)):
            spectra, names = read_start(options["spectra"])
            count = spectra.shape[1]
            return {"spectra": spectra.tolist(), "components": count, "stain_names": names}
    except ValueError as error:
        raise UsageError(str(error)) from error
    return {}
