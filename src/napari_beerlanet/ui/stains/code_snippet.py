"""Python code that reproduces the layers of a fit ("Copy as Python")."""

from __future__ import annotations

import numpy as np

from napari_beerlanet.core.stains.settings import DecomposeSettings
from napari_beerlanet.core.stains.slide import SlideColours
from napari_beerlanet.ui.stains.density_layers import Blending, stain_layer_name
from napari_beerlanet.ui.stains.fitting import FitResult, FitTarget, decompose_arguments


def code_snippet(fitted: FitResult, layer_name: str, blending: Blending = "opaque") -> str:
    """Python code that decomposes a layer of `viewer` and adds the density layers."""
    if fitted.slide_colours is not None:
        return _slide_snippet(fitted, fitted.slide_colours, layer_name, blending)
    lines = ["import numpy as np", "", "import napari_beerlanet as nb"]
    if fitted.target.whole_stack:
        lines += ["from napari_beerlanet.core.stains.block_sample import sample_stack"]
    lines += [""]
    lines += _source_lines(fitted.target, layer_name)
    lines += [f"d = nb.decompose(sample, {_argument_list(fitted.settings, fitted.target)})"]
    lines += _density_lines(fitted.target)
    return "\n".join([*lines, *_layer_lines(fitted, blending), ""])


def _slide_snippet(fitted: FitResult, colours: SlideColours, name: str, blending: Blending) -> str:
    """The same for a slide, whose colours are streamed."""
    target, plane = fitted.target, fitted.target.plane
    lines = ["import numpy as np", "", "import napari_beerlanet as nb"]
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
    return "\n".join([*lines, *_layer_lines(fitted, blending), ""])


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
    return [*lines, f"image = {finest}{index}", f"sample = np.asarray({coarse}{index}{rows})"]


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
    if target.whole_stack:
        return [
            "stack = np.asarray(image).reshape(-1, *image.shape[-3:])",
            "densities = np.stack([d.densities_of(plane) for plane in stack], axis=1)",
            "densities = densities.reshape(-1, *image.shape[:-1])  # (r, …, H, W)",
        ]
    return ["densities = d.densities_of(np.asarray(image))  # (r, H, W), all in memory"]


def _layer_lines(fitted: FitResult, blending: Blending) -> list[str]:
    d = fitted.decomposition
    names = {i: stain_layer_name(d, i) for i in d.order}
    planar = fitted.target.plane.index and not fitted.target.whole_stack
    transform = (
        "source.scale[-2:], source.translate[-2:]" if planar else "source.scale, source.translate"
    )
    more = ""
    if fitted.slide_colours is not None:
        more = f" multiscale={len(fitted.slide_colours.levels) > 1},"
    return [
        f"names = {names!r}",
        f"scale, translate = {transform}",
        "layers = [",
        "    viewer.add_image(",
        "        densities[i], name=name, scale=scale, translate=translate,",
        f"        contrast_limits=(0, {fitted.limit!r}), blending={blending!r},{more}",
        "    )",
        "    for i, name in names.items()",
        "]",
    ]
