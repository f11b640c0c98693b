"""Annotations of other programs: which image they belong to, their classes, what is left out."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from napari_beerlanet.core.common.progress import Cancelled
from napari_beerlanet.core.common.storage import FileError
from napari_beerlanet.core.formats.coco import write_coco
from napari_beerlanet.core.formats.dataset import check_dataset, read_dataset
from napari_beerlanet.core.formats.geojson import write_geojson
from napari_beerlanet.core.formats.voc import write_voc
from napari_beerlanet.core.formats.yolo import write_classes, write_yolo
from napari_beerlanet.core.project.import_annotations import import_dataset, import_for_image
from napari_beerlanet.core.project.project import Project
from projects import NAMES, smear
from tinydata import write_smears


@pytest.fixture
def project(tmp_path):
    with Project.create(tmp_path / "project", NAMES) as made:
        yield made


def write_image(path: Path, seed: int):
    """Write a field's image; returns its boxes as detections."""
    _, rgb, annotations = smear(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(rgb).save(path)
    return annotations.to_detections()


def saved(project: Project) -> dict[str, dict[str, int]]:
    """Numbers of boxes per class of each source, by its name."""
    return {
        source.name: project.load_annotations(source).counts()
        for source in project.sources().values()
    }


def expected(*seeds):
    return {f"{seed}.png": smear(seed)[2].counts() for seed in seeds}


@pytest.mark.parametrize("kind", ["yolo", "voc", "geojson"])
@pytest.mark.parametrize("apart", [False, True])
def test_a_folder_of_images_and_files_with_their_names(project, tmp_path, kind, apart):
    folder = tmp_path / "theirs"
    write, ending = {
        "yolo": (write_yolo, ".txt"),
        "voc": (write_voc, ".xml"),
        "geojson": (write_geojson, ".geojson"),
    }[kind]
    for seed in (1, 2, 3):
        found = write_image(folder / "images" / f"{seed}.png", seed)
        home = folder / ("labels" if apart else "images")
        home.mkdir(exist_ok=True)
        write(home / f"{seed}{ending}", found, f"{seed}.png")
        if kind == "yolo":
            write_classes(home / "classes.txt", found.names)
    imported = import_dataset(project, folder, 128)
    assert len(imported.added) == 3
    assert saved(project) == expected(1, 2, 3)
    assert project.classes == NAMES
    check_dataset(read_dataset(project.data))


def test_a_coco_file_about_many_images(project, tmp_path):
    folder = tmp_path / "theirs"
    content = {"images": [], "annotations": [], "categories": []}
    for seed in (1, 2):
        found = write_image(folder / "val" / f"{seed}.png", seed)
        write_coco(tmp_path / "one.json", found, f"val/{seed}.png")
        one = json.loads((tmp_path / "one.json").read_text())
        content["images"] += [{**one["images"][0], "id": seed}]
        content["annotations"] += [{**a, "image_id": seed} for a in one["annotations"]]
        content["categories"] = one["categories"]
    content["images"].append({"id": 9, "file_name": "gone.png", "width": 5, "height": 5})
    file = folder / "annotations" / "instances.json"
    file.parent.mkdir()
    file.write_text(json.dumps(content))
    for path in (folder, file):
        imported = import_dataset(project, path, 128)
        assert saved(project) == expected(1, 2)
        assert any("gone.png" in note for note in imported.notes)


def test_a_dataset_of_ultralytics(project, tmp_path):
    data = write_smears(tmp_path / "theirs", train=3, val=1, side=96)
    imported = import_dataset(project, data, 96)
    assert len(imported.added) == 4
    assert saved(project).keys() == {f"smear-{k}.png" for k in (0, 1, 2, 100)}
    theirs = read_dataset(data)
    boxes = sum(len(item.labels) for items in theirs.splits.values() for item in items)
    assert sum(sum(counts.values()) for counts in saved(project).values()) == boxes
    assert len(import_dataset(project, data.parent, 96).added) == 4
    assert project.summary()["images"] == 4, "the same images again are no new ones"


def test_an_image_of_a_dataset_without_a_readable_box_is_no_background(project, tmp_path):
    """Labels with confidences, say: the image came in with no box at all, as background."""
    data = write_smears(tmp_path / "data", train=3, val=1)
    first, *others = sorted((data.parent / "labels").rglob("*.txt"))
    first.write_text("".join(f"{line} 0.9\n" for line in first.read_text().splitlines()))
    imported = import_dataset(project, data, 96)
    assert len(imported.added) == len(others)
    assert first.stem not in {Path(name).stem for name in saved(project)}
    (told,) = [note for note in imported.notes if "is left out" in note]
    assert "6 numbers" in told
    assert first.stem in told


def test_classes_go_by_name_and_new_ones_are_added(project, tmp_path):
    found = write_image(tmp_path / "theirs" / "1.png", 1)
    other = type(found)(found.xyxy, found.labels, found.scores, ["rbc", "Blast", "Platelets"])
    write_voc(tmp_path / "theirs" / "1.xml", other)
    imported = import_dataset(project, tmp_path / "theirs", 128)
    assert imported.added
    assert project.classes[:3] == NAMES
    counts = saved(project)["1.png"]
    assert counts["RBC"] == found.counts()["RBC"]
    assert counts.get("Blast", 0) == found.counts()["WBC"]
    renamed = import_dataset(project, tmp_path / "theirs", 128, rename={"Blast": "WBC"})
    assert renamed.added
    assert saved(project)["1.png"]["WBC"] == found.counts()["WBC"]


def test_yolo_without_names_has_those_of_the_project(project, tmp_path):
    write_yolo(tmp_path / "theirs" / "1.txt", write_image(tmp_path / "theirs" / "1.png", 1))
    import_dataset(project, tmp_path / "theirs", 128)
    assert saved(project) == expected(1)


def test_objects_of_qupath_without_a_class_are_left_out_and_told(project, tmp_path):
    found = write_image(tmp_path / "theirs" / "1.png", 1)
    file = tmp_path / "theirs" / "1.geojson"
    write_geojson(file, found)
    content = json.loads(file.read_text())
    del content["features"][0]["properties"]["classification"]
    file.write_text(json.dumps(content))
    imported = import_dataset(project, tmp_path / "theirs", 128)
    assert any("1 object without a class left out" in note for note in imported.notes)
    assert sum(saved(project)["1.png"].values()) == len(found) - 1


def test_what_cannot_be_used_is_told_and_others_are_imported(project, tmp_path):
    folder = tmp_path / "theirs"
    for seed in (1, 2, 3, 4):
        write_voc(folder / f"{seed}.xml", write_image(folder / f"{seed}.png", seed))
    (folder / "2.xml").write_text("<annotation><object/></annotation>")
    (folder / "3.png").write_bytes(b"no image")
    write_image(folder / "bare.png", 5)
    imported = import_dataset(project, folder, 128)
    assert saved(project) == expected(1, 4)
    told = " ".join(imported.notes)
    for word in ("2.xml", "3.png", "1 image without annotations left out: bare.png"):
        assert word in told


def test_one_file_and_its_image(project, tmp_path):
    found = write_image(tmp_path / "a" / "field.png", 1)
    write_geojson(tmp_path / "b.geojson", found)
    import_dataset(project, tmp_path / "b.geojson", 128, images=tmp_path / "a" / "field.png")
    assert list(saved(project)) == ["field.png"]
    write_voc(tmp_path / "a" / "field.xml", found)
    assert len(import_dataset(project, tmp_path / "a" / "field.xml", 128).added) == 1
    with pytest.raises(FileError, match="no image with this name"):
        import_dataset(project, tmp_path / "b.geojson", 128, images=tmp_path / "project")


def test_images_of_one_name_in_two_folders_keep_their_own_boxes(project, tmp_path):
    for seed in (1, 2):
        found = write_image(tmp_path / "theirs" / f"slide {seed}" / "field.png", seed)
        write_voc(tmp_path / "theirs" / f"slide {seed}" / "field.xml", found)
    assert len(import_dataset(project, tmp_path / "theirs", 128).added) == 2
    boxes = sorted(len(project.load_annotations(s)) for s in project.sources().values())
    assert boxes == sorted(len(smear(seed)[2]) for seed in (1, 2))


@pytest.mark.parametrize("what", ["nowhere", "empty", "readme.md"])
def test_nothing_to_import_is_told(project, tmp_path, what):
    (tmp_path / "empty").mkdir()
    (tmp_path / "readme.md").write_text("hello")
    with pytest.raises(FileError, match=what):
        import_dataset(project, tmp_path / what, 128)


def test_a_cancelled_import_keeps_what_it_has(project, tmp_path):
    for seed in (1, 2, 3):
        file = tmp_path / "theirs" / f"{seed}.xml"
        write_voc(file, write_image(file.with_suffix(".png"), seed))

    def stop(progress):
        if progress.done == 2:
            raise Cancelled

    with pytest.raises(Cancelled):
        import_dataset(project, tmp_path / "theirs", 128, report=stop)
    assert saved(project) == expected(1, 2)


def test_a_project_that_vanishes_ends_the_import(project, tmp_path):
    for seed in (1, 2):
        file = tmp_path / "theirs" / f"{seed}.xml"
        write_voc(file, write_image(file.with_suffix(".png"), seed))
    shutil.move(project.path, tmp_path / "unplugged")
    with pytest.raises(FileError, match="folder is gone"):
        import_dataset(project, tmp_path / "theirs", 128)


def test_the_side_may_be_found_for_each_image(project, tmp_path):
    write_voc(tmp_path / "theirs" / "1.xml", write_image(tmp_path / "theirs" / "1.png", 1))
    asked = []

    def side(annotations, image):
        asked.append((len(annotations), image.name))
        return 64

    import_dataset(project, tmp_path / "theirs", 32, crop_size=side)
    assert asked == [(len(smear(1)[2]), "1.png")]
    assert {row.side for row in project.crops} == {64}


def test_annotations_for_the_image_that_is_open(tmp_path):
    found = write_image(tmp_path / "1.png", 1)
    write_geojson(tmp_path / "1.geojson", found)
    annotations, notes = import_for_image(tmp_path / "1.geojson", (96, 128), ["WBC", "RBC"])
    assert not notes
    assert annotations.names[:2] == ["WBC", "RBC"]
    assert annotations.counts()["RBC"] == found.counts()["RBC"]
    np.testing.assert_allclose(
        np.sort(annotations.xyxy, axis=0), np.sort(found.xyxy, axis=0), atol=0.01
    )
    write_yolo(tmp_path / "1.txt", found)
    assert import_for_image(tmp_path / "1.txt", (96, 128), NAMES)[0].counts() == found.counts()


@pytest.mark.slow
def test_real_smears_as_they_were_published(project, shared, tmp_path):
    for name in ("JPEGImages", "Annotations"):
        (tmp_path / "bccd" / name).mkdir(parents=True)
    for file in sorted((shared / "data" / "bccd" / "Annotations").glob("*.xml"))[:6]:
        shutil.copy(file, tmp_path / "bccd" / "Annotations")
        image = shared / "data" / "bccd" / "JPEGImages" / f"{file.stem}.jpg"
        shutil.copy(image, tmp_path / "bccd" / "JPEGImages")
    imported = import_dataset(project, tmp_path / "bccd", 320, crop_size=640)
    assert len(imported.added) == 6
    check_dataset(read_dataset(project.data))
