"""A Shapes layer into files: every format, all features, stacks, and back again."""

import json

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from napari.layers import Shapes

from box_files import yolo_folder
from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.common.storage import FileError
from napari_beerlanet.core.formats import FORMATS, image_names, read_detections
from napari_beerlanet.ui.common.session import get_session
from napari_beerlanet.ui.detections.detection_layer import DetectionLayer
from napari_beerlanet.ui.io import writers
from napari_beerlanet.ui.viewer.layer_data import detections_from_shapes

SHAPE = (100, 120)
WRITE = {
    "csv": writers.write_csv,
    "geojson": writers.write_geojson,
    "coco": writers.write_coco,
    "voc": writers.write_voc,
    "yolo": writers.write_yolo,
}


@pytest.fixture
def viewer(monkeypatch):
    """A viewer without a window."""
    import napari
    from napari.components import ViewerModel

    model = ViewerModel()
    monkeypatch.setattr(napari, "current_viewer", lambda: model)
    return model


def rectangle(x1, y1, x2, y2, leading=()):
    corners = [(y1, x1), (y1, x2), (y2, x2), (y2, x1)]
    return np.array([(*leading, y - 0.5, x - 0.5) for y, x in corners])


def drawn(viewer, **more):
    boxes = [rectangle(10, 20, 30.25, 40), rectangle(50, 5, 60, 25.5), rectangle(0, 0, 9, 9)]
    features = {
        "class": ["RBC", 'a "b", <c>', "RBC"],
        "confidence": [0.25, 0.75, np.nan],
        "status": ["accepted", "rejected", None],
        "Model channel 1 mean": np.array([0.5, 1.5, np.nan], np.float32),
        "id": [7, 8, 9],
    }
    layer = Shapes(boxes, features=features, name="cells", **more)
    viewer.add_layer(layer)
    return layer


def save(layer, path, kind):
    return WRITE[kind](str(path), *layer.as_layer_data_tuple()[:2])


@pytest.mark.parametrize("kind", sorted(WRITE))
def test_a_layer_is_saved_with_all_that_the_format_can_hold(tmp_path, viewer, kind):
    viewer.add_image(
        np.zeros((*SHAPE, 3), np.uint8), name="smear.png", scale=(0.5, 0.5), units=("um",) * 2
    )
    path = tmp_path / f"a{FORMATS[kind].suffix}"
    written = save(drawn(viewer), path, kind)
    assert written[0] == str(path)
    assert (len(written) == 2) == (kind == "yolo")
    read = read_detections(path, SHAPE)
    np.testing.assert_allclose(
        read.xyxy, [[0, 0, 9, 9], [50, 5, 60, 25.5], [10, 20, 30.25, 40]], atol=0.01
    )
    assert read.scores.tolist() == pytest.approx([1, 0.75, 0.25], abs=1e-6)
    assert [read.names[k] for k in read.labels] == ["RBC", 'a "b", <c>', "RBC"]
    if kind != "yolo":
        assert read.columns["status"].tolist() == ["", "rejected", "accepted"]
        assert read.columns["id"].tolist() == [9, 8, 7]
        np.testing.assert_array_equal(
            read.columns["Model channel 1 mean"], np.float32([np.nan, 1.5, 0.5])
        )
    if kind in ("csv", "coco", "voc"):
        assert image_names(path) == ["smear.png"]
    if kind == "csv":
        assert pd.read_csv(path)["width_um"].tolist() == [4.5, 5, 10.125]


def test_colours_go_to_qupath_and_back(tmp_path, viewer):
    from napari_beerlanet.ui.io.boxes_reader import read_paths

    viewer.add_image(np.zeros((*SHAPE, 3), np.uint8), name="smear")
    layer = drawn(viewer, edge_color=["#ff0000", "#00ff80", "#ff0000"])
    save(layer, tmp_path / "a.geojson", "geojson")
    features = json.loads((tmp_path / "a.geojson").read_text())["features"]
    kinds = {f["properties"]["classification"]["name"]: f["properties"] for f in features}
    assert kinds["RBC"]["classification"]["color"] == [255, 0, 0]
    (data,) = read_paths(str(tmp_path / "a.geojson"))
    assert data[1]["edge_color"] == ["#ff0000", "#00ff80", "#ff0000"]


def test_without_an_image_only_yolo_is_refused(tmp_path, viewer):
    layer = drawn(viewer)
    for kind in WRITE:
        path = tmp_path / f"a{FORMATS[kind].suffix}"
        if kind == "yolo":
            with pytest.raises(FileError, match="needs the size of the image; open the image"):
                save(layer, path, kind)
            assert not path.exists()
        else:
            save(layer, path, kind)
            assert path.exists()


def test_shapes_of_any_kind_become_boxes_and_lines_are_refused(tmp_path, viewer):
    layer = Shapes(ndim=2, name="cells")
    layer.add([np.array([[0, 0], [0, 10], [10, 10], [10, 0]])], shape_type="ellipse")
    layer.add([np.array([[20, 20], [30, 25], [22, 40]])], shape_type="polygon")
    viewer.add_layer(layer)
    save(layer, tmp_path / "a.geojson", "geojson")
    read = read_detections(tmp_path / "a.geojson")
    assert read.names == ["object"]
    np.testing.assert_allclose(read.xyxy, [[0.5, 0.5, 10.5, 10.5], [20.5, 20.5, 40.5, 30.5]])
    layer.add([np.array([[0, 0], [5, 5]])], shape_type="line")
    with pytest.raises(FileError, match="cells: 1 shape was left out: a line encloses nothing"):
        save(layer, tmp_path / "b.geojson", "geojson")
    assert not (tmp_path / "b.geojson").exists()


def test_a_layer_without_shapes(tmp_path, viewer):
    layer = Shapes(ndim=2, name="cells")
    viewer.add_layer(layer)
    save(layer, tmp_path / "a.geojson", "geojson")
    assert json.loads((tmp_path / "a.geojson").read_text())["features"] == []


def test_a_stack_becomes_a_file_for_each_plane(tmp_path, viewer):
    viewer.add_image(np.zeros((3, *SHAPE, 3), np.uint8), name="stack")
    boxes = [rectangle(1, 1, 9, 9, (k,)) for k in (0, 2, 2)]
    layer = Shapes(boxes, name="cells")
    viewer.add_layer(layer)
    written = save(layer, tmp_path / "a.csv", "csv")
    assert [path.rsplit(".", 2)[-2] for path in written] == ["0000", "0002"]
    assert [len(read_detections(path)) for path in written] == [1, 2]


def test_a_folder_comes_back_by_the_names_of_its_images(tmp_path, viewer):
    from napari_beerlanet.ui.io.boxes_reader import read_paths

    yolo_folder(tmp_path / "set", [SHAPE, SHAPE])
    stack, boxes = (
        viewer._add_layer_from_data(*data)[0] for data in read_paths(str(tmp_path / "set"))
    )
    assert stack.ndim == boxes.ndim == 3
    written = save(boxes, tmp_path / "out.json", "coco")
    assert [image_names(path) for path in written] == [["0.png"], ["1.png"]]


def test_what_a_layer_shows_in_parts_is_saved_whole(tmp_path, viewer):
    """A layer of thousands of detections holds those in view; the others are saved as well."""
    source = viewer.add_image(np.zeros((900, 900, 3), np.uint8), name="smear")
    rows, columns = np.divmod(np.arange(3600), 60)
    corners = 15.0 * np.stack([columns, rows], axis=1)
    found = Detections(
        np.concatenate([corners, corners + 9], axis=1).astype(np.float32),
        np.arange(3600) % 2,
        np.linspace(1, 0.5, 3600),
        ["a", "b"],
        image_shape=(900, 900),
    )
    shown = DetectionLayer(viewer, source, found)
    get_session(viewer).set_detections(source, found, shown)
    assert shown.layer.nshapes < 3600
    save(shown.layer, tmp_path / "a.csv", "csv")
    assert read_detections(tmp_path / "a.csv").counts() == {"a": 1800, "b": 1800}


def found_boxes(scores):
    corners = np.float32([[9 * k, 3] for k in range(len(scores))]).reshape(-1, 2)
    labels = np.arange(len(scores)) % 2
    return Detections(np.hstack([corners, corners + 8]), labels, scores, ["a", "b"])


@pytest.mark.parametrize("images", [[], ["x.png", "y.png", "y.tif", "z.png"]])
@pytest.mark.parametrize("kind", sorted(WRITE))
def test_detections_of_all_planes_are_saved_and_come_back(
    tmp_path, viewer, monkeypatch, kind, images
):
    """Whichever plane is shown, whatever a review lists; a file says which plane it is of."""
    from napari_beerlanet.ui.io.boxes_reader import read_paths

    stack = viewer.add_image(np.zeros((4, *SHAPE, 3), np.uint8), name="stack")
    stack.metadata["images"], told = images, []
    monkeypatch.setattr(writers, "show_info", told.append)
    planes = {(0,): [0.9, 0.8], (1,): [0.9, 0.8, 0.7, 0.6, 0.5, 0.1], (3,): [0.9, 0.8, 0.7]}
    viewer.dims.set_point(0, 1)
    shown = DetectionLayer(viewer, stack, found_boxes(planes[1,]), index=(1,))
    get_session(viewer).set_detections(stack, found_boxes(planes[1,]), shown)
    for index in ((0,), (3,)):
        shown.set_detections(found_boxes(planes[index]), index)
    decided = np.array([0, 0, 0, 0, 0, 1])  # below the threshold
    shown.apply_review(decided, ("unreviewed", "accepted"), shown.detections.labels, ["a", "b"])
    shown.set_filter(np.array([True, False, False, False, False, False]))
    written = save(shown.layer, tmp_path / f"cells{FORMATS[kind].suffix}", kind)
    paths = [path for path in written if "classes" not in path]
    words = sorted(path.split(".")[-2] for path in paths)
    assert words == (["0001", "x", "z"] if images else ["0000", "0001", "0003"])
    (sentence,) = told
    assert sentence.startswith("Saved in 3 files, one for each plane: cells.")
    viewer.dims.set_point(0, 2)
    read = [detections_from_shapes(*data[:2]) for data in read_paths(paths)]
    back = {index: part for parts in read for index, part in parts.items()}
    for index, scores in planes.items():
        assert back[index].scores.tolist() == pytest.approx(scores)
        np.testing.assert_allclose(back[index].xyxy, found_boxes(scores).xyxy, atol=0.01)


def test_boxes_of_one_plane_of_a_stack_come_back_on_it(tmp_path, viewer):
    from napari_beerlanet.ui.io.boxes_reader import read_paths

    stack = viewer.add_image(np.zeros((4, *SHAPE, 3), np.uint8), name="stack")
    viewer.dims.set_point(0, 2)
    shown = DetectionLayer(viewer, stack, found_boxes([0.9, 0.8]), index=(2,))
    get_session(viewer).set_detections(stack, found_boxes([0.9, 0.8]), shown)
    viewer.dims.set_point(0, 0)
    written = save(shown.layer, tmp_path / "cells.csv", "csv")
    ((data, attributes, _),) = read_paths(written)
    parts = detections_from_shapes(data, attributes)
    assert {index: len(part) for index, part in parts.items()} == {(2,): 2}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(
    words=st.lists(st.text(max_size=8), min_size=3, max_size=3),
    corners=st.lists(st.tuples(*[st.floats(0, 5e4, width=32)] * 2), min_size=3, max_size=3),
    kind=st.sampled_from(["csv", "geojson", "coco"]),
)
def test_any_class_and_place_comes_back(tmp_path, monkeypatch, words, corners, kind):
    import napari

    monkeypatch.setattr(napari, "current_viewer", lambda: None)
    shapes = [rectangle(x, y, x + 11.5, y + 7.25) for x, y in corners]
    attributes = {
        "features": pd.DataFrame({"class": words}),
        "shape_type": ["rectangle"] * 3,
        "name": "x",
    }
    path = tmp_path / f"a{FORMATS[kind].suffix}"
    WRITE[kind](str(path), shapes, attributes)
    read = read_detections(path)
    assert [read.names[k] for k in read.labels] == words
    expected = [[x, y, x + 11.5, y + 7.25] for x, y in corners]
    np.testing.assert_allclose(read.xyxy, expected, atol=0.01)


def test_pandas_kinds_of_columns():
    table = pd.DataFrame(
        {
            "class": pd.Categorical(["a", "b"]),
            "seen": pd.array([True, False], "boolean"),
            "n": pd.array([1, None], "Int64"),
            "text": pd.array(["x", None], "string"),
            "flag": [True, False],
        }
    )
    shapes = [rectangle(0, 0, 5, 5), rectangle(5, 5, 9, 9)]
    (d,) = detections_from_shapes(shapes, {"features": table, "shape_type": "rectangle"}).values()
    assert d.names == ["a", "b"]
    assert d.columns["seen"].tolist() == [True, False]
    assert d.columns["text"].tolist() == ["x", ""]
    assert d.columns["flag"].dtype == bool
    np.testing.assert_array_equal(d.columns["n"], [1, np.nan])
