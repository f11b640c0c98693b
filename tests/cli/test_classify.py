"""The command `classify`, and `train` and `evaluate` of classifiers."""

import csv
import errno
import json
import re

import numpy as np
import pytest
from PIL import Image

from napari_beerlanet.cli import main
from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.checkpoints.checkpoint import (
    load_classifier,
    packaged_models,
    read_info,
    save_checkpoint,
)
from napari_beerlanet.core.classification.slide_classifier import PatchMap
from napari_beerlanet.core.formats import read_detections, write_csv
from napari_beerlanet.core.images.files import read_image
from napari_beerlanet.samples import blood_smear, photograph_path
from tinyclasses import SMALL, TYPES, tiny_classifier, write_classes


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "types.safetensors"
    save_checkpoint(tiny_classifier(SMALL), path)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_classes(tmp_path_factory.mktemp("crops"), 3)


@pytest.fixture(scope="module")
def field(tmp_path_factory):
    """A smear, and a table of its cells."""
    folder = tmp_path_factory.mktemp("fields")
    smear = blood_smear((200, 240), seed=1, cell_diameter=40, white_cells=0.2)
    Image.fromarray(smear.image).save(folder / "smear.png")
    boxes = Detections(
        smear.boxes, smear.labels, np.linspace(0.9, 0.5, len(smear.boxes)), list(smear.names)
    )
    write_csv(folder / "boxes.csv", boxes, "smear.png")
    return folder / "smear.png", folder / "boxes.csv"


def run(*arguments):
    try:
        return main.main([str(part) for part in arguments])
    except SystemExit as end:
        return int(end.code or 0)


def rows(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_slide_gets_all_of_its_files_or_none(model, tmp_path, capsys, monkeypatch):
    Image.fromarray(blood_smear((64, 64), cell_diameter=20).image).save(tmp_path / "a.png")
    out = tmp_path / "out"
    command = ["classify", tmp_path / "a.png", "--patches", "32", "--min-tissue=0", "--quiet"]
    command += ["--model", model, "--out", out, "--device=cpu"]

    def full(*args, **named):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(PatchMap, "write_tiff", full)
        assert run(*command) == 1
    assert "no space left on device" in capsys.readouterr().err.lower()
    assert [path.name for path in out.iterdir()] == ["a.patches"], "which it resumes from"
    assert run(*command) == 0
    assert {"a.patches.csv", "a.patches.ome.tiff", "a.dark.png", "a.pale.png"} <= {
        path.name for path in out.iterdir()
    }


def test_slides_patch_by_patch(model, tmp_path, capsys, monkeypatch):
    """Tables and heat maps of two slides; what is done is not done again."""
    image = np.full((70, 130, 3), 240, np.uint8)
    image[:, :60] = blood_smear((70, 60), cell_diameter=20).image
    Image.fromarray(image).save(tmp_path / "a.png")
    out = tmp_path / "out"
    command = ["classify", tmp_path / "a.png", "--patches", "32", "--min-tissue=0", "--quiet"]
    command += ["--model", model, "--out", out, "--device=cpu", "--threshold=0.3"]
    assert run(*command) == 0
    said = capsys.readouterr().out
    assert "a.png: 15 patches; dark mean" in said
    assert "above 0.3" in said
    table = rows(out / "a.patches.csv")
    assert [(row["x1"], row["y2"]) for row in table[-2:]] == [("96", "70"), ("128", "70")]
    patches = [image[int(r["y1"]) : int(r["y2"]), int(r["x1"]) : int(r["x2"])] for r in table[:4]]
    expected = load_classifier(model, "cpu").classify(patches).scores[:, 0]
    np.testing.assert_allclose([float(r["P(dark)"]) for r in table[:4]], expected, atol=2e-6)
    with Image.open(out / "a.dark.png") as picture:
        assert picture.size == (130, 70)
        assert not np.array_equal(np.asarray(picture), image)
    before = (out / "a.patches.csv").read_bytes()
    monkeypatch.setattr("napari_beerlanet.core.classification.classifier.Classifier._infer", None)
    assert run(*command) == 0
    assert (out / "a.patches.csv").read_bytes() == before
    assert run(*[*command[:3], "2", *command[4:]]) == 2
    assert "patch must be" in capsys.readouterr().err
    regions = tmp_path / "regions.geojson"
    regions.write_text(json.dumps({"type": "FeatureCollection", "features": [
        polygon([[[0, 0], [64, 0], [64, 32], [0, 32], [0, 0]]], name="corner"),
        polygon([[[0, 0], [128, 0], [128, 64], [0, 64]], [[32, 0], [96, 0], [96, 64], [32, 64]]],
                classification={"name": "Tumour"}),
        polygon([[[500, 500], [600, 500], [600, 600]]]),
    ]}))  # fmt: skip
    assert run(*command, "--regions", regions) == 0
    measured = {row["region"]: row for row in rows(out / "a.regions.csv")}
    assert list(measured) == ["corner", "Tumour 2", "Region 3"]
    p = {(int(r["row"]), int(r["column"])): float(r["P(dark)"]) for r in table}
    corner = [p[0, 0], p[0, 1]]
    outer = [p[row, column] for row in (0, 1) for column in (0, 3)]  # beside the hole
    for name, inside in (("corner", corner), ("Tumour 2", outer)):
        row = measured[name]
        assert float(row["patches"]) == len(inside)
        assert float(row["mean(dark)"]) == pytest.approx(np.mean(inside), abs=1e-5)
        above = np.mean([value >= 0.3 for value in inside])
        assert float(row["above(dark)"]) == pytest.approx(above, abs=1e-5)
        assert float(row["classified"]) == 1
    assert (measured["Region 3"]["patches"], measured["Region 3"]["mean(dark)"]) == ("0.000000", "")
    assert run(*command, "--overwrite") == 1, "its patches are to be classified again"
    monkeypatch.undo()
    assert run(*command, "--overwrite") == 0
    assert (out / "a.patches.csv").read_bytes() == before


def test_boxes_outside_and_without_area_have_no_type_and_are_said(model, tmp_path, capsys):
    Image.fromarray(np.full((60, 60, 3), 200, np.uint8)).save(tmp_path / "a.png")
    boxes = tmp_path / "boxes.csv"
    lines = ["WBC,0.9,5,5,40,40", "WBC,0.8,500,500,540,540", "WBC,0.7,20,20,20,30"]
    boxes.write_text("class,confidence,x1,y1,x2,y2\n" + "\n".join(lines) + "\n")
    out = tmp_path / "out"
    command = ["classify", tmp_path / "a.png", "--boxes", boxes, "--model", model, "--out", out]
    assert run(*command, "--device=cpu") == 0
    said = capsys.readouterr()
    assert "2 boxes have no area in the image and no type." in said.out + said.err
    (row,) = rows(out / "a.types.csv")
    assert row["type"] in TYPES


def polygon(rings, **properties):
    geometry = {"type": "Polygon", "coordinates": rings}
    return {"type": "Feature", "geometry": geometry, "properties": properties}


def test_regions_that_cannot_be_measured(model, tmp_path, capsys):
    regions = tmp_path / "regions.geojson"
    regions.write_text('{"type": "FeatureCollection", "features": []}')
    for name in ("a", "b"):
        Image.fromarray(np.full((40, 40, 3), 200, np.uint8)).save(tmp_path / f"{name}.png")
    command = ["classify", tmp_path / "a.png", "--model", model, "--out", tmp_path / "out"]
    command += ["--regions", regions]
    assert run(*command) == 2
    assert "--regions is for patches; give --patches, too." in capsys.readouterr().err
    assert run(*command, "--patches") == 2
    assert "there are no regions in it" in capsys.readouterr().err
    assert run("classify", tmp_path / "b.png", *command[1:], "--patches") == 2
    assert "regions are of one slide, and 2 are given" in capsys.readouterr().err
    regions.write_text('{"type": "Feature", "geometry": {"type": "Point"}}')
    assert run(*command, "--patches") == 2
    assert "a feature is a Point, not a polygon" in capsys.readouterr().err


def test_crops_become_one_table(data, model, tmp_path, capsys):
    files = [data / "dark", data / "pale" / "pale-0.png"]
    assert run("classify", *files, "--model", model, "--out", tmp_path, "--device=cpu") == 0
    table = rows(tmp_path / "types.csv")
    assert [row["image"] for row in table] == [
        *(str(data / "dark" / f"dark-{k}.png") for k in range(3)),
        str(data / "pale" / "pale-0.png"),
    ]
    clf = load_classifier(model, "cpu")
    expected = clf.classify([read_image(row["image"]).pixels for row in table])
    assert [row["type"] for row in table] == [TYPES[k] for k in expected.labels]
    for row, scores in zip(table, expected.scores, strict=True):
        np.testing.assert_allclose([float(row[f"P({n})"]) for n in TYPES], scores, atol=1e-5)
    counts = expected.counts()
    assert f"{counts['dark']} dark, {counts['pale']} pale" in capsys.readouterr().out


def test_boxes_of_a_file(field, model, tmp_path):
    image, boxes = field
    options = ("--boxes", boxes, "--model", model, "--out", tmp_path, "--device", "cpu")
    assert run("classify", image, *options) == 0
    again = read_detections(tmp_path / "smear.types.csv")
    given = read_detections(boxes)
    np.testing.assert_allclose(again.xyxy, given.xyxy, atol=0.01)
    expected = load_classifier(model, "cpu").classify(read_image(image).pixels, given)
    np.testing.assert_allclose(again.columns["probability"], expected.confidence, atol=1e-4)
    assert again.columns["type"].tolist() == [TYPES[k] for k in expected.labels]
    assert again.counts() == given.counts()  # the detector's classes stay


def test_boxes_that_the_model_is_meant_for(field, model, tmp_path):
    image, boxes = field
    clf = load_classifier(model, "cpu")
    clf.info["applies_to"] = ["WBC", "blast"]
    save_checkpoint(clf, tmp_path / "white.safetensors")
    options = ("--boxes", boxes, "--model", tmp_path / "white.safetensors", "--device", "cpu")
    assert run("classify", image, *options, "--out", tmp_path) == 0
    white = read_detections(tmp_path / "smear.types.csv")
    assert white.counts()["WBC"] == len(white) == read_detections(boxes).counts()["WBC"] > 0
    assert run("classify", image, *options, "--out", tmp_path, "--only", "RBC") == 0
    red = read_detections(tmp_path / "smear.types.csv")
    assert red.counts()["RBC"] == len(red) > 0, "what is asked for comes first"


def test_a_detector_finds_the_cells(field, model, tmp_path):
    image, _ = field
    options = ("--detect", "blood-cells", "--model", model, "--out", tmp_path, "--device", "cpu")
    assert run("classify", image, *options, "--fit", "image") == 0
    found = read_detections(tmp_path / "smear.types.csv")
    assert len(found) > 3
    assert set(found.columns["type"]) <= set(TYPES)
    assert run("classify", image, *options, "--fit", "image", "--only", "WBC") == 0
    white = read_detections(tmp_path / "smear.types.csv")
    assert white.counts()["WBC"] == len(white) == found.counts()["WBC"] > 0
    np.testing.assert_allclose(
        white.columns["probability"],
        np.asarray(found.columns["probability"])[found.labels == found.names.index("WBC")],
        atol=1e-5,
    )


def test_types_are_resumed_and_are_those_of_detect(field, model, tmp_path, capsys):
    image, boxes = field
    options = ("--boxes", boxes, "--model", model, "--out", tmp_path / "a", "--device", "cpu")
    assert run("classify", image, *options) == 0
    first = capsys.readouterr().out
    written = (tmp_path / "a" / "smear.types.csv").stat().st_mtime_ns
    assert run("classify", image, *options) == 0
    assert capsys.readouterr().out == first, "the same counts, from what was done before"
    assert (tmp_path / "a" / "smear.types.csv").stat().st_mtime_ns == written
    assert run("classify", image, *options, "--overwrite") == 0
    assert (tmp_path / "a" / "smear.types.csv").stat().st_mtime_ns > written

    out = ("--device", "cpu", "--classify", model, "--classify-only", "WBC")
    assert run("detect", image, *out, "--out", tmp_path / "b", "--formats", "csv") == 0
    assert run("report", image, *out, "--out", tmp_path / "b.html", "--no-stains") == 0
    found = read_detections(tmp_path / "b" / "smear.detections.csv")
    white = found.labels == found.names.index("WBC")
    assert [name != "" for name in found.columns["type"]] == white.tolist()
    told = capsys.readouterr().out.splitlines()[-1]
    assert told.endswith("; " + ", ".join(f"{k} {n}" for k, n in found.type_counts().items()) + ".")
    assert run("detect", image, "--out", tmp_path / "c", "--classify-only", "WBC") == 2
    assert "give --classify" in capsys.readouterr().err
    assert run("report", image, *out, "--one-page", "--out", tmp_path / "c.html") == 2
    assert "infected red cells" in capsys.readouterr().err


def test_the_packaged_model_names_white_cells(tmp_path, capsys):
    info = read_info("white-cells")
    assert info["classes"] == ["basophil", "eosinophil", "lymphocyte", "monocyte", "neutrophil"]
    assert info["applies_to"] == ["WBC"]
    assert "white-cells" in packaged_models("classifier")
    assert info["stain_seen"], "so that a strange stain is told"
    smear = photograph_path("Blood smear (BCCD)")
    options = ("--detect", "blood-cells", "--model", "white-cells", "--out", tmp_path)
    assert run("classify", smear, *options, "--device", "cpu") == 0
    found = read_detections(tmp_path / f"{smear.stem}.types.csv")
    assert found.counts()["WBC"] == len(found) > 0, "by itself it takes white cells alone"
    assert set(found.columns["type"]) <= set(info["classes"])
    assert "Does not know blasts" in capsys.readouterr().err


def test_one_bad_file_does_not_spoil_the_others(data, model, tmp_path, capsys):
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    out = tmp_path / "out"
    files = (broken, data / "pale" / "pale-1.png", tmp_path / "none.png")
    assert run("classify", *files, "--model", model, "--out", out, "--device=cpu") == 1
    assert [row["image"] for row in rows(out / "types.csv")] == [str(files[1])]
    said = capsys.readouterr().err
    assert "broken.png" in said
    assert "none.png" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "blood-cells"], "a detector, where a classifier is needed"),
        (["--detect", "MODEL"], "a classifier, where a detector is needed"),
        (["--model", "no-such"], "no such file"),
        (["--boxes", "BOXES", "--detect", "blood-cells"], "not allowed with"),
        (["--boxes", "none.csv"], "none.csv"),
        (["--device", "toaster"], "toaster"),
        (["--fit", "slide"], "fit"),
        (["--only", "WBC"], "--only is for boxes"),
    ],
)
def test_one_line_errors(field, model, tmp_path, capsys, options, words):
    image, boxes = field
    given = [{"MODEL": str(model), "BOXES": str(boxes)}.get(part, part) for part in options]
    start = [image, "--model", model, "--out", tmp_path / "out", "--device", "cpu"]
    assert run("classify", *start, *given) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert words in said[-1]
    assert not (tmp_path / "out").exists()


def test_several_images_need_their_names_in_the_file(field, data, model, tmp_path, capsys):
    image, boxes = field
    other = data / "pale" / "pale-0.png"
    options = ("--boxes", boxes, "--model", model, "--out", tmp_path)
    assert run("classify", image, other, *options) == 2
    assert "it has no boxes of pale-0.png" in capsys.readouterr().err


# --- train and evaluate --------------------------------------------------------------------------


def test_train_and_evaluate_a_classifier(data, tmp_path, capfd):
    out = tmp_path / "run"
    options = ["--task=classify", f"--data={data}", f"--out={out}", "--device=cpu", "--epochs=1"]
    small = [
        "--backbone",
        SMALL,
        "--input-size=24",
        "--batch=4",
        "--set=components=3",
        "--no-jitter",
    ]
    assert run("train", *options, *small) == 0
    printed, said = capfd.readouterr()
    assert printed.strip() == f"{out / 'best.safetensors'}: trained on 4 crops, validated on 2"
    assert "training of 1 epochs: 4 train and 2 val crops, on cpu." in said
    assert "epoch 1 of 1: accuracy " in said
    info = load_classifier(out / "best.safetensors", "cpu").info
    assert (info["backbone"], info["components"], info["input_size"]) == (SMALL, 3, 24)
    assert info["training"]["settings"]["jitter"] is False

    result = tmp_path / "result.json"
    best = out / "best.safetensors"
    assert run("evaluate", "--data", data, "--model", best, "--out", result, "--device=cpu") == 0
    table = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in table[1:3]] == TYPES
    assert "balanced accuracy" in table[-1]
    assert "relaxed" not in table[-1]
    assert table[-1].endswith("6 images; 6 crops")
    assert "fewer than 10 crops of dark, pale" in table[3]
    assert table[0].split() == ["count", "called", "precision", "recall", "F1"]
    assert table[1].split()[1] == "3"
    assert re.search(r"accuracy [0-9.]+ % \([0-9]+ to [0-9]+ %\)", table[-1])
    assert json.loads(result.read_text())["crops"] == 6

    assert run("train", "--task=classify", "--resume", f"--out={out}", "--device=cpu") == 0
    assert run("train", *options, *small) == 1
    assert "resume it" in capfd.readouterr().err


def test_evaluate_with_ordered_classes(data, model, capsys):
    options = ("--data", data, "--model", model, "--device", "cpu")
    assert run("evaluate", *options, "--ordered", "dark, pale") == 0
    assert "relaxed accuracy 100.0 %" in capsys.readouterr().out
    assert run("evaluate", *options, "--ordered", "dark,green") == 1
    assert "'green', which is no class" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (["--scope", "head"], 2, "--scope is for detectors"),
        (["--backbone", "resnet19"], 1, "no classification network 'resnet19'"),
        (["--model", "blood-cells"], 1, "a detector, where a classifier is needed"),
        (["--set", "wobble=1"], 1, "no setting 'wobble'"),
    ],
)
def test_wrong_training_options(data, tmp_path, capsys, options, status, words):
    start = ["--task=classify", f"--data={data}", f"--out={tmp_path / 'run'}", "--device=cpu"]
    assert run("train", *start, *options) == status
    assert words in capsys.readouterr().err


def test_fields_of_a_smear_become_a_parasitaemia(tmp_path, capsys):
    """The detector is the packaged one; a classifier with made-up weights is as good here."""
    stages = ["gametocyte", "ring", "schizont", "trophozoite", "uninfected"]
    types = tmp_path / "types.safetensors"
    save_checkpoint(tiny_classifier(SMALL, stages, info={"applies_to": ["RBC"]}), types)
    for seed in (1, 2):
        smear = blood_smear((160, 200), seed=seed, cell_diameter=40)
        Image.fromarray(smear.image).save(tmp_path / f"field-{seed}.png")
    out = tmp_path / "out"
    options = ("--classify", types, "--out", out, "--device", "cpu", "--object-size", 40)
    assert run("malaria", tmp_path / "field-1.png", tmp_path / "field-2.png", *options) == 0
    said = capsys.readouterr()
    printed = dict(line.rsplit("  ", 1) for line in said.out.splitlines() if "  " in line)
    printed = {name.strip(): value.strip() for name, value in printed.items()}
    table = rows(out / "summary.csv")
    infected = sum(int(row[f"type {stage}"]) for row in table for stage in stages[:-1])
    red = infected + sum(int(row["type uninfected"]) for row in table)
    assert red > 5
    assert red == sum(int(row["count RBC"]) for row in table)
    assert (int(printed["infected red cells"]), int(printed["red cells"])) == (infected, red)
    assert printed["parasitaemia"] == f"{100 * infected / red:.3f} %"
    assert said.err.count(f"Only {red} red cells counted") == 1
    assert "blood-cells does not know parasites: those outside of the red cells" in said.err
    assert "Research use only" in (out / "field-1.report.html").read_text(encoding="utf-8")


def test_the_help_of_malaria_states_the_defaults_of_the_preset(capsys):
    assert run("malaria", "--help") == 0
    said = " ".join(capsys.readouterr().out.split())
    confidence, iou = (said.split(f" --{name} N ")[1] for name in ("confidence", "iou"))
    assert "(default 0.15)" in confidence.split(" --")[0]
    assert "(default 0.5)" in iou.split(" --")[0]


def test_a_classifier_of_other_cells_gives_no_parasitaemia(field, model, tmp_path, capsys):
    options = ("--classify", model, "--out", tmp_path / "out", "--device", "cpu")
    assert run("malaria", field[0], *options) == 2
    assert "uninfected and infected" in capsys.readouterr().err
