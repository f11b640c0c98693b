"""A picture of a decomposition: the image, its background light, each stain's colour and density.

Drawn with Pillow and the font that comes with it, so it looks the same on every machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from napari_beerlanet import __version__

from .decompose import Decomposition
from .drawing import GREY, LINE, rgb, shortened, swatch, thumbnail, tinted, write
from .images import white_level
from .results import percent
from .tiff import PixelSize

_EMPTY = (246, 246, 247)
_CHANNELS = {"R": (206, 70, 70), "G": (62, 148, 82), "B": (66, 104, 196)}
_MARGIN, _GAP, _CAPTION, _FOOTER, _TITLE, _NOTE = 32, 28, 34, 38, 84, 52
_WIDEST = 1760  # pixels of the whole picture, margins aside
_PANEL = (300, 520)  # least and greatest length of a panel's longer side
_ASPECT = (0.5, 3.5)  # panels of images beyond that are letterboxed


def preview(
    decomposition: Decomposition, name: str = "", pixel_size: PixelSize | None = None
) -> Image.Image:
    """Draw the image and its active components, the largest share first.

    Every density is shown from white (none) to its component's colour on one scale for all.
    """
    d = decomposition
    shown = [int(i) for i in np.argsort(-d.share, kind="stable") if d.active[i]]
    grid = _Grid.of(d.image.shape, 1 + len(shown))
    sheet = Image.new("RGB", grid.size, (255, 255, 255))
    draw = ImageDraw.Draw(sheet)
    maps = [thumbnail(d.densities[i], grid.fitted) for i in shown]
    most = _scale(maps)

    _write_title(draw, d, grid, name, pixel_size)
    _image_cell(sheet, d, grid)
    for place, (i, density) in enumerate(zip(shown, maps, strict=True), start=1):
        _density_cell(sheet, d, grid, place, i, density / most, f"{most:.2g}")
    _write_note(draw, d, grid, most)
    return sheet


@dataclass(frozen=True)
class _Grid:
    """Where everything is; lengths in pixels, (width, height)."""

    columns: int
    rows: int
    panel: tuple[int, int]
    fitted: tuple[int, int]  # the image inside its panel

    @classmethod
    def of(cls, shape: tuple[int, int], cells: int) -> _Grid:
        height, width = shape
        aspect = min(max(width / height, _ASPECT[0]), _ASPECT[1])

        def misfit(columns: int) -> float:
            rows = math.ceil(cells / columns)
            return abs(math.log(columns * aspect / (1.3 * rows) / 1.6)) + columns * rows / cells

        columns = min(range(1, cells + 1), key=misfit)
        room = (_WIDEST + _GAP) / columns - _GAP
        longer = min(max(room * max(1.0, 1 / aspect), _PANEL[0]), _PANEL[1])
        panel = (round(longer * min(aspect, 1)), round(longer * min(1 / aspect, 1)))
        # A caption needs its width, however narrow the image.
        panel = (max(panel[0], _PANEL[0]), panel[1])
        factor = min(panel[0] / width, panel[1] / height)
        fitted = max(round(width * factor), 1), max(round(height * factor), 1)
        return cls(columns, math.ceil(cells / columns), panel, fitted)

    @property
    def cell_height(self) -> int:
        return _CAPTION + self.panel[1] + _FOOTER

    @property
    def size(self) -> tuple[int, int]:
        width = 2 * _MARGIN + self.columns * (self.panel[0] + _GAP) - _GAP
        height = _TITLE + self.rows * (self.cell_height + _GAP) - _GAP + _NOTE
        return max(width, 2 * _MARGIN + _PANEL[1]), height

    def corner(self, place: int) -> tuple[int, int]:
        row, column = divmod(place, self.columns)
        return (
            _MARGIN + column * (self.panel[0] + _GAP),
            _TITLE + row * (self.cell_height + _GAP),
        )


def _image_cell(sheet: Image.Image, d: Decomposition, grid: _Grid) -> None:
    x, y = grid.corner(0)
    draw, gain = ImageDraw.Draw(sheet), _gain(d)
    write(draw, (x, y + 14), "Image", 19)
    light = rgb(255 * gain * d.light)
    swatch(draw, (x + grid.panel[0] - 20, y + 4), light)
    write(draw, (x + grid.panel[0] - 28, y + 14), "background light", 14, GREY, "rm")
    pixels = thumbnail(d.image.pixels, grid.fitted)
    shown = np.clip(pixels[..., :3] * (gain * 255 / d.image.white), 0, 255)
    if pixels.shape[2] == 4:
        alpha = pixels[..., 3:] / white_level(d.image.pixels.dtype)
        shown = alpha * shown + (1 - alpha) * 255
    _panel(sheet, grid, 0, np.rint(shown).astype(np.uint8))
    _bars(draw, grid, 0, "light", d.light)


def _density_cell(
    sheet: Image.Image,
    d: Decomposition,
    grid: _Grid,
    place: int,
    index: int,
    density: npt.NDArray[Any],
    most: str,
) -> None:
    x, y = grid.corner(place)
    right = x + grid.panel[0]
    draw, colour = ImageDraw.Draw(sheet), np.asarray(d.colours[index], np.float32)
    swatch(draw, (x, y + 4), rgb(colour))
    write(draw, (x + 30, y + 14), f"OD {index + 1} · {percent(d.share[index])}", 19)
    length = write(draw, (right, y + 14), most, 14, GREY, "rm")
    ramp = tinted(np.linspace(0, 1, 90, dtype=np.float32)[None].repeat(12, 0), colour)
    left = round(right - length - 8 - 90)
    sheet.paste(Image.fromarray(ramp), (left, y + 8))
    draw.rectangle((left - 1, y + 7, left + 90, y + 20), outline=LINE)
    write(draw, (left - 8, y + 14), "0", 14, GREY, "rm")
    _panel(sheet, grid, place, tinted(density, colour))
    _bars(draw, grid, place, "absorbs", d.spectra[:, index])


def _panel(sheet: Image.Image, grid: _Grid, place: int, pixels: npt.NDArray[np.uint8]) -> None:
    x, y = grid.corner(place)
    (width, height), (inner_width, inner_height) = grid.panel, grid.fitted
    y += _CAPTION
    box = (x - 1, y - 1, x + width, y + height)
    ImageDraw.Draw(sheet).rectangle(box, fill=_EMPTY, outline=LINE)
    corner = (x + (width - inner_width) // 2, y + (height - inner_height) // 2)
    sheet.paste(Image.fromarray(pixels), corner)


def _bars(
    draw: ImageDraw.ImageDraw, grid: _Grid, place: int, label: str, values: npt.NDArray[Any]
) -> None:
    """Three bars below a panel: how much of red, green and blue, 1 being full."""
    x, y = grid.corner(place)
    middle = y + grid.cell_height - _FOOTER + 22
    write(draw, (x, middle), label, 14, GREY)
    step = (grid.panel[0] - 62) / 3
    for k, ((channel, colour), value) in enumerate(zip(_CHANNELS.items(), values, strict=True)):
        left = x + 62 + k * step
        write(draw, (left, middle), channel, 14, colour)
        start, length = left + 15, step - 15 - 42
        draw.rectangle((start, middle - 4, start + length, middle + 4), fill=_EMPTY)
        filled = length * min(max(float(value), 0.0), 1.0)
        draw.rectangle((start, middle - 4, start + filled, middle + 4), fill=colour)
        write(draw, (start + length + 6, middle), f"{value:.2f}", 14, GREY)


def _write_title(
    draw: ImageDraw.ImageDraw,
    d: Decomposition,
    grid: _Grid,
    name: str,
    pixel_size: PixelSize | None,
) -> None:
    height, width = d.image.shape
    facts = [f"{width} x {height} pixels"]
    if pixel_size:
        y, x = pixel_size
        facts.append(f"{x:.3g} um per pixel" if x == y else f"{x:.3g} x {y:.3g} um per pixel")
    facts.append(f"lambda {d.lam:.3g}, gamma {d.gamma:.3g}")
    room = grid.size[0] - 2 * _MARGIN
    write(draw, (_MARGIN, 32), shortened(name or "Image", room, 26), 26)
    write(draw, (_MARGIN, 60), shortened(" · ".join(facts), room, 15), 15, GREY)


def _write_note(draw: ImageDraw.ImageDraw, d: Decomposition, grid: _Grid, most: float) -> None:
    r, active = len(d.active), int(d.active.sum())
    if active == 0:
        note = f"No stain found: all {r} components are inactive."
    else:
        note = f"Densities: white is 0, full colour {most:.2g} or more, alike in all panels."
        note += f" {r - active} of {r} components inactive." if active < r else ""
    width, height = grid.size
    program = f"napari-beerlanet {__version__}"
    used = write(draw, (width - _MARGIN, height - 24), program, 14, LINE, "rm")
    room = width - 2 * _MARGIN - used - 20
    write(draw, (_MARGIN, height - 24), shortened(note, room, 14), 14, GREY)


def _scale(maps: list[npt.NDArray[Any]]) -> float:
    """The density shown in full colour: so that hardly a pixel of the densest stain is beyond."""
    most = max((float(np.percentile(density, 99)) for density in maps), default=0.0)
    most = most or max((float(density.max()) for density in maps), default=0.0)
    return most if most > 0 else 1.0


def _gain(d: Decomposition) -> float:
    """Makes a camera's 12 bit in a 16-bit file visible; 1 for what is bright already."""
    brightest = float(d.light.max())
    return 0.95 / brightest if d.image.white != 255 and 0 < brightest < 0.5 else 1.0
