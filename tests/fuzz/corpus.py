"""Good files of every format, and hostile ones that once took gigabytes, minutes, or a traceback.

They are made here rather than stored: what is hostile about each can be read.
"""

from __future__ import annotations

import copy
import json
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

TINY = {
    "nc": 2,
    "reg_max": 1,
    "backbone": [[-1, 1, "Conv", [8, 3, 4]], [-1, 1, "Conv", [8, 3, 2]]],
    "head": [[-1, 1, "C2f", [8]], [[1, 2], 1, "Detect", ["nc"]]],
}
"""A detection network of a few thousand weights."""


def good_files(folder: Path) -> list[Path]:
    """One of each format."""
    import numpy as np
    import tifffile
    from PIL import Image

    from napari_beerlanet.core.formats import FORMATS, write_detections
    from napari_beerlanet.samples import blood_smear

    folder.mkdir(parents=True)
    smear = blood_smear((96, 128), cell_diameter=24).image
    detections = _detections()
    paths = [_detector(folder / "model.safetensors"), _pickled(folder / "model.pt")]
    paths.append(_classifier(folder / "classifier.safetensors"))
    for kind, made in FORMATS.items():
        paths.append(folder / f"boxes{made.suffix}")
        write_detections(paths[-1], detections, "a.png", format=kind)
    paths += [folder / "data.yaml", folder / "a.png", folder / "a.tif"]
    paths[-3].write_text("train: images\nval: images\nnames: [RBC, WBC]\n")
    Image.fromarray(smear).save(paths[-2])
    tifffile.imwrite(paths[-1], np.ascontiguousarray(smear), photometric="rgb", tile=(64, 64))
    return paths


def hostile_files(folder: Path) -> list[Path]:
    """Every file that broke the promise of docs/security.md before it was one."""
    folder.mkdir(parents=True)
    paths = []
    for name, write in HOSTILE.items():
        paths.append(folder / name)
        write(paths[-1])
    return paths


def _detections():
    import numpy as np

    from napari_beerlanet.core.boxes.detections import Detections

    rng = np.random.default_rng(0)
    corner = rng.uniform(0, 400, (12, 2))
    return Detections(
        np.hstack([corner, corner + rng.uniform(5, 60, (12, 2))]),
        rng.integers(0, 2, 12),
        rng.uniform(0.3, 1, 12),
        ["RBC", "WBC"],
        {"OD 1 mean": rng.random(12).astype(np.float32), "status": np.array(["new"] * 12, object)},
        image_shape=(480, 640),
    )


def _detector(path: Path, **changes) -> Path:
    import torch

    from napari_beerlanet.core.checkpoints.checkpoint import save_checkpoint
    from napari_beerlanet.core.checkpoints.serialize import describe_network
    from napari_beerlanet.core.detection.detector import Detector
    from napari_beerlanet.core.detection.network import StainDetectionModel

    torch.manual_seed(0)
    network = StainDetectionModel(copy.deepcopy(TINY), nc=2, imgsz=96, components=3, iterations=4)
    network.fit_mix()
    network.stain.reference_pixels = 5000.0
    known = {
        "object_sizes": {"a": {"low": 8.0, "median": 11.5, "high": 20.0, "count": 40}},
        "training": {
            **{"images": {"train": 5, "val": 2}, "date": "2026-01-02", "data": "x/data.yaml"},
            **{"metrics": {"mAP50": 0.5, "mAP50-95": 0.3}, "epochs": 3},
            "boxes": {"train": {"a": 9, "b": 9}, "val": {"a": 3, "b": 3}},
        },
    }
    info = describe_network(network, "tiny", ["a", "b"], 96, **known)
    save_checkpoint(Detector(network, info, "cpu"), path)
    if changes:
        path.write_bytes(_changed(path.read_bytes(), changes))
    return path


def _changed(data: bytes, changes: dict) -> bytes:
    """A checkpoint with other entries, and the checksum that belongs to them."""
    from safetensors.torch import load, save

    from napari_beerlanet.core.checkpoints.info import METADATA_KEY
    from napari_beerlanet.core.checkpoints.serialize import _checksum

    length = int.from_bytes(data[:8], "little")
    info = json.loads(json.loads(data[8 : 8 + length])["__metadata__"][METADATA_KEY])
    del info["checksum"]
    info |= changes
    tensors = load(data)
    text = json.dumps({**info, "checksum": _checksum(info, tensors)})
    return save(tensors, {METADATA_KEY: text})


def _classifier(path: Path) -> Path:
    from napari_beerlanet.core.checkpoints.checkpoint import save_checkpoint
    from tinyclasses import tiny_classifier

    save_checkpoint(tiny_classifier("shufflenet_v2_x0_5", input_size=32), path)
    return path


def _pickled(path: Path) -> Path:
    import torch

    from napari_beerlanet.core.detection.ultralytics_api import DetectionModel

    torch.manual_seed(0)
    network = DetectionModel(copy.deepcopy(TINY), nc=2, verbose=False).eval()
    network.names = {0: "red", 1: "white"}
    torch.save({"model": network, "train_args": {"imgsz": 96}, "date": "2026-01-02"}, path)
    return path


def _archive(program: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a/data.pkl", program)

    return write


def _text(content: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(content) and None


def _model(**changes) -> Callable[[Path], None]:
    return lambda path: _detector(path, **changes) and None


def _enlarging_layout(layer: list) -> dict:
    rows = [[-1, 1, "Conv", [8, 3, 4]], [-1, 1, "Conv", [8, 3, 2]], layer]
    return {**TINY, "backbone": rows, "head": [[[1, 2], 1, "Detect", ["nc"]]]}


def _coco(images: int, categories: int, attributes: list[dict] | None = None) -> str:
    found = attributes or [{} for _ in range(images)]
    return json.dumps(
        {
            "images": [{"id": k, "file_name": f"{k}.png"} for k in range(images)],
            "categories": [{"id": k, "name": f"c{k}"} for k in range(categories)],
            "annotations": [
                {
                    **{"image_id": k % images, "category_id": k % categories},
                    **{"bbox": [0, 0, 1, 1], "attributes": one},
                }
                for k, one in enumerate(found)
            ],
        }
    )


def _large_tiff(path: Path) -> None:
    import numpy as np
    import tifffile

    tifffile.imwrite(path, np.zeros((96, 96, 3), np.uint8), photometric="rgb", tile=(64, 64))
    with tifffile.TiffFile(path, mode="r+b") as file:
        for name in ("ImageWidth", "ImageLength"):
            file.pages[0].tags[name].overwrite(4_000_000_000, dtype="I")


def _shared_storage(path: Path) -> None:
    import torch

    numbers = torch.zeros(100_000)
    torch.save({f"w{k}": numbers[k : k + 1] for k in range(5000)}, path)


_NESTED_TUPLES = b"K\x01\x85" + b"q\x00h\x00h\x00\x86" * 60
_COLLIDING = b"".join(
    b"\x8a\x0c" + (k * (2**61 - 1)).to_bytes(12, "little") + b"K\x01" for k in range(1, 50_000)
)
_HEADER = "class,x1,y1,x2,y2,remark\n"

HOSTILE: dict[str, Callable[[Path], None]] = {
    "upsampled.safetensors": _model(
        model_yaml=_enlarging_layout([-1, 64, "nn.Upsample", [None, 2, "nearest"]])
    ),
    "transposed.safetensors": _model(
        model_yaml=_enlarging_layout([-1, 8, "nn.ConvTranspose2d", [8, 2, 2]])
    ),
    "object-sizes.safetensors": _model(
        object_sizes={"a": {"low": 10.0**6, "median": 10.0**6, "high": 10.0**6, "count": 4}}
    ),
    "images.safetensors": _model(training={"images": [1, 2]}),
    "ragged.safetensors": _model(
        stain_seen={
            "background": {"mean": [0.0] * 3, "sd": [1.0] * 3},
            "spectra": [[1.0], [1.0, 2.0], [1.0]],
        }
    ),
    "class-number.txt": _text("60000000 0.5 0.5 0.1 0.1"),
    "tuple-as-key.pt": _archive(b"\x80\x02}" + _NESTED_TUPLES + b"K\x01s."),
    "tuple-in-a-set.pt": _archive(b"\x80\x04\x8f(" + _NESTED_TUPLES + b"\x90."),
    "colliding-keys.pt": _archive(b"\x80\x02}(" + _COLLIDING + b"u."),
    "empty-lists.pt": _archive(b"\x80\x02" + b"]" * 9_000_000 + b"."),
    "empty-sets.pt": _archive(b"\x80\x04" + b"\x8f" * 9_000_000 + b"."),
    "long-name.pt": _archive(pickle.dumps({"x" * 1_000_000: 1}, 2)),
    "huge-memo.pt": _archive(b"\x80\x02}r" + struct.pack("<I", 2**32 - 1) + b"."),
    "shared-storage.pt": _shared_storage,
    "long-text.csv": _text(_HEADER + f"a,0,0,1,1,{'x' * 100_000}\n" + "a,0,0,1,1,x\n" * 4000),
    "long-text.json": _text(_coco(1, 1, [{"remark": "x" * 400_000}, *[{"remark": "x"}] * 4000])),
    "many-columns.json": _text(_coco(1, 1, [{f"only {k}": k} for k in range(20_000)])),
    "many-images.json": _text(_coco(20_000, 20_000)),
    "many-names.yaml": _text("names: [" + "[]," * 1_000_000 + "]"),
    "claims.tif": _large_tiff,
    "laughs.yaml": _text(
        "a0: &a0 [x]\n"
        + "".join(f"a{k}: &a{k} [{f'*a{k - 1},' * 9}]\n" for k in range(1, 12))
        + "names: *a11\n"
    ),
}
"""Writers by the name of the file."""
