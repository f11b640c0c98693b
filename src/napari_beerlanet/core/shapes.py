"""Shapes that a network's weights must have, known before anything is allocated for them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

Shapes = Mapping[str, tuple[int, ...]]
_BRANCHES = ("cv3", "one2one_cv3")  # of Ultralytics' head: those that tell the classes


def layer_shapes(
    layout: dict[str, Any], parse: Callable[..., Any], head_width: int | None = None
) -> dict[str, tuple[int, ...]]:
    """Shapes of all parameters and buffers of a checked layout's layers.

    `parse` is Ultralytics' `parse_model`; `head_width` as in `StainDetectionModel`.
    """
    shapes = _parsed(layout, parse)
    if head_width is None:
        return shapes
    classes = layout["nc"]
    starts = tuple(f"model.{_last(layout)}.{branch}." for branch in _BRANCHES)
    for name, shape in _parsed({**layout, "nc": head_width}, parse).items():
        if name.startswith(starts):
            ends = name.rsplit(".", 2)[-2] == "2"  # the last convolution, one output per class
            shapes[name] = (classes, *shape[1:]) if ends and len(name.split(".")) == 6 else shape
    return shapes


def head_width(layout: dict[str, Any], found: Shapes) -> int | None:
    """Channels inside the classifying branch of these weights; None where they do not say.

    Ultralytics derives it from the number of classes, but keeps that of the pretrained weights
    that a training began with.
    """
    shape = found.get(f"model.{_last(layout)}.cv3.0.2.weight", ())
    return shape[1] if len(shape) == 4 and 1 <= shape[1] <= 10_000 else None


def check_shapes(found: Shapes, expected: Shapes) -> None:
    """A `ValueError` with the reason where names or shapes of weights differ."""
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing:
        raise ValueError(f"it lacks {len(missing)} weights of its network, such as {missing[0]}")
    if extra:
        raise ValueError(f"{len(extra)} weights have no place in its network, such as {extra[0]}")
    for name, shape in expected.items():
        if found[name] != shape:
            raise ValueError(f"{name} has shape {found[name]} where its network has {shape}")


def _last(layout: dict[str, Any]) -> int:
    return len(layout["backbone"]) + len(layout["head"]) - 1


def _parsed(layout: dict[str, Any], parse: Callable[..., Any]) -> dict[str, tuple[int, ...]]:
    import torch

    # Activations have no parameters, and Ultralytics sets one for the whole process, for good
    # where it fails afterwards.
    plain = copy.deepcopy({k: v for k, v in layout.items() if k != "activation"})
    try:
        with torch.device("meta"):
            layers, _ = parse(plain, ch=3, verbose=False)
    except Exception as error:  # whatever a layer raises over arguments that do not suit it
        reason = " ".join(str(error).split())[:120]
        raise ValueError(f"its layers do not fit together ({reason})") from error
    return {f"model.{k}": tuple(v.shape) for k, v in layers.state_dict().items()}
