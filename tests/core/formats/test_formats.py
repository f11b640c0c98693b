"""Boxes to files and back: what each format keeps, what others wrote, what is refused and how."""

import csv
import json
import os
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from napari_beerlanet.core import formats as fm
from napari_beerlanet.core.boxes.annotations import Annotations
from napari_beerlanet.core.boxes.classes import class_colours, parse_colour
from napari_beerlanet.core.boxes.detections import RESERVED_COLUMNS, Detections
from napari_beerlanet.core.common.storage import FileError
from napari_beerlanet.core.formats import FORMATS, read_detections, write_detections

NAMES = ["RBC", "WBC", 'a "b", c; <d> & é\u4e2d']
ALL = sorted(FORMATS)
NAMED = [name for name in ALL if name != "yolo"]
WITH_COLUMNS = NAMED

in_one_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def some(n=20, seed=0, shape=(3000, 4000), columns=True, names=NAMES, **rest):
    rng = np.random.default_rng(seed)
    height, width = shape
    corner = rng.uniform(0, 0.9, (n, 2)) * (width, height)
    side = rng.uniform(0.001, 0.1, (n, 2)) * (width, height)
    further = {
        "Model channel 1 mean": rng.uniform(0, 3, n).astype(np.float32),
        "Model channel 1 sum": (rng.integers(1, 1000, n) * 1.0).astype(np.float32),
        "status": rng.choice(["accepted", "rejected", "new"], n),
    }
    return Detections(
        np.hstack([corner, corner + side]),
        rng.integers(0, len(names), n),
        rng.uniform(0, 1, n),
        names,
        further if columns else {},
        image_shape=shape,
        **rest,
    )


def same(read, written, coordinates=0.01):
    """Compares by class names, as a format may not keep classes without objects."""
    assert len(read) == len(written)
    np.testing.assert_allclose(read.xyxy, written.xyxy, atol=coordinates)
    np.testing.assert_allclose(read.scores, written.scores, atol=1e-6)
    assert [read.names[i] for i in read.labels] == [written.names[i] for i in written.labels]


def refusal(function, *args, **options):
    """What the function says where it refuses, or ""."""
    try:
        function(*args, **options)
    except ValueError as error:
        return str(error)
    return ""


def path_for(folder, kind, name="made"):
    return folder / f"{name}{FORMATS[kind].suffix}"


# --- round trips ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("n", [0, 1, 40])
def test_round_trip(tmp_path, kind, n):
    d = some(n)
    path = path_for(tmp_path, kind)
    write_detections(path, d, image_name="smear.png")
    read = read_detections(path, image_shape=d.image_shape, names=NAMES)
    same(read, d)
    assert read.names == NAMES
    assert read.image_shape == d.image_shape
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("kind", WITH_COLUMNS)
def test_densities_and_status_are_kept(tmp_path, kind):
    d = some()
    path = path_for(tmp_path, kind)
    write_detections(path, d)
    read = read_detections(path)
    assert set(read.columns) == set(d.columns)
    for name, values in d.columns.items():
        # Text is read as objects, which take no more room than they need.
        assert read.columns[name].dtype.kind == values.dtype.kind.replace("U", "O")
        np.testing.assert_array_equal(read.columns[name], values)


@pytest.mark.parametrize("kind", WITH_COLUMNS)
def test_values_that_are_missing(tmp_path, kind):
    columns = {"OD": np.array([np.nan, 2, np.inf], np.float32), "seen": np.array([3, 1, 2])}
    d = Detections([[0, 0, 1, 1]] * 3, [0] * 3, [0.9, 0.8, 0.7], ["a"], columns)
    path = path_for(tmp_path, kind)
    write_detections(path, d)
    read = read_detections(path)
    np.testing.assert_array_equal(read.columns["OD"], [np.nan, 2, np.nan])
    np.testing.assert_array_equal(read.columns["seen"], [3, 1, 2])


@in_one_folder
@given(
    names=st.lists(st.text(max_size=12), min_size=1, max_size=4, unique=True),
    kind=st.sampled_from(NAMED),
)
def test_any_class_name(tmp_path, names, kind):
    d = some(8, names=names, columns=False)
    path = path_for(tmp_path, kind)
    problem = refusal(write_detections, path, d, image_name="a,b.png")
    if problem:
        assert kind == "voc"
        assert "XML cannot hold" in problem
        return
    same(read_detections(path, names=names), d)
    same(read_detections(path), d)


@in_one_folder
@given(
    column=st.text(min_size=1, max_size=8),
    texts=st.lists(st.text(st.characters(codec="utf-8", exclude_categories=["Cc"])), min_size=3),
    kind=st.sampled_from(WITH_COLUMNS),
)
def test_any_column(tmp_path, column, texts, kind):
    texts = [f"text {text}" for text in texts[:3]]
    assume(column not in RESERVED_COLUMNS)
    d = Detections([[0, 0, 1, 1]] * 3, [0] * 3, [1, 1, 1], ["a"], {column: np.array(texts)})
    problem = refusal(write_detections, path_for(tmp_path, kind), d)
    if problem:
        assert kind == "voc"
        assert "XML cannot hold" in problem
        return
    read = read_detections(path_for(tmp_path, kind))
    assert read.columns[column].tolist() == d.columns[column].tolist()


words = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1, max_size=9)


@in_one_folder
@given(
    names=st.lists(words, min_size=1, max_size=3, unique=True),
    types=st.lists(words | st.sampled_from(["1", "1.5", "True", "1,5", "RBC"]), min_size=1,
                   max_size=4, unique=True),
    rows=st.lists(st.booleans(), min_size=5, max_size=5),
    seed=st.integers(0, 99),
    kind=st.sampled_from(WITH_COLUMNS),
)  # fmt: skip
def test_types_come_back_the_same(tmp_path, names, types, rows, seed, kind):
    rng = np.random.default_rng(seed)
    d = some(5, names=names, columns=False)
    p = rng.dirichlet(np.ones(len(types)), 5)[rows].astype(np.float32)
    d = d.with_types(types, p, rows=np.array(rows), classifier="tiny")
    path = path_for(tmp_path, kind)
    problem = refusal(write_detections, path, d)
    if problem:
        assert kind == "voc"
        assert "XML cannot hold" in problem
        return
    read = read_detections(path)
    same(read, d)
    assert read.columns["type"].tolist() == d.columns["type"].tolist()
    assert read.columns["type"].dtype == object  # one that a longer name fits into
    if any(rows) or kind == "csv":
        assert set(read.columns) == set(d.columns)
        assert read.types == types, "in the classifier's order, also those that no box has"
        assert read.type_counts() == d.type_counts()
        for name in list(d.columns)[1:]:
            assert read.columns[name].dtype == np.float32
            np.testing.assert_array_equal(read.columns[name], d.columns[name])


@pytest.mark.parametrize("kind", WITH_COLUMNS)
def test_types_of_annotations_are_exported(tmp_path, kind):
    boxes = [[0, 0, 9, 9], [5, 5, 20, 20]]
    drawn = Annotations(boxes, [0, 0], ["RBC"], types=["ring", ""], image_shape=(40, 50))
    write_detections(path_for(tmp_path, kind), drawn.to_detections())
    read = read_detections(path_for(tmp_path, kind), (40, 50))
    again = Annotations.empty(["RBC"], (40, 50)).with_detections(read)
    assert (again.types, again.names) == (("ring", ""), ["RBC"])


def test_qupath_sees_class_and_type(tmp_path):
    d = some(4, names=["RBC", "x: ring"], columns=False)
    d = d.with_types(
        ["ring", "late"], np.array([[1, 0], [0, 1]], np.float32), rows=np.array([0, 2])
    )
    fm.write_geojson(tmp_path / "a.json", d, colours=["#112233", "#445566"])
    content = json.loads((tmp_path / "a.json").read_text())
    shown = [f["properties"]["classification"] for f in content["features"]]
    names = [d.names[k] for k in d.labels]
    assert [s["name"] for s in shown] == [
        f"{names[0]}: ring", names[1], f"{names[2]}: late", names[3]
    ]  # fmt: skip
    first, second = (list(parse_colour(colour)) for colour in class_colours(2))
    assert (shown[0]["color"], shown[2]["color"]) == (first, second)
    read = fm.read_geojson(tmp_path / "a.json")
    same(read, d)
    assert read.report["colours"].items() <= {"RBC": "#112233", "x: ring": "#445566"}.items()
    content["features"][0]["properties"].pop("metadata")  # as QuPath itself would write it
    (tmp_path / "b.json").write_text(json.dumps(content))
    assert fm.read_geojson(tmp_path / "b.json").names[0] == f"{names[0]}: ring"


@in_one_folder
@given(
    boxes=st.lists(st.tuples(*[st.floats(0, 1, width=32)] * 4), min_size=1, max_size=5),
    shape=st.tuples(st.integers(1, 100_000), st.integers(1, 100_000)),
    kind=st.sampled_from(ALL),
)
def test_any_box(tmp_path, boxes, shape, kind):
    x1, y1, x2, y2 = np.array(boxes).T
    edges = [np.minimum(x1, x2), np.minimum(y1, y2), np.maximum(x1, x2), np.maximum(y1, y2)]
    xyxy = np.float32(np.stack(edges, 1) * [shape[1], shape[0], shape[1], shape[0]])
    n = len(xyxy)
    d = Detections(xyxy, [0] * n, [0.5] * n, ["a"], image_shape=shape)
    if kind == "yolo":
        d = d[((xyxy[:, 2:] - xyxy[:, :2]) > 0).all(1)]
    write_detections(path_for(tmp_path, kind), d)
    same(read_detections(path_for(tmp_path, kind), image_shape=shape, names=["a"]), d)


def test_format_by_name_and_by_ending(tmp_path):
    d = some(3)
    write_detections(tmp_path / "boxes.dat", d, format="COCO")
    same(read_detections(tmp_path / "boxes.dat", format="coco"), d)
    write_detections(tmp_path / "BOXES.GEOJSON", d)
    assert json.loads((tmp_path / "BOXES.GEOJSON").read_text())["type"] == "FeatureCollection"
    with pytest.raises(ValueError, match="no format 'tfrecord'; there are csv, geojson"):
        write_detections(tmp_path / "a.csv", d, format="tfrecord")
    with pytest.raises(FileError, match=r"a.dat: not a known format of boxes.*\.csv, \.geojson"):
        write_detections(tmp_path / "a.dat", d)
    with pytest.raises(FileError, match="not a known format of boxes"):
        read_detections(tmp_path / "a.dat")


@pytest.mark.parametrize("kind", ALL)
def test_a_failed_write_leaves_the_old_file(tmp_path, kind, monkeypatch):
    path = path_for(tmp_path, kind)
    write_detections(path, some(3))
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(FileError, match="no space left on device"):
        write_detections(path, some(9))
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("kind", ALL)
def test_any_image_name(tmp_path, kind):
    """Names of files may hold control characters, and on Linux bytes that are no text."""
    path = path_for(tmp_path, kind)
    write_detections(path, some(3), image_name=os.fsdecode(b"a\xff\x07.png"))
    same(read_detections(path, image_shape=(3000, 4000), names=NAMES), some(3))


def test_thousands_in_every_format(tmp_path):
    d = some(4000, shape=(50_000, 80_000))
    for kind in ALL:
        write_detections(path_for(tmp_path, kind), d)
        same(read_detections(path_for(tmp_path, kind), image_shape=d.image_shape, names=NAMES), d)


# --- classes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", NAMED)
def test_classes_in_the_order_asked_for(tmp_path, kind):
    d = some(columns=False)
    write_detections(path_for(tmp_path, kind), d)
    order = ["Platelets", *reversed(NAMES)]
    read = read_detections(path_for(tmp_path, kind), names=order)
    assert read.names == order
    same(read, d)


@pytest.mark.parametrize("kind", NAMED)
def test_a_class_that_was_not_asked_for(tmp_path, kind):
    write_detections(path_for(tmp_path, kind), some())
    with pytest.raises(FileError, match=r'the class ".*" is not one of the requested ones \(RBC\)'):
        read_detections(path_for(tmp_path, kind), names=["RBC"])


def test_coco_keeps_classes_without_objects(tmp_path):
    fm.write_coco(tmp_path / "a.json", Detections.empty(NAMES))
    assert fm.read_coco(tmp_path / "a.json").names == NAMES


# --- CSV -----------------------------------------------------------------------------------------


def test_csv_as_pandas_and_python_see_it(tmp_path):
    d = some(pixel_size=(0.5, 0.25))
    fm.write_csv(tmp_path / "a.csv", d, "smear, 1.png")
    frame = pd.read_csv(tmp_path / "a.csv")
    mine = d.to_frame()
    assert list(frame) == ["image", *mine]
    assert set(frame["image"]) == {"smear, 1.png"}
    assert frame["class"].tolist() == mine["class"].tolist()
    numbers = [name for name in mine if name not in ("class", "status")]
    np.testing.assert_allclose(frame[numbers], mine[numbers].astype(float), atol=1.1e-3)
    np.testing.assert_allclose(frame["width_um"], frame["width"] / 4, atol=1e-3)
    np.testing.assert_allclose(frame["height_um"], frame["height"] / 2, atol=1e-3)
    raw = (tmp_path / "a.csv").read_bytes()
    assert raw.count(b"\r\n") == 21
    assert raw.endswith(b"\r\n")


def test_csv_without_pixel_size_or_name(tmp_path):
    fm.write_csv(tmp_path / "a.csv", some(columns=False))
    with (tmp_path / "a.csv").open(newline="", encoding="utf-8") as file:
        header = next(csv.reader(file))
    assert header == [
        *("class", "confidence", "x1", "y1", "x2", "y2"),
        *("width", "height", "centre_x", "centre_y"),
    ]


def test_csv_numbers_are_short(tmp_path):
    d = Detections([[1, 2.5, 3, 1000]], [0], [0.9], ["a"], {"OD": np.array([0.1], np.float32)})
    fm.write_csv(tmp_path / "a.csv", d)
    line = (tmp_path / "a.csv").read_text().splitlines()[1]
    assert line == "a,0.9,1,2.5,3,1000,2,997.5,2,501.25,0.1"


@pytest.mark.parametrize(
    "text",
    [
        "class,x1,y1,x2,y2\na,1,2.5,3,4\n",
        "\ufeffclass;x1;y1;x2;y2;OD\r\na;1;2,5;3;4;0,25\r\n",
        "y2\tx2\ty1\tx1\tclass\n4\t3\t2.5\t1\ta",
        ',class,x1,y1,x2,y2,confidence\n0,"a",1,2.5,3,4,\n\n',
    ],
)
def test_csv_of_others(tmp_path, text):
    (tmp_path / "a.csv").write_text(text, encoding="utf-8")
    read = fm.read_csv(tmp_path / "a.csv", image_shape=(10, 20))
    assert read.xyxy.tolist() == [[1, 2.5, 3, 4]]
    assert read.names == ["a"]
    assert read.scores.tolist() == [1]
    assert read.image_shape == (10, 20)
    assert {name: v.tolist() for name, v in read.columns.items()} in ({}, {"OD": [0.25]})


def test_csv_of_several_images(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("image,class,x1,y1,x2,y2\np,a,0,0,1,1\nq,a,0,0,2,2\nq,b,0,0,3,3\n")
    assert fm.read_csv(path, image_name="q").xyxy[:, 2].tolist() == [2, 3]
    with pytest.raises(FileError, match="about 2 images, of which '' is none"):
        fm.read_csv(path)


# --- GeoJSON -------------------------------------------------------------------------------------


def test_geojson_is_what_qupath_reads(tmp_path):
    """QuPath wants name and colour of a class together, numbers alone among the measurements."""
    d = Detections(
        [[10, 20, 30, 60]], [1], [0.75], ["RBC", "WBC"],
        {"Model channel 1 mean": np.array([0.5], np.float32), "status": ["new"], "gap": [np.nan]},
    )  # fmt: skip
    write_detections(tmp_path / "a.geojson", d, colours=["#000000", "#ff8001"])
    assert json.loads((tmp_path / "a.geojson").read_text()) == {
        "type": "FeatureCollection",
        "features": [
            {
                "type": "Feature",
                "geometry": {
                    "type": "Polygon",
                    "coordinates": [[[10, 20], [30, 20], [30, 60], [10, 60], [10, 20]]],
                },
                "properties": {
                    "objectType": "detection",
                    "classification": {"name": "WBC", "color": [255, 128, 1]},
                    "measurements": {"Confidence": 0.75, "Model channel 1 mean": 0.5},
                    "metadata": {"status": "new"},
                },
            }
        ],
    }
    fm.write_geojson(tmp_path / "b.geojson", d, object_type="annotation")
    properties = json.loads((tmp_path / "b.geojson").read_text())["features"][0]["properties"]
    assert properties["objectType"] == "annotation"
    assert properties["classification"]["color"] == list(parse_colour(class_colours(2)[1]))


def feature(classification=None, measurements=None, children=None):
    ring = [[5.5, 1], [9, 4], [5, 8.25], [5.5, 1]]
    properties = {"objectType": "annotation"}
    properties |= {"classification": classification} if classification else {}
    properties |= {"measurements": measurements} if measurements else {}
    properties |= {"childObjects": children} if children else {}
    shape = {"type": "Polygon", "coordinates": [ring]}
    return {"type": "Feature", "geometry": shape, "properties": properties}


@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: [f]])
@pytest.mark.parametrize("suffix", ["json", "geojson"])
@pytest.mark.parametrize(
    ("classification", "name"),
    [
        ({"name": "Tumor", "color": [200, 0, 0]}, "Tumor"),
        ({"names": ["Tumor", "Positive"], "color": [200, 0, 0]}, "Tumor: Positive"),
        ({"name": "Tumor", "colorRGB": -3670016}, "Tumor"),
        ("Tumor", "Tumor"),
        (None, "Unclassified"),
    ],
)
def test_geojson_of_qupath(tmp_path, wrap, suffix, classification, name):
    path = tmp_path / f"a.{suffix}"
    old = [{"name": "Confidence", "value": 0.5}, {"name": "Area", "value": "NaN"}]
    path.write_text(json.dumps(wrap(feature(classification, old))))
    read = read_detections(path)
    assert read.xyxy.tolist() == [[5, 1, 9, 8.25]]
    assert [read.names[i] for i in read.labels] == [name]
    assert read.scores.tolist() == [0.5]
    assert np.isnan(read.columns["Area"]).all()


def test_geojson_of_objects_within_objects(tmp_path):
    inner = feature({"name": "cell", "color": [1, 2, 3]})
    (tmp_path / "a.geojson").write_text(json.dumps([feature("region", None, [inner, inner])]))
    assert read_detections(tmp_path / "a.geojson").counts() == {"region": 1, "cell": 2}


# --- YOLO ----------------------------------------------------------------------------------------


def test_yolo_by_hand(tmp_path):
    d = Detections([[10, 20, 30, 60]], [1], [0.5], NAMES, image_shape=(200, 100))
    fm.write_yolo(tmp_path / "a.txt", d)
    assert (tmp_path / "a.txt").read_text() == (
        "1 0.20000000 0.20000000 0.20000000 0.20000000 0.500000\n"
    )
    fm.write_yolo(tmp_path / "b.txt", d, confidence=False)
    assert len((tmp_path / "b.txt").read_text().split()) == 5
    assert fm.read_yolo(tmp_path / "b.txt", (200, 100), NAMES).scores.tolist() == [1]


def test_yolo_is_cut_off_at_the_borders(tmp_path):
    boxes = [[-5, -5, 10, 10], [90, 90, 120, 130], [200, 200, 210, 210]]
    d = Detections(boxes, [0] * 3, [0.9, 0.8, 0.7], ["a"], image_shape=(100, 100))
    fm.write_yolo(tmp_path / "a.txt", d)
    read = fm.read_yolo(tmp_path / "a.txt", (100, 100))
    np.testing.assert_allclose(read.xyxy, [[0, 0, 10, 10], [90, 90, 100, 100]], atol=1e-4)


def test_yolo_names(tmp_path):
    (tmp_path / "a.txt").write_text("\n2 0.5 0.5 0.1 0.1\n\n0 .1 .1 .2 .2 .25\n")
    read = fm.read_yolo(tmp_path / "a.txt", (10, 10))
    assert read.names == ["0", "1", "2"]
    fm.write_classes(tmp_path / "classes.txt", ["white\ncell", "", "c"])
    read = fm.read_yolo(tmp_path / "a.txt", (10, 10))
    assert read.names == ["white cell", "", "c"]
    assert read.labels.tolist() == [2, 0]
    with pytest.raises(FileError, match="class 2, but the classes are 0 to 1"):
        fm.read_yolo(tmp_path / "a.txt", (10, 10), ["a", "b"])


def test_yolo_outlines_become_boxes(tmp_path):
    (tmp_path / "a.txt").write_text("0 0.1 0.2 0.5 0.3 0.2 0.9\n")
    read = fm.read_yolo(tmp_path / "a.txt", (100, 1000))
    np.testing.assert_allclose(read.xyxy, [[100, 20, 500, 90]])


def test_yolo_needs_the_image_size(tmp_path):
    with pytest.raises(ValueError, match="image_shape must be known"):
        fm.write_yolo(tmp_path / "a.txt", Detections.empty(["a"]))
    with pytest.raises(ValueError, match="image_shape must be given"):
        read_detections(tmp_path / "a.txt")


def test_real_yolo_labels(shared, tmp_path):
    for path in sorted((shared / "data/other-lab/labels").glob("*.txt"))[:5]:
        read = fm.read_yolo(path, (480, 640))
        assert len(read) == len(path.read_text().split("\n")) - path.read_text().endswith("\n")
        fm.write_yolo(tmp_path / "a.txt", read, confidence=False)
        mine = np.loadtxt(tmp_path / "a.txt", ndmin=2)
        np.testing.assert_allclose(mine, np.loadtxt(path, ndmin=2)[:, :5], atol=2e-3)


# --- COCO ----------------------------------------------------------------------------------------


def test_coco_by_hand(tmp_path):
    d = Detections([[10, 20, 30, 60]], [1], [0.5], ["a", "b"], image_shape=(200, 100))
    fm.write_coco(tmp_path / "a.json", d, "x.png")
    assert json.loads((tmp_path / "a.json").read_text()) == {
        "images": [{"id": 1, "file_name": "x.png", "height": 200, "width": 100}],
        "categories": [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}],
        "annotations": [
            {
                **{"id": 1, "image_id": 1, "category_id": 2, "bbox": [10, 20, 20, 40]},
                **{"area": 800, "iscrowd": 0, "segmentation": [], "score": 0.5, "attributes": {}},
            }
        ],
    }


def test_coco_of_several_images(tmp_path):
    content = {
        "type": "instances",
        "images": [
            {"id": 7, "file_name": "train/p.png", "width": 20, "height": 10},
            {"id": "q", "file_name": "q.png"},
        ],
        "categories": [{"id": 5, "name": "a"}, {"id": 3, "name": "b"}],
        "annotations": [
            {"image_id": 7, "category_id": 3, "bbox": [1, 2, 3, 4]},
            {"image_id": "q", "category_id": 5, "bbox": [1, 1, 1, 1]},
            {"image_id": 7, "category_id": 5, "bbox": [0, 0, 2, 2]},
        ],
    }
    path = tmp_path / "a.json"
    path.write_text(json.dumps(content))
    read = read_detections(path, image_name="p.png")
    assert read.xyxy.tolist() == [[1, 2, 4, 6], [0, 0, 2, 2]]
    assert [read.names[i] for i in read.labels] == ["b", "a"]
    assert read.image_shape == (10, 20)
    everything = dict(fm.read_coco_images(path))
    assert {name: len(d) for name, d in everything.items()} == {"train/p.png": 2, "q.png": 1}
    with pytest.raises(FileError, match="about 2 images, 0 of them with the name"):
        read_detections(path, image_name="r.png")


# --- Pascal VOC ----------------------------------------------------------------------------------


def test_real_voc(shared, tmp_path):
    for path in sorted((shared / "data/bccd/Annotations").glob("*.xml"))[:20]:
        read = fm.read_voc(path, image_shape=(480, 640))
        root = ET.parse(path).getroot()
        boxes = [[float(side.text) for side in box] for box in root.iter("bndbox")]
        np.testing.assert_array_equal(read.xyxy, boxes)
        assert [read.names[i] for i in read.labels] == [
            e.findtext("name") for e in root.iter("object")
        ]
        fm.write_voc(tmp_path / "a.xml", read, "a.jpg")
        same(fm.read_voc(tmp_path / "a.xml"), read)


def test_voc_in_another_encoding(tmp_path):
    box = "<bndbox><xmax>3</xmax><xmin>1</xmin><ymin>2</ymin><ymax>4</ymax></bndbox>"
    text = f"<annotation><object><name>Thrombozytén</name>{box}</object></annotation>"
    for encoding in ("iso-8859-1", "utf-16"):
        whole = f'<?xml version="1.0" encoding="{encoding}"?>{text}'
        (tmp_path / "a.xml").write_bytes(whole.encode(encoding))
        read = fm.read_voc(tmp_path / "a.xml")
        assert read.names == ["Thrombozytén"]
        assert read.xyxy.tolist() == [[1, 2, 3, 4]]


def test_voc_refuses_entities(tmp_path):
    """A few lines that would grow to gigabytes."""
    bomb = "".join(f'<!ENTITY l{i} "{f"&l{i - 1};" * 10}">' for i in range(1, 10))
    text = (
        f'<!DOCTYPE a [<!ENTITY l0 "ha">{bomb}]><annotation><filename>&l9;</filename></annotation>'
    )
    for encoding in ("utf-8", "utf-16"):
        (tmp_path / "a.xml").write_bytes(text.encode(encoding))
        with pytest.raises(FileError, match="declares a document type"):
            fm.read_voc(tmp_path / "a.xml")


def test_voc_refuses_names_that_xml_cannot_hold(tmp_path):
    d = some(3, names=["a\x07"])
    with pytest.raises(ValueError, match=r"XML cannot hold the character '\\x07'"):
        fm.write_voc(tmp_path / "a.xml", d)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["coco", "voc"])
def test_made_for_another_image(tmp_path, kind):
    write_detections(path_for(tmp_path, kind), some(shape=(300, 400)))
    with pytest.raises(FileError, match="an image of 400 x 300 pixels, but this one has 800 x 600"):
        read_detections(path_for(tmp_path, kind), image_shape=(600, 800))


# --- files that are no good ----------------------------------------------------------------------

HEAD = "class,x1,y1,x2,y2\n"
COCO = '{"images": [{"id": 1}], "categories": [{"id": 1, "name": "a"}], "annotations": [%s]}'
VOC = "<annotation><object>%s</object></annotation>"
BAD = [
    ("a.csv", "", "the file is empty"),
    ("a.csv", "a,b\n1,2\n", "its header lacks class, x1, y1, x2, y2"),
    ("a.csv", HEAD + "a,1,2,3\n", "row 1 has 4 cells, the header 5"),
    ("a.csv", HEAD + "a,1,2,3,four\n", "could not convert"),
    ("a.csv", HEAD + "a,1,2,0,4\n", "ends before it begins"),
    ("a.csv", HEAD + "a,1,2,nan,4\n", "no finite numbers"),
    ("a.csv", HEAD + "a,1,2,1e300,4\n", "no finite numbers"),
    ("a.csv", HEAD + '"a,1,2,3,4\n', "unexpected end of data"),
    ("a.csv", "class,x1,y1,x2,y2,x1\n", "two columns have the same name"),
    ("a.csv", "class,x1,y1,x2,y2,confidence\na,1,2,3,4,7\n", "Scores are from 0 to 1"),
    ("a.geojson", "{", "not GeoJSON that can be read"),
    ("a.geojson", "[" * 100_000, "nested too deep"),
    ("a.geojson", '{"type": "FeatureCollection"}', "'features' is missing"),
    ("a.geojson", '{"type": "Feature", "geometry": {"type": "Point"}}', "a Point, not a polygon"),
    ("a.geojson", '{"type": "Feature", "geometry": null}', "thing without shape"),
    ("a.geojson", "[3]", "other than a Feature"),
    ("a.geojson", "7", "other than a Feature"),
    (
        "a.geojson",
        '{"type": "Feature", "geometry": {"type": "Polygon", "coordinates": []}}',
        "a polygon has no points",
    ),
    ("a.json", "nonsense", "not COCO or GeoJSON that can be read"),
    ("a.json", "7", "no images, no annotations"),
    ("a.json", "[]", "a list without images"),
    ("a.json", "{}", "'images' is missing"),
    ("a.json", COCO % '{"image_id": 1, "category_id": 2, "bbox": [1, 1, 1, 1]}', "no category 2"),
    ("a.json", COCO % '{"image_id": 1, "category_id": 1, "bbox": [1, 1]}', "values to unpack"),
    ("a.json", COCO % '{"image_id": 1, "category_id": 1, "bbox": [1, 1, -1, 1]}', "ends before"),
    ("a.json", COCO % '{"image_id": 1, "category_id": 1}', "'bbox' is missing"),
    ("a.json", COCO % "3", "not COCO JSON"),
    ("a.txt", "0 0.5 0.5 0.1\n", "line 1: 4 numbers"),
    ("a.txt", "0 .5 .5 .1 .1\n\ncell 0.5 0.5 0.1 0.1\n", "line 3: not numbers"),
    ("a.txt", "0 50 50 10 10\n", "line 1: out of range"),
    ("a.txt", "0 nan 0.5 0.1 0.1\n", "line 1: not finite"),
    ("a.txt", "0.5 0.5 0.5 0.1 0.1\n", "line 1: class 0.5"),
    ("a.txt", "-1 0.5 0.5 0.1 0.1\n", "line 1: class -1"),
    ("a.txt", "inf 0.5 0.5 0.1 0.1\n", "line 1: class inf"),
    ("a.txt", "0 0.5 0.5 0.1 0.1 8\n", "line 1: the confidence is 8"),
    ("a.txt", "0 0.5 0.5 -0.005 0.1\n", "line 1: a box without area: a size below 0"),
    ("a.xml", "<annotation>", "no XML"),
    ("a.xml", "<html></html>", "it is about <html>, not <annotation>"),
    ("a.xml", VOC % "<name>a</name>", "<object> has no bndbox/xmin"),
    ("a.xml", VOC % "<bndbox/>", "has no"),
    ("a.xml", "<annotation><size><width>x</width></size></annotation>", "could not convert"),
]


@pytest.mark.parametrize(("name", "text", "sentence"), BAD)
def test_a_bad_file_gets_its_sentence(tmp_path, name, text, sentence):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(FileError, match=sentence) as caught:
        read_detections(path, image_shape=(100, 100))
    message = str(caught.value)
    assert message.startswith(str(path))
    assert message.endswith(".")
    assert "\n" not in message
    assert len(message) < len(str(path)) + 250


@pytest.mark.parametrize("kind", ALL)
def test_what_is_no_text_file(tmp_path, kind):
    path = path_for(tmp_path, kind)
    with pytest.raises(FileError, match="there is no such file"):
        read_detections(path, image_shape=(1, 1))
    path.write_bytes(b"\xff\xfe\x00\x80PNG\x00" * 9)
    with pytest.raises(FileError, match=r"not a text file in UTF-8|no XML"):
        read_detections(path, image_shape=(1, 1))
    path.unlink()
    path.mkdir()
    with pytest.raises(FileError, match="a folder, not a file"):
        read_detections(path, image_shape=(1, 1))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_is_refused_rather_than_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.csv")
    with pytest.raises(FileError, match="not a regular file"):
        read_detections(tmp_path / "a.csv")


@pytest.mark.skipif(
    sys.platform == "win32" or os.geteuid() == 0, reason="the administrator may read everything"
)
def test_no_permission(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(HEAD)
    path.chmod(0)
    with pytest.raises(FileError, match="no permission"):
        read_detections(path)


@settings(in_one_folder, max_examples=300)
@given(st.data(), st.sampled_from(ALL))
def test_damaged_files_never_raise_anything_else(tmp_path, data, kind):
    """Bytes of a good file changed, cut out or doubled."""
    path: Path = path_for(tmp_path, kind)
    write_detections(path, some(4), image_name="a.png")
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content)))
        length = data.draw(st.integers(0, 20))
        content[place : place + length] = data.draw(
            st.sampled_from(
                [b"", b"0", b"-", b'"', b"null", b"[]", b"{}", b"1e999", b"<", b",", b"\n"]
            )
        )
    path.write_bytes(bytes(content))
    problem = refusal(read_detections, path, image_shape=(3000, 4000), names=NAMES)
    assert not problem or problem.startswith(str(path))


# --- colours -------------------------------------------------------------------------------------


def test_class_colours_are_distinct_and_stay():
    assert len(set(class_colours(60))) == 60
    assert class_colours(60)[:3] == class_colours(3)
    assert class_colours(0) == []
    assert parse_colour("#0a10FF") == (10, 16, 255)
    for wrong in ("red", "#12345", "#12345g", None):
        with pytest.raises(ValueError, match="A colour is written as"):
            parse_colour(wrong)


def test_names_of_classes_beside_the_folder_of_labels(tmp_path):
    """As Label Studio exports them: classes.txt, images and labels side by side."""
    labels = tmp_path / "labels" / "train"
    labels.mkdir(parents=True)
    (labels / "a.txt").write_text("1 0.5 0.5 0.2 0.2\n")
    fm.write_classes(tmp_path / "classes.txt", ["RBC", "WBC"])
    assert fm.read_yolo(labels / "a.txt", (100, 100)).names == ["RBC", "WBC"]
    elsewhere = tmp_path / "boxes"
    elsewhere.mkdir()
    (elsewhere / "a.txt").write_text("1 0.5 0.5 0.2 0.2\n")
    assert fm.read_yolo(elsewhere / "a.txt", (100, 100)).names == ["0", "1"]
