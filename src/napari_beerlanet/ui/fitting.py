"""What the decomposition widget asks core for, without any Qt: settings, one fit, its snippet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.progress import Report, tell, within

from .layers import DensityMap
from .planes import Plane, stack_of

if TYPE_CHECKING:
    from napari_beerlanet.core.decompose import Decomposition

RESIDUAL_RANGE = 0.3  # OD that is shown as black or white in the residual

_SAMPLE = 100_000  # pixels that the shared scale is estimated from


@dataclass(frozen=True)
class Settings:
    """The arguments of `decompose` that the widget offers."""

    components: int = 8
    iterations: int | Literal["converge"] = "converge"
    lam: float | Literal["auto"] = "auto"
    gamma: float | Literal["auto"] = "auto"
    spectra: npt.NDArray[np.float64] | None = field(default=None, compare=False)

    def arguments(self) -> dict[str, Any]:
        """As `decompose` takes them."""
        asked = {
            "components": self.components,
            "iterations": self.iterations,
            "lam": self.lam,
            "gamma": self.gamma,
        }
        return asked if self.spectra is None else asked | {"spectra": self.spectra}


@dataclass(frozen=True)
class Result:
    """A plane's decomposition, ready to be shown."""

    plane: Plane
    settings: Settings
    decomposition: Decomposition
    maps: list[DensityMap]
    limit: float
    whole_stack: bool = False


class PlaneReader:
    """Reads planes, and remembers the last that did not lie in memory anyway."""

    def __init__(self) -> None:
        self._last: tuple[Any, tuple[int, ...], npt.NDArray[Any]] | None = None

    def __call__(self, plane: Plane) -> npt.NDArray[Any]:
        """(H, W, 3 or 4)."""
        if isinstance(plane.array, np.ndarray):
            return plane.read()
        if self._last and self._last[0] is plane.array and self._last[1] == plane.index:
            return self._last[2]
        pixels = plane.read()
        self._last = (plane.array, plane.index, pixels)
        return pixels


def fit(
    plane: Plane, settings: Settings, read: PlaneReader, whole_stack: bool, report: Report
) -> Result:
    """Decompose the plane; for a whole stack, its other planes follow lazily under the same fit."""
    from napari_beerlanet.core.decompose import decompose

    tell(report, 0, 1, "reading the image")
    pixels = read(plane)
    d = decompose(pixels, **settings.arguments(), report=within(report, 0.05, 1.0))
    r = len(d.active)
    stack = whole_stack and plane.is_stack
    densities: Sequence[Any] = stack_of(plane, d.densities_of, r) if stack else d.densities
    maps = [
        DensityMap(i, densities[i], d.colours[i], float(d.share[i]), bool(d.active[i]))
        for i in range(r)
    ]
    return Result(plane, settings, d, maps, shared_limit(d), stack)


def shared_limit(d: Decomposition) -> float:
    """The density shown in full colour: hardly a pixel of the densest stain is beyond."""
    flat = d.densities.reshape(len(d.active), -1)
    step = max(1, flat.shape[1] // _SAMPLE)
    seen = [flat[i, ::step] for i in np.flatnonzero(d.active)]
    most = max((float(np.percentile(values, 99.5)) for values in seen), default=0.0)
    most = most or max((float(values.max()) for values in seen), default=0.0)
    return float(f"{most:.2g}") if most > 0 else 1.0


def residual_picture(d: Decomposition) -> npt.NDArray[np.float32]:
    """(H, W, 3) float32 in [0, 1]: mid-grey is explained, darker absorbs more than the model."""
    lacking = np.nan_to_num(d.residual())
    return np.clip(0.5 - lacking / (2 * RESIDUAL_RANGE), 0, 1).astype(np.float32)


def as_python(result: Result) -> str:
    """A snippet for napari's console that makes the same layers again."""
    plane, asked = result.plane, dict(result.settings.arguments())
    if "spectra" in asked:
        asked["spectra"] = asked["spectra"].tolist()
    arguments = ", ".join(f"{name}={value!r}" for name, value in asked.items())
    place = {name: _plain(value) for name, value in plane.place.items()}
    chosen = "" if plane.level is None else f"[{plane.level}]"
    chosen += f"[{', '.join(map(str, plane.index))}]" if plane.index else ""
    lift = ", ".join(["None"] * len(plane.index))
    density = f"d.densities[i][{lift}]" if lift else "d.densities[i]"
    return f"""\
import napari
import numpy as np
import napari_beerlanet as nb
from napari_beerlanet.ui.layers import stain_colormap

viewer = napari.current_viewer()
rgb = np.asarray(viewer.layers[{plane.name!r}].data{chosen})
d = nb.decompose(rgb, {arguments})
place = {place!r}
for i in np.flatnonzero(d.active):
    viewer.add_image({density}, name=f"OD {{i + 1}} · {{100 * d.share[i]:.0f}} %", rgb=False,
                     colormap=stain_colormap(d.colours[i]), blending="opaque",
                     contrast_limits=(0, {result.limit!r}), **place)
"""


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return [str(part) for part in value]
