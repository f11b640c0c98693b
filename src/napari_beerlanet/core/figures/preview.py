"""Contact sheet of a decomposition: the image, its background, each stain's colour and density.

Drawn with Pillow and the font that comes with it, so it looks the same on every machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from napari_beerlanet._version import __version__
from napari_beerlanet.core.common.messages import format_percent
from napari_beerlanet.core.figures.drawing import (
    GREY,
    LINE,
    draw_swatch,
    draw_text,
    elide,
    text_length,
    thumbnail,
    tint,
    to_rgb,
)
from napari_beerlanet.core.images import PixelSize
from napari_beerlanet.core.images.rgb import white_level
from napari_beerlanet.core.stains.decomposition import Decomposition

_PANEL_FILL = (246, 246, 247)
_CHANNELS = {"R": (206, 70, 70), "G": (62, 148, 82), "B": (66, 104, 196)}
_MARGIN, _GAP, _CAPTION, _FOOTER, _TITLE, _NOTE = 32, 28, 34, 38, 84, 52
_MAX_WIDTH = 1760  # pixels of the whole picture, margins aside
_PANEL_SIDE_RANGE = (300, 520)  # of a panel's longer side
_ASPECT_RANGE = (0.5, 3.5)  # panels of images beyond that are letterboxed


def draw_preview(
    decomposition: Decomposition, name: str = "", pixel_size: PixelSize | None = None
) -> Image.Image:
    """Draw the image and its active components, the largest share first.

    Every density is shown from white (none) to its component's colour on one scale for all.
    """
    d = decomposition
    components = [int(i) for i in np.argsort(-d.share, kind="stable") if d.active[i]]
    grid = _PanelGrid.of(d.image.shape, 1 + len(components))
    sheet = Image.new("RGB", grid.size, (255, 255, 255))
    draw = ImageDraw.Draw(sheet)
    maps = [thumbnail(d.densities[i], grid.fitted) for i in components]
    if d.image.pixels.shape[2] == 4:
        visible = thumbnail(d.image.pixels[..., 3], grid.fitted) / d.image.white
        maps = [density * visible for density in maps]
    full_scale = _full_colour_density(maps)

    _write_title(draw, d, grid, name, pixel_size)
    _draw_image_cell(sheet, d, grid)
    for cell, (i, density) in enumerate(zip(components, maps, strict=True), start=1):
        _draw_density_cell(sheet, d, grid, cell, i, density / full_scale, f"{full_scale:.2g}")
    _write_note(draw, d, grid, full_scale)
    return sheet


@dataclass(frozen=True)
class _PanelGrid:
    """Where everything is; lengths in pixels, (width, height)."""

    columns: int
    rows: int
    panel: tuple[int, int]
    fitted: tuple[int, int]  # the image inside its panel

    @classmethod
    def of(cls, shape: tuple[int, int], cells: int) -> _PanelGrid:
        height, width = shape
        aspect = min(max(width / height, _ASPECT_RANGE[0]), _ASPECT_RANGE[1])

        def misfit(columns: int) -> float:
            rows = math.ceil(cells / columns)
            return abs(math.log(columns * aspect / (1.3 * rows) / 1.6)) + columns * rows / cells

        columns = min(range(1, cells + 1), key=misfit)
        room = (_MAX_WIDTH + _GAP) / columns - _GAP
        longer = min(max(room * max(1.0, 1 / aspect), _PANEL_SIDE_RANGE[0]), _PANEL_SIDE_RANGE[1])
        panel = (round(longer * min(aspect, 1)), round(longer * min(1 / aspect, 1)))
        # A caption needs its width, however narrow the image.
        panel = (max(panel[0], _PANEL_SIDE_RANGE[0]), panel[1])
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
        return max(width, 2 * _MARGIN + _PANEL_SIDE_RANGE[1]), height

    def corner(self, cell: int) -> tuple[int, int]:
        row, column = divmod(cell, self.columns)
        return (
            _MARGIN + column * (self.panel[0] + _GAP),
            _TITLE + row * (self.cell_height + _GAP),
        )


def _draw_image_cell(sheet: Image.Image, d: Decomposition, grid: _PanelGrid) -> None:
    x, y = grid.corner(0)
    draw, gain = ImageDraw.Draw(sheet), _display_gain(d)
    draw_text(draw, (x, y + 14), "Image", 19)
    background = to_rgb(255 * gain * d.light)
    draw_swatch(draw, (x + grid.panel[0] - 20, y + 4), background)
    draw_text(draw, (x + grid.panel[0] - 28, y + 14), "background", 14, GREY, "rm")
    pixels = thumbnail(d.image.pixels, grid.fitted)
    shown = np.clip(pixels[..., :3] * (gain * 255 / d.image.white), 0, 255)
    if pixels.shape[2] == 4:
        alpha = pixels[..., 3:] / white_level(d.image.pixels.dtype)
        shown = alpha * shown + (1 - alpha) * 255
    _paste_panel(sheet, grid, 0, np.rint(shown).astype(np.uint8))
    _draw_channel_bars(draw, grid, 0, "intensity", d.light)


def _draw_density_cell(
    sheet: Image.Image,
    d: Decomposition,
    grid: _PanelGrid,
    cell: int,
    index: int,
    density: npt.NDArray[Any],
    full_scale: str,
) -> None:
    x, y = grid.corner(cell)
    right = x + grid.panel[0]
    draw, colour = ImageDraw.Draw(sheet), np.asarray(d.colours[index], np.float32)
    draw_swatch(draw, (x, y + 4), to_rgb(colour))
    length = draw_text(draw, (right, y + 14), full_scale, 14, GREY, "rm")
    ramp = tint(np.linspace(0, 1, 90, dtype=np.float32)[None].repeat(12, 0), colour)
    left = round(right - length - 8 - 90)
    share = f" · {format_percent(d.share[index])}"
    room = left - 24 - (x + 30)
    name = elide(d.labels[index], room - text_length(share, 19), 19)
    draw_text(draw, (x + 30, y + 14), name + share, 19)
    sheet.paste(Image.fromarray(ramp), (left, y + 8))
    draw.rectangle((left - 1, y + 7, left + 90, y + 20), outline=LINE)
    draw_text(draw, (left - 8, y + 14), "0", 14, GREY, "rm")
    _paste_panel(sheet, grid, cell, tint(density, colour))
    _draw_channel_bars(draw, grid, cell, "absorbs", d.spectra[:, index])


def _paste_panel(
    sheet: Image.Image, grid: _PanelGrid, cell: int, pixels: npt.NDArray[np.uint8]
) -> None:
    x, y = grid.corner(cell)
    (width, height), (inner_width, inner_height) = grid.panel, grid.fitted
    y += _CAPTION
    box = (x - 1, y - 1, x + width, y + height)
    ImageDraw.Draw(sheet).rectangle(box, fill=_PANEL_FILL, outline=LINE)
    corner = (x + (width - inner_width) // 2, y + (height - inner_height) // 2)
    sheet.paste(Image.fromarray(pixels), corner)


def _draw_channel_bars(
    draw: ImageDraw.ImageDraw, grid: _PanelGrid, cell: int, label: str, values: npt.NDArray[Any]
) -> None:
    """Three bars below a panel: how much of red, green and blue, 1 being full."""
    x, y = grid.corner(cell)
    middle = y + grid.cell_height - _FOOTER + 22
    draw_text(draw, (x, middle), label, 14, GREY)
    step = (grid.panel[0] - 62) / 3
    for k, ((channel, colour), value) in enumerate(zip(_CHANNELS.items(), values, strict=True)):
        left = x + 62 + k * step
        draw_text(draw, (left, middle), channel, 14, colour)
        start, length = left + 15, step - 15 - 42
        draw.rectangle((start, middle - 4, start + length, middle + 4), fill=_PANEL_FILL)
        filled = length * min(max(float(value), 0.0), 1.0)
        draw.rectangle((start, middle - 4, start + filled, middle + 4), fill=colour)
        draw_text(draw, (start + length + 6, middle), f"{value:.2f}", 14, GREY)


def _write_title(
    draw: ImageDraw.ImageDraw,
    d: Decomposition,
    grid: _PanelGrid,
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
    draw_text(draw, (_MARGIN, 32), elide(name or "Image", room, 26), 26)
    draw_text(draw, (_MARGIN, 60), elide(" · ".join(facts), room, 15), 15, GREY)


def _write_note(
    draw: ImageDraw.ImageDraw, d: Decomposition, grid: _PanelGrid, full_scale: float
) -> None:
    r, active = len(d.active), int(d.active.sum())
    if active == 0:
        note = f"No stain found: all {r} components are inactive."
    else:
        note = f"Densities: white is 0, full colour {full_scale:.2g} or more, alike in all panels."
        note += f" {r - active} of {r} components inactive." if active < r else ""
    width, height = grid.size
    program = f"napari-beerlanet {__version__}"
    used = draw_text(draw, (width - _MARGIN, height - 24), program, 14, LINE, "rm")
    room = width - 2 * _MARGIN - used - 20
    draw_text(draw, (_MARGIN, height - 24), elide(note, room, 14), 14, GREY)


def _full_colour_density(maps: list[npt.NDArray[Any]]) -> float:
    """The density shown in full colour: so that hardly a pixel of the densest stain is beyond."""
    full_scale = max((float(np.percentile(density, 99)) for density in maps), default=0.0)
    full_scale = full_scale or max((float(density.max()) for density in maps), default=0.0)
    return full_scale if full_scale > 0 else 1.0


def _display_gain(d: Decomposition) -> float:
    """Makes a camera's 12 bit in a 16-bit file visible; 1 for what is bright already."""
    brightest = float(d.light.max())
    return 0.95 / brightest if d.image.white != 255 and 0 < brightest < 0.5 else 1.0
