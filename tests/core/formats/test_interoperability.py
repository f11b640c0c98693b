"""Files of others and for others: QuPath, pycocotools, Ultralytics, BCCD; and hostile ones."""

import contextlib
import io
import json
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from PIL import Image

from napari_beerlanet.core import formats as fm
from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.common.storage import FileError

NAMES = ["RBC", "WBC", 'a "b", c; <d> & é\u4e2d\n2']


def some(n=30, names=NAMES, shape=(480, 640), seed=0):
    random = np.random.default_rng(seed)
    corner = random.uniform(0, 0.8, (n, 2)) * (shape[1], shape[0])
    boxes = np.hstack([corner, corner + random.uniform(5, 60, (n, 2))])
    boxes = np.minimum(boxes, [shape[1], shape[0]] * 2)
    columns = {
        "id": np.arange(n),
        "status": random.choice(["accepted", "rejected", "unreviewed"], n),
        "source": np.array(["blood-cells"] * n),
        "Model channel 1 mean": random.uniform(0, 2, n).astype(np.float32),
        "Model channel 2 mean": np.where(random.random(n) < 0.1, np.nan, random.random(n)),
    }
    labels, scores = random.integers(0, len(names), n), random.uniform(0.05, 1, n)
    return Detections(boxes, labels, scores, names, columns, image_shape=shape)


# --- QuPath --------------------------------------------------------------------------------------


def check_qupath(content, object_type):
    """The structure that QuPath's documentation gives for exported and imported objects.

    docs: "Exporting annotations" / GeoJSON: a FeatureCollection of Features; geometry a closed
    ring in pixels; properties with objectType, classification of a name and a color of three
    whole numbers, measurements as numbers by name, and metadata as text by name.
    """
    assert set(content) == {"type", "features"}
    assert content["type"] == "FeatureCollection"
    for feature in content["features"]:
        assert feature["type"] == "Feature"
        geometry, properties = feature["geometry"], feature["properties"]
        assert geometry["type"] == "Polygon"
        (ring,) = geometry["coordinates"]
        assert ring[0] == ring[-1]
        assert len(ring) == 5
        assert all(isinstance(v, (int, float)) for point in ring for v in point)
        assert properties["objectType"] == object_type
        kind = properties["classification"]
        assert isinstance(kind["name"], str)
        assert len(kind["color"]) == 3
        assert all(type(v) is int and 0 <= v <= 255 for v in kind["color"])
        assert all(type(v) in (int, float) for v in properties["measurements"].values())
        assert all(type(v) is str for v in properties.get("metadata", {}).values())


@pytest.mark.parametrize("object_type", ["detection", "annotation"])
def test_geojson_has_the_structure_that_qupath_documents(tmp_path, object_type):
    d = some()
    fm.write_geojson(tmp_path / "a.geojson", d, object_type=object_type)
    content = json.loads((tmp_path / "a.geojson").read_text(encoding="utf-8"))
    check_qupath(content, object_type)
    first = content["features"][0]["properties"]
    assert set(first["measurements"]) <= {
        "Confidence",
        "id",
        "Model channel 1 mean",
        "Model channel 2 mean",
    }
    assert set(first["metadata"]) == {"status", "source"}


def test_everything_comes_back_from_qupath(tmp_path):
    """QuPath adds ids, names, and a locked mark, and may leave out what it does not use."""
    d = some()
    fm.write_geojson(tmp_path / "a.geojson", d)
    content = json.loads((tmp_path / "a.geojson").read_text(encoding="utf-8"))
    for number, feature in enumerate(content["features"]):
        feature["id"] = f"7e2b1c44-0000-4000-8000-{number:012d}"
        feature["properties"] |= {"isLocked": True, "name": "cell"}
    (tmp_path / "b.geojson").write_text(json.dumps(content))
    read = fm.read_geojson(tmp_path / "b.geojson", names=NAMES)
    np.testing.assert_allclose(read.xyxy, d.xyxy, atol=0.005)
    assert read.labels.tolist() == d.labels.tolist()
    for name in d.columns:
        np.testing.assert_array_equal(
            read.columns[name], np.asarray(d.columns[name], read.columns[name].dtype)
        )


def test_colours_come_back_from_qupath(tmp_path):
    d = some(30, ["RBC", "WBC", "c"])
    fm.write_geojson(tmp_path / "a.geojson", d, colours=["#010203", "#fffefd", "#a0b0c0"])
    read = fm.read_geojson(tmp_path / "a.geojson", names=d.names)
    assert read.report["colours"] == {"RBC": "#010203", "WBC": "#fffefd", "c": "#a0b0c0"}
    fm.write_geojson(tmp_path / "b.geojson", read)
    assert fm.read_geojson(tmp_path / "b.geojson").report == read.report


@pytest.mark.parametrize(
    ("given", "colour"),
    [
        ({"name": "a", "colorRGB": -3670016}, {"a": "#c80000"}),
        ({"name": "a", "color": [200, 0, 300]}, None),
        ({"name": "a", "color": "red"}, None),
        ({"name": "a", "color": [1, 2]}, None),
        ("a", None),
    ],
)
def test_colours_of_any_kind(tmp_path, given, colour):
    fm.write_geojson(tmp_path / "a.geojson", some(1, ["a"]))
    content = json.loads((tmp_path / "a.geojson").read_text())
    content["features"][0]["properties"]["classification"] = given
    (tmp_path / "a.geojson").write_text(json.dumps(content))
    assert fm.read_geojson(tmp_path / "a.geojson").report.get("colours") == colour


# --- COCO ----------------------------------------------------------------------------------------


def test_pycocotools_reads_our_coco(tmp_path):
    coco = pytest.importorskip("pycocotools.coco").COCO
    d = some()
    fm.write_coco(tmp_path / "a.json", d, "smear é.png")
    with contextlib.redirect_stdout(io.StringIO()):
        read = coco(str(tmp_path / "a.json"))
    (image,) = read.loadImgs(read.getImgIds())
    assert (image["file_name"], image["height"], image["width"]) == ("smear é.png", 480, 640)
    assert [c["name"] for c in read.loadCats(read.getCatIds())] == NAMES
    anns = read.loadAnns(read.getAnnIds(imgIds=[image["id"]]))
    assert [a["category_id"] - 1 for a in anns] == d.labels.tolist()
    boxes = np.array([a["bbox"] for a in anns])
    np.testing.assert_allclose(boxes[:, :2] + boxes[:, 2:], d.xyxy[:, 2:], atol=0.005)
    for a in anns:
        assert a["area"] == pytest.approx(a["bbox"][2] * a["bbox"][3], abs=0.001)
    assert [a["attributes"]["status"] for a in anns] == d.columns["status"].tolist()


# --- YOLO ----------------------------------------------------------------------------------------


def test_ultralytics_reads_our_yolo(tmp_path):
    from napari_beerlanet.core.detection.ultralytics_api import ultralytics

    d = some(names=["RBC", "WBC", "Platelets"])
    for folder in ("images", "labels"):
        (tmp_path / folder).mkdir()
    Image.new("RGB", (640, 480)).save(tmp_path / "images/a.png")
    fm.write_yolo(tmp_path / "labels/a.txt", d, confidence=False)
    check = ultralytics.data.utils.verify_image_label
    task = (
        str(tmp_path / "images/a.png"),
        str(tmp_path / "labels/a.txt"),
        "",
        False,
        3,
        0,
        0,
        False,
    )
    _, labels, shape, _, _, missing, found, empty, corrupt, message = check(task)
    assert (missing, found, empty, corrupt, message) == (0, 1, 0, 0, "")
    assert tuple(shape) == (480, 640)
    ours = np.column_stack(
        [d.labels, (d.xyxy[:, :2] + d.xyxy[:, 2:]) / 2, d.xyxy[:, 2:] - d.xyxy[:, :2]]
    )
    ours[:, 1:] /= (640, 480, 640, 480)
    np.testing.assert_allclose(labels[np.lexsort(labels.T)], ours[np.lexsort(ours.T)], atol=1e-6)


def test_classes_beside_labels_only_grow(tmp_path):
    one, two = some(6, ["b", "a"]), some(6, ["c", "a", ""], seed=1)
    assert fm.write_yolo_with_classes(tmp_path / "1.txt", one)[1].name == "classes.txt"
    fm.write_yolo_with_classes(tmp_path / "2.txt", two)
    assert (tmp_path / "classes.txt").read_text() == "b\na\nc\n\n"
    for path, written in ((tmp_path / "1.txt", one), (tmp_path / "2.txt", two)):
        read = fm.read_yolo(path, (480, 640))
        assert [read.names[k] for k in read.labels] == [written.names[k] for k in written.labels]
    assert fm.ClassesFile(tmp_path).numbers(["a", "d", "b"]).tolist() == [1, 3, 0]


def test_names_of_a_data_yaml_above(tmp_path):
    folder = tmp_path / "labels/train"
    folder.mkdir(parents=True)
    (folder / "a.txt").write_text("1 0.5 0.5 0.1 0.1\n")
    (tmp_path / "data.yaml").write_text("names: {0: RBC, 1: WBC}\n")
    assert fm.read_yolo(folder / "a.txt", (10, 10)).names == ["RBC", "WBC"]
    for other in ("names: 7", "[", "names: {0: a, 7: b}", "names: [[a]]", "x: " + "[" * 5000):
        (tmp_path / "data.yaml").write_text(other)
        assert fm.read_yolo(folder / "a.txt", (10, 10)).names == ["0", "1"]


# --- Pascal VOC ----------------------------------------------------------------------------------


def test_bccd_is_read_whole(shared):
    """Every object of every file, as a plain reading of the text has them."""
    files = sorted((shared / "data/bccd/Annotations").glob("*.xml"))
    assert len(files) > 300
    counts = {}
    for path in files:
        text = path.read_text()
        read = fm.read_voc(path)
        assert read.image_shape == (480, 640)
        assert fm.image_names(path) == [ET.parse(path).getroot().findtext("filename")]
        assert len(read) == text.count("<object>")
        corners = [re.findall(f"<{side}>(-?[0-9.]+)</{side}>", text) for side in ("xmin", "ymax")]
        np.testing.assert_array_equal(read.xyxy[:, [0, 3]], np.array(corners, float).T)
        for name, n in read.counts().items():
            counts[name] = counts.get(name, 0) + n
    assert set(counts) == {"RBC", "WBC", "Platelets"}
    assert sum(counts.values()) > 4800


# --- names of images -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["csv", "coco", "voc"])
@pytest.mark.parametrize("name", ["smear 1.png", 'a, "b" & <c>.png', "中é.tif"])
def test_image_names_are_kept(tmp_path, kind, name):
    path = tmp_path / f"a{fm.FORMATS[kind].suffix}"
    fm.write_detections(path, some(3), name)
    assert fm.image_names(path) == [name]


def test_formats_without_image_names(tmp_path):
    fm.write_geojson(tmp_path / "a.json", some(3))
    assert fm.detect_format(tmp_path / "a.json") == "geojson"
    assert fm.image_names(tmp_path / "a.json") == []
    fm.write_csv(tmp_path / "a.csv", some(3))
    assert fm.image_names(tmp_path / "a.csv") == []
    fm.write_voc(tmp_path / "a.xml", some(3))
    assert fm.image_names(tmp_path / "a.xml") == []


def test_half_a_character_comes_back_from_json(tmp_path):
    """A name that a program cut in two; UTF-8 has no place for it, JSON's escapes have."""
    for kind in ("coco", "geojson"):
        path = tmp_path / f"a{fm.FORMATS[kind].suffix}"
        fm.write_detections(path, some(4, ["x\ud83d", "b"]))
        assert "x\ud83d" in fm.read_detections(path).names


# --- what is too much ----------------------------------------------------------------------------


def refused(path, reason):
    with pytest.raises(FileError, match=reason) as caught:
        fm.read_detections(path, image_shape=(100, 100))
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    assert message.endswith(".")


@pytest.mark.parametrize("suffix", [".csv", ".geojson", ".json", ".txt", ".xml"])
def test_a_file_of_gigabytes_is_not_read(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    with path.open("wb") as file:
        file.truncate(1 << 31)
    refused(path, "larger than 256 MB, the limit for a file of boxes")


@pytest.mark.parametrize("depth", [900, 20_000, 1_000_000])
@pytest.mark.parametrize(
    "opening", ["[", '{"features":', '{"type":"Feature","properties":{"childObjects":[']
)
def test_nested_deep(tmp_path, depth, opening):
    (tmp_path / "a.geojson").write_text(opening * depth)
    refused(tmp_path / "a.geojson", "nested too deep|can be read")


def test_objects_in_objects_in_objects(tmp_path):
    """Deep, and well formed: QuPath's children, one in another."""
    feature = '{"type":"Feature","geometry":null,"properties":{"children":[%s]}}'
    text = "%s"
    for _ in range(300):
        text = text.replace("%s", feature)
    (tmp_path / "a.geojson").write_text(text.replace("%s", ""))
    refused(tmp_path / "a.geojson", "thing without shape|nested too deep")


@pytest.mark.parametrize(
    "text",
    [
        '<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]><annotation>&x;</annotation>',
        '<!DOCTYPE a SYSTEM "http://localhost:1/a.dtd"><annotation/>',
        "<annotation>&unknown;</annotation>",
        "<?xml version='1.0'?><!DOCTYPE a [<!ENTITY % p 'x'> %p;]><annotation/>",
    ],
)
def test_xml_that_fetches_or_defines(tmp_path, text):
    (tmp_path / "a.xml").write_text(text)
    refused(tmp_path / "a.xml", "declares a document type|no XML")


def test_images_outside_are_names_and_nothing_else(tmp_path):
    """Reading never follows a path that a file names."""
    outside = "../../../../etc/passwd"
    fm.write_coco(tmp_path / "a.json", some(3), outside)
    assert list(dict(fm.read_coco_images(tmp_path / "a.json"))) == [outside]
    assert fm.image_names(tmp_path / "a.json") == [outside]
    assert len(fm.read_coco(tmp_path / "a.json", image_name="passwd")) == 3
