"""Image files of every odd kind in `evaluate`, `fine_tune` and `classify`: a result or a sentence.

The same table for all: what is good is used, what is not is named with what is wrong with it.
"""

import os
import re
import shutil
import struct
import zlib

import numpy as np
import pytest
import tifffile
import torch
from imagecodecs import png_encode
from PIL import Image

from napari_beerlanet.cli import main
from napari_beerlanet.core.checkpoints.checkpoint import save_checkpoint
from napari_beerlanet.core.checkpoints.serialize import describe_network
from napari_beerlanet.core.common.storage import DataError
from napari_beerlanet.core.detection.detector import Detector
from napari_beerlanet.core.detection.network import StainDetectionModel
from napari_beerlanet.core.evaluation.dataset import evaluate
from napari_beerlanet.core.training.fine_tune import fine_tune
from napari_beerlanet.core.training.train_classifier import train_classifier
from napari_beerlanet.samples import blood_smear
from tinyclasses import SMALL, tiny_classifier, write_classes
from tinydata import MODEL, NAMES, write_smears

PIXELS = blood_smear((64, 64), seed=3, cell_diameter=24, white_cells=0.2).image
DEEP = PIXELS.astype(np.uint16) * 257
ALPHA = np.full((64, 64, 1), 255, np.uint8)
FLOAT = PIXELS.astype(np.float32) / 255


def save(mode=None, frames=1):
    """A writer of a picture by Pillow."""

    def write(path):
        image = Image.fromarray(PIXELS).convert(mode)
        others = [image.rotate(90 * k) for k in range(1, frames)]
        image.save(path, **({"append_images": others, "save_all": True} if others else {}))

    return write


def png(pixels):
    return lambda path: path.write_bytes(png_encode(pixels))


def tiff(pixels):
    return lambda path: tifffile.imwrite(path, pixels, photometric="rgb")


def cut(path):
    Image.fromarray(PIXELS).save(path)
    path.write_bytes(path.read_bytes()[:700])


def huge_png(path):
    """It says that it has 3.6 gigapixels."""
    data = bytearray(png_encode(PIXELS))
    data[16:24] = struct.pack(">II", 60_000, 60_000)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    path.write_bytes(data)


def huge_tiff(path):
    """It says that it has 16 billion gigapixels."""
    tifffile.imwrite(path, PIXELS, photometric="rgb", tile=(16, 16), bigtiff=True)
    with tifffile.TiffFile(path, mode="r+b") as file:
        for name in ("ImageWidth", "ImageLength"):
            file.pages[0].tags[name].overwrite(4_000_000_000)


def exif_turned(path):
    image = Image.fromarray(PIXELS)
    turned = image.getexif()
    turned[0x0112] = 6
    image.save(path, exif=turned)


GOOD = {
    "16 bit.png": png(DEEP),
    "alpha.png": png(np.dstack([PIXELS, ALPHA])),
    "alpha 16 bit.png": png(np.dstack([DEEP, ALPHA.astype(np.uint16) * 257])),
    "float.tif": tiff(FLOAT),
    "palette.gif": save(mode="P"),
    "turned.jpg": exif_turned,
    "black.png": png(np.zeros((64, 64, 3), np.uint8)),
    "narrow.png": png(PIXELS[:, :11].copy()),
}
BAD = {
    "grey.png": (save(mode="L"), "a grey image has no colours"),
    "float 255.tif": (tiff(FLOAT * 255), "do not say what white is"),
    "nan.tif": (tiff(np.where(FLOAT > 0.5, np.nan, FLOAT)), "NaN or infinite"),
    "signed.tif": (tiff(PIXELS.astype(np.int16)), "Unsupported type of values"),
    "empty.png": (lambda path: path.touch(), "the file is empty"),
    "cut.jpg": (cut, "damaged or cut short"),
    "moving.gif": (save(frames=2), "2 images in one"),
    "cmyk.jpg": (save(mode="CMYK"), "stored as CMYK"),
    "huge.png": (huge_png, "too many pixels|damaged or cut short"),
    "huge.tif": (huge_tiff, "damaged or cut short|more than the 400 million"),
    "folder.png": (lambda path: path.mkdir(), "a folder, not an image file"),
    "text.png": (lambda path: path.write_text("a picture"), "not an image of a known format"),
    "photo.heic": (lambda path: path.write_bytes(b"\0\0\0\x18ftypheic"), "not an image"),
    "lost.png": (lambda path: path.symlink_to(path.parent / "gone"), "there is no such file"),
    "pipe.png": (lambda path: os.mkfifo(path), "not a regular file"),
    "locked.png": (lambda path: (png(PIXELS)(path), path.chmod(0)), "no permission"),
}
TINY = {"one pixel.png": png(PIXELS[:1, :1].copy())}

FAILED = {"run.json", "progress.jsonl", "start.safetensors", ".lock"}
"""Files of a run that has not begun; with better data it can be resumed."""

pytestmark = pytest.mark.skipif(os.name == "nt", reason="links and pipes of Unix")


def skip_where_root_may_all(name):
    if name == "locked.png" and os.geteuid() == 0:
        pytest.skip("root may read everything")


@pytest.fixture(scope="module")
def detector():
    torch.manual_seed(0)
    network = StainDetectionModel(MODEL, nc=3, imgsz=64)
    network.fit_mix()
    return Detector(network, describe_network(network, "tiny", list(NAMES), 64))


@pytest.fixture(scope="module")
def classifier():
    return tiny_classifier(SMALL)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A good dataset for a detector, and one for a classifier."""
    folder = tmp_path_factory.mktemp("plain")
    write_smears(folder / "boxes", 2, 2, 64)
    write_classes(folder / "crops", 3)
    return folder


@pytest.fixture
def data(plain, tmp_path):
    shutil.copytree(plain, tmp_path / "data")
    return tmp_path / "data"


def add(data, name, write, split="val"):
    """Add a file to both datasets."""
    write(data / "boxes" / "images" / split / name)
    label = (data / "boxes" / "labels" / split / name).with_suffix(".txt")
    label.write_text("0 0.5 0.5 0.4 0.4\n")
    write(data / "crops" / "dark" / name)


def test_what_is_odd_and_good_is_used(data, detector, classifier, tmp_path):
    """One training of an epoch has them all."""
    for name, write in GOOD.items():
        add(data, f"v {name}", write)
    measured = evaluate(detector, data / "boxes" / "data.yaml")
    assert measured["images"] == 2 + len(GOOD)
    assert 0 <= measured["mAP50"] <= 1
    types = evaluate(classifier, data / "crops", "all")
    assert types["images"] == 6 + len(GOOD)
    shutil.rmtree(data / "boxes" / "images" / "val")
    shutil.rmtree(data / "boxes" / "labels" / "val")
    write_smears(data / "boxes", 2, 2, 64)
    for name, write in GOOD.items():
        add(data, f"t {name}", write, "train")
    trained = fine_tune(
        detector, data / "boxes" / "data.yaml", tmp_path / "run", scope="head", epochs=1,
        image_size=64, batch=4, device="cpu", repeats=1,
    )  # fmt: skip
    assert all(torch.isfinite(p).all() for p in trained.network.parameters())


@pytest.mark.parametrize("name", [*BAD, *TINY])
def test_what_cannot_be_used_is_named_and_nothing_is_learned(
    data, detector, classifier, tmp_path, name
):
    skip_where_root_may_all(name)
    write, said = BAD.get(name) or (TINY[name], "only 1 × 1 pixels")
    add(data, name, write)
    yaml, out = data / "boxes" / "data.yaml", tmp_path / "out"
    calls = {
        "boxes": [
            lambda: evaluate(detector, yaml),
            lambda: fine_tune(detector, yaml, out / "a", epochs=1, device="cpu"),
        ],
        "crops": [
            lambda: evaluate(classifier, data / "crops", "all"),
            lambda: train_classifier(data / "crops", out / "b", SMALL, epochs=1, device="cpu"),
        ],
    }
    for kind, both in calls.items():
        for call in both:
            with pytest.raises(DataError) as caught:
                call()
            lines = str(caught.value).splitlines()
            assert lines[0].endswith("cannot be used:")
            assert [line for line in lines[1:] if name in line] == lines[1:], kind
            assert len(lines) == 2
            assert re.search(said, lines[1]), lines[1]
            assert lines[1].endswith(".")
    assert {path.name for path in out.rglob("*.*")} <= FAILED


def test_classify_says_what_it_cannot_read_and_does_the_rest(data, classifier, tmp_path, capsys):
    bad = {name: rule for name, rule in BAD.items() if name != "photo.heic"}  # not looked for
    if os.geteuid() == 0:
        del bad["locked.png"]
    folder = tmp_path / "crops"
    folder.mkdir()
    for name, write in {**GOOD, **TINY}.items():
        write(folder / name)
    for name, (write, _) in bad.items():
        write(folder / name)
    save_checkpoint(classifier, tmp_path / "types.safetensors")
    command = ["classify", folder, "--model", tmp_path / "types.safetensors", "--quiet"]
    command += ["--out", tmp_path / "out", "--device", "cpu"]
    assert main.main([str(word) for word in command]) == 1
    lines = capsys.readouterr().err.splitlines()
    for name, (_, said) in bad.items():
        if name == "folder.png":  # a subfolder, which nobody has asked for
            continue
        (line,) = [line for line in lines if f"{name}:" in line]
        assert re.search(said, line), line
    table = (tmp_path / "out" / "types.csv").read_text().splitlines()
    assert len(table) == 1 + len(GOOD) + len(TINY)
