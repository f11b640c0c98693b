"""Python code that reproduces the layers of a fit ("Copy as Python")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from napari.layers import Image
from napari.utils.colormaps import AVAILABLE_COLORMAPS

from napari_beerlanet.core.stains.settings import DecomposeSettings
from napari_beerlanet.core.stains.slide import SlideColours
from napari_beerlanet.ui.stains.density_layers import (
    DYE_PREFIX,
    GLOW_PREFIX,
    Blending,
    stain_layer_name,
)
from napari_beerlanet.ui.stains.fitting import FitResult, FitTarget, decompose_arguments

_IMPORTS = [
    "import numpy as np",
    "from napari.utils.colormaps import Colormap",
    "",
    "import napari_beerlanet as nb",
    "from napari_beerlanet.ui.stains.density_layers import dye_colormap, glow_colormap",
    "from napari_beerlanet.ui.viewer.layers import transform_kwargs",
]


def code_snippet(
    fitted: FitResult,
    layer_name: str,
    blending: Blending = "opaque",
    layers: Mapping[int, Image] | None = None,
) -> str:
    """Python code that decomposes a layer of `viewer` and adds the density layers.

    `layers` are the present ones, by component: theirs are the names and colours.
    """
    shown = _layer_lines(fitted, blending, layers or {})
    if fitted.slide_colours is not None:
        return _slide_snippet(fitted, fitted.slide_colours, layer_name, shown)
    lines = list(_IMPORTS)
    if fitted.target.whole_stack:
        lines += ["from napari_beerlanet.core.stains.block_sample import sample_stack"]
    lines += [""]
    lines += _source_lines(fitted.target, layer_name)
    lines += [f"d = nb.decompose(sample, {_argument_list(fitted.settings, fitted.target)})"]
    lines += _density_lines(fitted.target)
    return "\n".join([*lines, *shown, ""])


def _slide_snippet(
    fitted: FitResult, colours: SlideColours, name: str, shown: Sequence[str]
) -> str:
    """The same for a slide, whose colours are streamed."""
    target, plane = fitted.target, fitted.target.plane
    lines = list(_IMPORTS)
    adds_levels = len(colours.levels) > len(plane.levels)
    if adds_levels:
        lines += ["from napari_beerlanet.core.images.pyramid import with_overviews"]
    index = f"[{', '.join(map(str, plane.index))}]" if plane.index else ""
    levels = "list(source.data)" if len(plane.levels) > 1 else "[source.data]"
    if index:
        levels = f"[level{index} for level in {levels}]"
    lines += ["", f"source = viewer.layers[{name!r}]"]
    lines += [f"levels = with_overviews({levels})" if adds_levels else f"levels = {levels}"]
    options = "".join(f", {k}={v!r}" for k, v in target.options.arguments(fitted.preview).items())
    arguments = _argument_list(fitted.settings, target)
    lines += [f"slide = nb.decompose_slide(levels{options}, {arguments})"]
    lines += ["d = slide.fit  # background and spectra of the slide, densities of its thumbnail"]
    lines += [
        "densities = [slide.pyramid(i) for i in range(len(d.active))]  # lazy, at every level"
    ]
    return "\n".join([*lines, *shown, ""])


def _source_lines(target: FitTarget, name: str) -> list[str]:
    """`image`, whose layers are added, and `sample`, which is fitted."""
    level, step = target.sampling
    levels = len(target.plane.levels) > 1
    lines = [f"source = viewer.layers[{name!r}]"]
    if target.whole_stack:
        finest = "source.data[0]" if levels else "source.data"
        planes = f"source.data[{level}]" if levels else "source.data"
        lines += [f"image = {finest}", f"planes = {planes}"]
        rows = f"[:, ::{step}, ::{step}]" if step > 1 else ""
        lines += [
            f"planes = planes.reshape(-1, *planes.shape[-3:]){rows}",
            "sample, palette = sample_stack(planes, len(planes))",
        ]
        return lines
    index = f"[{', '.join(map(str, target.plane.index))}]" if target.plane.index else ""
    finest = "source.data[0]" if levels else "source.data"
    coarse = f"source.data[{level}]" if levels else "source.data"
    rows = f"[::{step}, ::{step}]" if step > 1 else ""
    return [*lines, f"image = {finest}", f"sample = np.asarray({coarse}{index}{rows})"]


def _argument_list(settings: DecomposeSettings, target: FitTarget) -> str:
    parts = []
    for name, value in decompose_arguments(settings).items():
        if isinstance(value, np.ndarray):
            parts.append(f"{name}=np.array({value.tolist()!r})")
        elif name != "components" or settings.spectra is None:
            parts.append(f"{name}={value!r}")
    if target.whole_stack:
        parts.append("palette=palette")
    return ", ".join(parts)


def _density_lines(target: FitTarget) -> list[str]:
    """`densities`, (r, …, H, W)."""
    if not target.lazy:
        return ["densities = d.densities  # (r, H, W): one plane for each stain"]
    if target.is_stack:
        return [
            "stack = np.asarray(image).reshape(-1, *image.shape[-3:])",
            "densities = np.stack([d.densities_of(plane) for plane in stack], axis=1)",
            "densities = densities.reshape(-1, *image.shape[:-1])  # (r, …, H, W)",
        ]
    return ["densities = d.densities_of(np.asarray(image))  # (r, H, W), all in memory"]


def _layer_lines(fitted: FitResult, blending: Blending, layers: Mapping[int, Image]) -> list[str]:
    """The layers as they look now: names, colours, contrast and which are visible."""
    d = fitted.decomposition
    planar = fitted.target.plane.index and not fitted.target.is_stack
    lines = []
    if any(d.names) and not d.fixed_spectra:
        lines += [f"d = d.with_names({ {i: name for i, name in enumerate(d.names) if name}!r})"]
    lines += [f"where = transform_kwargs(source, planar={bool(planar)})", "layers = ["]
    for i in d.order:
        name, colormap = stain_layer_name(d, i), f"dye_colormap(d.colours[{i}])"
        limits, visible = (0.0, fitted.limit), True
        if i in layers:
            name, colormap = layers[i].name, _colormap_code(layers[i])
            low, high = (float(value) for value in layers[i].contrast_limits)
            limits, visible = (low, high), bool(layers[i].visible)
        lines += [
            "    viewer.add_image(",
            f"        densities[{i}], name={name!r}, colormap={colormap},",
            f"        contrast_limits={limits}, blending={blending!r}, visible={visible},",
            f"        multiscale={isinstance(_first(fitted), list)}, rgb=False, **where,",
            "    ),",
        ]
    return [*lines, "]"]


def _first(fitted: FitResult) -> object:
    """A list where the snippet's densities are lists of levels, as those of a slide are."""
    colours = fitted.slide_colours
    return [] if colours is not None and len(colours.levels) > 1 else None


def _colormap_code(layer: Image) -> str:
    """Python code for a layer's colormap: ours by its colour, napari's by its name."""
    name = str(layer.colormap.name)
    for prefix, function in ((DYE_PREFIX, "dye_colormap"), (GLOW_PREFIX, "glow_colormap")):
        if name.startswith(prefix):
            return f"{function}({tuple(bytes.fromhex(name.removeprefix(prefix)))})"
    if name in AVAILABLE_COLORMAPS:
        return repr(name)
    return f"Colormap({np.round(layer.colormap.colors, 4).tolist()!r})"
