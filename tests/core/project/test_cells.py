"""Cells that have a type: stored with an image, split as its images, cut as `classify` cuts."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

import napari_beerlanet as nb
from napari_beerlanet.core.boxes.annotations import CLASSIFIED, COPIED, DRAWN, Annotations
from napari_beerlanet.core.boxes.regions import Region
from napari_beerlanet.core.checkpoints.checkpoint import load_classifier, save_checkpoint
from napari_beerlanet.core.checkpoints.model_card import headline
from napari_beerlanet.core.classification.crops import cut_crops, to_rgb8
from napari_beerlanet.core.classification.network import head_keys
from napari_beerlanet.core.classification.settings import ClassifierSettings
from napari_beerlanet.core.common.storage import DataError
from napari_beerlanet.core.evaluation.classification import classify_items
from napari_beerlanet.core.formats.class_folders import read_crop_dataset
from napari_beerlanet.core.project import crop_files
from napari_beerlanet.core.project.files import ImageSource, ProjectError
from napari_beerlanet.core.project.project import Project
from napari_beerlanet.core.training.comparison import compare_models, save_best_model
from napari_beerlanet.core.training.estimate import summarise_crops
from napari_beerlanet.core.training.train_classifier import ClassifierTrainSettings
from napari_beerlanet.core.training.trainer.classification import TrainingCrops
from projects import smear, tree
from tinyclasses import SMALL, tiny_classifier, typed_field, write_classes

QUICK = {"input_size": 24, "components": 3, "iterations": 3, "batch": 6, "device": "cpu"}
QUICK |= {"epochs": 1, "learning_rate": 1e-3}
KNOWN = ["basophil", "dark", "pale"]


@pytest.fixture(scope="module")
def typed(tmp_path_factory):
    """A project of four fields of dark and pale cells, closed."""
    folder = tmp_path_factory.mktemp("typed") / "project"
    with Project.create(folder, ["WBC"]) as project:
        for seed in range(4):
            project.add_image(*typed_field(seed), 128)
    return folder


# --- on the disk ---------------------------------------------------------------------------------


def test_a_project_without_types_has_no_cells_on_the_disk(tmp_path):
    with Project.create(tmp_path, ["RBC", "WBC", "Platelets"]) as project:
        project.add_image(*smear(0), 128)
        assert project.types == []
    assert not any(name.startswith("cells") for name in tree(tmp_path))
    assert json.loads((tmp_path / "project.json").read_text())["types"] == []


def test_types_and_their_colours_stay_with_the_project(typed):
    with Project.open(typed, read_only=True) as project:
        assert project.types == ["dark", "pale"]
        assert len(project.cells) == 48
        assert "48 cells have a type" in project.summary()["sentence"]
        splits = {cell.source: cell.split for cell in project.cells}
        assert splits == {crop.source: crop.split for crop in project.crops}
        assert set(splits.values()) == {"train", "val"}
        counted = sum(sum(project.summary()[s]["types"].values()) for s in ("train", "val"))
        assert counted == 48


def test_a_renamed_type_is_renamed_everywhere(tmp_path):
    source, image, annotations = typed_field(1)
    with Project.create(tmp_path, ["WBC"]) as project:
        project.add_image(source, image, annotations, 128)
        project.set_type_colours({"dark": "#102030"})
        project.rename_type("dark", "lympho")
        assert project.types == ["lympho", "pale"]
        assert project.type_colours["lympho"] == "#102030"
        assert set(project.load_annotations(source).types) == {"lympho", "pale"}
        with pytest.raises(ProjectError, match="pale is there twice"):
            project.rename_type("lympho", "pale")
        with pytest.raises(ProjectError, match="no type dark"):
            project.rename_type("dark", "x")
        assert project.add_types(["pale", "band"]) == ["lympho", "pale", "band"]
    assert read_crop_dataset(tmp_path).names == ["lympho", "pale"]


def test_adding_again_replaces_and_removing_removes(tmp_path):
    source, image, annotations = typed_field(1)
    with Project.create(tmp_path, ["WBC"]) as project:
        project.add_image(source, image, annotations, 128)
        files = set(tree(tmp_path / "cells"))
        fewer = replace(annotations, types=["dark", *[""] * 11])
        added = project.add_image(source, image, fewer, 128)
        assert added.types == {"dark": 1}
        assert [cell.type for cell in project.cells] == ["dark"]
        assert not files & set(tree(tmp_path / "cells"))
        project.remove_image(added.id)
        assert project.cells == []
        assert not (tmp_path / "cells.csv").exists()
        assert tree(tmp_path / "cells") == {}
        assert set(project.load_annotations(source).types) == {"dark", ""}


def test_copies_that_nobody_has_reviewed_are_left_out_on_request(tmp_path):
    source, image, annotations = typed_field(1)
    copied = replace(annotations, status=[COPIED] * 5 + ["drawn"] * 7)
    with Project.create(tmp_path, ["WBC"]) as project:
        assert project.add_image(source, image, copied, 128, reviewed_only=True).types == {
            "dark": 1,
            "pale": 6,
        }
        assert project.add_image(source, image, copied, 128).types == {"dark": 6, "pale": 6}


def test_types_that_a_classifier_gave_are_marked_and_said(tmp_path):
    """Of boxes that somebody has drawn; nobody has looked at the types of the first three."""
    source, image, annotations = typed_field(3)
    status = [CLASSIFIED] * 3 + [DRAWN] * 9
    annotations = replace(annotations, status=status)
    with Project.create(tmp_path, ["WBC"]) as project:
        added = project.add_image(source, image, annotations, 128)
        assert (added.types, added.unreviewed_types) == ({"dark": 6, "pale": 6}, 3)
        assert [cell.reviewed for cell in project.cells].count(False) == 3
    sentence = "3 of 12 crops have types that a classifier gave and nobody has reviewed."
    assert summarise_crops(tmp_path).notes[0] == sentence
    said = []
    nb.train_classifier(tmp_path, tmp_path / "run", backbone=SMALL, progress=said.append, **QUICK)
    warnings = [event["message"] for event in said if event["event"] == "warning"]
    assert sentence in warnings
    with Project.open(tmp_path) as project:
        added = project.add_image(source, image, annotations, 128, reviewed_only=True)
        assert (added.types, added.unreviewed_types) == ({"dark": 3, "pale": 6}, 3)
        assert added.used == 12, "the boxes are the user's, and the detector learns them"
        assert all(cell.reviewed for cell in project.cells)
        assert len(project.cells) == 9
    assert not any("reviewed" in note for note in summarise_crops(tmp_path).notes)


def test_one_image_validates_where_its_crops_do(tmp_path):
    source, image, annotations = typed_field(2, count=16)
    with Project.create(tmp_path, ["WBC"]) as project:
        project.add_image(source, image, annotations, 96, crop_size=96)
        assert {crop.split for crop in project.crops} == {"train", "val"}
        for one in project.cells:
            x, y = one.x + (one.x1 + one.x2) / 2, one.y + (one.y1 + one.y2) / 2
            inside = any(
                crop.split == "val"
                and crop.x <= x < crop.x + crop.width
                and crop.y <= y < crop.y + crop.height
                for crop in project.crops
            )
            assert one.split == ("val" if inside else "train")
        assert {one.split for one in project.cells} == {"train", "val"}


@pytest.mark.parametrize(
    ("old", "new"),
    [("x1", "no number"), ("file", "../../etc/passwd"), ("split", "elsewhere"), ("type", "")],
)
def test_a_damaged_table_is_one_sentence(typed, tmp_path, old, new):
    lines = (typed / "cells.csv").read_text().splitlines()
    place = lines[0].split(",").index(old)
    row = lines[1].split(",")
    row[place] = new
    (tmp_path / "cells.csv").write_text("\n".join([lines[0], ",".join(row)]) + "\n")
    with pytest.raises(DataError, match="damaged, or no table of cells"):
        read_crop_dataset(tmp_path)


# --- crops ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_crops_are_cut_as_classify_cuts_them(tmp_path, dtype, monkeypatch):
    """Also at the border, of large and of tiny boxes, and of boxes that reach beyond the image."""
    monkeypatch.setattr(crop_files, "_CELL_TILE", 32)  # so that a file has hardly more than a cell
    random = np.random.default_rng(0)
    image = random.integers(0, np.iinfo(dtype).max, (300, 400, 3)).astype(dtype)
    x1, y1 = random.uniform(-6, 380, 40), random.uniform(-6, 280, 40)
    sides = random.uniform(7, 60, (40, 2))
    boxes = np.stack([x1, y1, x1 + sides[:, 0], y1 + sides[:, 1]], 1)
    names = [f"t{k % 3}" for k in range(40)]
    annotations = Annotations(
        boxes,
        np.zeros(40, np.int64),
        ["WBC"],
        regions=(Region.whole_image((300, 400)),),
        image_shape=(300, 400),
        types=names,
    )
    usable, _ = annotations.trainable()
    with Project.create(tmp_path, ["WBC"]) as project:
        project.add_image(ImageSource.from_image(image, "a.png"), image, annotations, 128)
    dataset = read_crop_dataset(tmp_path)
    items = [item for split in dataset.splits.values() for item in split]
    assert len(items) == len(usable)
    settings = ClassifierSettings(input_size=40)
    crops = TrainingCrops(items, settings)
    expected = {
        (names[k], crop.tobytes())
        for k, crop in zip(
            usable.object_ids,
            cut_crops(to_rgb8(image), boxes[usable.object_ids], 40, settings.fill),
            strict=True,
        )
    }
    plain = crops.plain(range(len(items)))
    found = {
        (dataset.names[item.label], crop.tobytes()) for item, crop in zip(items, plain, strict=True)
    }
    assert found == expected


# --- training ------------------------------------------------------------------------------------


def test_a_classifier_learns_the_types_of_a_project(typed, tmp_path):
    clf = nb.train_classifier(typed, tmp_path / "run", SMALL, **QUICK)
    assert clf.classes == ["dark", "pale"]
    record = clf.info["training"]
    with Project.open(typed, read_only=True) as project:
        trained = [one for one in project.cells if one.split == "train"]
    assert record["images"] == {"train": len(trained), "val": 48 - len(trained)}
    assert record["sources"] == {"train": len(trained) // 12, "val": 4 - len(trained) // 12}
    assert nb.evaluate(clf, typed)["crops"] == 48 - len(trained)
    by_class = nb.train_classifier  # the boxes' classes are still there, in the data.yaml
    with pytest.raises(DataError, match="only one class"):
        by_class(typed / "data.yaml", tmp_path / "classes", SMALL, **QUICK)


@pytest.fixture(scope="module")
def grown(tmp_path_factory):
    """A classifier of three types, trained on two of them and a new one: its project, and events.

    Crops of all that it knew are a reference.
    """
    folder = tmp_path_factory.mktemp("grown")
    save_checkpoint(tiny_classifier(SMALL, KNOWN, seed=4), folder / "parent.safetensors")
    with Project.create(folder / "project", ["WBC"]) as project:
        for seed in range(3):
            project.add_image(*typed_field(seed, ("dark", "pale", "band")), 128)
    write_classes(folder / "reference", 3)
    (folder / "reference" / "dark").rename(folder / "reference" / "basophil")
    heard: list[dict] = []
    options = {"epochs": 2, "learning_rate": 1e-2, "batch": 6, "device": "cpu"}
    nb.train_classifier(
        folder / "project",
        folder / "project" / "runs" / "a",
        model=folder / "parent.safetensors",
        reference=str(folder / "reference"),
        progress=heard.append,
        **options,
    )
    return folder, heard


def test_a_new_type_is_added_and_types_without_crops_stay_as_they_were(grown):
    folder, heard = grown
    clf = load_classifier(folder / "project" / "runs" / "a" / "best.safetensors", "cpu")
    assert clf.classes == [*KNOWN, "band"]
    assert any("No training crops of basophil: kept" in str(e.get("message")) for e in heard)
    before = load_classifier(folder / "parent.safetensors", "cpu").network.state_dict()
    after = clf.network.state_dict()
    heads = head_keys(clf.network)
    for key in after.keys() - heads:
        assert (after[key] == before[key]).all(), f"{key} would change what basophils look like"
    for key in heads:
        assert (after[key][0] == before[key][0]).all(), "no crop has said anything about basophils"
        assert (after[key][1] != before[key][1]).any()
        assert np.isfinite(after[key].numpy()).all()


def test_before_and_after_are_what_both_classifiers_say(grown):
    folder, _ = grown
    run = folder / "project" / "runs" / "a"
    result = compare_models(run)
    before = load_classifier(folder / "parent.safetensors", "cpu")
    after = load_classifier(run / "best.safetensors", "cpu")
    dataset = read_crop_dataset(folder / "project")
    items = dataset.splits["val"]
    true = [dataset.names[item.label] for item in items]
    old, new = (
        [model.classes[k] for k in classify_items(model, items).labels] for model in (before, after)
    )
    assert result.task == "classify"
    assert result.crops == len(items)
    changed = [(t, a, b) for t, a, b in zip(true, old, new, strict=True) if a != b]
    assert sorted(one[1:] for one in result.changes) == sorted(changed)
    gained = sum(b == t for t, _, b in changed)
    lost = sum(a == t for t, a, _ in changed)
    assert f": {gained} gained, {lost} lost" in result.describe_changes()
    for name in ("dark", "pale"):
        mine = [k for k, other in enumerate(true) if other == name]
        shares = [np.mean([types[k] == name for k in mine]) for types in (old, new)]
        assert result.classes["new data"][name] == (*np.round(shares, 5), len(mine))
    assert result.classes["new data"]["band"][0] is None
    assert any("does not know band" in note for note in result.notes)
    known = [k for k, name in enumerate(true) if name != "band"]
    accuracy = np.mean([new[k] == true[k] for k in known])
    assert result.new[1]["accuracy"] == pytest.approx(accuracy, abs=1e-5)
    assert result.classes["reference"]["basophil"][2] == 3
    assert [row.what for row in result.rows()] == [
        "New data, balanced accuracy",
        "New data, accuracy",
        "Reference, balanced accuracy",
        "Reference, accuracy",
    ]
    path = save_best_model(run, "ours", result)
    kept = load_classifier(path, "cpu")
    assert kept.info["name"] == "ours"
    assert kept.info["training"]["compared"]["reference"] == list(result.reference)
    crops, images = len(dataset.splits["train"]), dataset.sources("train")
    expected = f"trained on {crops} crops of {images} image{'s' * (images > 1)}, validated on "
    assert headline(kept.info).startswith(f"{expected}{len(items)}; reference ")


def test_a_reference_that_cannot_be_used_is_said(grown, tmp_path):
    folder, _ = grown
    run = tmp_path / "run"
    shutil.copytree(folder / "project" / "runs" / "a", run)
    content = json.loads((run / "run.json").read_text())
    content["settings"]["reference"] = str(tmp_path / "nowhere")
    (run / "run.json").write_text(json.dumps(content))
    result = compare_models(run)
    assert result.reference is None
    assert any("reference crops cannot be used" in note for note in result.notes)
    assert any("no crops to measure basophil with" in note for note in result.notes)


def test_without_a_model_before_there_is_an_after(typed, tmp_path):
    nb.train_classifier(typed, tmp_path / "run", SMALL, **QUICK)
    result = compare_models(tmp_path / "run")
    assert result.before is None
    assert result.new[0] is None
    assert result.changes == ()
    assert result.describe_changes() == ""
    assert any("started from a backbone" in note for note in result.notes)


def test_all_of_the_network_is_trained_where_all_types_have_crops(typed, tmp_path):
    save_checkpoint(tiny_classifier(SMALL, ["dark", "pale"], seed=4), tmp_path / "a.safetensors")
    options = {"epochs": 1, "learning_rate": 1e-2, "batch": 6, "device": "cpu"}
    clf = nb.train_classifier(typed, tmp_path / "run", model=tmp_path / "a.safetensors", **options)
    before = load_classifier(tmp_path / "a.safetensors", "cpu").network.state_dict()
    after = clf.network.state_dict()
    assert (after["backbone.conv1.0.weight"] != before["backbone.conv1.0.weight"]).any()


def test_few_crops_from_a_backbone_are_shown_often_enough():
    for weights in (None, "a.pth"):
        few = ClassifierTrainSettings(weights=weights).resolved(40)
        assert few.epochs * -(-40 // few.batch) >= 150


def test_few_crops_of_a_type_and_types_that_only_validate_are_said(tmp_path):
    with Project.create(tmp_path / "project", ["WBC"]) as project:
        for seed in range(2):
            project.add_image(*typed_field(seed, count=4), 128)
        validating = next(one.source for one in project.cells if one.split == "val")
        source = project.sources()[validating]
        seed = int(source.name.split()[1].split(".")[0])
        _, image, annotations = typed_field(seed, count=4)
        rare = replace(annotations, types=["eosinophil", *annotations.types[1:]])
        project.add_image(source, image, rare, 128)
    heard = []
    clf = nb.train_classifier(
        tmp_path / "project", tmp_path / "run", SMALL, progress=heard.append, **QUICK
    )
    told = " ".join(str(e.get("message")) for e in heard if e["event"] == "warning")
    assert "Only 4 crops of dark, 4 of pale: about 10 crops of a type" in told
    assert "All cells of type eosinophil are in images that validate" in told
    assert clf.classes == ["dark", "pale"]


def test_what_a_project_cannot_teach(tmp_path):
    with Project.create(tmp_path / "a", ["WBC"]) as project:
        project.add_image(*typed_field(0, ("dark",)), 128)
    with pytest.raises(DataError, match=r"only one type \(dark\)"):
        nb.train_classifier(tmp_path / "a", tmp_path / "run", SMALL, **QUICK)
    with Project.create(tmp_path / "b", ["WBC"]) as project:
        project.add_image(*typed_field(0), 128)
    with pytest.raises(ValueError, match=r"fill is 0.2, and a project stores"):
        nb.train_classifier(tmp_path / "b", tmp_path / "run", SMALL, fill=0.2, **QUICK)
