"""Reading a data.yaml: what it means, and what is told before anything is learned from it."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from napari_beerlanet.core.common.progress import Cancelled
from napari_beerlanet.core.common.storage import DataError
from napari_beerlanet.core.formats.dataset import (
    check_dataset,
    dataset_hash,
    label_path,
    read_dataset,
    read_labelled_image,
)
from tinydata import NAMES, write_smear, write_smears


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("smears")
    write_smears(folder, train=3, val=2, side=32)
    return folder


@pytest.fixture
def folder(made, tmp_path) -> Path:
    """A copy that a test may spoil."""
    shutil.copytree(made, tmp_path / "smears")
    return tmp_path / "smears"


def problems(folder: Path, splits=("train", "val")) -> str:
    with pytest.raises(DataError) as error:
        check_dataset(read_dataset(folder / "data.yaml"), splits)
    return str(error.value)


def rewrite(folder: Path, text: str) -> Path:
    (folder / "data.yaml").write_text(text, encoding="utf-8")
    return folder


def images(dataset, split="train"):
    return [item.image.name for item in dataset.splits[split]]


# --- what is meant -------------------------------------------------------------------------------


def test_good_data_is_read_without_a_word(folder):
    dataset = read_dataset(folder / "data.yaml")
    notes = check_dataset(dataset)
    assert dataset.names == list(NAMES)
    assert images(dataset) == ["smear-0.png", "smear-1.png", "smear-2.png"]
    assert images(dataset, "val") == ["smear-100.png", "smear-101.png"]
    assert all("no boxes of" in note for note in notes)
    item = dataset.splits["train"][0]
    table = np.loadtxt(folder / "labels" / "train" / "smear-0.txt", ndmin=2)
    assert (item.labels == table[:, 0]).all()
    assert item.labels.dtype == np.int64
    np.testing.assert_array_equal(item.cxcywh, table[:, 1:])
    assert dataset.inspections[item.image].shape == (32, 32)


def test_labels_are_those_that_ultralytics_reads(folder):
    from napari_beerlanet.core.detection.ultralytics_api import YOLODataset

    dataset = read_dataset(folder / "data.yaml")
    theirs = YOLODataset(
        img_path=str(folder / "images" / "train"),
        data={"names": dict(enumerate(NAMES))},
        augment=False,
        imgsz=32,
    )
    assert theirs.im_files == [str(item.image) for item in dataset.splits["train"]]
    for ours, label in zip(dataset.splits["train"], theirs.labels, strict=True):
        np.testing.assert_array_equal(label["cls"][:, 0], ours.labels)
        np.testing.assert_array_equal(label["bboxes"], ours.cxcywh.astype(np.float32))


@pytest.mark.parametrize(
    "text",
    [
        "train: images/train\nval: images/val\nnames: {0: RBC, 1: WBC, 2: Platelets}\n",
        "train: [images/train]\nval: [images/val]\nnames: [RBC, WBC, Platelets]\nnc: 3\n",
        "path: .\ntrain: ../images/train\nvalidation: images/val\nnames: ['RBC', WBC, Platelets]\n",
        "\ufefftrain: images/train\nval: images/val\nnames: {'0': RBC, '1': WBC, '2': Platelets}\n",
        "train: train.txt\nval: images/val\nnames: [RBC, WBC, Platelets]\n",
        "path: {folder}\ntrain: [list/a.txt]\nval: images/val\nnames: [RBC, WBC, Platelets]\n",
    ],
)
def test_ways_to_write_the_same(folder, text):
    paths = [f"images/train/smear-{k}.png" for k in range(3)]
    (folder / "train.txt").write_text("\n".join(paths) + "\n\n")
    (folder / "list").mkdir()
    (folder / "list" / "a.txt").write_text("\n".join(f"./../{path}" for path in paths))
    rewrite(folder, text.replace("{folder}", folder.as_posix()))
    dataset = read_dataset(folder)
    assert dataset.names == list(NAMES)
    assert images(dataset) == ["smear-0.png", "smear-1.png", "smear-2.png"]
    check_dataset(dataset)


def test_class_names_may_be_a_number(folder):
    rewrite(folder, "train: images/train\nval: images/val\nnc: 3\n")
    assert read_dataset(folder).names == ["class 0", "class 1", "class 2"]


def test_labels_lie_beside_images_without_a_folder_of_that_name():
    assert label_path(Path("a/images/b/images/c.png")) == Path("a/images/b/labels/c.txt")
    assert label_path(Path("a/pictures/c.tiff")) == Path("a/pictures/c.txt")


def test_outlines_become_boxes(tmp_path):
    (tmp_path / "a.txt").write_text("1 0.1 0.2 0.5 0.2 0.5 0.6 0.1 0.6\n")
    item = read_labelled_image(tmp_path / "a.png", 2)
    np.testing.assert_allclose(item.cxcywh, [[0.3, 0.4, 0.4, 0.4]])


def test_nothing_is_written_or_fetched(folder, monkeypatch):
    rewrite(
        folder,
        "train: images/train\nval: images/val\nnames: [RBC, WBC, Platelets]\n"
        "download: import os; os.mkdir('fetched')\n",
    )
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    check_dataset(read_dataset("data.yaml"))
    assert sorted(folder.rglob("*")) == before


def test_hash_follows_content_and_not_place(folder, tmp_path):
    first = dataset_hash(read_dataset(folder))
    shutil.copytree(folder, tmp_path / "elsewhere")
    assert dataset_hash(read_dataset(tmp_path / "elsewhere")) == first
    labels = folder / "labels" / "train" / "smear-0.txt"
    labels.write_text(labels.read_text().splitlines()[0])
    changed = dataset_hash(read_dataset(folder))
    assert changed != first
    Image.new("RGB", (32, 32), "red").save(folder / "images" / "train" / "smear-1.png")
    assert dataset_hash(read_dataset(folder)) not in (first, changed)


def test_looking_at_images_can_be_stopped(folder):
    def report(progress):
        raise Cancelled

    with pytest.raises(Cancelled):
        check_dataset(read_dataset(folder), report=report)


# --- what is wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "not a data.yaml"),
        ("[1, 2]", "not a data.yaml"),
        ("a: [", "not a YAML file"),
        ("train: !!python/object/apply:os.getcwd []\n", "a tag"),
        ("train: images/train\nval: images/val\n", "`names`"),
        ("train: images/train\nval: images/val\nnames: []\n", "`names`"),
        ("train: images/train\nval: images/val\nnames: {1: a, 2: b}\n", "without a gap"),
        ("train: images/train\nval: images/val\nnames: [a, a]\n", "a twice"),
        ("train: images/train\nval: images/val\nnames: [a, b]\nnc: 3\n", "`nc` says 3"),
        ("path: nowhere\ntrain: images/train\nval: images/val\nnames: [a]\n", "nowhere"),
    ],
)
def test_a_file_that_describes_no_data(folder, text, word):
    rewrite(folder, text)
    with pytest.raises(DataError, match=r"data\.yaml") as error:
        read_dataset(folder)
    assert word in str(error.value)


def test_no_file(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        read_dataset(tmp_path / "data.yaml")


def test_a_folder_per_class_is_told_from_images_with_boxes(tmp_path):
    (tmp_path / "ring").mkdir()
    with pytest.raises(DataError, match=r"no data\.yaml in it, .* for classifiers"):
        read_dataset(tmp_path)


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("0 0.5 0.5 0.2", "4 numbers"),
        ("0 0.5 0.5 0.2 0.2 0.9", "6 numbers"),
        ("RBC 0.5 0.5 0.2 0.2", "not numbers"),
        ("0 nan 0.5 0.2 0.2", "finite"),
        ("3 0.5 0.5 0.2 0.2", "class 3, but the classes are 0 to 2"),
        ("-1 0.5 0.5 0.2 0.2", "class -1"),
        ("0.5 0.5 0.5 0.2 0.2", "class 0.5"),
        ("0 48 52 20 20", "out of range"),
        ("0 -0.3 0.5 0.2 0.2", "out of range"),
        ("0 0.5 0.5 0 0.2", "without area"),
        ("0 0.5 0.5 0.2 -0.001", "without area"),
        ("0 0.1 0.1 0.3 0.1 0.2 0.1", "without area"),
    ],
)
def test_every_bad_label_is_named(folder, line, word):
    labels = folder / "labels" / "val" / "smear-100.txt"
    labels.write_text(f"0 0.5 0.5 0.2 0.2\n\n{line}\n")
    message = problems(folder)
    assert f"{labels}, line 3" in message
    assert word in message


def test_bad_images_are_named(folder):
    train = folder / "images" / "train"
    (train / "smear-0.png").write_bytes((train / "smear-0.png").read_bytes()[:400])
    (train / "smear-1.png").write_bytes(b"")
    Image.new("L", (32, 32)).save(train / "smear-2.png")
    Image.new("RGB", (5, 32)).save(train / "small.png")
    message = problems(folder)
    for name in ("smear-0.png", "smear-1.png", "smear-2.png", "small.png"):
        assert name in message
    assert "5 × 32" in message


def test_missing_images_are_named(folder):
    (folder / "train.txt").write_text("images/train/smear-0.png\nimages/train/gone.png\n")
    rewrite(folder, "train: train.txt\nval: images/val\nnames: [RBC, WBC, Platelets]\n")
    assert "gone.png: there is no such file" in problems(folder)


@pytest.mark.parametrize(
    ("val", "word"),
    [
        ("", "no `val:`"),
        ("val: []", "no `val:`"),
        ("val: images/gone", "does not exist"),
        ("val: https://example.org/images.zip", "does not exist"),
        ("val: 7", "must be a folder"),
        ("val: images/empty", "`val` has no images"),
        ("val: images/bare", "no boxes"),
    ],
)
def test_a_split_of_nothing(folder, val, word):
    (folder / "images" / "empty").mkdir()
    (folder / "images" / "bare").mkdir()
    Image.new("RGB", (32, 32), "white").save(folder / "images" / "bare" / "blank.png")
    rewrite(folder, f"train: images/train\n{val}\nnames: [RBC, WBC, Platelets]\n")
    assert word in problems(folder)
    check_dataset(read_dataset(folder), ["train"])


@pytest.mark.parametrize("name", ["a" * 5000, "b/" * 5000])
def test_names_that_no_file_can_have(folder, name):
    """They ended in an OSError, which quoted all of them."""
    rewrite(folder, f"path: {name}\ntrain: train\nval: val\nnames: [a]")
    with pytest.raises(DataError, match="no such folder") as error:
        read_dataset(folder / "data.yaml")
    said = [str(error.value)]
    rewrite(folder, f"train: {name}\nval: {name}\nnames: [a]")
    said.append(problems(folder))
    (folder / "list.txt").write_text(f"{name}\n")
    rewrite(folder, "train: list.txt\nval: list.txt\nnames: [a]")
    said.append(problems(folder))
    assert max(map(len, said)) < 600 + len(str(folder)) * 4


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes by name")
def test_a_pipe_instead_of_a_list_or_of_labels_is_not_waited_for(folder):
    os.mkfifo(folder / "list.txt")
    rewrite(folder, "train: list.txt\nval: list.txt\nnames: [a]")
    assert "list.txt: not a folder, an image, or a list of images" in problems(folder)
    image = next(folder.rglob("*.png"))
    label_path(image).unlink()
    os.mkfifo(label_path(image))
    assert read_labelled_image(image, 3).problems == (
        f"{label_path(image)}: not a text file that can be read.",
    )


def test_the_same_image_in_train_and_val(folder):
    shutil.copy(folder / "images" / "train" / "smear-1.png", folder / "images" / "val" / "copy.png")
    message = problems(folder)
    assert "copy.png: the same image as" in message
    assert "smear-1.png" in message


def test_the_same_folder_twice_is_odd_but_meant(folder):
    rewrite(folder, "train: images/train\nval: images/train\nnames: [RBC, WBC, Platelets]\n")
    assert any("share 3 images" in note for note in check_dataset(read_dataset(folder)))


def test_many_problems_are_cut_short(folder):
    labels = folder / "labels" / "train" / "smear-0.txt"
    labels.write_text("9 0.5 0.5 0.2 0.2\n" * 40)
    message = problems(folder)
    assert message.count("\n") == 11
    assert message.endswith("and 30 more.")


def test_oddities_are_told(folder):
    write_smear(folder, "train", 7, side=32)
    (folder / "labels" / "train" / "smear-7.txt").unlink()
    labels = folder / "labels" / "train" / "smear-0.txt"
    labels.write_text("0 0.5 0.5 0.2 0.2\n" * 3)
    shutil.copy(
        folder / "images" / "train" / "smear-1.png", folder / "images" / "train" / "again.png"
    )
    notes = " ".join(check_dataset(read_dataset(folder)))
    assert "smear-7.png" in notes or "again.png" in notes
    assert "used as background" in notes
    assert f"{labels}: 2 duplicate boxes ignored" in notes
    assert "duplicate image" in notes


def test_labels_that_are_no_text(folder):
    labels = folder / "labels" / "train" / "smear-0.txt"
    labels.write_bytes(b"\xff\xfe\x00")
    assert f"{labels}: not a text file" in problems(folder)


@given(st.lists(st.text(max_size=30), max_size=6))
def test_no_label_file_breaks_the_reader(tmp_path_factory, lines):
    folder = tmp_path_factory.mktemp("any")
    (folder / "a.txt").write_text("\n".join(lines), encoding="utf-8")
    item = read_labelled_image(folder / "a.png", 3)
    assert len(item.labels) == len(item.cxcywh)
    assert np.isfinite(item.cxcywh).all()


@given(st.integers(0, 2), st.tuples(*[st.floats(0, 1)] * 2), st.tuples(*[st.floats(1e-6, 1)] * 2))
def test_written_boxes_are_read(tmp_path_factory, label, centre, size):
    folder = tmp_path_factory.mktemp("box")
    numbers = " ".join(repr(value) for value in (*centre, *size))
    (folder / "a.txt").write_text(f"{label} {numbers}\n", encoding="utf-8")
    item = read_labelled_image(folder / "a.png", 3)
    assert item.problems == ()
    assert item.labels.tolist() == [label]
    assert item.cxcywh.tolist() == [[*centre, *size]]
