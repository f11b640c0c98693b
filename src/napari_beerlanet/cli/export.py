"""The command `export`: a detector for programs that have neither this package nor torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from napari_beerlanet.cli.common import UsageError, echo, prepare_folder, raise_if_interrupted

HELP = "write a detector as ONNX or OpenVINO, to run it elsewhere"
DESCRIPTION = (
    "Write the network behind the front end as ONNX or OpenVINO, the front end as data "
    "(model.json), and a README with a short Python program that needs neither this package nor "
    "torch and gives the same boxes."
)


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = command.add_argument
    add("model", metavar="MODEL", help="a packaged model's name, or a checkpoint's path")
    add("--format", choices=("onnx", "openvino"), default="onnx", help="default onnx")
    add("--out", required=True, type=Path, metavar="DIR", help="folder for the files")


def run(options: argparse.Namespace) -> int:
    """Write the files, all or none."""
    from napari_beerlanet.core.checkpoints.checkpoint import load_detector
    from napari_beerlanet.core.checkpoints.export import export_detector

    if options.out.exists():
        prepare_folder(options.out)
    try:
        model = load_detector(options.model, "cpu")
    except ValueError as error:
        raise UsageError(str(error)) from error
    for path in export_detector(model, options.out, options.format, check=raise_if_interrupted):
        echo(str(path))
    return 0
