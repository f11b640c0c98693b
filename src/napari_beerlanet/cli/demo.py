"""The command `demo`: decompose sample images, detect their cells, and open the viewer."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from napari_beerlanet.cli.common import (
    echo,
    prepare_folder,
    print_message,
    raise_if_interrupted,
)

_VIRTUAL_SCREEN = "-screen 0 1400x900x24"


HELP = "decompose sample images, detect their cells, and open the viewer on them"
DESCRIPTION = (
    "Decompose a blood smear (BCCD) and an H&E section, detect the cells of the smear with the "
    "packaged model, and show it in napari. Without a display the window is drawn "
    "on a virtual one (xvfb) and saved as pictures."
)


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = command.add_argument
    folder = Path("beerlanet-demo")
    add("--out", type=Path, default=folder, metavar="DIR", help="folder to write to")
    add("--pictures", action="store_true", help="save the window as pictures and close it")
    add("--no-window", action="store_true", help="write files only")


def run(options: argparse.Namespace) -> int:
    """Decompose a smear and a section, detect the smear's cells, and show it all."""
    folder = prepare_folder(options.out)
    print_message(f"decomposing two sample images into {folder} ...")

    smear = _decompose_sample(folder, "Blood smear (BCCD)")
    _decompose_sample(folder, "H&E section")
    _detect_sample(smear)
    return 0 if options.no_window else _show_window(folder, options.pictures)


def _decompose_sample(folder: Path, name: str) -> Path:
    """Decompose a copy of a sample; its path."""
    from napari_beerlanet.core.batch.settings import DECOMPOSE_PRESET
    from napari_beerlanet.core.common.storage import atomic_path, read_json
    from napari_beerlanet.samples import photograph_path

    sample = photograph_path(name)
    picture = folder / sample.name
    with atomic_path(picture) as unfinished:
        shutil.copyfile(sample, unfinished)
    _process(picture, DECOMPOSE_PRESET)
    echo(f"{picture}: {name}. Found from the image alone:")
    for line in _stain_table(read_json(picture.with_suffix(".spectra.json"))):
        echo(line)
    preview = picture.with_suffix(".preview.png")
    echo(f"Look at {preview}; beside it are the densities and the spectra.")
    echo("")
    return picture


def _detect_sample(picture: Path) -> None:
    from napari_beerlanet.core.batch.settings import DETECT_PRESET

    print_message("detecting the cells of the smear with the packaged model ...")
    found = _process(picture, DETECT_PRESET)["counts"]
    counts = ", ".join(f"{count} {name}" for name, count in found.items())
    echo(f"{picture}: detected {counts}.")
    overlay = picture.with_suffix(".overlay.png")
    echo(f"Look at {overlay}; beside it are the boxes as CSV and GeoJSON.")


def _process(picture: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The record of one image, whose results lie beside it."""
    from napari_beerlanet.core.batch.study import run_study
    from napari_beerlanet.core.common.storage import FileError

    study = run_study(
        picture,
        picture.parent,
        settings,
        workers=0,
        overwrite=True,
        layout="files",
        report=lambda _: raise_if_interrupted(),
    )
    for error in study.failures.values():
        raise FileError(error)
    return study.entries[0].record


def _stain_table(content: dict[str, Any]) -> list[str]:
    """The active stains of a spectra file as lines of text, the largest share first."""
    from napari_beerlanet.core.common.messages import format_percent

    lines = ["  stain      share   absorbs red, green, blue   looks"]
    for stain in sorted(content["components"], key=lambda stain: -stain["share"]):
        if stain["active"]:
            absorbs = "  ".join(f"{value:z.2f}" for value in stain["spectrum"])
            name = stain["name"].rpartition(" (")[0]
            share = format_percent(stain["share"])
            looks = f"{_colour_name(bytes.fromhex(stain['colour'][1:]))} {stain['colour']}"
            lines.append(f"  {name:<9}  {share:>5}   {absorbs:<24}   {looks}")
    light = "  ".join(f"{value:z.2f}" for value in content["background"]["light"])
    lines.append(f"  background: {light} of full red, green, blue")
    return lines


def _colour_name(rgb: Any) -> str:
    import colorsys

    hue, saturation, _ = colorsys.rgb_to_hsv(*(float(value) / 255 for value in rgb))
    if saturation < 0.15:
        return "grey"
    names = {14: "red", 42: "brown", 70: "olive", 160: "green", 200: "cyan", 245: "blue"}
    names |= {278: "violet", 320: "purple", 346: "pink", 361: "red"}
    return next(name for limit, name in names.items() if 360 * hue < limit)


def _show_window(folder: Path, pictures: bool) -> int:
    """Open the viewer in a process of its own: on the display, or on a virtual one for pictures."""
    command = [sys.executable, "-m", "napari_beerlanet.ui.demo"]
    if not _has_display():
        if shutil.which("xvfb-run") is None:
            print_message(
                "there is no display, and no xvfb-run for a virtual one; the files are all."
            )
            return 0
        command, pictures = ["xvfb-run", "-a", "-s", _VIRTUAL_SCREEN, *command], True
    if pictures:
        command += ["--pictures", str(folder)]
    print_message("drawing the viewer's window ..." if pictures else "opening the viewer ...")
    status = subprocess.run(command, check=False).returncode
    if status == 0 and pictures:
        echo(f"Look at {folder / 'window-stains.png'} and {folder / 'window-cells.png'}.")
    elif status:
        print_message("the viewer did not come up; the files are there all the same.")
    return 1 if status else 0


def _has_display() -> bool:
    if sys.platform != "linux":
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
