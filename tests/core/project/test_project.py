"""A project's folder: what is in it, that others can use it, that adding again updates it."""

import csv
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from napari_beerlanet.core.boxes.history import objects_by_id
from napari_beerlanet.core.boxes.regions import Region
from napari_beerlanet.core.common.progress import Cancelled
from napari_beerlanet.core.common.storage import DataError
from napari_beerlanet.core.formats.dataset import check_dataset, read_dataset
from napari_beerlanet.core.images.files import read_image
from napari_beerlanet.core.images.rgb import PADDING_GREY
from napari_beerlanet.core.project.files import ImageSource, ProjectError
from napari_beerlanet.core.project.project import Project
from projects import NAMES, fill, smear, tree


@pytest.fixture
def project(tmp_path):
    with Project.create(tmp_path / "my project", NAMES) as made:
        yield made


def pieces(project, split):
    return sorted((project.path / "images" / split).glob("*.png"))


# --- the folder ----------------------------------------------------------------------------------


def test_a_new_project_has_the_folders_of_ultralytics(project):
    names = {path.name for path in project.path.iterdir()}
    assert {"project.json", "data.yaml", "images", "labels", "runs", "models"} <= names
    assert project.classes == NAMES
    assert project.summary()["images"] == 0
    assert project.split_notes() == ["No image has been added yet."]


def test_what_is_saved_comes_back_to_the_last_digit(project):
    source, _, annotations = smear(1)
    annotations = replace(
        annotations,
        xyxy=annotations.xyxy / 3,
        regions=(Region("polygon", [[0.1, 0], [50, 1], [9, 60]]),),
    )
    project.save_annotations(source, annotations)
    project.close()
    with Project.open(project.path) as again:
        found = again.load_annotations(source)
        assert objects_by_id(found) == objects_by_id(annotations)
        np.testing.assert_array_equal(found.regions[0].points, annotations.regions[0].points)
        assert again.sources()[source.id] == source
        assert again.load_annotations(smear(2)[0]) is None


def test_colours_stay_with_their_classes(project):
    names = project.classes
    project.set_colours({names[0]: "#112233", names[1]: "#445566"})
    project.rename_class(names[0], "renamed")
    project.add_classes(["one more"])
    folder = project.path
    project.close()
    with Project.open(folder) as again:
        assert again.colours == {"renamed": "#112233", names[1]: "#445566"}
        with pytest.raises(ValueError, match="A colour is written as"):
            again.set_colours({names[1]: "red"})
    manifest = json.loads((folder / "project.json").read_text())
    manifest["colours"] = {"renamed": "reddish", names[1]: "#445566"}
    (folder / "project.json").write_text(json.dumps(manifest))
    with Project.open(folder) as again:
        assert again.colours == {names[1]: "#445566"}


def test_pieces_are_the_images_own_pixels_and_boxes(project):
    fill(project, [1, 2])
    for row in project.crops:
        seed = int(row.source_name.split()[1].split(".")[0])
        source, rgb, annotations = smear(seed)
        pixels = read_image(project.path / row.image()).pixels
        window = slice(row.y, row.y + row.height), slice(row.x, row.x + row.width)
        np.testing.assert_array_equal(pixels[: row.height, : row.width], rgb[window])
        assert row.source_digest == source.digest
        assert row.boxes == len((project.path / row.label()).read_text().splitlines())
        item = next(
            i
            for split in read_dataset(project.data).splits.values()
            for i in split
            if i.image.stem == row.file
        )
        height, width = pixels.shape[:2]
        centres = (annotations.xyxy[:, :2] + annotations.xyxy[:, 2:]) / 2
        np.testing.assert_allclose(item.cxcywh[:, :2] * (width, height), centres, atol=1e-4)
        assert item.labels.tolist() == annotations.labels.tolist()


def test_the_table_says_where_each_piece_is_from(project):
    shape = (96, 300)
    project.add_image(*smear(1, shape=shape), 96)
    with (project.path / "crops.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == len(project.crops) > 2
    assert {row["source_name"] for row in table} == {"smear 1.png"}
    assert max(int(row["x"]) + int(row["width"]) for row in table) == 300
    assert all(len(row["sha256"]) == 64 for row in table)


def test_our_reader_finds_nothing_wrong(project):
    fill(project, [1, 2, 3])
    notes = check_dataset(read_dataset(project.data))
    assert all("no boxes of" in note for note in notes)


@pytest.mark.parametrize("count", [1, 3])
def test_ultralytics_alone_reads_it(project, monkeypatch, count):
    monkeypatch.setenv("YOLO_OFFLINE", "true")
    from ultralytics.data.utils import check_det_dataset

    from napari_beerlanet.core.detection.ultralytics_api import YOLODataset

    fill(project, range(count))
    data = check_det_dataset(str(project.data), autodownload=False)
    assert list(data["names"].values()) == NAMES
    ours = read_dataset(project.data)
    for split in ("train", "val"):
        theirs = YOLODataset(img_path=data[split], data=data, augment=False, imgsz=128)
        items = ours.splits[split]
        assert theirs.im_files == [str(item.image) for item in items]
        for item, label in zip(items, theirs.labels, strict=True):
            np.testing.assert_array_equal(label["cls"][:, 0], item.labels)
            np.testing.assert_allclose(label["bboxes"], item.cxcywh, atol=1e-6)


def test_the_folder_may_be_moved(project, tmp_path):
    fill(project, [1, 2])
    project.close()
    shutil.move(project.path, tmp_path / "elsewhere")
    dataset = read_dataset(tmp_path / "elsewhere" / "data.yaml")
    assert {len(items) for items in dataset.splits.values()} == {1}
    with Project.open(tmp_path / "elsewhere") as again:
        assert again.summary()["images"] == 2


# --- adding again --------------------------------------------------------------------------------


def test_adding_again_without_a_change_changes_no_file(project):
    fill(project, [1, 2, 3])
    before = tree(project.path)
    fill(project, [2])
    after = tree(project.path)
    saved = [name for name in before if name.startswith("annotations")]
    assert {k: v for k, v in after.items() if k not in saved} == {
        k: v for k, v in before.items() if k not in saved
    }


def test_adding_again_replaces_what_is_stale_and_leaves_others_alone(project):
    first, second = fill(project, [1, 2])
    others = {k: v for k, v in tree(project.path).items() if first in k and "images" in k}
    source, rgb, annotations = smear(2)
    added = project.add_image(source, rgb, annotations[[0, 1]], 128)
    assert added.id == second
    mine = [row for row in project.crops if row.source == second]
    assert [row.boxes for row in mine] == [2]
    now = tree(project.path)
    assert {k: v for k, v in now.items() if first in k and "images" in k} == others
    assert sum(second in name and name.startswith("images") for name in now) == 1
    assert sum(second in name and name.startswith("labels") for name in now) == 1


def test_an_image_keeps_its_side_when_others_are_added(project):
    fill(project, range(2))
    for seed in range(2, 9):
        before = {row.file: row.split for row in project.crops}
        fill(project, [seed])
        assert {row.file: row.split for row in project.crops if row.file in before} == before
        assert {row.split for row in project.crops} == {"train", "val"}


def test_an_image_can_be_taken_out(project):
    first, second = fill(project, [1, 2])
    project.remove_image(second)
    assert {row.source for row in project.crops} == {first}
    assert not any(second in name for name in tree(project.path) if "annotations" not in name)
    assert project.load_annotations(smear(2)[0]) is not None
    check_dataset(read_dataset(project.data))


def test_the_same_image_from_elsewhere_is_the_same_source(project):
    source, rgb, annotations = smear(1, path="/a/smear.png")
    project.add_image(source, rgb, annotations, 128)
    other = ImageSource.from_image(rgb, "copy of it.png", "/b/copy.png")
    assert project.id_of(other) == source.id
    assert project.add_image(other, rgb, annotations, 128).id == source.id


def test_a_file_that_has_changed_is_another_image_until_somebody_says_it_is_not(project):
    source, rgb, annotations = smear(1, path="/a/smear.png")
    first = project.add_image(source, rgb, annotations, 128).id
    darker = np.minimum(rgb, 200)
    anew = ImageSource.from_image(darker, "smear 1.png", "/a/smear.png")
    assert project.id_of(anew) != first
    assert project.load_annotations(anew) is None
    assert project.previous_version_of(anew) == first
    assert not project.previous_version_of(source)
    assert not project.previous_version_of(
        ImageSource.from_image(rgb[:50], "smear 1.png", "/a/smear.png")
    )
    assert not project.previous_version_of(ImageSource.from_image(darker, "smear 1.png"))
    assert objects_by_id(project.reuse_annotations(anew, first)) == objects_by_id(annotations)
    assert project.add_image(anew, darker, annotations, 128).id == first
    project.close()
    with Project.open(project.path) as again:
        assert again.id_of(anew) == first
        assert again.summary()["images"] == 1
        assert again.crops[0].source_digest == anew.digest


# --- one image -----------------------------------------------------------------------------------


def test_an_only_image_validates_on_itself_and_that_is_told(project):
    added = project.add_image(*smear(1), 128)
    assert any("will be optimistic" in note for note in added.notes)
    assert not pieces(project, "val")
    notes = check_dataset(read_dataset(project.data))
    assert any("share" in note for note in notes)


def test_an_only_image_with_two_regions_is_split_by_region(project):
    regions = [Region.rectangle(0, 0, 60, 96), Region.rectangle(70, 0, 128, 96)]
    added = project.add_image(*smear(1, regions=regions), 96)
    assert any("one of its regions is used for validation" in note for note in added.notes)
    assert len(pieces(project, "val")) == len(pieces(project, "train")) == 1
    check_dataset(read_dataset(project.data))


def test_an_only_long_image_is_cut_in_two_that_share_no_pixel(project):
    project.add_image(*smear(1, shape=(96, 400)), 96)
    reach = {
        split: [(r.x, r.x + r.width) for r in project.crops if r.split == split]
        for split in ("train", "val")
    }
    assert max(end for _, end in reach["train"]) <= min(start for start, _ in reach["val"])
    check_dataset(read_dataset(project.data))


def test_with_a_second_image_the_first_goes_to_one_side(project):
    regions = [Region.rectangle(0, 0, 60, 96), Region.rectangle(70, 0, 128, 96)]
    first = project.add_image(*smear(1, regions=regions), 96).id
    (second,) = fill(project, [2])
    sides = {row.source: set() for row in project.crops}
    for row in project.crops:
        sides[row.source].add(row.split)
        assert (project.path / row.image()).is_file()
        assert (project.path / row.label()).is_file()
    assert sides == {first: {"train"}, second: {"val"}}
    assert len(tree(project.path / "images")) == len(project.crops)
    assert len(tree(project.path / "labels")) == len(project.crops)


# --- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["a b (c).tif", "Präparat 7 µm.tif", "标本.png", "../../x", ".", ""]
)
def test_any_name_makes_a_plain_file_name(project, name):
    source, rgb, annotations = smear(1, name=name or " ")
    added = project.add_image(source, rgb, annotations, 128)
    assert added.id.isascii()
    assert not set(added.id) & set(" /\\:.")
    assert pieces(project, "train")
    project.close()
    with Project.open(project.path) as again:
        assert again.sources()[added.id].name == source.name
        assert again.crops[0].source_name == source.name
        assert objects_by_id(again.load_annotations(source)) == objects_by_id(annotations)


def test_images_of_one_name_are_two(project):
    ids = fill(project, [1, 2], name="field.tif")
    assert len(set(ids)) == 2
    assert project.summary()["images"] == 2


def test_planes_of_a_stack_are_images_of_their_own(project):
    source, _, annotations = smear(1)
    other = replace(source, plane=(4,))
    project.save_annotations(source, annotations)
    project.save_annotations(other, annotations[[0]])
    assert len(project.load_annotations(source)) == len(annotations)
    assert len(project.load_annotations(other)) == 1


def test_planes_of_a_stack_stay_on_one_side(project):
    for seed in range(6):
        source, rgb, annotations = smear(seed, name="stack.tif", path="/a/stack.tif")
        project.add_image(replace(source, plane=(seed,)), rgb, annotations, 128)
        assert "Only one image" in project.split_notes()[0]
    fill(project, [9])
    sides = {}
    for row in project.crops:
        sides.setdefault(row.source_name, set()).add(row.split)
    assert sides == {"stack.tif": {"train"}, "smear 9.png": {"val"}}


def test_regions_of_a_lone_stack_are_split_alike_in_all_planes(project):
    regions = [Region.rectangle(0, 0, 60, 96), Region.rectangle(70, 0, 128, 96)]
    for seed in range(3):
        source, rgb, annotations = smear(seed, name="stack.tif", regions=regions)
        project.add_image(replace(source, plane=(seed,)), rgb, annotations, 96)
    places = {side: {r.x for r in project.crops if r.split == side} for side in ("train", "val")}
    assert sorted(map(sorted, places.values())) == [[0], [70]]
    check_dataset(read_dataset(project.data))


# --- classes -------------------------------------------------------------------------------------


def test_classes_are_added_behind_the_others(project):
    fill(project, [1, 2])
    assert project.add_classes(["ring", "RBC"]) == [*NAMES, "ring"]
    assert read_dataset(project.data).names == [*NAMES, "ring"]
    check_dataset(read_dataset(project.data))


def test_a_class_is_renamed_everywhere(project):
    fill(project, [1, 2])
    project.rename_class("RBC", "red cell")
    assert read_dataset(project.data).names[0] == "red cell"
    found = project.load_annotations(smear(1)[0])
    assert found.names[0] == "red cell"
    assert project.add_image(smear(1)[0], smear(1)[1], found, 128).boxes


@pytest.mark.parametrize(
    ("names", "words"),
    [([], "at least one"), (["a", " "], "each a name"), (["a", "A"], "twice")],
)
def test_classes_that_make_no_sense_are_refused(tmp_path, names, words):
    with pytest.raises(ProjectError, match=words):
        Project.create(tmp_path / "p", names)
    assert not (tmp_path / "p").exists()


# --- bad input -----------------------------------------------------------------------------------


def test_a_class_that_the_project_lacks_is_refused_by_name(project):
    source, rgb, annotations = smear(1)
    strange = replace(annotations, names=["RBC", "WBC", "ghost"])
    ghosts = replace(strange, labels=np.full(len(strange), 2))
    with pytest.raises(ProjectError, match="no class ghost in the project"):
        project.add_image(source, rgb, ghosts, 128)
    assert not project.crops


def test_without_a_region_nothing_is_added_but_the_work_is_saved(project):
    source, rgb, annotations = smear(1, regions=[])
    with pytest.raises(ProjectError, match="no region of it is marked"):
        project.add_image(source, rgb, annotations, 128)
    assert not project.crops
    assert len(project.load_annotations(source)) == len(annotations)


def test_an_image_of_another_size_is_refused(project):
    source, rgb, annotations = smear(1)
    with pytest.raises(ProjectError, match="not the image that was annotated"):
        project.add_image(source, rgb[:50], annotations, 128)


def test_images_without_boxes_are_background_and_told(project):
    source, rgb, annotations = smear(1)
    project.add_image(source, rgb, annotations[[]], 128)
    assert "nothing to train on" in project.split_notes()[0]
    fill(project, [2, 3])
    check_dataset(read_dataset(project.data))
    assert project.split_notes()[0].startswith("1 image for training, 1 for validation")


def test_odd_boxes_are_told(project):
    source, rgb, annotations = smear(1)
    odd = np.array([[500, 500, 510, 510], [3, 3, 3, 9], [-9, -9, 20, 20]], float)
    strange = replace(
        annotations[[]], xyxy=odd, labels=np.zeros(3, int), ids=np.arange(3), status=["drawn"] * 3
    )
    added = project.add_image(source, rgb, strange, 128)
    assert added.boxes == 1
    assert "1 box has no area and is left out." in added.notes
    assert "1 box has no part in the image and is left out." in added.notes


def test_what_was_not_reviewed_is_neither_object_nor_background(project):
    source, rgb, annotations = smear(1)
    copies = replace(annotations, status=["copied", *["drawn"] * (len(annotations) - 1)])
    whole = project.add_image(source, rgb, copies, 128)
    assert (whole.used, whole.unused) == (len(annotations), {})
    added = project.add_image(source, rgb, copies, 128, reviewed_only=True)
    assert added.used == len(annotations) - 1
    assert added.unused == {"copied from detections and not reviewed": 1}
    (crop,) = [crop for crop in project.crops if crop.source == added.id]
    pixels = np.asarray(Image.open(project.path / crop.image()))
    x1, y1, x2, y2 = annotations.xyxy[0].round().astype(int)
    others = np.zeros(pixels.shape[:2], bool)
    for a1, b1, a2, b2 in annotations.xyxy[1:].round().astype(int):
        others[b1:b2, a1:a2] = True
    hidden = np.zeros_like(others)
    hidden[max(y1, 0) : y2, max(x1, 0) : x2] = True
    assert (pixels[hidden & ~others] == PADDING_GREY).all()
    assert crop.boxes == len(annotations) - 1
    assert len(project.load_annotations(source)) == len(annotations)  # saved are all of them


def test_stray_boxes_are_counted_by_reason(project):
    source, rgb, annotations = smear(1)
    stray = np.array([[500, 500, 510, 510], [30, 30, 32, 60]], float)
    n = len(annotations)
    given = replace(
        annotations,
        xyxy=np.concatenate([annotations.xyxy, stray]),
        labels=np.append(annotations.labels, [0, 0]),
        ids=np.arange(n + 2),
        status=["drawn"] * (n + 2),
        types=(),
    )
    added = project.add_image(source, rgb, given, 128)
    assert added.used == n
    assert added.unused == {
        "with no part in the image": 1,
        "with a side of less than 4 pixels": 1,
    }


def test_boxes_that_nothing_is_learned_from_are_told(project):
    regions = [Region.rectangle(0, 0, 64, 96)]
    source, rgb, annotations = smear(1, regions=regions)
    added = project.add_image(source, rgb, annotations, 64)
    told = [note for note in added.notes if "not used for training" in note]
    share = np.clip(64 - annotations.xyxy[:, 0], 0, None) / np.diff(annotations.xyxy[:, ::2])[:, 0]
    lost = int((share < 0.5).sum())
    assert lost > 1
    assert told[0].startswith(f"{lost} boxes are not used for training")


def test_empty_glass_on_two_slides_does_not_keep_from_training(project):
    for seed in (1, 2):
        source, rgb, annotations = smear(seed, shape=(96, 300))
        rgb = rgb.copy()
        rgb[:, 96:] = 255
        left = annotations[annotations.xyxy[:, 2] < 96]
        project.add_image(ImageSource.from_image(rgb, source.name), rgb, left, 96)
    check_dataset(read_dataset(project.data))


def test_what_is_saved_while_an_image_is_added_is_kept(project):
    source, rgb, annotations = smear(1, shape=(96, 300))

    def save(progress):
        project.save_annotations(source, annotations[[0]])

    project.add_image(source, rgb, annotations, 96, report=save)
    assert len(project.load_annotations(source)) == 1


def test_an_image_that_cannot_be_seen_is_refused(project):
    source, rgb, annotations = smear(1)
    hidden = np.dstack([rgb, np.zeros(rgb.shape[:2], np.uint8)])
    with pytest.raises(ProjectError, match="nothing is visible"):
        project.add_image(source, hidden, annotations[[]], 128)
    assert not list(project.path.glob(".stage*"))


def test_cancelling_leaves_everything_as_it_was(project):
    fill(project, [1, 2])
    before = tree(project.path)

    def stop(progress):
        if progress.done:
            raise Cancelled

    source, rgb, annotations = smear(3, shape=(96, 400))
    with pytest.raises(Cancelled):
        project.add_image(source, rgb, annotations, 96, report=stop)
    now = tree(project.path)
    assert {k: v for k, v in now.items() if source.id not in k} == before
    assert not list(project.path.glob(".stage*"))


def test_a_large_image_is_known_by_a_sample(monkeypatch):
    from napari_beerlanet.core.common import storage

    rgb = np.random.default_rng(0).integers(0, 255, (700, 900, 3), dtype=np.uint8)
    assert ImageSource.from_image(rgb, "a").digest.startswith("sha256:")
    monkeypatch.setattr(storage, "_MAX_FULL_HASH_BYTES", 1000)
    sampled = ImageSource.from_image(rgb, "a").digest
    assert sampled.startswith("sampled-sha256:")
    other = rgb.copy()
    other[0, 0] ^= 255
    assert ImageSource.from_image(other, "a").digest != sampled


def test_the_table_of_pieces_can_be_read_by_people_and_project_json_too(project):
    fill(project, [1])
    content = json.loads((project.path / "project.json").read_text())
    assert content["classes"] == NAMES
    assert content["format"] == 1
    with Image.open(pieces(project, "train")[0]) as picture:
        assert (picture.format, picture.mode) == ("PNG", "RGB")


# --- what training needs to know -----------------------------------------------------------------


def test_without_images_or_boxes_there_is_nothing_to_train_on(project):
    with pytest.raises(DataError, match="No image has been added"):
        project.check_ready_to_train()
    source, rgb, annotations = smear(1)
    project.add_image(source, rgb, annotations[[]], 128)
    with pytest.raises(DataError, match="None of the images has a box"):
        project.check_ready_to_train()
    fill(project, [2])
    project.check_ready_to_train()


def test_the_pixel_size_is_that_of_all_or_of_none(project):
    assert project.pixel_size is None
    fill(project, [1])
    assert project.pixel_size == pytest.approx(0.1)
    source, rgb, annotations = smear(2)
    twice = replace(source, path=None, pixel_size=(0.05, 0.05))
    project.add_image(twice, rgb, annotations, 128, crop_size=256)
    middle = np.median([crop.side for crop in project.crops])
    assert project.pixel_size == pytest.approx(128 * 0.1 / middle, rel=1e-4)
    project.add_image(twice, rgb, annotations, 128)
    assert project.pixel_size is None
    project.add_image(replace(source, pixel_size=None), rgb, annotations, 128)
    assert project.pixel_size is None
