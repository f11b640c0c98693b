"""A detector for programs that have neither this package nor torch: ONNX or OpenVINO, and a README.

The network behind the front end is one file; the front end is data, `model.json`: the learned start
of Algorithm 1 and the 1×1 map from densities to what the network gets. The README holds a program
of some sixty lines that needs NumPy alone to apply it, and gives the boxes of `detect`.
"""

from __future__ import annotations

import errno
import json
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from napari_beerlanet._version import __version__
from napari_beerlanet.core.common.messages import quoted
from napari_beerlanet.core.common.storage import FileError, staged_folder
from napari_beerlanet.core.detection.detector import Detector
from napari_beerlanet.core.detection.object_sizes import reference_size
from napari_beerlanet.core.detection.openvino_network import (
    NetworkBehindFrontEnd,
    describe_difference,
    import_openvino,
    to_openvino,
)
from napari_beerlanet.core.images.rgb import PADDING_GREY
from napari_beerlanet.core.stains.front_end import decompose_settings

ExportFormat = Literal["onnx", "openvino"]

NETWORK_FILES: dict[ExportFormat, str] = {"onnx": "network.onnx", "openvino": "network.xml"}
"""The network's file; OpenVINO's weights are beside it, in network.bin."""

_OPSET = 17  # of ONNX, which every runtime of the last years reads


def export_detector(
    model: Detector,
    folder: Path,
    format: ExportFormat = "onnx",
    *,
    check: Callable[[], None] = lambda: None,
) -> list[Path]:
    """Write the network, model.json and README.md into a folder, all or none; their paths.

    `check` is called between steps and may raise, to stop.
    """
    network = model.runner.network
    if format not in get_args(ExportFormat):
        raise ValueError(f'format must be "onnx" or "openvino", not {quoted(format)}.')
    if network.normalizer is not None or network.front_end == "lstainnorm":
        what = "a normalizer" if network.normalizer is not None else "LStainNorm"
        raise FileError(f"This detector has {what} in front of it, which cannot be exported.")
    name = NETWORK_FILES[format]
    with staged_folder(folder) as stage:
        check()
        fused = Detector(model.network, model.info, "cpu").runner.network
        (_write_onnx if format == "onnx" else _write_openvino)(fused, stage / name)
        check()
        described = describe_model(model) | {"network": name}
        text = json.dumps(described, indent=1, ensure_ascii=False) + "\n"
        (stage / "model.json").write_text(text, encoding="utf-8")
        (stage / "README.md").write_text(_readme(model, format), encoding="utf-8")
        check()
        written = sorted(path.name for path in stage.iterdir())
    return [folder / one for one in written]


def describe_model(model: Detector) -> dict[str, Any]:
    """What is needed beside the network, as plain JSON values."""
    network, info = model.network, model.info
    front: dict[str, Any] = {"kind": network.front_end}
    if network.has_stain:
        settings = decompose_settings(network.stain)
        front |= settings | {"spectra": settings["spectra"].tolist()}
        front |= {
            "map_weight": network.mix.weight.detach().cpu().double().flatten(1).tolist(),
            "map_bias": network.mix.bias.detach().cpu().double().tolist(),
            "exponential": network.light,
        }
    return {
        "name": info.get("name", ""),
        "written_by": f"napari-beerlanet {__version__}",
        "classes": model.classes,
        "stride": int(network.stride.max()),
        "padding": PADDING_GREY,
        "boxes_are_final": bool(getattr(network, "end2end", False)),
        "typical_size": reference_size(info),
        "image_size": info["image_size"],
        "front_end": front,
    }


def _write_onnx(network: Any, path: Path) -> None:
    if find_spec("onnx") is None:
        raise FileError('ONNX is not installed: pip install "napari-beerlanet[onnx]".')
    axes = {"mixed": {0: "n", 2: "height", 3: "width"}, "predictions": {0: "n", 2: "anchors"}}
    if getattr(network, "end2end", False):
        axes["predictions"] = {0: "n", 1: "boxes"}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the exporter that needs no compiler is deprecated
        torch.onnx.export(
            NetworkBehindFrontEnd(network),
            (torch.rand(1, 3, 96, 64),),
            str(path),
            dynamo=False,
            opset_version=_OPSET,
            input_names=["mixed"],
            output_names=["predictions"],
            dynamic_axes=axes,
        )
    if find_spec("onnxruntime") is not None:
        import onnxruntime

        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        _refuse(
            describe_difference(
                network,
                lambda x: torch.from_numpy(session.run(None, {"mixed": x.numpy()})[0]),
            )
        )


def _write_openvino(network: Any, path: Path) -> None:
    if find_spec("openvino") is None:
        raise FileError('OpenVINO is not installed: pip install "napari-beerlanet[openvino]".')
    openvino = import_openvino()
    converted = to_openvino(network)
    compiled = openvino.compile_model(converted, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    _refuse(describe_difference(network, lambda x: torch.tensor(compiled(x.numpy())[0])))
    try:
        openvino.save_model(converted, path, compress_to_fp16=False)
    except RuntimeError as error:  # which says no more
        raise OSError(errno.EIO, "the disk is full, or refuses to be written to") from error


def _refuse(difference: str) -> None:
    if difference:
        raise FileError(f"This network cannot be exported for images of any size: {difference}.")


def _readme(model: Detector, format: ExportFormat) -> str:
    """How to run it elsewhere."""
    typical = reference_size(model.info)
    size = "" if typical is None else f" Objects were about {typical:.0f} pixels wide there."
    package = "onnxruntime" if format == "onnx" else "openvino"
    text = _README.replace("LOAD\n", _LOAD[format]).replace("PACKAGE", package)
    name, classes = model.info.get("name") or "A detector", ", ".join(model.classes)
    files = NETWORK_FILES[format] + (" and network.bin" if format == "openvino" else "")
    for word, value in (("NAME", name), ("CLASSES", classes), ("FILES", files), ("SIZE", size)):
        text = text.replace(word, value)
    return text


_LOAD: dict[ExportFormat, str] = {
    "onnx": """import onnxruntime
session = onnxruntime.InferenceSession(str(folder / model["network"]))

def network(mixed):
    return session.run(None, {"mixed": mixed})[0]
""",
    "openvino": """import openvino
compiled = openvino.Core().compile_model(
    folder / model["network"], "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
)

def network(mixed):
    return compiled(mixed)[0]
""",
}

_README = """# NAME

Detects CLASSES. Written by napari-beerlanet; research use only. The weights carry the licence of
the model that they were exported from.

- FILES: the network behind the front end. Input `mixed` (n, 3, height, width) float32, sides
  multiples of `stride`; output (n, 4 + classes, anchors): centre x, centre y, width, height in
  pixels of the input, then a confidence for each class. Where `boxes_are_final`: (n, boxes, 6),
  corners, confidence, class.
- model.json: classes, and the front end as data: what Algorithm 1 of BeerLaNet starts from
  (spectra, λ, γ, iterations) and the 1×1 map from densities to `mixed`.

Show the network objects as large as in training: scale the image first.SIZE napari-beerlanet
finds that scale by itself and gives it as `found.report["scale"]`.

Needs `pip install numpy pillow PACKAGE`, and runs as `python run.py IMAGE` if saved as run.py
beside these files. On an image that needs no scaling the boxes are those of napari-beerlanet.

```python
import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image

folder = Path(__file__).resolve().parent
model = json.loads((folder / "model.json").read_text(encoding="utf-8"))
LOAD

def densities(X, w, S, lam, gamma, iterations, unit_spectra, reference_pixels):
    \"\"\"Algorithm 1: densities (r, u) of u colours X (3, u) that w (u,) pixels have.\"\"\"
    w = w * (reference_pixels / w.sum()) if reference_pixels else w
    D = np.zeros((S.shape[1], X.shape[1]))
    for _ in range(iterations):
        x0 = (X + S @ D) @ w / w.sum()
        if S.any():
            tau, s = 1 / (S**2).sum(), np.linalg.norm(S, axis=0)
            D = D - tau * S.T @ (S @ D + X - x0[:, None])
            D = np.maximum(D - (lam * gamma * tau * s)[:, None], 0)
            d = np.sqrt((w * D**2).sum(1))
            D = D * (1 - np.minimum(d, lam * tau * s) / np.where(d > 0, d, 1))[:, None]
        if (w * D**2).sum() > 0:
            tau, WD = 1 / (w * D**2).sum(), w * D
            S = np.maximum(S - tau * (S @ (D @ WD.T) + X @ WD.T - np.outer(x0, WD.sum(1))), 0)
            s, d = np.linalg.norm(S, axis=0), gamma * WD.sum(1) + np.sqrt((WD * D).sum(1))
            S = S * (1 - np.minimum(s, lam * tau * d) / np.where(s > 0, s, 1))
        if unit_spectra:
            s = np.linalg.norm(S, axis=0)
            S, D = S / np.where(s > 0, s, 1), D * s[:, None]
    return D


def apply_front_end(rgb):
    \"\"\"What the network gets, (3, H, W) float32, of an image (H, W, 3); padding stays grey.\"\"\"
    front, grey = model["front_end"], model["padding"]
    if front["kind"] == "none":
        return np.moveaxis(rgb, 2, 0).astype(np.float32) / 255
    if front["kind"] == "grey":
        return np.repeat((rgb @ np.array([0.299, 0.587, 0.114]) / 255)[None], 3, 0).astype("f4")
    colours, place, count = np.unique(
        rgb.reshape(-1, 3), axis=0, return_inverse=True, return_counts=True
    )
    padding = (colours == grey).all(1)
    X = np.maximum(colours.T, 1) / 255
    X = np.log(X) if front["domain"] == "log" else colours.T / 255
    names = ("lam", "gamma", "iterations", "unit_spectra", "reference_pixels")
    D = densities(
        X, np.where(padding, 0.0, count), np.array(front["spectra"]), *(front[k] for k in names)
    )
    mixed = np.array(front["map_weight"]) @ D + np.array(front["map_bias"])[:, None]
    mixed = np.exp(np.minimum(mixed, 1)) if front["exponential"] else mixed
    mixed = np.where(padding, grey / 255, mixed)
    return mixed[:, place.ravel()].reshape(3, *rgb.shape[:2]).astype(np.float32)


def suppress(boxes, scores, labels, overlap):
    \"\"\"Indices of the boxes (n, 4) that are left, best first: no duplicates within a class.\"\"\"
    order, kept = np.argsort(-scores, kind="stable"), []
    while len(order):
        best, order = order[0], order[1:]
        kept.append(best)
        a, b = boxes[best], boxes[order]
        sides = np.minimum(a[2:], b[:, 2:]) - np.maximum(a[:2], b[:, :2])
        shared = np.clip(sides, 0, None).prod(1)
        union = (a[2:] - a[:2]).prod() + (b[:, 2:] - b[:, :2]).prod(1) - shared
        order = order[(shared <= overlap * union) | (labels[order] != labels[best])]
    return np.array(kept, int)


def detect(rgb, confidence=0.25, overlap=0.7):
    \"\"\"Boxes (n, 4) in pixels, confidences (n,), classes (n,) of an image (H, W, 3) uint8.\"\"\"
    (height, width), stride = rgb.shape[:2], model["stride"]
    high, wide = (-(-side // stride) * stride for side in (height, width))
    top, left = (high - height) // 2, (wide - width) // 2
    padded = np.full((high, wide, 3), model["padding"], np.uint8)
    padded[top : top + height, left : left + width] = rgb
    found = network(apply_front_end(padded)[None])[0]
    if model["boxes_are_final"]:
        boxes, scores, labels = found[:, :4], found[:, 4], found[:, 5].astype(int)
    else:
        centre, half = found[:2].T, found[2:4].T / 2
        boxes = np.concatenate([centre - half, centre + half], 1)
        scores, labels = found[4:].max(0), found[4:].argmax(0)
    likely = scores > confidence
    boxes, scores, labels = boxes[likely], scores[likely], labels[likely]
    if not model["boxes_are_final"]:
        kept = suppress(boxes, scores, labels, overlap)
        boxes, scores, labels = boxes[kept], scores[kept], labels[kept]
    boxes = np.clip(boxes - [left, top, left, top], 0, [width, height, width, height])
    return boxes, scores, labels


if __name__ == "__main__":
    rgb = np.asarray(Image.open(sys.argv[1]).convert("RGB"))
    for box, score, label in zip(*detect(rgb)):
        print(model["classes"][label], f"{score:.3f}", *(f"{side:.1f}" for side in box))
```
"""
