"""`detect` and `evaluate` on real files with the packaged model, and that model itself."""

import json

import numpy as np
import pandas as pd
import pytest
from PIL import Image

import napari_beerlanet as nb
from napari_beerlanet.cli.main import main
from napari_beerlanet.core.boxes.classes import class_colours
from napari_beerlanet.core.boxes.matching import match_boxes
from napari_beerlanet.core.checkpoints import checkpoint
from napari_beerlanet.core.checkpoints.checkpoint import packaged_models, read_info
from napari_beerlanet.core.checkpoints.info import limits_text
from napari_beerlanet.core.formats import read_detections
from napari_beerlanet.samples import blood_smear
from tinydata import write_smears


@pytest.fixture(scope="module")
def smear():
    return blood_smear((480, 640), seed=3)


@pytest.fixture(scope="module")
def model():
    return nb.load_checkpoint("blood-cells", device="cpu")


def run(*arguments: object) -> int:
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as end:
        return int(end.code or 0)


@pytest.fixture(scope="module")
def done(smear, tmp_path_factory):
    """A folder with two images, one broken file, and what `detect` made of them."""
    folder = tmp_path_factory.mktemp("images")
    Image.fromarray(smear.image).save(folder / "smear one.png")
    Image.fromarray(np.full((64, 64, 3), 230, np.uint8)).save(folder / "empty.png")
    (folder / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n and no more")
    out = folder / "out"
    assert run("detect", folder, "--out", out, "--device", "cpu") == 1
    return folder, out


def test_all_formats_hold_the_same_boxes(done, smear):
    _, out = done
    shape = smear.image.shape[:2]
    table = pd.read_csv(out / "smear one.detections.csv")
    assert len(table) > 5
    channels = {"Model channel 1 mean", "Model channel 8 sum"}
    assert {"class", "confidence", "x1", *channels} <= set(table.columns)
    geo = read_detections(out / "smear one.detections.geojson")
    text = read_detections(
        out / "yolo" / "smear one.txt", image_shape=shape, names=["RBC", "WBC", "Platelets"]
    )
    for found in (geo, text):
        assert len(found) == len(table)
        corners = table[["x1", "y1", "x2", "y2"]].to_numpy()
        np.testing.assert_allclose(found.xyxy, np.clip(corners, 0, None), atol=0.02)
    with Image.open(out / "smear one.overlay.png") as picture:
        assert picture.size == (640, 480)
    record = json.loads((out / "smear one.detections.json").read_text())
    assert sum(record["counts"].values()) == len(table)
    assert record["found"]["object_size"] > 0


def test_an_empty_slide_gives_empty_files(done):
    _, out = done
    assert len(pd.read_csv(out / "empty.detections.csv")) == 0
    assert (out / "yolo" / "empty.txt").read_text() == ""


def test_a_second_run_skips_without_loading_the_model(done, capsys, monkeypatch):
    folder, out = done
    monkeypatch.setattr(checkpoint, "load_detector", lambda *_: pytest.fail("was loaded"))
    assert run("detect", folder / "smear one.png", "--out", out, "--device", "cpu") == 0
    assert "0 done, 1 skipped" in capsys.readouterr().out


def test_what_the_model_does_not_know_is_told_with_its_counts(smear, tmp_path, capsys):
    Image.fromarray(smear.image[:200, :200]).save(tmp_path / "smear.png")
    options = (tmp_path / "smear.png", "--device", "cpu", "--object-size", 60, "--out")
    limits = "oes not know parasites; may call them WBC or Platelets."
    assert run("detect", *options, tmp_path / "out") == 0
    assert limits in capsys.readouterr().err
    assert run("report", *options, tmp_path / "report.html", "--no-stains") == 0
    assert limits in (tmp_path / "report.html").read_text()


def test_results_are_not_taken_for_images(done, capsys):
    _, out = done
    assert run("detect", out, "--out", out) != 0
    said = capsys.readouterr()
    assert "overlay" not in said.out + said.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "no-such-model"], "no-such-model"),
        (["--confidence", "2"], "0 to 1"),
        (["--object-size", "-3"], "at least 1"),
        (["--tile", "9"], "128"),
        (["--device", "toaster"], "toaster"),
    ],
)
def test_bad_settings_get_one_sentence(done, tmp_path, capsys, arguments, words):
    folder, _ = done
    assert run("detect", folder / "smear one.png", "--out", tmp_path / "out", *arguments) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert words in said
    assert "Traceback" not in said


def test_evaluate_prints_a_table_and_writes_everything(tmp_path, capsys):
    data = write_smears(tmp_path, train=1, val=2, side=320)
    out = tmp_path / "result.json"
    assert run("evaluate", "--data", data, "--out", out, "--device", "cpu") == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in table[1:]] == ["RBC", "WBC", "Platelets", "all"]
    result = json.loads(out.read_text())
    assert result["per_class"]["RBC"]["count"] > 0
    assert f"{100 * result['mAP50']:.1f} %" in table[-1]


def test_evaluate_without_that_split_says_so(tmp_path, capsys):
    data = write_smears(tmp_path, train=1, val=1)
    assert run("evaluate", "--data", data, "--split", "test") == 1
    assert "test" in capsys.readouterr().err


# --- the packaged model --------------------------------------------------------------------------


def test_packaged_model_describes_itself(model):
    assert "blood-cells" in packaged_models("detector")
    assert model.info == read_info("blood-cells")
    assert model.classes == ["RBC", "WBC", "Platelets"]
    record = model.info["training"]
    assert record["images"] == {"train": 292, "val": 72}
    assert len(record["data_hash"]) == 64
    assert set(model.info["object_sizes"]) == set(model.classes)
    assert model.info["colours"] == class_colours(3)
    limits = "Does not know parasites; may call them WBC or Platelets."
    assert limits_text(model.info) == limits


@pytest.mark.parametrize("shift", [0.0, 0.5, 1.0])
def test_packaged_model_finds_red_cells_whatever_the_stain(model, shift):
    field = blood_smear((480, 640), seed=4, shift=shift, lab=2)
    found = model.detect(field.image)
    red = found[found.labels == 0]
    cells = field.boxes[field.labels == 0]
    matched = match_boxes(red.xyxy, cells, 0.5, red.scores) >= 0
    assert matched.sum() > 0.85 * len(cells)
    assert (~matched).sum() < 0.15 * len(red)


@pytest.mark.parametrize("factor", [0.5, 3])
def test_packaged_model_finds_cells_at_any_magnification(model, smear, factor):
    size = (round(640 * factor), round(480 * factor))
    other = np.asarray(Image.fromarray(smear.image).resize(size, Image.Resampling.LANCZOS))
    here, there = model.detect(smear.image), model.detect(other)
    sizes = [f.report["object_size"] for f in (here, there)]
    assert sizes[1] / sizes[0] == pytest.approx(factor, rel=0.35)
    count = [np.sum(f.labels == 0) for f in (here, there)]
    assert abs(int(count[1]) - int(count[0])) <= 0.15 * count[0]


@pytest.mark.slow
def test_packaged_model_on_another_laboratory(model, shared):
    """A sample of what the model card reports on all 500 images."""
    files = sorted((shared / "data" / "other-lab" / "images").iterdir())[::50]
    true = found = missed = 0
    for file in files:
        image = np.asarray(Image.open(file).convert("RGB"))
        rows = np.loadtxt(shared / "data" / "other-lab" / "labels" / f"{file.stem}.txt", ndmin=2)
        size = np.array(image.shape[1::-1])
        centre, half = rows[:, 1:3] * size, rows[:, 3:5] * size / 2
        cells = np.hstack([centre - half, centre + half])
        shown = model.detect(image, confidence=0.1, densities=False)
        matched = match_boxes(shown.xyxy, cells, 0.5, shown.scores, shown.labels, rows[:, 0]) >= 0
        true, missed = true + matched.sum(), missed + len(cells) - matched.sum()
        found += len(shown)
    assert true / (true + missed) > 0.93
    assert true / found > 0.75


# --- info ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kind"), [("blood-cells", "detector"), ("malaria", "classifier")])
def test_info_prints_what_a_model_is(capsys, name, kind):
    assert run("info", name) == 0
    facts = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    info = read_info(name)
    assert (facts["Name"], facts["Kind"]) == (name, kind)
    assert facts["Classes"] == ", ".join(info["classes"])
    assert facts["SHA-256"] == checkpoint.checkpoint_hash(name)
    assert facts["Limits"] == limits_text(info)
    assert info["training"]["data"] in facts["Trained on"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("nowhere.safetensors", "no such file"),
        ("blood-cell", "blood-cells"),
        ("picture.safetensors", "not a checkpoint"),
        ("picture.pt", "picture.pt"),
    ],
)
def test_info_of_what_is_no_model_is_one_sentence(tmp_path, monkeypatch, capsys, given, words):
    monkeypatch.chdir(tmp_path)
    for ending in ("safetensors", "pt"):
        Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(f"picture.{ending}", "PNG")
    assert run("info", given) == 2
    said = capsys.readouterr()
    assert not said.out
    assert words in said.err
    assert len(said.err.splitlines()) == 1
