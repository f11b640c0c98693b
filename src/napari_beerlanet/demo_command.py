"""The command `demo`: sample images taken apart, their cells found; files and the viewer."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from napari_beerlanet.commands import made, say, stop_if_asked

if TYPE_CHECKING:
    from napari_beerlanet.core.batch import Folder
    from napari_beerlanet.core.decompose import Decomposition
    from napari_beerlanet.sample_data import SampleField

_SCREEN = "-screen 0 1400x900x24"


def add_parser(verbs: Any, finish: Any) -> None:
    """Add the command to the parser."""
    command = verbs.add_parser(
        "demo",
        help="take sample images apart, find their cells, and open the viewer on them",
        description="Make a synthetic blood smear and tissue section, decompose both, find the "
        "cells of the smear with the packaged model, and show it in napari. Without a display "
        "the window is drawn on a virtual one (xvfb) and saved as pictures.",
    )
    add = command.add_argument
    add(
        "--out", type=Path, default=Path("beerlanet-demo"), metavar="DIR", help="folder to write to"
    )
    add("--pictures", action="store_true", help="save the window as pictures and close it")
    add("--no-window", action="store_true", help="write files only")
    finish(command, demo)


def demo(options: argparse.Namespace) -> int:
    """Decompose a synthetic smear and section, find the smear's cells, and show it all."""
    from napari_beerlanet.core.batch import Folder

    folder = Folder(made(options.out))
    say(f"decomposing two sample images into {folder.path} ...")

    from napari_beerlanet import sample_data

    smear = sample_data.blood_smear((768, 1024), seed=11)
    _show_stains(folder, "blood-smear", smear)
    _show_stains(folder, "tissue-section", sample_data.he_field((768, 1024), seed=2))
    _show_cells(folder.path, "blood-smear", smear)
    return 0 if options.no_window else _show_window(folder.path, options.pictures)


def _show_stains(folder: Folder, name: str, field: SampleField) -> None:
    from PIL import Image

    from napari_beerlanet.core.batch import write_results
    from napari_beerlanet.core.decompose import decompose
    from napari_beerlanet.core.files import atomic_path

    result = decompose(field.image, iterations="converge", report=lambda _: stop_if_asked())
    picture = folder.path / f"{name}.png"
    with atomic_path(picture) as unfinished:
        Image.fromarray(field.image).save(unfinished)
    size = (field.pixel_size, field.pixel_size)
    written = write_results(folder, name, result, size, picture.name)
    print(f"{picture}: stained with {' and '.join(field.stains)}. Found from the image alone:")
    print("\n".join(_table(result)))
    print(f"Look at {written[1]}; beside it are the densities and the spectra.\n", flush=True)


def _show_cells(folder: Path, name: str, field: SampleField) -> None:
    from napari_beerlanet.core.checkpoint import load_checkpoint
    from napari_beerlanet.core.detectfiles import DetectFolder, write_found

    say("finding the cells of the smear with the packaged model ...")
    model = load_checkpoint("blood-cells")
    found = model.detect(field.image, report=lambda _: stop_if_asked())
    place = DetectFolder(folder)
    colours = model.info["colours"]
    files = write_found(place, name, found, field.image, f"{name}.png", colours)
    counts = ", ".join(f"{count} {name}" for name, count in found.counts().items())
    drawn = ", ".join(f"{(field.labels == k).sum()} {n}" for k, n in enumerate(field.names))
    print(f"{folder / name}.png: found {counts}; drawn were {drawn}.")
    print(f"Look at {files['overlay']}; beside it are the boxes as CSV and GeoJSON.", flush=True)


def _table(result: Decomposition) -> list[str]:
    """The stains that were found as lines of text, the largest share first."""
    from napari_beerlanet.core.results import hex_colour, percent

    lines = ["  component  share   absorbs red, green, blue   looks"]
    for i in sorted(range(len(result.share)), key=lambda k: -result.share[k]):
        if result.active[i]:
            absorbs = "  ".join(f"{value:.2f}" for value in result.spectra[:, i])
            looks = f"{_colour_name(result.colours[i])} {hex_colour(result.colours[i])}"
            lines.append(
                f"  OD {i + 1:<6}  {percent(result.share[i]):>5}   {absorbs:<24}   {looks}"
            )
    light = "  ".join(f"{value:.2f}" for value in result.light)
    lines.append(f"  background light: {light} of full red, green, blue")
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
            say("there is no display, and no xvfb-run for a virtual one; the files are all.")
            return 0
        command, pictures = ["xvfb-run", "-a", "-s", _SCREEN, *command], True
    if pictures:
        command += ["--pictures", str(folder)]
    say("drawing the viewer's window ..." if pictures else "opening the viewer ...")
    status = subprocess.run(command, check=False).returncode
    if status == 0 and pictures:
        print(f"Look at {folder / 'window-stains.png'} and {folder / 'window-cells.png'}.")
    elif status:
        say("the viewer did not come up; the files are there all the same.")
    return 1 if status else 0


def _has_display() -> bool:
    if sys.platform != "linux":
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
