"""Model layout (Ultralytics' YAML) from an untrusted file, validated; and the shapes it implies.

Ultralytics evaluates the activation's string, looks layers up by name (one of them downloads
weights) and builds whatever size is requested. So only layers of its detection models are accepted,
with numbers of the size that such models have, and the image never grows beyond the input. The
shapes of all weights are known before anything is allocated for them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

from napari_beerlanet.core.common.messages import error_detail, quoted, shortened

Shapes = Mapping[str, tuple[int, ...]]

_SCALAR_RANGES: dict[str, tuple[float, float]] = {
    "nc": (1, 10_000),
    "reg_max": (1, 64),
    "depth_multiple": (0.01, 4),
    "width_multiple": (0.01, 8),
    "channels": (3, 3),
}
_OTHER_KEYS = (
    "scales",
    "scale",
    "activation",
    "end2end",
    "inplace",
    "backbone",
    "head",
    "yaml_file",
)
_ACTIVATIONS = {
    f"{start}nn.{call}"
    for start in ("", "torch.")
    for call in ("SiLU()", "ReLU()", "LeakyReLU(0.1)", "LeakyReLU()", "GELU()", "Hardswish()")
}
_HEADS = {"Detect", "v10Detect"}
# By the number of leading arguments that count channels; the others are kernels, repeats, ratios.
_CHANNEL_ARGUMENTS: dict[str, int] = {
    **dict.fromkeys(("Conv", "DWConv", "GhostConv", "SCDown", "ADown", "AConv"), 1),
    **dict.fromkeys(("Bottleneck", "C1", "C2", "C2f", "C2fCIB", "C3", "C3k2", "C3x", "C3Ghost"), 1),
    **dict.fromkeys(("SPP", "SPPF", "PSA", "C2PSA", "A2C2f", "RepC3", "nn.ConvTranspose2d"), 1),
    **dict.fromkeys(("BottleneckCSP", "GhostBottleneck"), 1),
    **{"SPPELAN": 2, "ELAN1": 3, "RepNCSPELAN4": 3, "CBLinear": 1},
    **dict.fromkeys(("Concat", "CBFuse", "nn.Identity", "nn.MaxPool2d", "nn.ZeroPad2d"), 0),
    **{"nn.Upsample": 0, "Detect": 1, "v10Detect": 1},
}
_MAX_LAYERS, _MAX_BLOCKS = 256, 256
_MAX_CHANNELS, _MAX_ARGUMENT = 8192, 16
_MAX_WEIGHTS = 200_000_000  # numbers; Ultralytics' largest has 173 million
_CLASS_BRANCHES = ("cv3", "one2one_cv3")  # of Ultralytics' head: those that tell the classes


def check_layout(yaml: Any) -> dict[str, Any]:
    """A copy of a model YAML with only what Ultralytics reads, or a `ValueError` with the reason.

    Unknown keys are left out, the scale is named, and of the YAML's own path only the name stays.
    """
    if not isinstance(yaml, dict):
        raise ValueError("its model layout is no table")
    checked: dict[str, Any] = {
        k: _check_number(yaml[k], *_SCALAR_RANGES[k], k) for k in _SCALAR_RANGES if k in yaml
    }
    if not isinstance(checked.get("nc"), int) or not isinstance(yaml.get("backbone"), list):
        raise ValueError("its model layout lacks nc or backbone")
    checked.update({k: yaml[k] for k in _OTHER_KEYS if yaml.get(k) is not None}, channels=3)
    _check_texts(checked)
    depth = _resolve_scale(checked)
    if not isinstance(checked.get("head"), list):
        raise ValueError("its model layout has no head")
    rows = [*checked["backbone"], *checked["head"]]
    if not 2 <= len(rows) <= _MAX_LAYERS:
        raise ValueError(f"its model layout has {len(rows)} layers; at most {_MAX_LAYERS} fit")
    for place, row in enumerate(rows):
        _check_layer(row, place, checked["nc"] if place == len(rows) - 1 else None)
    # As Ultralytics repeats them.
    if sum(max(round(row[1] * depth), 1) if row[1] > 1 else 1 for row in rows) > _MAX_BLOCKS:
        raise ValueError("the network that it describes is larger than any detection model")
    return copy.deepcopy(checked)


def _check_texts(layout: dict[str, Any]) -> None:
    activation = layout.setdefault("activation", "nn.SiLU()")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise ValueError(f"its activation {quoted(activation)} is not one that we know")
    if activation == "nn.SiLU()":
        del layout["activation"]  # Ultralytics' default
    for key in ("end2end", "inplace"):
        if not isinstance(layout.get(key, True), bool):
            raise ValueError(f"{key} of its model layout is neither true nor false")
    name = layout.get("yaml_file", "")
    if not isinstance(name, str) or len(name) > 1000:
        raise ValueError("yaml_file of its model layout is no file name")
    if name:
        layout["yaml_file"] = name.replace("\\", "/").rpartition("/")[2]


def _resolve_scale(layout: dict[str, Any]) -> float:
    """The factor of depth; the scale's name is filled in."""
    scales, scale = layout.get("scales"), layout.get("scale", "")
    if scales is None or scales == {}:
        layout.pop("scales", None)
        layout.pop("scale", None)
        return float(layout.get("depth_multiple", 1.0))
    if not isinstance(scales, dict) or len(scales) > 20 or not isinstance(scale, str):
        raise ValueError("scales of its model layout are no table of sizes")
    layout["scale"] = scale = scale or str(next(iter(scales)))
    if not isinstance(scales.get(scale), list) or len(scales[scale]) != 3:
        raise ValueError(f"its model layout has no scale {quoted(scale)}")
    layout["scales"] = {scale: scales[scale]}
    limits = ((0.01, 4), (0.01, 8), (1, _MAX_CHANNELS))
    for value, limit in zip(scales[scale], limits, strict=True):
        _check_number(value, *limit, "scales")
    return float(scales[scale][0])


def _check_layer(row: Any, place: int, classes: int | None) -> None:
    """One layer: where from, how often, what, with which arguments; the last one knows classes."""
    if not isinstance(row, list) or len(row) != 4 or not isinstance(row[3], list):
        raise ValueError(f"layer {place} of its model layout is not [from, repeats, module, args]")
    sources, repeats, name, arguments = row
    if (
        not isinstance(name, str)
        or name not in _CHANNEL_ARGUMENTS
        or (name in _HEADS) == (classes is None)
    ):
        raise ValueError(f"layer {place} is {quoted(name)}, which no detection model has there")
    sources = sources if isinstance(sources, list) else [sources]
    if not sources or len(sources) > 20 or len(arguments) > 10:
        raise ValueError(f"layer {place} ({name}) has too many arguments or sources")
    if (isinstance(row[0], list)) != (name in _HEADS | {"Concat", "CBFuse"}):
        raise ValueError(f"layer {place} ({name}) takes its input from the wrong number of layers")
    for source in sources:
        if not _is_integer(source) or not (-max(place, 1) <= source < place) or source == place:
            raise ValueError(
                f"layer {place} ({name}) takes its input from a layer {quoted(source)}"
            )
    if not _is_integer(repeats) or not 1 <= repeats <= 64:
        raise ValueError(f"layer {place} ({name}) is repeated {quoted(repeats)} times")
    if not (arguments in (["nc"], [classes]) if classes else _arguments_fit(name, arguments)):
        raise ValueError(f"layer {place} ({name}) has arguments {quoted(arguments)}")


def _arguments_fit(name: str, arguments: list[Any]) -> bool:
    if name == "nn.Upsample":
        return arguments in ([None, 2, "nearest"], ["None", 2, "nearest"])
    leading = _CHANNEL_ARGUMENTS[name]
    return len(arguments) >= leading and all(
        _argument_fits(value, _MAX_CHANNELS if k < leading else _MAX_ARGUMENT, k < leading)
        for k, value in enumerate(arguments)
    )


def _argument_fits(value: Any, most: int, channels: bool) -> bool:
    if isinstance(value, list):
        flat = 0 < len(value) <= 8 and not any(isinstance(v, list) for v in value)
        return flat and all(_argument_fits(v, most, channels) for v in value)
    if channels:
        return _is_integer(value) and 1 <= value <= most
    return isinstance(value, (bool, int, float)) and -1 <= value <= most


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_number(value: Any, least: float, most: float, name: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise ValueError(f"{name} of its model layout is {quoted(value)}")
    return value


def layer_shapes(
    layout: dict[str, Any], parse: Callable[..., Any], head_width: int | None = None
) -> dict[str, tuple[int, ...]]:
    """Shapes of all parameters and buffers of a checked layout's layers.

    `parse` is Ultralytics' `parse_model`; `head_width` as in `StainDetectionModel`.
    """
    shapes = _parse_shapes(layout, parse)
    if head_width is None:
        return shapes
    classes = layout["nc"]
    starts = tuple(f"model.{_head_index(layout)}.{branch}." for branch in _CLASS_BRANCHES)
    for name, shape in _parse_shapes({**layout, "nc": head_width}, parse).items():
        if name.startswith(starts):
            ends = name.rsplit(".", 2)[-2] == "2"  # the last convolution, one output per class
            shapes[name] = (classes, *shape[1:]) if ends and len(name.split(".")) == 6 else shape
    return shapes


def head_width(layout: dict[str, Any], found: Shapes) -> int | None:
    """Channels inside the classifying branch of these weights; None where they do not say.

    Ultralytics derives it from the number of classes, but keeps that of the pretrained weights
    that a training began with.
    """
    shape = found.get(f"model.{_head_index(layout)}.cv3.0.2.weight", ())
    return shape[1] if len(shape) == 4 and 1 <= shape[1] <= 10_000 else None


def check_shapes(found: Shapes, expected: Shapes) -> None:
    """A `ValueError` with the reason where names or shapes of weights differ."""
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing:
        raise ValueError(f"it lacks {len(missing)} weights of its network, such as {missing[0]}")
    if extra:
        raise ValueError(
            f"{len(extra)} weights have no place in its network, such as {shortened(extra[0])}"
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise ValueError(
                f"{name} has shape {quoted(found[name])} where its network has {shape}"
            )


def _head_index(layout: dict[str, Any]) -> int:
    return len(layout["backbone"]) + len(layout["head"]) - 1


def _parse_shapes(layout: dict[str, Any], parse: Callable[..., Any]) -> dict[str, tuple[int, ...]]:
    import torch

    # Activations have no parameters, and Ultralytics sets one for the whole process, for good
    # where it fails afterwards.
    plain = copy.deepcopy({k: v for k, v in layout.items() if k != "activation"})
    try:
        with torch.device("meta"):
            layers, _ = parse(plain, ch=3, verbose=False)
    except Exception as error:  # whatever a layer raises over arguments that do not suit it
        reason = error_detail(error)
        raise ValueError(f"its layers do not fit together ({reason})") from error
    shapes = {f"model.{k}": tuple(v.shape) for k, v in layers.state_dict().items()}
    if sum(map(math.prod, shapes.values())) > _MAX_WEIGHTS:
        raise ValueError("the network that it describes has more weights than any detection model")
    return shapes
