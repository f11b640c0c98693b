"""Small files that would take gigabytes or minutes are read in little, or refused in a sentence."""

import csv
import io
import json

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz.corpus import HOSTILE
from fuzz.opener import open_file
from napari_beerlanet.core import formats as fm
from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.common.storage import (
    DataError,
    FileError,
    csv_cell,
    csv_text,
    read_yaml,
    staged_folder,
)
from napari_beerlanet.core.formats import common, yolo

BOXES = np.array([[0, 0, 5, 5], [5, 5, 9, 9]], np.float32)


def two(names=("a", "b"), **columns):
    return Detections(
        BOXES, np.array([0, 1]), np.array([0.9, 0.8]), list(names), columns, image_shape=(10, 10)
    )


def test_a_class_number_of_yolo_that_would_fill_the_memory(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("60000000 0.5 0.5 0.1 0.1")
    with pytest.raises(FileError, match=r"line 1: class 60000000; up to 10,000 classes"):
        fm.read_yolo(path, (10, 10))
    path.write_text("9999 0.5 0.5 0.1 0.1")
    assert fm.read_yolo(path, (10, 10)).names[-1] == "9999"


def test_a_long_list_of_classes(tmp_path):
    (tmp_path / "a.txt").write_text("0 0.5 0.5 0.1 0.1")
    (tmp_path / "classes.txt").write_text("a\n" * 20_000)
    with pytest.raises(FileError, match="more than 10,000 values"):
        fm.read_yolo(tmp_path / "a.txt", (10, 10))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("merged.yaml", "a merge key"),
        ("huge.json", "made for an image of 1000"),
        ("huge.review.json", "its decisions cannot be read"),
        ("huge.preset.json", "needs 3 numbers"),
        ("small-floats.normalizer.safetensors", "not a saved normalizer"),
    ],
)
def test_numbers_that_no_float_holds_and_settings_that_grow(tmp_path, name, said):
    HOSTILE[name](tmp_path / name)
    with pytest.raises(FileError, match=said) as refused:
        open_file(tmp_path / name)
    assert len(str(refused.value)) < 400


def test_a_yaml_file_that_takes_a_minute(tmp_path):
    path = tmp_path / "data.yaml"
    path.write_text("names: [" + "[]," * 400_000 + "]")
    with pytest.raises(FileError, match="larger than 1 MB"):
        read_yaml(path)
    path.write_text("names:\n" + "".join(f"- a{k % 15_000}\n" for k in range(30_000)))
    with pytest.raises(DataError, match="twice") as refused:
        yolo.class_names_of(yolo.read_data_yaml(path), path)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("kind", ["csv", "coco", "voc", "geojson"])
def test_one_long_text_takes_the_room_of_one(tmp_path, kind):
    """NumPy's own text would give each of the rows the room of the longest."""
    path = tmp_path / f"a{fm.FORMATS[kind].suffix}"
    detections = two(remark=np.array(["x" * 100_000, "short"], object))
    fm.write_detections(path, detections, "a.png", format=kind)
    read = fm.read_detections(path, (10, 10))
    column = read.columns["remark"]
    assert column.dtype == object
    assert [len(text) for text in column] == [common.MAX_TEXT_LENGTH, 5]
    assert read.report["notes"] == [
        f'{path}: texts of more than 1,000 characters were cut ("remark").'
    ]


def test_a_column_of_its_own_for_every_box(tmp_path):
    path, count = tmp_path / "a.json", 20_000
    attributes = [{f"only {k}": k, "shared": k} for k in range(count)]
    content = {
        "images": [{"id": 1, "file_name": "a.png"}],
        "categories": [{"id": 1, "name": "cell"}],
        "annotations": [
            {"image_id": 1, "category_id": 1, "bbox": [0, 0, 1, 1], "attributes": one}
            for one in attributes
        ],
    }
    path.write_text(json.dumps(content))
    read = fm.read_coco(path)
    assert len(read.columns) == common.MIN_COLUMNS
    assert read.columns["shared"].tolist() == list(range(count))
    assert read.report["notes"] == [
        f"{path}: 32 of 20,001 further columns were read, those that most boxes have."
    ]


def test_a_table_of_many_full_columns_is_read_whole(tmp_path):
    columns = {f"value {k}": np.arange(2) + k for k in range(400)}
    fm.write_csv(tmp_path / "a.csv", two(**columns))
    assert len(fm.read_csv(tmp_path / "a.csv").columns) == 400


def test_a_class_with_an_endless_name(tmp_path):
    fm.write_csv(tmp_path / "a.csv", two(names=("a" * 5000, "b")))
    with pytest.raises(FileError, match="a name of 5,000 characters; up to 1,000"):
        fm.read_csv(tmp_path / "a.csv")


# --- spreadsheets --------------------------------------------------------------------------------

FORMULAS = ["=cmd|' /C calc'!A0", "@SUM(1)", "+1+1", "-2+3", "\t=1", "'=quoted", "''=twice"]


@given(st.one_of(st.sampled_from(FORMULAS), st.text()))
def test_no_cell_is_a_formula_and_all_come_back(text):
    cell = csv_cell(text)
    assert csv_text(cell) == text
    if cell[:1] in tuple("=+-@\t\r"):
        float(cell)  # a number, which stays one


@pytest.mark.parametrize("text", FORMULAS)
def test_names_that_are_formulas(tmp_path, text):
    path = tmp_path / "a.csv"
    detections = two(names=(text, "b"), type=np.array([text, ""], object))
    fm.write_csv(path, detections, image_name=text)
    with path.open(newline="", encoding="utf-8") as file:
        for cell in (cell for line in csv.reader(file) for cell in line):
            assert not cell.startswith(("=", "@", "\t", "+1+", "-2+"))
    read = fm.read_csv(path)
    assert read.names == [text, "b"]
    assert read.columns["type"].tolist() == [text, ""]
    assert fm.image_names(path) == [text]


def test_a_study_writes_no_formulas(tmp_path):
    from napari_beerlanet.core.batch.manifest import write_summary

    rows = [{"image": "=1+1", "count @x": 3, "value": -2.5}]
    write_summary(tmp_path, rows)
    text = (tmp_path / "summary.csv").read_text()
    assert text.splitlines()[1] == "'=1+1,3,-2.5"
    assert pd.read_csv(io.StringIO(text))["value"].tolist() == [-2.5]


# --- all files or none ---------------------------------------------------------------------------


def test_files_of_a_folder_come_together(tmp_path):
    folder = tmp_path / "new" / "folder"
    with staged_folder(folder) as stage:
        for name in ("a.txt", "b.txt"):
            (stage / name).write_text(name)
        assert [path.name for path in folder.iterdir()] == [stage.name]
    assert sorted(path.name for path in folder.iterdir()) == ["a.txt", "b.txt"]


def test_none_comes_where_one_fails(tmp_path):
    folder = tmp_path / "new" / "folder"

    def interrupted(text, error):
        with staged_folder(folder) as stage:
            (stage / "a.txt").write_text(text)
            raise error

    with pytest.raises(KeyboardInterrupt):
        interrupted("a", KeyboardInterrupt)
    assert list(tmp_path.iterdir()) == []
    folder.mkdir(parents=True)
    (folder / "a.txt").write_text("old")
    with pytest.raises(ValueError, match="bad"):
        interrupted("new", ValueError("bad"))
    assert [path.name for path in folder.iterdir()] == ["a.txt"]
    assert (folder / "a.txt").read_text() == "old"


def test_a_link_in_the_folder_leads_nowhere(tmp_path):
    folder, outside = tmp_path / "out", tmp_path / "outside.txt"
    folder.mkdir()
    outside.write_text("untouched")
    (folder / "a.txt").symlink_to(outside)
    with staged_folder(folder) as stage:
        (stage / "a.txt").write_text("mine")
    assert outside.read_text() == "untouched"
    assert (folder / "a.txt").read_text() == "mine"
    assert not (folder / "a.txt").is_symlink()


def test_yolo_that_cannot_be_written_leaves_no_classes(tmp_path):
    (tmp_path / "a.txt").mkdir()  # where the file should go
    (tmp_path / "a.txt" / "inside").write_text("")
    (tmp_path / "b.txt").write_text("0 0.5 0.5 0.1 0.1")
    detections = two()
    object.__setattr__(detections, "image_shape", None)
    with pytest.raises(ValueError, match="image_shape must be known"):
        fm.write_yolo_with_classes(tmp_path / "c.txt", detections)
    assert not (tmp_path / "classes.txt").exists()
    assert fm.read_yolo(tmp_path / "b.txt", (10, 10)).names == ["0"]


@pytest.fixture
def answer():
    """How opening a file ends, within limits."""
    pytest.importorskip("resource", reason="Windows has no limits for a process")
    from fuzz.opener import answer

    return answer


@pytest.mark.parametrize(
    "name",
    ["classes.annotations.json", "names.review.json", "types.cells.csv", "many-classes.csv"],
)
def test_names_by_the_hundred_thousand(name, answer, tmp_path):
    """Within ten seconds of the processor, where looking each up among all took hours."""
    HOSTILE[name](tmp_path / name)
    assert answer(tmp_path / name) == "result"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cells-too-many.crops.csv", "a row has not as many cells as the header"),
        ("cells-too-few.cells.csv", "damaged"),
        ("id.annotations.json", "damaged"),
        ("stains.preset.json", "100,000 stains; up to 64 are possible"),
        ("long-name.preset.json", "absorbs nothing"),
        ("nested.layout.yaml", "no layout of a network"),
        ("two-heads.layout.yaml", "no network can be built of this layout"),
        ("long.layout.yaml", "larger than 1 MB"),
    ],
)
def test_files_that_ended_in_a_traceback_or_took_long(name, said, answer, tmp_path):
    HOSTILE[name](tmp_path / name)
    assert said in answer(tmp_path / name)
