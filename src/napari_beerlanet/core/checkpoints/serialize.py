"""Networks to checkpoint bytes and back, and networks from Ultralytics' `.pt`.

What a file declares is checked before anything is built for it, and every weight before it is used.
Reasons against a file are `ValueError`s without its name.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from napari_beerlanet.core.boxes.classes import class_colours
from napari_beerlanet.core.checkpoints.info import (
    CLASSIFIER,
    FORMAT_VERSION,
    METADATA_KEY,
    NORMALIZER_PREFIX,
    check_info,
    read_header,
    to_json_types,
)
from napari_beerlanet.core.checkpoints.layout import (
    Shapes,
    check_layout,
    check_shapes,
    head_width,
    layer_shapes,
)
from napari_beerlanet.core.checkpoints.pt_import import PickledModel, read_pt
from napari_beerlanet.core.classification.network import (
    OWN_BACKBONE,
    ClassificationNetwork,
    backbone_shapes,
)
from napari_beerlanet.core.classification.settings import ClassifierSettings
from napari_beerlanet.core.common.messages import GET_AGAIN, error_detail, shortened
from napari_beerlanet.core.detection.network import StainDetectionModel
from napari_beerlanet.core.detection.ultralytics_api import parse_model
from napari_beerlanet.core.stains.front_end import FRONT_END_PREFIXES, PADDING
from napari_beerlanet.core.stains.layer import BeerLaNet
from napari_beerlanet.core.stains.settings import DEFAULT_COMPONENTS, DEFAULT_ITERATIONS

if TYPE_CHECKING:
    from napari_beerlanet.core.normalization.normalizer import Normalizer

_FRONT_END_SETTINGS = (
    *("front_end", "light", "components", "iterations", "domain", "unit_spectra"),
    "attention_pool",
)

Weights = Mapping[str, torch.Tensor]
Network = StainDetectionModel | ClassificationNetwork

_UNTRAINED_NOTE = (
    "The stain front end is untrained: the file is a plain YOLO, so its network sees colours much "
    "as they are; train it before you rely on what it finds."
)
_UNFINISHED_NOTE = "Imported from a training that was not finished."


def serialize_checkpoint(network: Network, info: Mapping[str, Any]) -> bytes:
    """A checkpoint of a network; settings that it knows itself are not taken from `info`."""
    weights = _storable_weights(network.state_dict())
    described = {key: value for key, value in info.items() if key != "normalizer"}
    if network.normalizer is not None:
        arrays, settings = network.normalizer.state()
        described["normalizer"] = {"method": network.normalizer.method, "settings": settings}
    checked = check_info(
        to_json_types({**described, **_network_settings(network), "format": FORMAT_VERSION})
    )
    if isinstance(network, StainDetectionModel):
        _check_layer_shapes(checked, _tensor_shapes(weights))
    if network.normalizer is not None:
        weights |= {
            NORMALIZER_PREFIX + name: torch.from_numpy(np.array(array))
            for name, array in arrays.items()
        }
    text = _info_json({**checked, "checksum": _checksum(checked, weights)})
    return save(weights, {METADATA_KEY: text})


def deserialize_checkpoint(
    data: bytes, backbone: torch.nn.Module | None = None
) -> tuple[Network, dict[str, Any]]:
    """The network (float32, eval) and the `info` of a checkpoint.

    `backbone` is the caller's own network, for a classifier that was made with one.
    """
    info, checksum, tensors = read_header(io.BytesIO(data), len(data))
    normalizer = info.get("normalizer")
    shapes = {
        name: shape
        for name, (_, shape) in tensors.items()
        if not (normalizer and name.startswith(NORMALIZER_PREFIX))
    }
    classifier = info.get("kind") == CLASSIFIER
    if classifier:
        _check_backbone_shapes(info, shapes, backbone)
    else:
        width = _check_layer_shapes(info, shapes)
    try:
        weights = load(data)
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"damaged ({error_detail(error)}); {GET_AGAIN}") from error
    if _checksum(info, weights) != checksum:
        raise ValueError(
            f"damaged: its checksum differs from the one that it was written with; {GET_AGAIN}"
        )
    network: Network
    network = _build_classifier(info, backbone) if classifier else _build_network(info, width)
    _load_weights(network, {name: weights[name] for name in shapes})
    if normalizer:
        network.normalizer = _build_normalizer(normalizer, weights)
    return network, info


def _build_normalizer(described: Mapping[str, Any], weights: Weights) -> Normalizer:
    """The normalizer that a checkpoint's `info` describes."""
    from napari_beerlanet.core.normalization.methods import find_method

    arrays = {
        name.removeprefix(NORMALIZER_PREFIX): value.numpy()
        for name, value in weights.items()
        if name.startswith(NORMALIZER_PREFIX)
    }
    try:
        return find_method(described["method"]).restore(arrays, described["settings"])
    except (ValueError, TypeError, KeyError) as error:
        reason = error_detail(error)
        raise ValueError(f"its normalizer cannot be used: {reason}") from error


def import_pt(path: Path) -> tuple[StainDetectionModel, dict[str, Any]]:
    """The network and `info` of an Ultralytics `.pt`; a plain YOLO gets an untrained front end."""
    parts = read_pt(path)
    info = check_info(_pt_info(parts, path.stem))
    network = _build_network(info, _check_layer_shapes(info, _tensor_shapes(parts.weights)))
    weights = dict(parts.weights)
    if parts.stain is None:
        network.fit_mix()
        weights |= {
            k: v for k, v in network.state_dict().items() if k.startswith(FRONT_END_PREFIXES)
        }
    _load_weights(network, weights)
    return network, info


def describe_classifier(
    network: ClassificationNetwork, name: str, classes: list[str], **known: Any
) -> dict[str, Any]:
    """A complete `info` of a classifier; `known` are the further entries, others are left open."""
    of_classifiers: dict[str, Any] = {"temperature": 1.0, "prior": [], "applies_to": []}
    return {**_describe(network, name, classes), **of_classifiers, **known}


def describe_network(
    network: StainDetectionModel, name: str, classes: list[str], image_size: int, **known: Any
) -> dict[str, Any]:
    """A complete `info` of a network; `known` are the further entries, others are left open."""
    of_detectors: dict[str, Any] = {
        "image_size": image_size,
        "pixel_size": None,
        "object_sizes": {},
    }
    described = _describe(network, name, classes)
    return {**described, **of_detectors, "densities_seen": None, **known}


def _describe(network: Network, name: str, classes: list[str]) -> dict[str, Any]:
    """What every `info` has, with what is not known left open."""
    return {
        "format": FORMAT_VERSION,
        "name": name,
        "classes": list(classes),
        "colours": class_colours(len(classes)),
        **_network_settings(network),
        "stain_seen": None,
        "unknown": {},
        "training": None,
    }


def _info_json(info: dict[str, Any]) -> str:
    return json.dumps(info, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _checksum(info: dict[str, Any], weights: Weights) -> str:
    """SHA-256 over a description and its weights: bits that flip on a disk do not go unseen."""
    total = hashlib.sha256(_info_json(info).encode())
    for name in sorted(weights):
        value = weights[name]
        total.update(f"\n{name} {value.dtype} {tuple(value.shape)}\n".encode())
        total.update(value.contiguous().numpy().tobytes())
    return total.hexdigest()


def _storable_weights(weights: Weights) -> dict[str, torch.Tensor]:
    """Weights on the CPU, in half precision where that holds them."""
    stored = {}
    for name, value in weights.items():
        value = value.detach().cpu()
        if value.is_floating_point():
            value = value.float()
            _check_finite(name, value)
            half = value.half()
            if not name.startswith(FRONT_END_PREFIXES) and _is_finite(half):
                value = half
        stored[name] = value.clone(memory_format=torch.contiguous_format)
    return stored


def _is_finite(value: torch.Tensor) -> bool:
    # numpy's check of a small array waits for no other thread.
    numbers = value.float() if value.dtype == torch.bfloat16 else value
    return bool(np.isfinite(numbers.numpy()).all())


def _check_finite(name: str, value: torch.Tensor) -> None:
    if not _is_finite(value):
        raise ValueError(f"{shortened(name)} holds values that are no numbers (NaN or infinite)")


def _network_settings(network: Network) -> dict[str, Any]:
    """The entries of `info` that the network itself knows."""
    if isinstance(network, ClassificationNetwork):
        own = {"kind": CLASSIFIER, "backbone": network.backbone_name}
        own |= network.settings.record()
        trained = _stain_settings(network.stain) if network.has_stain else {}
        return {"reference_pixels": None, "padding": None, **own, **trained}
    layout = copy.deepcopy(network.yaml)
    settings = {**_stain_settings(network.measuring_stain), "light": network.light}
    if network.front_end != "beerlanet":  # files that were written before have no such entry
        settings["front_end"] = network.front_end
    if network.front_end == "lstainnorm":
        settings["attention_pool"] = network.lstainnorm.pool
    return {**settings, "model_yaml": layout}


def _stain_settings(stain: BeerLaNet) -> dict[str, Any]:
    keys = ("components", "iterations", "domain", "unit_spectra", "reference_pixels", "padding")
    return {key: getattr(stain, key) for key in keys}


def _check_layer_shapes(info: dict[str, Any], shapes: Shapes) -> int | None:
    """Compare shapes with the layout, before anything is allocated for a network.

    Returns the width of the classifying branch.
    """
    layers = {
        name: shape for name, shape in shapes.items() if not name.startswith(FRONT_END_PREFIXES)
    }
    width = head_width(info["model_yaml"], layers)
    check_shapes(layers, layer_shapes(info["model_yaml"], parse_model, width))
    return width


def _tensor_shapes(weights: Weights) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in weights.items()}


def _build_network(info: dict[str, Any], width: int | None) -> StainDetectionModel:
    """A network as a checked `info` describes it; random numbers are left as they were."""
    try:
        with torch.random.fork_rng(devices=[]):
            network = StainDetectionModel(
                copy.deepcopy(info["model_yaml"]),
                nc=len(info["classes"]),
                imgsz=info["image_size"],
                head_width=width,
                **{k: info[k] for k in _FRONT_END_SETTINGS if k in info},
            )
    except MemoryError:
        raise
    except Exception as error:  # whatever a layer raises over an input that does not suit it
        reason = error_detail(error)
        raise ValueError(f"its layers do not fit together ({reason})") from error
    network.measuring_stain.reference_pixels = info["reference_pixels"]
    network.measuring_stain.padding = info["padding"]
    network.names = dict(enumerate(info["classes"]))
    network.eval()
    return network


def _check_backbone_shapes(
    info: dict[str, Any], shapes: Shapes, backbone: torch.nn.Module | None
) -> None:
    """The same for a classifier, so that a file allocates no more than it holds."""
    prefix = "backbone."
    mine = {
        name.removeprefix(prefix): shape
        for name, shape in shapes.items()
        if not name.startswith(FRONT_END_PREFIXES)
    }
    available = sum(math.prod(shape) for shape in mine.values())
    check_shapes(mine, _expected_shapes(info, backbone, available))
    others = [name for name in shapes if not name.startswith((prefix, *FRONT_END_PREFIXES))]
    if others:
        raise ValueError(
            f"{len(others)} weights have no place in its network, such as {shortened(others[0])}"
        )


def _expected_shapes(
    info: dict[str, Any], backbone: torch.nn.Module | None, available: int
) -> Shapes:
    if backbone is not None:
        return _tensor_shapes(backbone.state_dict())
    if info["backbone"] == OWN_BACKBONE:
        raise ValueError(
            "its backbone is no network of torchvision; give yours, as load_checkpoint(path, "
            "backbone=…)"
        )
    try:
        return backbone_shapes(info["backbone"], len(info["classes"]), available)
    except ValueError:
        raise
    except Exception as error:  # whatever torchvision raises over a number of classes
        raise ValueError(f"its network cannot be built ({error_detail(error)})") from error


def _build_classifier(
    info: dict[str, Any], backbone: torch.nn.Module | None
) -> ClassificationNetwork:
    """A classifier's network as a checked `info` describes it; random numbers stay as they were."""
    settings = ClassifierSettings(
        **{k: info[k] for k in ClassifierSettings.model_fields if k in info}
    )
    own = None if backbone is None else copy.deepcopy(backbone)
    with torch.random.fork_rng(devices=[]):
        network = ClassificationNetwork(own or info["backbone"], len(info["classes"]), settings)
    if network.has_stain:
        network.stain.reference_pixels = info["reference_pixels"]
        network.stain.padding = info["padding"]
    return network.eval()


def _load_weights(network: Network, weights: Weights) -> None:
    """Give a network its weights, after a look at every one of them."""
    own = network.state_dict()
    check_shapes(_tensor_shapes(weights), _tensor_shapes(own))
    for name, value in weights.items():
        precise = name.startswith(FRONT_END_PREFIXES) or not own[name].is_floating_point()
        if value.dtype != own[name].dtype if precise else not value.is_floating_point():
            raise ValueError(f"{name} is of type {value.dtype}, not {own[name].dtype}")
        if value.is_floating_point():
            _check_finite(name, value)
    network.load_state_dict(weights)


def _pt_info(parts: PickledModel, name: str) -> dict[str, Any]:
    layout = check_layout(parts.layout)
    size = _image_size(parts.record)
    fresh: dict[str, Any] = {
        **{"components": DEFAULT_COMPONENTS, "iterations": DEFAULT_ITERATIONS},
        **{"domain": "log", "unit_spectra": True},
        **{"reference_pixels": float(size**2), "padding": PADDING, "light": True},
    }
    stain = fresh if parts.stain is None else {**parts.stain, "light": parts.light}
    classes = _class_names(parts.names, layout["nc"])
    return {
        **{"format": FORMAT_VERSION, "name": name[:200], "classes": classes},
        **{"colours": class_colours(len(classes)), "model_yaml": layout},
        **{key: stain.get(key) for key in fresh},
        **{"image_size": size, "pixel_size": None, "object_sizes": {}},
        **{"stain_seen": None, "training": None},
        "notes": [_UNTRAINED_NOTE if parts.stain is None else _UNFINISHED_NOTE],
    }


def _class_names(names: Any, count: int) -> list[str]:
    """Ultralytics' names, a table by number or a list; a class without one is its number."""
    table = dict(enumerate(names)) if isinstance(names, (list, tuple)) else names
    found = [table.get(k) if isinstance(table, dict) else None for k in range(count)]
    return [n if isinstance(n, str) and n else str(k) for k, n in enumerate(found)]


def _image_size(record: Mapping[str, Any]) -> int:
    """Side of the training images, as Ultralytics notes it, or its default."""
    asked = record.get("train_args")
    size = asked.get("imgsz") if isinstance(asked, dict) else None
    return size if isinstance(size, int) and 32 <= size <= 8192 else 640
