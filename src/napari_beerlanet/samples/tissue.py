"""Stroma, nests, glands and nuclei of a synthetic H&E section.

Lengths are in pixels and follow from an epithelial nucleus' diameter; planes are haematoxylin,
eosin and, where there is a third, DAB.
"""

from dataclasses import dataclass

import numpy as np
from scipy import ndimage

from napari_beerlanet.samples.shapes import (
    Canvas,
    DiscScatter,
    Rng,
    coverage,
    noise_tile,
    random_crop,
    random_outline,
    round_randomly,
    smooth_noise,
    smoothstep,
)

HAEMATOXYLIN, EOSIN, DAB = range(3)
EPITHELIAL, STROMAL, LYMPHOCYTE = range(3)
DAB_PATTERNS = ("nuclear", "membrane", "")  # what DAB marks in one nest after the other


@dataclass(frozen=True)
class SectionStyle:
    """What the cells of one field have in common."""

    unit: float  # epithelial nucleus diameter, pixels
    vesicular: float  # how clear the nuclei are inside their rim, 0 to 1
    fine: np.ndarray
    coarse: np.ndarray

    @classmethod
    def draw(cls, rng: Rng, unit: float) -> "SectionStyle":
        fine = noise_tile(rng, 12 * unit, 0.035 * unit)
        coarse = noise_tile(rng, 12 * unit, 0.1 * unit)
        return cls(unit, rng.uniform(0.2, 0.6), fine, coarse)


class Nest:
    """The outline of a group of epithelial cells, and of its lumen where it is a gland.

    Parameters
    ----------
    y, x, radius : float
        Centre and mean radius, pixels.
    unit : float
        Nucleus diameter, pixels.
    """

    def __init__(self, rng: Rng, y: float, x: float, radius: float, unit: float):
        self.y, self.x, self.radius = y, x, radius
        self.gland = rng.random() < 0.5
        self.lumen_radius = max(radius - rng.uniform(1.6, 2.2) * unit, 0.4 * unit)
        self._outer = random_outline(rng, (0.3, 0.16, 0.1, 0.06, 0.04))
        self._inner = random_outline(rng, (0.2, 0.12, 0.08, 0.06, 0.05))
        self._halo_outline = random_outline(rng, (0.6, 0.5, 0.4, 0.4, 0.3, 0.3))

    def rho(self, z: np.ndarray) -> np.ndarray:
        """Distance from the centre, 1 on the outline; z is x + iy from the centre."""
        return np.abs(z) / (self.radius * self._outer(z))

    def lumen(self, z: np.ndarray) -> np.ndarray:
        """Distance from the centre, 1 on the edge of the lumen; large everywhere without one."""
        if not self.gland:
            return np.full(z.shape, 9, np.float32)
        return np.abs(z) / (self.lumen_radius * self._outer(z) * self._inner(z))

    def halo_width(self, z: np.ndarray) -> np.ndarray:
        """Width of the gap to the stroma in this direction; negative where there is none."""
        return self._halo_outline(z) - 1.25


def fibre_coordinates(
    shape: tuple[int, int], rng: Rng, unit: float, nests: list[Nest]
) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates across and along the stroma's fibres, each (H, W) float32.

    The level lines of the first are the fibres: a smooth height map gives bundles that bend
    without a seam, and the stream function of a flow around discs leads them around the nests.
    """
    turn = rng.uniform(0, np.pi)
    normal = np.complex64(np.exp(1j * turn))
    rows = np.arange(shape[0], dtype=np.float32)[:, None]
    cols = np.arange(shape[1], dtype=np.float32)
    across = normal.real * cols + normal.imag * rows
    along = normal.real * rows - normal.imag * cols
    for scale, size in ((14, 4.0), (4, 0.8), (1.0, 0.15), (0.4, 0.05)):
        across += np.float32(size * unit) * smooth_noise(shape, rng, scale * unit)
    along += np.float32(2 * unit) * smooth_noise(shape, rng, 9 * unit)
    frame = Canvas(shape, 0)
    for nest in nests:
        spans, z = frame.window(nest.y, nest.x, 3 * nest.radius)
        rho = np.maximum(nest.rho(z), 1)
        across[spans] -= (z * normal.conj()).real / rho**2 * smoothstep(-rho, -2.4, -1.2)
    return across, along


def stroma(
    canvas: Canvas, rng: Rng, style: SectionStyle, across: np.ndarray, along: np.ndarray
) -> None:
    """Eosin fibres of three thicknesses, denser and looser regions, clefts of bare glass."""
    unit, tile = style.unit, noise_tile(rng, 512, 1.0)

    def fibres(thick: float, long: float) -> np.ndarray:
        at = np.stack([across / np.float32(thick * unit), along / np.float32(long * unit)])
        at += rng.integers(len(tile), size=(2, 1, 1)).astype(np.float32)
        return ndimage.map_coordinates(tile, at, order=1, mode="grid-wrap")

    loose = smooth_noise(canvas.shape, rng, 6 * unit)
    bundle, strand, thread = fibres(0.3, 1.6), fibres(0.1, 1.0), fibres(0.06, 0.5)
    eosin = 0.42 + 0.12 * bundle + 0.14 * np.exp(-((strand / 0.4) ** 2)) - 0.08 * loose
    eosin *= 1 + 0.16 * thread + 0.1 * strand + 0.12 * random_crop(style.fine, canvas.shape, rng)
    wide = smoothstep(fibres(0.25, 1.1) + 0.7 * loose, 1.2, 1.7)
    fine = smoothstep(strand + 0.6 * thread + 0.9 * loose, 1.1, 2.2)
    solid = (1 - wide) * (1 - fine)
    canvas.planes[EOSIN] += np.maximum(eosin, 0.05) * solid
    canvas.planes[HAEMATOXYLIN] += (0.02 + 0.035 * np.clip(loose + 0.5 * strand, 0, 3)) * solid


def fibre_angle(across: np.ndarray, y: float, x: float) -> float:
    """Direction of the fibre through a point: the level line of ``across``, in radians."""
    row, col = (int(np.clip(at, 0, n - 1)) for at, n in zip((y, x), across.shape, strict=True))
    column, line = across[max(row - 3, 0) : row + 4, col], across[row, max(col - 3, 0) : col + 4]
    dy = (column[-1] - column[0]) / len(column)
    dx = (line[-1] - line[0]) / len(line)
    return float(np.arctan2(dx, -dy))


def nucleus(
    canvas: Canvas,
    rng: Rng,
    style: SectionStyle,
    y: float,
    x: float,
    radius: float,
    aspect: float,
    angle: float,
    kind: int,
    positive: bool = False,
) -> None:
    """An ellipse with a rim, chromatin and perhaps nucleoli; brown where positive for DAB."""
    shape = random_outline(rng, (0.04, 0.06, 0.04, 0.02))
    clear = 0.0 if kind == LYMPHOCYTE else style.vesicular * rng.uniform(0.3, 1.3)
    depth = {EPITHELIAL: 1.1, STROMAL: 1.2, LYMPHOCYTE: 1.6}[kind] * np.exp(rng.normal(0, 0.2))
    spots = rng.uniform(-0.45, 0.45, (rng.integers(0, 3), 2))

    spans, z = canvas.window(y, x, 1.3 * radius * np.sqrt(aspect) + 2)
    turned = z * np.complex64(np.exp(-1j * angle))
    ellipse = turned.real / np.sqrt(aspect) + 1j * turned.imag * np.sqrt(aspect)
    rho = np.abs(ellipse) / (radius * shape(ellipse))
    inside = coverage(rho, radius / np.sqrt(aspect))
    rim = np.exp(-(((rho - 0.92) / 0.13) ** 2))
    chromatin = 0.3 * random_crop(style.coarse, z.shape, rng) + 0.22 * random_crop(
        style.fine, z.shape, rng
    )
    fill = 1 - clear * (1 - rho**2) + 0.35 * rim + (0.4 + clear) * chromatin
    for col, row in spots if kind == EPITHELIAL else ():
        spot = np.abs(ellipse / radius - np.complex64(col + 1j * row))
        fill += 0.6 * np.exp(-((spot / 0.13) ** 2))
    dye = np.float32(depth) * np.clip(fill, 0.1, 2.2) * inside
    for plane in canvas.planes:
        plane[spans] *= 1 - 0.9 * inside
    share = 0.95 if positive else 0.0
    canvas.planes[HAEMATOXYLIN][spans] += (1 - share) * dye
    if positive:
        canvas.planes[DAB][spans] += share * dye
    canvas.add_box(spans, inside > 0.5, np.pi * radius**2, kind)


def _place_nuclei(rng: Rng, unit: float, nest: Nest) -> list[complex]:
    """Nuclei about one cell apart, x + iy from the nest's centre, clear of its edges."""
    count = int(60 * (nest.radius / unit) ** 2) + 8
    reach = 1.5 * nest.radius * np.sqrt(rng.random(count))
    points = (reach * np.exp(2j * np.pi * rng.random(count))).astype(np.complex64)
    spacing = unit * rng.uniform(0.38 if nest.gland else 0.43, 0.53, count)
    room = nest.rho(points) < 1 - 0.45 * unit / nest.radius
    room &= nest.lumen(points) > 1 + 0.7 * unit / nest.lumen_radius
    scatter = DiscScatter(2 * unit)
    for point, radius in zip(points[room].tolist(), spacing[room].tolist(), strict=True):
        if scatter.free(point.imag, point.real, radius, 1.0):
            scatter.add(point.imag, point.real, radius)
    return [complex(x, y) for y, x, _, _ in scatter.discs]


def _cell_borders(z: np.ndarray, points: list[complex]) -> np.ndarray:
    """Lines half-way between neighbouring nuclei, in [0, 1]."""
    line = np.zeros(z.shape, np.float32)
    seeds = np.ones(z.shape, bool)
    index = np.zeros(z.shape, np.int32)
    for number, point in enumerate(points):
        row, col = int(point.imag - z[0, 0].imag + 0.5), int(point.real - z[0, 0].real + 0.5)
        if 0 <= row < z.shape[0] and 0 <= col < z.shape[1]:
            seeds[row, col], index[row, col] = False, number
    if seeds.all():
        return line
    near = ndimage.distance_transform_edt(seeds, return_distances=False, return_indices=True)
    owner = index[tuple(near)]
    line[1:] = owner[1:] != owner[:-1]
    line[:, 1:] = np.maximum(line[:, 1:], owner[:, 1:] != owner[:, :-1])
    return line


def cytoplasm(
    canvas: Canvas, rng: Rng, style: SectionStyle, nest: Nest, points: list[complex], brown: bool
) -> None:
    """Clear the stroma away and fill the nest around its lumen, with borders between cells."""
    unit, radius = style.unit, nest.radius
    spans, z = canvas.window(nest.y, nest.x, 1.7 * radius + unit)
    if not z.size:
        return
    rho = nest.rho(z)
    ragged = 0.05 * unit * random_crop(style.coarse, z.shape, rng)
    inside = coverage(rho + ragged / radius, radius / 2)
    lumen = coverage(nest.lumen(z) + ragged / nest.lumen_radius, nest.lumen_radius / 2)
    gap = smoothstep((1 - rho) * radius / unit + nest.halo_width(z), 0.0, 0.15)
    canvas.planes[(slice(None), *spans)] *= (1 - inside) * (1 - gap)
    body = inside * (1 - lumen)
    line = ndimage.gaussian_filter(_cell_borders(z, points), 0.04 * unit) * min(0.1 * unit, 2.5)
    line += 0.8 * np.exp(-(((1 - rho) * radius / (0.05 * unit)) ** 2))
    mottle = 0.5 * random_crop(style.coarse, z.shape, rng) + random_crop(style.fine, z.shape, rng)
    canvas.planes[EOSIN][spans] += body * np.clip(0.36 + 0.05 * mottle + 0.12 * line, 0, 2)
    canvas.planes[HAEMATOXYLIN][spans] += body * np.clip(0.19 + 0.04 * mottle, 0, 2)
    if brown:
        canvas.planes[DAB][spans] += body * np.clip(0.05 + 0.7 * line, 0, 1.5)


def capillary(
    canvas: Canvas, rng: Rng, style: SectionStyle, y: float, x: float, angle: float
) -> None:
    """A slit of glass between the fibres with red cells in it: eosin and nothing else."""
    half, thick = style.unit * rng.uniform(0.7, 1.6), style.unit * rng.uniform(0.3, 0.5)
    shape = random_outline(rng, (0.1, 0.08, 0.05))
    spans, z = canvas.window(y, x, 1.4 * half + 2)
    turned = z * np.complex64(np.exp(-1j * angle))
    ellipse = turned.real / half + 1j * turned.imag / thick
    rho = np.abs(ellipse) / shape(ellipse)
    inside = coverage(rho, thick)
    for plane in canvas.planes:
        plane[spans] *= 1 - inside
    cells = np.clip(1.1 + 0.25 * random_crop(style.coarse, z.shape, rng), 0.3, 2)
    canvas.planes[EOSIN][spans] += cells * coverage(rho * 1.2, thick)


def stromal_cell(
    canvas: Canvas, rng: Rng, style: SectionStyle, y: float, x: float, radius: float, angle: float
) -> None:
    """A spindle nucleus along the fibre, or now and then a lymphocyte."""
    if rng.random() < 0.16:
        size, aspect = 0.3 * style.unit, rng.uniform(1, 1.25)
        nucleus(canvas, rng, style, y, x, size, aspect, angle, LYMPHOCYTE)
    else:
        aspect = float(np.clip(rng.lognormal(np.log(3), 0.4), 1.3, 7))
        angle += rng.normal(0, 0.12)
        nucleus(canvas, rng, style, y, x, radius, aspect, angle, STROMAL)


def epithelium(
    canvas: Canvas, rng: Rng, dab: Rng, style: SectionStyle, nests: list[Nest]
) -> np.ndarray:
    """Draw the nests over the stroma; returns where they and their margins are, (H, W) bool."""
    unit, taken = style.unit, np.zeros(canvas.shape, bool)
    for number, nest in enumerate(nests):
        points = _place_nuclei(rng, unit, nest)
        brown = DAB_PATTERNS[number % 3] if len(canvas.planes) == 3 else ""
        cytoplasm(canvas, rng, style, nest, points, brown == "membrane")
        for point in points:
            size = 0.5 * unit * float(np.clip(rng.normal(0.95, 0.12), 0.6, 1.4))
            aspect, angle = rng.uniform(1.05, 1.6), rng.uniform(0, np.pi)
            pose = (size, aspect, float(np.angle(point)) if nest.gland else angle)
            positive = brown == "nuclear" and dab.random() < 0.8
            at = nest.y + point.imag, nest.x + point.real
            nucleus(canvas, rng, style, *at, *pose, EPITHELIAL, positive)
        spans, z = canvas.window(nest.y, nest.x, 1.7 * nest.radius + unit)
        taken[spans] |= nest.rho(z) < 1 + 0.6 * unit / nest.radius
    return taken


def section(
    shape: tuple[int, int], rng: Rng, stains: int, unit: float, nests: float, cells: float
) -> Canvas:
    """Densities and boxes of a whole field; see ``he_field`` for the arguments."""
    canvas, style = Canvas(shape, stains), SectionStyle.draw(rng, unit)
    dab = rng.spawn(1)[0]  # so that the third dye moves nothing
    groups = [Nest(rng, *spot, unit) for spot in _scatter_discs(shape, rng, nests, 4.5 * unit, 0.3)]
    across, along = fibre_coordinates(shape, rng, unit, groups)
    stroma(canvas, rng, style, across, along)
    for y, x, _ in _scatter_discs(shape, rng, cells / 5, unit, 0.2):
        capillary(canvas, rng, style, y, x, fibre_angle(across, y, x))
    taken = epithelium(canvas, rng, dab, style, groups)
    ground = (canvas.planes[EOSIN] > 0.1) & ~taken
    for y, x, size in _scatter_discs(shape, rng, cells, 0.36 * unit, 0.2):
        if ground[int(np.clip(y, 0, shape[0] - 1)), int(np.clip(x, 0, shape[1] - 1))]:
            stromal_cell(canvas, rng, style, y, x, size, fibre_angle(across, y, x))
    return canvas


def _scatter_discs(
    shape: tuple[int, int], rng: Rng, share: float, radius: float, spread: float
) -> list[tuple[float, float, float]]:
    """Discs (y, x, r) that together would cover ``share`` of the field, none on another."""
    height, width = (n + radius for n in shape)
    count = round_randomly(rng, share * height * width / (np.pi * radius**2))
    scatter = DiscScatter(5 * radius)
    for _ in range(20 * count):
        if len(scatter.discs) >= count:
            break
        y, x = rng.random() * height - radius / 2, rng.random() * width - radius / 2
        r = radius * float(np.clip(rng.lognormal(0, spread), 0.5, 2))
        if scatter.free(y, x, r, 1.2):
            scatter.add(y, x, r)
    return [disc[:3] for disc in scatter.discs]
