"""Export of a detector: the program in its README, without this package, finds the same boxes."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from discs import SIZES, enlivened
from napari_beerlanet.cli import common
from napari_beerlanet.cli.main import main
from napari_beerlanet.core.checkpoints.export import export_detector
from napari_beerlanet.core.detection.detector import Detector
from napari_beerlanet.core.detection.network import StainDetectionModel
from napari_beerlanet.samples import blood_smear
from tinydata import MODEL, NAMES


def detector(front_end="beerlanet"):
    """An untrained network whose scores are anywhere from 0 to 1."""
    torch.manual_seed(1)
    network = StainDetectionModel(dict(MODEL), nc=3, imgsz=128, front_end=front_end)
    if front_end == "beerlanet":
        network.fit_mix()
    enlivened(network, blood_smear((128, 128), seed=9, cell_diameter=40.0).image)
    info = {"classes": list(NAMES), "image_size": 128, "object_sizes": SIZES, "name": "tiny"}
    return Detector(network, info)


@pytest.fixture(scope="module")
def image():
    return blood_smear((100, 150), seed=2, cell_diameter=40.0).image


def readme_program(folder):
    """The program in a README, loaded as if it stood beside it."""
    text = (folder / "README.md").read_text(encoding="utf-8")
    code = text.split("```python\n")[1].split("```")[0]
    program = {"__name__": "run", "__file__": str(folder / "run.py")}
    exec(compile(code, "README.md", "exec"), program)
    return code, program


@pytest.mark.parametrize(
    ("format", "front_end"),
    [("onnx", "beerlanet"), ("onnx", "none"), ("onnx", "grey"), ("openvino", "beerlanet")],
)
def test_the_program_of_the_readme_finds_our_boxes(tmp_path, image, format, front_end):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime" if format == "onnx" else "openvino")
    model = detector(front_end)
    files = export_detector(model, tmp_path / "out", format)
    names = {"onnx": ["network.onnx"], "openvino": ["network.bin", "network.xml"]}[format]
    assert [path.name for path in files] == sorted(["README.md", "model.json", *names])
    ours = model.detect(image, 0.1, object_size=40.0)
    assert ours.report["scale"] == 1.0
    _, program = readme_program(tmp_path / "out")
    boxes, scores, labels = program["detect"](image, 0.1)
    assert len(boxes) == len(ours) > 10
    order, expected = np.argsort(-scores), np.argsort(-ours.scores)
    np.testing.assert_allclose(boxes[order], ours.xyxy[expected], atol=0.1)
    np.testing.assert_allclose(scores[order], ours.scores[expected], atol=1e-3)
    np.testing.assert_array_equal(labels[order], ours.labels[expected])


def test_the_packaged_model_runs_without_this_package(tmp_path, capsys, image):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    assert main(["export", "blood-cells", "--format", "onnx", "--out", str(tmp_path)]) == 0
    assert str(tmp_path / "network.onnx") in capsys.readouterr().out
    code, _ = readme_program(tmp_path)
    (tmp_path / "run.py").write_text(code)
    Image.fromarray(blood_smear((320, 416), seed=3).image).save(tmp_path / "field.png")
    command = [sys.executable, "-I", str(tmp_path / "run.py"), str(tmp_path / "field.png")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    from napari_beerlanet import load_checkpoint
    from napari_beerlanet.core.detection.object_sizes import reference_size

    model = load_checkpoint("blood-cells", "cpu")
    size = reference_size(model.info)
    pixels = np.asarray(Image.open(tmp_path / "field.png"))
    ours = model.detect(pixels, object_size=size)
    rows = [line.split() for line in done.stdout.splitlines()]
    assert len(rows) == len(ours) > 3
    assert sorted(row[0] for row in rows) == sorted(ours.names[k] for k in ours.labels)
    theirs = np.array([row[2:] for row in rows], float)
    near = np.abs(theirs[:, None] - ours.xyxy).max(2) < 0.2
    assert near.any(0).all()


def test_the_front_end_is_data(tmp_path):
    pytest.importorskip("onnx")
    model = detector()
    export_detector(model, tmp_path)
    stored = json.loads((tmp_path / "model.json").read_text())
    front = stored["front_end"]
    np.testing.assert_allclose(front["map_weight"], model.network.mix.weight.detach().flatten(1))
    np.testing.assert_allclose(front["spectra"], model.network.stain.spectra.detach())
    assert stored["classes"] == list(NAMES)


def test_a_signal_leaves_nothing_behind(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        "napari_beerlanet.core.checkpoints.export._write_onnx",
        lambda network, path: (path.write_bytes(b"half"), common.received_signals.append(2)),
    )
    assert main(["export", "blood-cells", "--out", str(tmp_path / "out")]) == 130
    assert not (tmp_path / "out").exists()
    assert "interrupted" in capsys.readouterr().err


def test_what_cannot_be_exported_is_one_sentence(tmp_path, capsys):
    assert main(["export", "white-cells", "--out", str(tmp_path / "out")]) == 2
    assert "a classifier, where a detector is needed" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "none.safetensors"), "--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no such file" in line
    (tmp_path / "file").write_text("")
    assert main(["export", "blood-cells", "--out", str(tmp_path / "file")]) == 2
    with pytest.raises(ValueError, match="LStainNorm in front of it, which cannot be exported"):
        export_detector(detector("lstainnorm"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
