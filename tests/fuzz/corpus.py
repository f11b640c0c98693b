"""Good files of every format, and hostile ones that once took gigabytes, minutes, or a traceback.

They are made here rather than stored: what is hostile about each can be read.
"""

from __future__ import annotations

import copy
import json
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

TINY = {
    "nc": 2,
    "reg_max": 1,
    "backbone": [[-1, 1, "Conv", [8, 3, 4]], [-1, 1, "Conv", [8, 3, 2]]],
    "head": [[-1, 1, "C2f", [8]], [[1, 2], 1, "Detect", ["nc"]]],
}
"""A detection network of a few thousand weights."""


BENCHMARK = """\
tasks:
- {name: cells, kind: classify, train: one, tests: {two: two, three: three}}
methods: [none, beerlanet]
seeds: [0]
"""
CELLS = "file,split,source,type,x1,y1,x2,y2,x,y,width,height,reviewed\n"
IDENTITY = {"model": "a", "shape": [96, 128]}
"""Of the run that the file of tiles is of."""


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
    ways = {"deflate": "deflate", "jpeg": "jpeg", "jpeg-2000": "jpeg2000", "lzw": "lzw"}
    for name, compression in ways.items():
        paths.append(folder / f"{name}.tif")
        options = {"photometric": "rgb", "tile": (64, 64), "compression": compression}
        tifffile.imwrite(paths[-1], np.ascontiguousarray(smear), **options)
    for suffix in ("jpg", "bmp", "webp", "gif", "jp2", "ppm", "tga"):
        paths.append(folder / f"a.{suffix}")
        Image.fromarray(smear).save(paths[-1])
    paths.append(folder / "a.ome.tif")
    tifffile.imwrite(paths[-1], np.ascontiguousarray(smear), photometric="rgb", ome=True)
    return [*paths, *_own_files(folder, smear, detections)]


def _own_files(folder: Path, smear, detections) -> list[Path]:
    """Files of ours that people send to each other; what one is, is said before its suffix."""
    import numpy as np

    from napari_beerlanet.core.boxes.detections import DetectionTiles, RawDetections
    from napari_beerlanet.core.normalization.methods import fitted_normalizer, save_normalizer
    from napari_beerlanet.core.project.project import Project
    from napari_beerlanet.core.review.review import Review, save_review
    from napari_beerlanet.core.stains.presets import NamedSpectrum, StainPreset, write_preset
    from projects import NAMES, fill

    paths = [folder / f"a.{kind}" for kind in ("study.yaml", "benchmark.yaml", "layout.yaml")]
    paths[0].write_text("images: [images]\nout: out\ncomponents: 2\nworkers: 1\n")
    paths[1].write_text(BENCHMARK)
    paths[2].write_text(json.dumps(TINY))
    review = Review(detections)
    review.status[:] = 1
    paths.append(save_review(folder / "a.review.json", review, "a.png"))
    stains = (NamedSpectrum("eosin", (0.1, 0.9, 0.3)), NamedSpectrum("azure", (0.7, 0.6, 0.3)))
    paths.append(folder / "a.preset.json")
    write_preset(paths[-1], StainPreset("mine", stains, "measured"))
    paths.append(folder / "a.normalizer.safetensors")
    save_normalizer(fitted_normalizer("reinhard", smear), paths[-1])
    with Project.create(folder / "project", NAMES) as project:
        fill(project, [1], 64)
    for name in ("project.json", "crops.csv", "annotations.json"):
        annotations = next((folder / "project" / "annotations").glob("[!.]*.json"))
        source = annotations if name == "annotations.json" else folder / "project" / name
        paths.append(folder / f"a.{name}")
        paths[-1].write_bytes(source.read_bytes())
    paths.append(folder / "a.cells.csv")
    paths[-1].write_text(CELLS + "a,train,s,ring,0,0,9,9,0,0,20,20,True\n")
    paths.append(folder / "a.tiles")
    tiles = DetectionTiles.create(paths[-1], {"identity": IDENTITY}, {"x": np.zeros(3)})
    tiles.add(0, RawDetections(detections.xyxy, detections.labels, detections.scores))
    tiles.close()
    paths.append(folder / "a.onnx")
    write_onnx([_convolution("x", "y")])(paths[-1])
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
        {
            "Model channel 1 mean": rng.random(12).astype(np.float32),
            "status": np.array(["new"] * 12, object),
        },
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


def _tiff(tags: dict[int, list[int] | bytes], more: bytes = b"") -> Callable[[Path], None]:
    """A TIFF with one page of these tags, and something after it; see `_page`."""

    def write(path: Path) -> None:
        page, values = _page(tags, 8)
        path.write_bytes(b"II*\0" + struct.pack("<I", 8) + page + bytes(4) + values + more)

    return write


def _page(tags: dict[int, list[int] | bytes], begin: int) -> tuple[bytes, bytes]:
    """A page without the place of the next one, and the values that do not fit into it."""
    end = begin + 2 + 12 * len(tags) + 4
    page, values = struct.pack("<H", len(tags)), b""
    for tag, given in sorted(tags.items()):
        text = isinstance(given, bytes)
        data = given if text else struct.pack(f"<{len(given)}I", *given)
        place = data.ljust(4, b"\0")
        if len(data) > 4:
            place = struct.pack("<I", end + len(values))
            values += data
        page += struct.pack("<HHI", tag, 2 if text else 4, len(given)) + place
    return page, values


def _rgb_tags(side: int, **more: list[int] | bytes) -> dict[int, list[int] | bytes]:
    """Of an RGB image in one strip, or in one tile where its side is named."""
    numbers = {"bits": 258, "compression": 259, "samples": 277, "format": 339, "text": 270}
    numbers |= {"offsets": 273, "counts": 279, "tile": 322, "pages": 330}
    tags: dict[int, list[int] | bytes] = {256: [side], 257: [side], 258: [8] * 3, 259: [1]}
    tags |= {262: [2], 277: [3], 278: [side], 273: [8], 279: [0]}
    tags |= {numbers[name]: value for name, value in more.items()}
    if "tile" in more:
        tags |= {323: more["tile"], 324: tags.pop(273), 325: tags.pop(279)}
    return tags


def _many_pages(count: int) -> Callable[[Path], None]:
    """Pages of different widths, with nothing in them."""

    def write(path: Path) -> None:
        data = bytearray(b"II*\0" + struct.pack("<I", 8))
        for k in range(count):
            data += _page({256: [16 + k], 257: [16]}, 0)[0]
            data += struct.pack("<I", len(data) + 4 if k < count - 1 else 0)
        path.write_bytes(data)

    return write


def _ome(pixels: str, count: int = 1) -> bytes:
    pixels = f'<Image ID="I"><Pixels ID="P" DimensionOrder="XYCZT" Type="uint8" {pixels}</Image>'
    space = "http://www.openmicroscopy.org/Schemas/OME/2016-06"
    return f'<?xml version="1.0"?><OME xmlns="{space}">{pixels * count}</OME>\0'.encode()


def _tile_of_another_size(path: Path) -> None:
    """A tile of 64 pixels that is a JPEG which says that it has 65 000."""
    import imagecodecs
    import numpy as np

    coded = bytearray(imagecodecs.jpeg8_encode(np.zeros((64, 64, 3), np.uint8)))
    place = coded.find(b"\xff\xc0")
    coded[place + 5 : place + 9] = struct.pack(">HH", 65_000, 65_000)
    tags = _rgb_tags(64, tile=[64], compression=[7], counts=[len(coded)])
    page, values = _page(tags, 8)
    tags[324] = [8 + len(page) + 4 + len(values)]
    _tiff(tags, bytes(coded))(path)


def _tile(compression: int, encode: Callable[[], bytes]) -> Callable[[Path], None]:
    """A TIFF of 64 x 64 pixels in one tile, which is what `encode` returns."""

    def write(path: Path) -> None:
        coded = encode()
        tags = _rgb_tags(64, tile=[64], compression=[compression], counts=[len(coded)])
        page, values = _page(tags, 8)
        tags[324] = [8 + len(page) + 4 + len(values)]
        _tiff(tags, coded)(path)

    return write


def _coded(codec: str, side: int, **options) -> bytes:
    """A black image of so many pixels a side, as imagecodecs writes it."""
    import imagecodecs
    import numpy as np

    encode = getattr(imagecodecs, f"{codec}_encode")
    return bytes(encode(np.zeros((side, side, 3), np.uint8), **options))


def _jpeg_after_rubbish() -> bytes:
    """A JPEG that says that it has 65 000 pixels a side, where only a decoder finds it."""
    coded = bytearray(_coded("jpeg8", 64))
    place = coded.find(b"\xff\xc0")
    coded[place + 5 : place + 9] = struct.pack(">HH", 65_000, 65_000)
    return bytes(coded[:place] + b"\0" + coded[place:])


def _jp2_with_another_inside() -> bytes:
    """A JP2 of 9 000 pixels a side, in front of which a box looks like one of 64."""
    coded = _coded("jpeg2k", 9000, codecformat="jp2")
    place = coded.find(b"jp2c") - 4
    small = b"\xff\x4f\xff\x51\0\0\0\0" + struct.pack(">4I", 64, 64, 0, 0) + bytes(6000)
    return coded[:place] + struct.pack(">I", len(small) + 8) + b"free" + small + coded[place:]


def _same_tile(side: int, samples: int, bits: int, photometric: int = 2) -> Callable[[Path], None]:
    """A TIFF in which all tiles are the same few bytes."""

    def write(path: Path) -> None:
        import imagecodecs

        coded = imagecodecs.zstd_encode(bytes(512 * 512 * samples * bits // 8), level=19)
        tiles = (-(-side // 512)) ** 2
        tags = _rgb_tags(side, tile=[512], compression=[50000], counts=[len(coded)] * tiles)
        tags |= {258: [bits] * samples, 262: [photometric], 277: [samples]}
        tags |= {339: [3 if bits > 16 else 1] * samples, 324: [8] * tiles}
        tags |= {320: [0] * 768} if photometric == 3 else {}
        page, values = _page(tags, 8)
        tags[324] = [8 + len(page) + 4 + len(values)] * tiles
        _tiff(tags, coded)(path)

    return write


def write_png(width: int, height: int) -> Callable[[Path], None]:
    """Black, in as few bytes as there can be."""

    def write(path: Path) -> None:
        packed, lines = zlib.compressobj(9), bytes(1 + 3 * width) * min(height, 100)
        data = b"".join(packed.compress(lines) for _ in range(height // min(height, 100)))
        head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        parts = ((b"IHDR", head), (b"IDAT", data + packed.flush()), (b"IEND", b""))
        path.write_bytes(
            b"\x89PNG\r\n\x1a\n"
            + b"".join(
                struct.pack(">I", len(content))
                + kind
                + content
                + struct.pack(">I", zlib.crc32(kind + content))
                for kind, content in parts
            )
        )

    return write


def _jpeg_of_many_scans(path: Path) -> None:
    """A progressive JPEG whose last pass over all pixels comes again and again."""
    from PIL import Image

    Image.new("RGB", (6000, 6000)).save(path, "JPEG", progressive=True, quality=1)
    data = path.read_bytes()
    last = data.rfind(b"\xff\xda")
    path.write_bytes(data[:-2] + data[last:-2] * (9_000_000 // len(data[last:-2])) + data[-2:])


def _endless_tiles(path: Path) -> None:
    """A database in which what should be a table never ends."""
    import sqlite3
    from contextlib import closing

    from napari_beerlanet.core.boxes.detections import DetectionTiles

    DetectionTiles.create(path, {"identity": IDENTITY}, {}).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(
            "DROP TABLE tile; CREATE VIEW tile AS WITH RECURSIVE r(n) AS "
            "(SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT n AS number, x'' AS boxes, 0 AS "
            "checksum FROM r"
        )


def _annotations(classes: int, objects: int) -> str:
    found = [{"id": k, "class": f"c{classes - 1}", "box": [0, 0, 1, 1]} for k in range(objects)]
    return json.dumps(
        {
            "format": 1,
            "source": {"name": "a.png", "digest": "sha256:0", "shape": [96, 128]},
            "classes": [f"c{k}" for k in range(classes)],
            "objects": [{**one, "status": "confirmed"} for one in found],
            "regions": [],
        }
    )


def _decisions(count: int) -> str:
    rows = [[1, 1, 5, 5, 0.5, f"c{k}", "accepted", f"d{k}"] for k in range(count)]
    return json.dumps({"kind": "napari-beerlanet review", "version": 1, "decisions": rows})


def write_onnx(nodes: list, constants: dict | None = None) -> Callable[[Path], None]:
    """A network of images x to images y; `nodes`: (operation, inputs, outputs, attributes)."""

    def write(path: Path) -> None:
        import numpy as np
        from onnx import TensorProto, helper, numpy_helper

        weights = {"w": np.full((3, 3, 1, 1), 0.3, np.float32), "b": np.zeros(3, np.float32)}
        arrays = {name: np.asarray(value) for name, value in (constants or {}).items()}
        arrays = {k: v.astype(np.float32) if v.dtype == float else v for k, v in arrays.items()}
        image = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, "h", "w"])]
        made = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
        layers = [helper.make_node(o, i, to, **more) for o, i, to, more in nodes]
        stored = [numpy_helper.from_array(v, k) for k, v in (weights | arrays).items()]
        graph = helper.make_graph(layers, "generator", image, made, stored)
        opset = [helper.make_opsetid("", 17)]
        model = helper.make_model(graph, opset_imports=opset, ir_version=8)
        path.write_bytes(model.SerializeToString())

    return write


def _convolution(given: str, made: str) -> tuple:
    return "Conv", [given, "w", "b"], [made], {}


def _onnx_loop(path: Path) -> None:
    """Two to the power of sixty turns."""
    from onnx import TensorProto, helper

    def value(name: str, kind: int):
        return helper.make_tensor_value_info(name, kind, None)

    turn = helper.make_graph(
        [helper.make_node("Identity", [a], [b]) for a, b in (("go", "on"), ("v", "r"))],
        "turn",
        [value("k", TensorProto.INT64), value("go", TensorProto.BOOL), value("v", 1)],
        [value("on", TensorProto.BOOL), value("r", 1)],
    )
    write_onnx(
        [("Loop", ["turns", "true", "x"], ["y"], {"body": turn})], {"turns": 2**60, "true": True}
    )(path)


def _onnx_elsewhere(path: Path) -> None:
    """Weights in a file that is a device."""
    import onnx

    write_onnx([_convolution("x", "y")])(path)
    model = onnx.load_from_string(path.read_bytes())
    weight = model.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = onnx.TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="../../../../../dev/zero")
    path.write_bytes(model.SerializeToString())


def _preset(stains: int, name: str, spectrum: list[int]) -> str:
    listed = [{"name": f"{name}{k}", "spectrum": spectrum} for k in range(stains)]
    return json.dumps(
        {"kind": "napari-beerlanet stain preset", "version": 1, "name": name, "stains": listed}
    )


_HUGE = "1" + "0" * 4000  # as many digits as Python's JSON reads, and more than a float has


def _small_floats(path: Path) -> None:
    """A normalizer whose numbers have 8 bits, which safetensors knows and NumPy does not."""
    entry = {"dtype": "F8_E4M3", "shape": [3], "data_offsets": [0, 3]}
    facts = {"kind": "normalizer", "version": 1, "method": "reinhard", "settings": {}}
    about = {"napari-beerlanet": json.dumps(facts)}
    header = json.dumps({"__metadata__": about, "means": entry})
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(3))


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
    "many-classes.csv": _text(_HEADER + "".join(f"c{k},0,0,1,1,\n" for k in range(100_000))),
    "long-text.json": _text(_coco(1, 1, [{"remark": "x" * 400_000}, *[{"remark": "x"}] * 4000])),
    "many-columns.json": _text(_coco(1, 1, [{f"only {k}": k} for k in range(20_000)])),
    "many-images.json": _text(_coco(20_000, 20_000)),
    "many-names.yaml": _text("names: [" + "[]," * 1_000_000 + "]"),
    "claims.tif": _large_tiff,
    "no-places.tif": _tiff({k: v for k, v in _rgb_tags(64).items() if k != 273}),
    "nothing-stored.tif": _tiff(_rgb_tags(20_000, bits=[64] * 3, format=[3] * 3)),
    "samples.tif": _tiff(_rgb_tags(3000, samples=[60_000], bits=[8] * 60_000)),
    "many-pages.tif": _many_pages(200_000),
    "many-sub-images.tif": _tiff(_rgb_tags(16, pages=[8] * 2_000_000, counts=[96])),
    "planes.ome.tif": _tiff(
        _rgb_tags(16, text=_ome('SizeX="16" SizeY="16" SizeC="3" SizeZ="1" SizeT="999999999"/>'))
    ),
    "images.ome.tif": _tiff(
        _rgb_tags(
            16,
            text=_ome(
                'SizeX="16" SizeY="16" SizeC="3" SizeZ="1" SizeT="1"><TiffData/></Pixels>', 50_000
            ),
        )
    ),
    "not-deflated.tif": _tiff(_rgb_tags(64, tile=[64], compression=[8], counts=[100]), bytes(200)),
    "tile-size.tif": _tile_of_another_size,
    "rubbish.tif": _tile(7, _jpeg_after_rubbish),
    "two-in-one.tif": _tile(34712, _jp2_with_another_inside),
    "png-tile.tif": _tile(34933, lambda: _coded("png", 15_000, level=9)),
    "webp-tile.tif": _tile(50001, lambda: _coded("webp", 16_000, lossless=True)),
    "lerc-tile.tif": _tile(34887, lambda: _coded("lerc", 12_000)),
    "jpeg-xr-tile.tif": _tile(34934, lambda: _coded("jpegxr", 4000)),
    "wide-values.tif": _same_tile(19_968, 16, 64),
    "precise.tif": _same_tile(19_968, 3, 64),
    "wide-palette.tif": _same_tile(9984, 16, 8, photometric=3),
    "nested.ome.tif": _tiff(
        _rgb_tags(16, text=_ome("/>" + "<a>" * 1_000_000 + "</a>" * 1_000_000))
    ),
    "entities.ome.tif": _tiff(
        _rgb_tags(
            16,
            text=b'<?xml version="1.0"?><!DOCTYPE OME [<!ENTITY a "'
            + b"x" * 60_000
            + b'">]>'
            + _ome("/>" + "&a;" * 9000).partition(b"?>")[2],
        )
    ),
    "large.png": write_png(9500, 9500),
    "narrow.png": write_png(1, 170_000_000),
    "scans.jpg": _jpeg_of_many_scans,
    "digits.ppm": _text("P3 1300 1300 255\n" + "#\n" * 2_400_000),
    "endless.tiles": _endless_tiles,
    "classes.annotations.json": _text(_annotations(100_000, 60_000)),
    "id.annotations.json": _text(_annotations(1, 1).replace('"id": 0', f'"id": {2**80}')),
    "stains.preset.json": _text(_preset(100_000, "s", [1, 1, 1])),
    "long-name.preset.json": _text(_preset(1, "s" * 100_000, [0, 0, 0])),
    "names.review.json": _text(_decisions(120_000)),
    "huge.review.json": _text(_decisions(1).replace("[[1,", f"[[{_HUGE},")),
    "huge.preset.json": _text(_preset(1, "s", [1, 1, 1]).replace("[1,", f"[{_HUGE},")),
    "huge.json": _text(_coco(1, 1).replace('"id": 0', f'"width": {_HUGE}, "height": 9, "id": 0')),
    "small-floats.normalizer.safetensors": _small_floats,
    "merged.yaml": _text(
        "a: &a {" + ", ".join(f"k{k}: 1" for k in range(30_000)) + "}\n"
        "names:\n" + "- {<<: *a}\n" * 30_000
    ),
    "types.cells.csv": _text(
        CELLS + "".join(f"a,train,s,t{k},0,0,9,9,0,0,20,20,True\n" for k in range(80_000))
    ),
    "cells-too-many.crops.csv": _text(
        "file,split,source,x,y,width,height,size,counts\na,train,s,0,0,9,9,64,0:1,1,2,3\n"
    ),
    "cells-too-few.cells.csv": _text(CELLS + "a\n"),
    "two-heads.layout.yaml": _text(
        '{"nc": 2, "backbone": [[-1, 1, "Conv", [8, 3, 4]], [-1, 1, "Conv", [8, 3, 2]]], '
        '"head": [[-1, 1, "C2f", [8]], [[1, 2], 2, "Detect", ["nc"]]]}'
    ),
    "enlarged.onnx": write_onnx(
        [("Resize", ["x", "", "s"], ["a"], {"mode": "nearest"}), _convolution("a", "y")],
        {"s": [1.0, 1.0, 300.0, 300.0]},
    ),
    "doubled.onnx": write_onnx(
        [
            *(
                ("Concat", [f"a{k}" if k else "x"] * 2, [f"a{k + 1}"], {"axis": 2})
                for k in range(20)
            ),
            ("MaxPool", ["a20"], ["y"], {"kernel_shape": [1, 1], "strides": [2**20, 1]}),
        ]
    ),
    "loop.onnx": _onnx_loop,
    "constant.onnx": write_onnx(
        [
            ("ConstantOfShape", ["s"], ["a"], {}),
            ("Add", ["x", "a"], ["y"], {}),
        ],
        {"s": [100_000, 3, 64, 64]},
    ),
    "elsewhere.onnx": _onnx_elsewhere,
    "dimensions.tif": _tiff(
        _rgb_tags(16, text=b'{"shape": [' + b"1," * 1_000_000 + b"16, 16, 3]}\0")
    ),
    "nested.yaml": _text("- " * 100_000),
    "nested.layout.yaml": _text("[" * 100_000),
    "long.layout.yaml": _text("a: [1" + ", 1" * 1_500_000 + "]"),
    "laughs.yaml": _text(
        "a0: &a0 [x]\n"
        + "".join(f"a{k}: &a{k} [{f'*a{k - 1},' * 9}]\n" for k in range(1, 12))
        + "names: *a11\n"
    ),
}
"""Writers by the name of the file."""


# --- small files that cost much, in families ------------------------------------------------------


def _chain(lengths: list[int], tags: int, back: int) -> Callable[[Path], None]:
    """Pages of so many tags each, the last of which is followed by the one numbered `back`."""

    def write(path: Path) -> None:
        data, places = bytearray(b"II*\0" + struct.pack("<I", 8)), []
        for k in range(lengths[0]):
            places.append(len(data))
            entries = {256: [16 + k % 9], 257: [16]} | {60_000 + n: [n] for n in range(tags)}
            data += _page(entries, 0)[0]
            last = k == lengths[0] - 1
            data += struct.pack("<I", places[back] if last else len(data) + 4)
        path.write_bytes(data)

    return write


def _shared_values(tags: int, count: int, kind: int) -> Callable[[Path], None]:
    """A page whose tags have all the same values."""

    def write(path: Path) -> None:
        known = _rgb_tags(64)
        page, values = _page(known, 8 + 12 * tags)
        begin = 8 + 2 + 12 * (len(known) + tags) + 4
        entries = page[2:] + b"".join(
            struct.pack("<HHII", 279, kind, count, begin) for n in range(tags)
        )
        head = struct.pack("<H", len(known) + tags)
        path.write_bytes(b"II*\0" + struct.pack("<I", 8) + head + entries + bytes(4) + values)
        with path.open("ab") as file:
            file.write(bytes(count * {1: 1, 3: 2, 4: 4, 12: 8}[kind]))

    return write


def _overlapping(pages: int, step: int, tags: int) -> Callable[[Path], None]:
    """Pages that begin one within the other, so that each has the tags of the next, too."""

    def write(path: Path) -> None:
        data = bytearray(8 + (pages + tags) * max(step, 12) + 64)
        data[:8] = b"II*\0" + struct.pack("<I", 8)
        for k in range(pages):
            at = 8 + k * step
            struct.pack_into("<H", data, at, tags)
            end = at + 2 + 12 * tags
            if end + 4 <= len(data):
                struct.pack_into("<I", data, end, at + step if k < pages - 1 else 0)
        path.write_bytes(data)

    return write


def _subpages(count: int, same: bool) -> Callable[[Path], None]:
    """A page of many pages below it, which are itself or one after the other."""
    return _tiff(_rgb_tags(16, pages=[8 if same else 8 + 2 * k for k in range(count)], counts=[96]))


def _one_chunk(codec: str, number: int, side: int, tiles: int = 1) -> Callable[[Path], None]:
    """A black TIFF in tiles that are all the same bytes, compressed without pictures' ways."""

    def write(path: Path) -> None:
        import imagecodecs

        coded = bytes(getattr(imagecodecs, f"{codec}_encode")(bytes(3 * side * side)))
        tags = _rgb_tags(side * tiles, tile=[side], compression=[number])
        tags |= {324: [8] * tiles**2, 325: [len(coded)] * tiles**2}
        page, values = _page(tags, 8)
        tags[324] = [8 + len(page) + 4 + len(values)] * tiles**2
        _tiff(tags, coded)(path)

    return write


def _jpeg2000(side: int, exponent: int, levels: int, components: int = 3, tile: int = 0) -> bytes:
    """A JPEG 2000 of a header alone, with precincts of 2 ** exponent pixels."""
    place = (side, side, 0, 0, tile or side, tile or side, 0, 0)
    size = struct.pack(">H8IH", 0, *place, components) + b"\7\1\1" * components
    precincts = bytes([exponent * 17] * (levels + 1))
    style = struct.pack(">BBHBBBBBB", 1, 0, 1, 0, levels, 4, 4, 0, 1) + precincts
    steps = bytes([0x40] + [0x40] * (3 * levels + 1))
    parts = ((0x51, size), (0x52, style), (0x5C, steps))
    head = b"".join(struct.pack(">BBH", 255, k, len(p) + 2) + p for k, p in parts)
    return b"\xff\x4f" + head + struct.pack(">BBHHIBB", 255, 0x90, 10, 0, 0, 0, 1) + b"\xff\x93\0\0"


def _scans(side: int, scans: int, progressive: bool, kinds: int = 3) -> bytes:
    """A JPEG in which the passes over all pixels come again and again."""
    import io

    from PIL import Image

    Image.new("RGB", (side, side)).save(
        kept := io.BytesIO(), "JPEG", progressive=progressive, quality=1
    )
    data = kept.getvalue()
    last = data.rfind(b"\xff\xda")
    scan = data[last:-2]
    if not progressive:  # a pass of one component, which ends before its pixels do
        scan = b"\xff\xda\0\x08\x01\x01\0\0\x3f\0" + b"\0" * 4
    return data[:-2] + scan * scans + data[-2:]


def _bmp(width: int, height: int, bits: int, data: bytes = b"\0\1") -> Callable[[Path], None]:
    """A run-length BMP of so many pixels, in a few bytes."""
    colours = bytes(4 * 2**bits)
    head = struct.pack(
        "<IiiHHIIiiII", 40, width, height, 1, bits, 1 if bits == 8 else 2, 0, 1, 1, 0, 0
    )
    start = struct.pack("<2sIHHI", b"BM", 54 + len(colours) + len(data), 0, 0, 54 + len(colours))
    return lambda path: path.write_bytes(start + head + colours + data) and None


def _picture(kind: str, side: int, mode: str = "RGB", pad: int = 0, **options) -> Callable:
    """A black picture, followed by so many bytes of nothing."""

    def write(path: Path) -> None:
        from PIL import Image

        Image.new(mode, (side, side)).save(path, kind, **options)
        with path.open("ab") as file:
            file.write(bytes(pad))

    return write


def _film(kind: str, frames: int, side: int) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        from PIL import Image

        shown = [Image.new("L", (side, side), k % 250).convert("P") for k in range(frames)]
        shown[0].save(path, kind, save_all=True, append_images=shown[1:])

    return write


def _tga(width: int, height: int, data: bytes) -> Callable[[Path], None]:
    head = struct.pack("<BBBHHBHHHHBB", 0, 0, 10, 0, 0, 0, 0, 0, width, height, 24, 0x20)
    return lambda path: path.write_bytes(head + data) and None


def _wide_layout(channels: int, kernel: int, layers: int, name: str = "Conv") -> str:
    row = [-1, 1, name, [channels, kernel, 2] if name == "Conv" else [channels]]
    first = [-1, 1, "Conv", [channels, 3, 8]]
    rows = [first, [-1, 1, "Conv", [8, 3, 2]], [-1, 1, "Conv", [channels, 3, 1]], *[row] * layers]
    head = [[-1, 1, "Conv", [8, 1, 1]], [[-1], 1, "Detect", ["nc"]]]
    return json.dumps({"nc": 2, "backbone": rows, "head": head})


def _written(make: Callable[[], bytes | str]) -> Callable[[Path], None]:
    """What a function returns, as a file."""

    def write(path: Path) -> None:
        data = make()
        path.write_bytes(data.encode() if isinstance(data, str) else data)

    return write


def _strip(codec: str, number: int, side: int, bits: int = 8, **more) -> Callable[[Path], None]:
    """A black TIFF in one strip."""

    def write(path: Path) -> None:
        import imagecodecs

        raw = bytes(3 * side * side * bits // 8)
        coded = bytes(getattr(imagecodecs, f"{codec}_encode")(raw, **more))
        tags = _rgb_tags(side, compression=[number], counts=[len(coded)], bits=[bits] * 3)
        tags |= {339: [1 if bits < 32 else 3] * 3}
        page, values = _page(tags, 8)
        tags[273] = [8 + len(page) + 4 + len(values)]
        _tiff(tags, coded)(path)

    return write


def _onnx(kind: str, times: int) -> Callable[[Path], None]:
    """A generator that enlarges, doubles, fills, or looks far."""
    resized = ("Resize", ["x", "", "s"], ["a"], {"mode": "nearest"})
    scale = {"s": [1.0, 1.0, float(times), float(times)]}
    if kind == "enlarged":
        return write_onnx([resized, _convolution("a", "y")], scale)
    if kind == "filled":
        layers = [("ConstantOfShape", ["s"], ["a"], {}), ("Add", ["x", "a"], ["y"], {})]
        return write_onnx(layers, {"s": [times * 1000, 3, 64, 64]})
    doubled = [
        ("Concat", [f"a{k}" if k else "x"] * 2, [f"a{k + 1}"], {"axis": 1}) for k in range(times)
    ]
    return write_onnx(
        [*doubled, ("Slice", [f"a{times}", "b", "e", "c"], ["y"], {})],
        {"b": [0], "e": [3], "c": [1]},
    )


def _rows(kind: str, count: int) -> str:
    """Boxes each of which has a column, a class, or a list of its own."""
    if kind == "columns":
        return _coco(1, 1, [{f"only {k}": k} for k in range(count)])
    if kind == "lists":
        return '{"images": [' + "[]," * count + "[]]}"
    if kind == "header":
        return "class,x1,y1,x2,y2," + ",".join(f"c{k}" for k in range(count)) + "\na,0,0,1,1\n"
    if kind == "cells":
        header = "class,x1,y1,x2,y2," + ",".join(f"c{k}" for k in range(999)) + "\n"
        return header + ("a,0,0,1,1" + "," * 999 + "\n") * (count // 1000)
    if kind == "words":
        return "0 .5 .5 .1 .1 " + "1 " * count
    return '<annotation><object a="' + '"/><a b="' * count + '"/></object></annotation>'


_JPEG, _J2K = 7, 34712
SMALL: dict[str, dict[str, Callable[[Path], None]]] = {
    "loops": {
        f"{n}-{tags}-{back}.tif": _chain([n], tags, back)
        for n, tags, back in [
            (1, 0, 0),
            (2, 5, 1),
            (50, 3, 7),
            (99, 0, 98),
            (101, 0, 50),
            (200, 12, 150),
            (1000, 0, 500),
            (1000, 30, 999),
            (1300, 0, 700),
            (9000, 2, 4500),
        ]
    },
    "values": {
        f"{n}-{count}-{kind}.tif": _shared_values(n, count, kind)
        for n, count, kind in [
            (4000, 100, 4),
            (4000, 1000, 4),
            (4000, 10_000, 4),
            (4000, 100_000, 1),
            (3000, 9000, 12),
            (3000, 50_000, 3),
            (1000, 100_000, 4),
            (500, 200_000, 4),
            (4000, 60_000, 12),
            (100, 240_000, 4),
        ]
    },
    "overlapping": {
        f"{n}-{step}-{tags}.tif": _overlapping(n, step, tags)
        for n, step, tags in [
            (100, 12, 50),
            (1000, 12, 500),
            (5000, 12, 3000),
            (9999, 12, 4000),
            (9000, 2, 9),
            (9000, 14, 4000),
            (500, 24, 4000),
            (9999, 24, 100),
            (9999, 6, 1000),
            (3000, 12, 2000),
        ]
    },
    "below": {
        f"{n}-{same}.tif": _subpages(n, same)
        for n in (100, 3000, 9000, 60_000, 240_000)
        for same in (False, True)
    },
    "same": {
        f"{codec}-{side}-{tiles}.tif": _one_chunk(codec, number, side, tiles)
        for codec, number, side, tiles in [
            ("deflate", 8, 512, 40),
            ("deflate", 8, 256, 200),
            ("zstd", 50000, 512, 60),
            ("zstd", 50000, 64, 200),
            ("lzw", 5, 512, 60),
            ("lzw", 5, 256, 80),
            ("lzma", 34925, 512, 60),
            ("zstd", 50000, 1024, 100),
            ("deflate", 8, 2048, 20),
            ("zstd", 50000, 4096, 12),
        ]
    },
    "chunks": {
        f"{codec}-{side}.tif": _strip(codec, number, side)
        for codec, number, side in [
            ("deflate", 8, 9000),
            ("deflate", 8, 16_000),
            ("zstd", 50000, 9000),
            ("zstd", 50000, 19_000),
            ("lzma", 34925, 12_000),
            ("lzw", 5, 8000),
            ("deflate", 8, 5000),
            ("zstd", 50000, 14_000),
            ("deflate", 8, 12_000),
            ("zstd", 50000, 17_000),
        ]
    },
    "precincts": {
        f"{side}-{exponent}-{levels}{kind}": write(_jpeg2000(side, exponent, levels))
        for kind, write in (
            (".jp2", lambda d: _written(lambda: d)),
            (".tif", lambda d: _tile(_J2K, lambda: d)),
        )
        for side, exponent, levels in [
            (1000, 0, 0),
            (2000, 1, 1),
            (2500, 0, 0),
            (4000, 1, 5),
            (6000, 2, 2),
        ]
    },
    "passes": {
        f"{side}-{n}-{progressive}.jpg": _written(
            lambda side=side, n=n, progressive=progressive: _scans(side, n, progressive)
        )
        for side, n in [(500, 20_000), (2000, 5000), (4000, 2000), (4000, 35), (6000, 35)]
        for progressive in (False, True)
    },
    "passes of a tile": {
        f"{side}-{n}-{progressive}.tif": _tile(
            _JPEG, lambda side=side, n=n, progressive=progressive: _scans(side, n, progressive)
        )
        for side, n in [(64, 40_000), (512, 20_000), (1500, 5000), (2000, 1000), (2000, 49)]
        for progressive in (False, True)
    },
    "runs": {
        f"{width}-{height}-{bits}.bmp": _bmp(width, height, bits, data)
        for width, height, bits, data in [
            (9000, 9000, 8, b"\0\1"),
            (13_000, 13_000, 8, b"\0\1"),
            (5000, 5000, 4, b"\0\1"),
            (60_000, 2900, 8, b"\0\0" * 2900),
            (3000, 3000, 8, b"\0\2\1\1" * 9000),
            (100, 1_000_000, 8, b"\0\1"),
            (999_999, 170, 8, b"\0\0" * 170),
            (8000, 8000, 8, b"\xff\0" * 250_000),
            (12_000, 9000, 4, b"\0\0" * 9000),
            (4000, 4000, 8, b"\0\0" * 4000),
        ]
    },
    "pictures": {
        "9500.png": write_png(9500, 9500),
        "13000.png": write_png(13_000, 13_000),
        "narrow.png": write_png(900_000, 150),
        "7000.webp": _picture("WEBP", 7000, lossless=True),
        "12000.webp": _picture("WEBP", 12_000),
        "9000.gif": _picture("GIF", 9000, "P"),
        "frames.gif": _film("GIF", 3000, 16),
        "frames.webp": _film("WEBP", 300, 64),
        "8000.jpg": _picture("JPEG", 8000, quality=1),
        "9000.jp2": _picture("JPEG2000", 7000),
    },
    "padded": {
        **{f"{side}.png": _picture("PNG", side, pad=500_000) for side in (5000, 11_000, 13_000)},
        **{f"{side}.webp": _picture("WEBP", side, pad=700_000) for side in (5000, 12_000)},
        **{f"{side}.jp2": _picture("JPEG2000", side, pad=900_000) for side in (2000, 7000)},
        "9000.tga": _tga(9000, 9000, b"\xff\0\0\0" * 200_000),
        "13000.tga": _tga(13_000, 13_000, b"\xff\0\0\0" * 250_000),
        "12000.jpg": _picture("JPEG", 12_000, quality=1, progressive=True),
    },
    "weights": {
        f"{channels}-{kernel}-{layers}-{name}.layout.yaml": _text(
            _wide_layout(channels, kernel, layers, name)
        )
        for channels, kernel, layers, name in [
            (8192, 3, 1, "Conv"),
            (8192, 16, 4, "Conv"),
            (4096, 7, 3, "Conv"),
            (2048, 9, 2, "Conv"),
            (8192, 1, 9, "Conv"),
            (8192, 1, 1, "C2f"),
            (4096, 1, 5, "C3"),
            (8192, 1, 1, "SPPF"),
            (2048, 1, 60, "C2f"),
            (8192, 1, 1, "PSA"),
        ]
    },
    "layers": {
        f"{kind}-{times}.onnx": _onnx(kind, times)
        for kind, times in [
            ("enlarged", 20),
            ("enlarged", 100),
            ("enlarged", 300),
            ("doubled", 10),
            ("doubled", 14),
            ("doubled", 20),
            ("filled", 5),
            ("filled", 30),
            ("filled", 100),
            ("enlarged", 50),
        ]
    },
    "rows": {
        f"{kind}-{count}.{suffix}": _text(_rows(kind, count))
        for kind, count, suffix in [
            ("columns", 5000, "json"),
            ("columns", 10_000, "json"),
            ("lists", 300_000, "json"),
            ("header", 100_000, "csv"),
            ("cells", 900_000, "csv"),
            ("words", 450_000, "txt"),
            ("tags", 100_000, "xml"),
            ("header", 5000, "csv"),
            ("columns", 1000, "json"),
            ("lists", 1000, "json"),
        ]
    },
}
"""150 files of up to a megabyte by family: each is small, and asks for much in its own way."""


def small_files(folder: Path) -> list[Path]:
    """Those of SMALL."""
    paths = []
    for family, writers in SMALL.items():
        (folder / family).mkdir(parents=True)
        for name, write in writers.items():
            paths.append(folder / family / name)
            write(paths[-1])
    return paths
