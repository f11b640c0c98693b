"""A few lines of Python that make the same layers again."""

from __future__ import annotations

import numpy as np

from napari_beerlanet.ui.component_layer import Look, component_name
from napari_beerlanet.ui.fitting import Fitted, Settings, Target


def snippet(fitted: Fitted, layer_name: str, look: Look = "opaque") -> str:
    """Python that finds the image in `viewer`, takes it apart and adds the layers."""
    if fitted.seen is not None:
        return _of_slide(fitted, layer_name, look)
    lines = ["import numpy as np", "", "import napari_beerlanet as nb"]
    if fitted.target.whole_stack:
        lines += ["from napari_beerlanet.core.stacks import colours_of_stack"]
    lines += [""]
    lines += _source(fitted.target, layer_name)
    if fitted.settings.starts_from_counted:
        lines += [f"counted = nb.decompose(seen, {_arguments(Settings(), fitted.target)})"]
    lines += [f"d = nb.decompose(seen, {_arguments(fitted.settings, fitted.target)})"]
    lines += _densities(fitted.target)
    return "\n".join([*lines, *_layers(fitted, look), ""])


def _of_slide(fitted: Fitted, name: str, look: Look) -> str:
    """The same of a slide, whose colours are streamed."""
    target, seen = fitted.target, fitted.seen
    assert seen is not None
    plane, settings = target.plane, fitted.settings
    lines = ["import numpy as np", "", "import napari_beerlanet as nb"]
    made = len(seen.levels) > len(plane.levels)
    if made:
        lines += ["from napari_beerlanet.core.overviews import with_overviews"]
    index = f"[{', '.join(map(str, plane.index))}]" if plane.index else ""
    levels = "list(source.data)" if len(plane.levels) > 1 else "[source.data]"
    if index:
        levels = f"[level{index} for level in {levels}]"
    lines += ["", f"source = viewer.layers[{name!r}]"]
    lines += [f"levels = with_overviews({levels})" if made else f"levels = {levels}"]
    how = "".join(f", {k}={v!r}" for k, v in target.choice.arguments(fitted.preview).items())
    if settings.starts_from_counted:
        lines += [
            f"counted = nb.decompose_slide(levels{how}, {_arguments(Settings(), target)}).fit"
        ]
    lines += [f"slide = nb.decompose_slide(levels{how}, {_arguments(settings, target)})"]
    lines += ["d = slide.fit  # light and spectra are the slide's, densities a thumbnail's"]
    lines += [
        "densities = [slide.pyramid(i) for i in range(len(d.active))]  # lazy, at every level"
    ]
    return "\n".join([*lines, *_layers(fitted, look), ""])


def _source(target: Target, name: str) -> list[str]:
    """`image`, what the layers are of, and `seen`, what is fitted."""
    level, step = target.sampling
    levels = len(target.plane.levels) > 1
    lines = [f"source = viewer.layers[{name!r}]"]
    if target.whole_stack:
        finest = "source.data[0]" if levels else "source.data"
        seen = f"source.data[{level}]" if levels else "source.data"
        lines += [f"image = {finest}", f"planes = {seen}"]
        rows = f"[:, ::{step}, ::{step}]" if step > 1 else ""
        lines += [
            f"planes = planes.reshape(-1, *planes.shape[-3:]){rows}",
            "seen, palette = colours_of_stack(planes, len(planes))",
        ]
        return lines
    index = f"[{', '.join(map(str, target.plane.index))}]" if target.plane.index else ""
    finest = "source.data[0]" if levels else "source.data"
    coarse = f"source.data[{level}]" if levels else "source.data"
    rows = f"[::{step}, ::{step}]" if step > 1 else ""
    return [*lines, f"image = {finest}{index}", f"seen = np.asarray({coarse}{index}{rows})"]


def _arguments(settings: Settings, target: Target) -> str:
    parts = []
    for name, value in settings.arguments.items():
        if name == "spectra" and settings.starts_from_counted:
            parts.append("spectra=counted.spectra")
        elif isinstance(value, np.ndarray):
            parts.append(f"{name}=np.array({value.tolist()!r})")
        elif name != "components" or settings.spectra is None:
            parts.append(f"{name}={value!r}")
    if target.whole_stack:
        parts.append("palette=palette")
    return ", ".join(parts)


def _densities(target: Target) -> list[str]:
    """`densities`, (r, …, H, W)."""
    if not target.lazy:
        return ["densities = d.densities  # (r, H, W): one plane for each stain"]
    if target.whole_stack:
        return [
            "stack = np.asarray(image).reshape(-1, *image.shape[-3:])",
            "densities = np.stack([d.densities_of(plane) for plane in stack], axis=1)",
            "densities = densities.reshape(-1, *image.shape[:-1])  # (r, …, H, W)",
        ]
    return ["densities = d.densities_of(np.asarray(image))  # (r, H, W); needs memory for it all"]


def _layers(fitted: Fitted, look: Look) -> list[str]:
    d = fitted.decomposition
    names = {int(i): component_name(i, d.share[i]) for i in np.flatnonzero(d.active)}
    planar = fitted.target.plane.index and not fitted.target.whole_stack
    place = (
        "source.scale[-2:], source.translate[-2:]" if planar else "source.scale, source.translate"
    )
    more = " multiscale=True," if fitted.seen is not None and len(fitted.seen.levels) > 1 else ""
    if fitted.seen is not None and not more:
        more = " multiscale=False,"
    return [
        f"names = {names!r}",
        f"scale, translate = {place}",
        "layers = [",
        "    viewer.add_image(",
        "        densities[i], name=name, scale=scale, translate=translate,",
        f"        contrast_limits=(0, {fitted.limit!r}), blending={look!r},{more}",
        "    )",
        "    for i, name in names.items()",
        "]",
    ]
