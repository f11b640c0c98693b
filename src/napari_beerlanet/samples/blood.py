"""Red cells, white cells, platelets and parasites of a synthetic blood smear.

Lengths are in pixels and follow from the red cell's diameter; every function draws one object on
the two planes of a canvas, and records its box.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import cos, sin

import numpy as np

from napari_beerlanet.samples.shapes import (
    Canvas,
    DiscScatter,
    Rng,
    coverage,
    disc_union,
    noise_tile,
    random_crop,
    random_outline,
    round_randomly,
    smooth_noise,
)

HAEMOGLOBIN, NUCLEAR = range(2)
RBC, WBC, PLATELET, RING, TROPHOZOITE = range(5)

# Haemoglobin dye (eosin) spread and in granules, nuclear dye spread and in granules.
CYTOPLASM = {
    "lymphocyte": (0.0, 0.0, 0.28, 0.03),
    "monocyte": (0.04, 0.02, 0.27, 0.04),
    "neutrophil": (0.08, 0.06, 0.14, 0.11),
    "eosinophil": (0.22, 0.28, 0.09, 0.14),
}


@dataclass(frozen=True)
class SmearStyle:
    """What the cells of one smear have in common."""

    unit: float  # red cell diameter, pixels
    pallor: float  # how pale the middle of a red cell is, 0 to 1
    crenated: float  # share of red cells with a spiky edge
    fine: np.ndarray  # granules
    coarse: np.ndarray  # chromatin
    broad: np.ndarray  # folds

    @classmethod
    def draw(cls, rng: Rng, unit: float) -> "SmearStyle":
        fine = noise_tile(rng, 4 * unit, 0.012 * unit)
        coarse = noise_tile(rng, 4 * unit, 0.03 * unit)
        broad = noise_tile(rng, 4 * unit, 0.09 * unit)
        crenated = rng.choice([0.0, 0.0, 0.06])
        return cls(unit, rng.uniform(0.55, 0.9), crenated, fine, coarse, broad)


@dataclass(frozen=True)
class _CellKind:
    """How cells of one kind settle; lengths in red cell diameters."""

    radius: Callable[[], float]
    gap: Callable[[], float]  # closest approach to others, 1 is touching
    clump: float = 0.0  # share that settles next to one of its kind
    own_gap: float = 0.0  # what others must keep; above 0 also ignores the crowding


def _scatter_cells(
    scatter: DiscScatter, rng: Rng, crowd: np.ndarray, unit: float, kind: _CellKind, count: int
) -> list[tuple[float, float, float]]:
    """Throw ``count`` cells where there is room and ``crowd`` (H, W) is high; list of (y, x, r)."""
    height, width = crowd.shape
    start = len(scatter.discs)
    for _ in range(25 * count):
        if len(scatter.discs) - start >= count:
            break
        r = kind.radius() * unit
        y = rng.random() * (height + unit) - unit / 2
        x = rng.random() * (width + unit) - unit / 2
        if len(scatter.discs) > start and rng.random() < kind.clump:
            y, x, near, _ = scatter.discs[rng.integers(start, len(scatter.discs))]
            angle, step = 2 * np.pi * rng.random(), (r + near) * rng.uniform(0.72, 1.08)
            y, x = y + step * sin(angle), x + step * cos(angle)
        if abs(y - height / 2) > (height + unit) / 2 or abs(x - width / 2) > (width + unit) / 2:
            continue
        here = crowd[min(max(int(y), 0), height - 1), min(max(int(x), 0), width - 1)]
        welcome = kind.own_gap > 0 or rng.random() < 0.6 + 0.4 * here
        if welcome and scatter.free(y, x, r, kind.gap()):
            scatter.add(y, x, r, kind.own_gap)
    return [disc[:3] for disc in scatter.discs[start:]]


def place_cells(
    shape: tuple[int, int], rng: Rng, unit: float, red: float, white: float, platelets: float
) -> list[list[tuple[float, float, float]]]:
    """Positions and radii (y, x, r) of white cells, red cells and platelets.

    ``red`` is the share of the field that red cells would cover side by side; ``white`` and
    ``platelets`` are numbers per red cell. White cells push red ones aside; red ones clump.
    """
    kinds = (
        _CellKind(lambda: rng.uniform(0.62, 0.98), lambda: 1.05, own_gap=0.97),
        _CellKind(
            lambda: 0.5 * min(max(rng.normal(1, 0.08), 0.7), 1.3),
            lambda: rng.uniform(0.62, 0.9) if rng.random() < 0.25 else 1.0,
            clump=0.35,
        ),
        _CellKind(
            lambda: min(rng.lognormal(np.log(0.17), 0.22), 0.3),
            lambda: 0.6 if rng.random() < 0.15 else 1.05,
        ),
    )
    expected = red * (shape[0] + unit) * (shape[1] + unit) / (np.pi / 4 * unit**2)
    counts = [round_randomly(rng, share * expected) for share in (white, 1, platelets)]
    crowd, scatter = smooth_noise(shape, rng, 4 * unit), DiscScatter(2.1 * unit)
    crowd -= crowd.mean()  # a small field is no emptier than a large one
    return [
        _scatter_cells(scatter, rng, crowd, unit, kind, count)
        for kind, count in zip(kinds, counts, strict=True)
    ]


def red_cell(
    canvas: Canvas, rng: Rng, style: SmearStyle, y: float, x: float, radius: float
) -> None:
    """A dried biconcave disc: sharp edge, faint rim, pale middle."""
    shape = random_outline(rng, (0.09, 0.05, 0.03, 0.015, 0.008))
    spikes = random_outline(rng, (0.03, 0.05, 0.05, 0.04), first=12)
    spiky = rng.random() < style.crenated
    pallor = np.clip(rng.normal(style.pallor, 0.17), 0, 0.9)
    width, power = rng.uniform(0.32, 0.62), rng.uniform(1.8, 3.6)
    off = radius * 0.1 * complex(*rng.normal(size=2))
    depth = 0.52 * np.exp(rng.normal(0, 0.12)) * (1 - 0.25 * pallor)

    spans, z = canvas.window(y, x, 1.3 * radius + 2)
    edge = radius * shape(z) * (spikes(z) if spiky else 1)
    rho = np.abs(z) / edge
    body = np.sqrt(np.clip(1 - rho**6, 0, 1)) + 0.16 * np.exp(-(((rho - 0.91) / 0.06) ** 2))
    pale = 1 - pallor * np.exp(-((np.abs(z - np.complex64(off)) / (width * edge)) ** power))
    uneven = 1 + 0.04 * random_crop(style.coarse, z.shape, rng)
    inside = coverage(rho, radius)
    canvas.planes[HAEMOGLOBIN][spans] += np.float32(depth) * inside * body * pale * uneven
    canvas.add_box(spans, inside > 0.5, np.pi * radius**2, RBC)


def _nucleus_lobes(rng: Rng, kind: str, radius: float) -> tuple[np.ndarray, np.ndarray]:
    """Centres (complex) and radii of the discs that make up a white cell's nucleus."""
    turn = np.exp(2j * np.pi * rng.random())
    if kind == "lymphocyte":
        centres = radius * np.array([0.05, 0.18 * np.exp(1j * rng.uniform(0, 6))])
        return centres * turn, radius * np.array([0.74, 0.5])
    if kind == "monocyte":
        angles = np.linspace(-1.1, 1.1, 6)
        return radius * (0.42 * np.exp(1j * angles) - 0.12) * turn, np.full(6, 0.33 * radius)
    n = 2 if kind == "eosinophil" else int(rng.choice([3, 3, 4, 4, 5]))
    r = radius * rng.uniform(0.85, 1.12, n) * {2: 0.36, 3: 0.32, 4: 0.28, 5: 0.25}[n]
    steps = 2 * np.arcsin(np.minimum(1.15 * (r[1:] + r[:-1]) / (0.96 * radius), 0.95))
    angles = np.concatenate([[0], np.cumsum(steps)])
    lobes = (0.48 + rng.normal(0, 0.06, n)) * radius * np.exp(1j * angles) * turn
    strands = (lobes[1:] + lobes[:-1]) / 2
    return np.concatenate([lobes, strands]), np.concatenate([r, np.full(n - 1, 0.09 * radius)])


def white_cell(
    canvas: Canvas, rng: Rng, style: SmearStyle, y: float, x: float, radius: float
) -> None:
    """Lobed, kidney-shaped or round nucleus with chromatin, in granular or clear cytoplasm."""
    big = ["neutrophil", "neutrophil", "neutrophil", "monocyte", "eosinophil"]
    kind = "lymphocyte" if radius < 0.7 * style.unit else big[rng.integers(len(big))]
    shape = random_outline(rng, (0.06, 0.05, 0.04, 0.03, 0.02))
    centres, radii = _nucleus_lobes(rng, kind, radius)
    depth = rng.uniform(1.0, 1.35)

    spans, z = canvas.window(y, x, 1.3 * radius + 2)
    rho = np.abs(z) / (radius * shape(z))
    inside = coverage(rho, radius)
    body = inside * (0.75 + 0.25 * np.sqrt(np.clip(1 - rho**4, 0, 1)))
    ripple = 1 + np.float32(0.04) * random_crop(style.broad, z.shape, rng)
    nucleus = disc_union(z * ripple, centres, radii) * inside
    grain = random_crop(style.fine, z.shape, rng)
    chromatin = 1 + 0.13 * random_crop(style.coarse, z.shape, rng) + 0.06 * grain
    pink, pink_dots, blue, blue_dots = CYTOPLASM[kind]
    granules = np.clip(grain - 0.3, 0, 2)
    bare = body * (1 - nucleus)
    canvas.planes[HAEMOGLOBIN][spans] += bare * (pink + pink_dots * granules)
    canvas.planes[NUCLEAR][spans] += bare * (blue * chromatin + blue_dots * granules)
    canvas.planes[NUCLEAR][spans] += nucleus * np.float32(depth) * np.clip(chromatin, 0.5, 1.6)
    canvas.add_box(spans, inside > 0.5, np.pi * radius**2, WBC)


def platelet(
    canvas: Canvas, rng: Rng, style: SmearStyle, y: float, x: float, radius: float
) -> None:
    """A small ragged body: pale blue edge, purple granules in the middle."""
    shape = random_outline(rng, (0.15, 0.11, 0.09, 0.06, 0.05, 0.05))
    depth = rng.uniform(0.35, 0.65)
    spans, z = canvas.window(y, x, 1.6 * radius + 2)
    rho = np.abs(z) / (radius * shape(z))
    inside = coverage(rho, radius)
    granules = np.clip(0.7 + 0.5 * random_crop(style.fine, z.shape, rng), 0, 2)
    middle = np.exp(-((rho / 0.65) ** 3))
    canvas.planes[NUCLEAR][spans] += inside * np.float32(depth) * (0.35 + middle * granules)
    canvas.planes[HAEMOGLOBIN][spans] += inside * middle * 0.06 * granules
    canvas.add_box(spans, inside > 0.5, np.pi * radius**2, PLATELET)


def parasite(
    canvas: Canvas, rng: Rng, style: SmearStyle, y: float, x: float, radius: float
) -> None:
    """A ring form (thin circle with a chromatin dot) or a trophozoite in the red cell at (y, x)."""
    ring = rng.random() < 0.7
    size = radius * (rng.uniform(0.22, 0.34) if ring else rng.uniform(0.38, 0.55))
    away = (0.85 * radius - size) * np.sqrt(rng.random()) * np.exp(2j * np.pi * rng.random())
    shape = random_outline(rng, (0.12, 0.08, 0.05) if ring else (0.25, 0.2, 0.12, 0.08))
    dot = size * (0.85 if ring else 0.35) * np.exp(2j * np.pi * rng.random())

    spans, z = canvas.window(y + away.imag, x + away.real, 1.6 * size + 2)
    rho = np.abs(z) / (size * shape(z))
    body = coverage(rho, size)
    chromatin = disc_union(z, np.array([dot]), np.array([size * (0.32 if ring else 0.38)]))
    if ring:
        rim = np.exp(-(((rho - 0.82) / 0.2) ** 2)) * body
        canvas.planes[HAEMOGLOBIN][spans] *= 1 - 0.5 * body * (rho < 0.8)
    else:
        rim = body * np.clip(0.6 + 0.35 * random_crop(style.coarse, z.shape, rng), 0.1, 1.5)
        canvas.planes[HAEMOGLOBIN][spans] *= 1 - 0.4 * body
    canvas.planes[NUCLEAR][spans] += 0.55 * rim + 0.9 * chromatin
    seen = (body > 0.5) | (chromatin > 0.5)
    canvas.add_box(spans, seen, np.pi * size**2, RING if ring else TROPHOZOITE)


def smear(
    shape: tuple[int, int], rng: Rng, unit: float, parasites: float, plasma: float, **counts: float
) -> Canvas:
    """Densities and boxes of a whole smear; see :func:`place_cells` for ``counts``."""
    canvas = Canvas(shape, 2)
    germs = rng.spawn(1)[0]
    style = SmearStyle.draw(rng, unit)
    canvas.planes[HAEMOGLOBIN] = plasma * np.clip(0.5 + smooth_noise(shape, rng, 3 * unit), 0, 2)
    whites, reds, platelets = place_cells(shape, rng, unit, **counts)
    for disc in reds:
        red_cell(canvas, rng, style, *disc)
    for disc in reds:
        if germs.random() < parasites:
            parasite(canvas, germs, style, *disc)
    for disc in whites:
        white_cell(canvas, rng, style, *disc)
    for disc in platelets:
        platelet(canvas, rng, style, *disc)
    return canvas
