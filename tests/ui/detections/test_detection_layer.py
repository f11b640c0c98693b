"""The layer of detections: shown, filtered, thin at any zoom, and careful with the user's edits."""

import gc

import numpy as np
import pytest
from napari.utils.colormaps.standardize_color import transform_color
from qtpy.QtCore import QTimer
from qtpy.QtWidgets import QApplication

from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.ui.detections.box_store import (
    ADDED,
    EDITED,
    FOUND,
    BoxStore,
    classified_types,
)
from napari_beerlanet.ui.detections.detection_layer import DetectionLayer
from napari_beerlanet.ui.detections.edits import commit_edits
from napari_beerlanet.ui.viewer import box_shapes, fast_shapes

pytestmark = pytest.mark.window
NAMES = ["RBC", "WBC"]
COLOURS = ["#e6194b", "#4363d8"]


def detections(n: int, side: int = 1000, seed: int = 0) -> Detections:
    rng = np.random.default_rng(seed)
    corner = rng.uniform(0, side - 20, (n, 2))
    return Detections(
        np.concatenate([corner, corner + rng.uniform(5, 20, (n, 2))], axis=1),
        rng.integers(0, 2, n),
        np.linspace(1, 0.02, n),
        NAMES,
        columns={"Model channel 1 mean": rng.random(n), "Model channel 1 sum": rng.random(n)},
        image_shape=(side, side),
        report={"model": "tiny"},
    ).above(0.25)


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """napari's kernels, which no test should wait for in a window."""
    assert fast_shapes.fast_shapes_supported()


@pytest.fixture
def viewer(shared_viewer):
    return shared_viewer()


def image(viewer, side: int = 1000, **options):
    return viewer.add_image(np.full((side, side, 3), 200, np.uint8), name="smear", **options)


def shown_ids(made: DetectionLayer) -> set[int]:
    return set(made.layer.features["id"])


# --- built by pattern ----------------------------------------------------------------------------


def test_boxes_survive_the_way_into_napari_and_back():
    boxes = detections(50).xyxy
    np.testing.assert_allclose(
        box_shapes.bounding_boxes(box_shapes.corners_from_boxes(boxes, (3,))),
        boxes,
        atol=1e-4,
    )


def test_a_box_covers_its_pixels(viewer):
    """Pixel 0 lies from -0.5 to 0.5 in napari's coordinates."""
    found = Detections(np.array([[0, 0, 10, 20.0]]), [0], [0.9], NAMES)
    made = DetectionLayer(viewer, image(viewer), found, COLOURS)
    corners = made.layer.data[0]
    np.testing.assert_allclose([corners.min(0), corners.max(0)], [[-0.5, -0.5], [19.5, 9.5]])


def test_fast_layer_is_as_napari_makes_it(viewer, monkeypatch):
    source = image(viewer)
    made = DetectionLayer(viewer, source, detections(100), COLOURS)
    slow = DetectionLayer(viewer, source, detections(0), COLOURS)
    monkeypatch.setattr(box_shapes, "fast_shapes_supported", lambda: False)
    slow.set_detections(detections(100))
    assert len(made.layer.data) == len(slow.layer.data) == len(detections(100))
    for ours, theirs in zip(made.layer.data, slow.layer.data, strict=True):
        np.testing.assert_allclose(ours, theirs)
    np.testing.assert_allclose(made.layer.edge_color, slow.layer.edge_color)
    np.testing.assert_allclose(made.layer.edge_width, slow.layer.edge_width, rtol=1e-5)
    assert made.layer.features.equals(slow.layer.features)


def some_types(store: BoxStore):
    p = np.random.default_rng(0).dirichlet([1, 1], store.model_count).astype(np.float32)
    names = ["round", "flat"]
    return classified_types(store.types, store.model_rows, store.model_rows, names, p, {})


def test_between_new_types_and_their_painting_the_window_answers(shared_viewer, until):
    viewer = shared_viewer(show=True)
    made = DetectionLayer(viewer, image(viewer), detections(200), COLOURS)
    canvas = viewer.window._qt_viewer.canvas
    until(lambda: canvas.native.isVisible())
    happened = []

    def painted(event):
        happened.append("painted")

    def expect(action):
        QApplication.processEvents()
        happened.clear()
        action()
        assert not canvas.native.updatesEnabled()
        # Whoever comes first after this turn of the event loop: mouse and keys, or the painting.
        QTimer.singleShot(0, lambda: happened.append("heard"))
        until(lambda: "painted" in happened)
        assert happened[0] == "heard"
        assert canvas.native.updatesEnabled()

    canvas._scene_canvas.events.draw.connect(painted)
    try:
        expect(lambda: made.set_types(some_types(made.store), colour_by="type"))
        expect(made.undo_types)
        expect(made.undo_types)
    finally:
        canvas._scene_canvas.events.draw.disconnect(painted)


def test_other_colours_and_types_do_not_build_the_boxes_anew(viewer, until):
    found = detections(200)
    made = DetectionLayer(viewer, image(viewer), found, COLOURS)
    shapes = list(made.layer._data_view.shapes)
    made.layer.selected_data = {3}
    store = made.store
    made.set_types(some_types(store), colour_by="type")
    view = made.layer._data_view
    assert all(a is b for a, b in zip(view.shapes, shapes, strict=True))
    assert made.layer.selected_data == {3}
    assert made.layer.features["type"].tolist() == store.types_of(made.rows).tolist()
    shades = transform_color(made.type_colours)[store.type_codes[made.rows] - 1]
    np.testing.assert_allclose(made.layer.edge_color, shades, atol=1e-6)
    # What is drawn is what a layer that is built so would draw.
    twin = DetectionLayer(viewer, viewer.layers["smear"], store.detections, COLOURS)
    twin.set_colour_by("type")
    theirs = twin.layer._data_view
    assert theirs.shapes[0] is not view.shapes[0]
    for name in ("displayed_triangles_colors", "triangles_colors", "vertices"):
        np.testing.assert_allclose(getattr(view._mesh, name), getattr(theirs._mesh, name))
    twin.remove()
    # And the user's edits are still noticed, one among many.
    table = made.layer.features.copy()
    table.loc[7, "type"] = "odd"
    made.layer.features = table
    made.commit_edits()
    assert store.types_of([made.rows[7]]).tolist() == ["odd"]
    assert int(store.touched.sum()) == 1


def test_another_napari_is_noticed(monkeypatch):
    wrong = fast_shapes._rectangle_arrays
    monkeypatch.setattr(
        fast_shapes, "_rectangle_arrays", lambda *a: wrong(*a) | {"_box": np.zeros((3, 9, 2))}
    )
    fast_shapes._matches_napari.cache_clear()
    assert not fast_shapes.fast_shapes_supported()
    assert box_shapes.max_drawn_boxes() == box_shapes.MAX_DRAWN_BOXES_SLOW
    fast_shapes._matches_napari.cache_clear()


# --- shown ---------------------------------------------------------------------------------------


def test_layer_lies_on_its_image_and_has_its_features(viewer):
    source = image(viewer, scale=(0.5, 0.5), translate=(10, 20), rotate=15, units="um")
    other = image(viewer)  # another one, above it
    viewer.layers.selection.active = source
    made = DetectionLayer(viewer, source, detections(20), COLOURS)
    np.testing.assert_allclose(made.layer.affine.affine_matrix, source.affine.affine_matrix)
    np.testing.assert_allclose(made.layer.scale, source.scale)
    np.testing.assert_allclose(made.layer.translate, source.translate)
    np.testing.assert_allclose(made.layer.rotate, source.rotate)
    assert made.layer.units == source.units
    columns = ["id", "class", "confidence", "status", "source", "area", "Model channel 1 mean"]
    assert list(made.layer.features) == columns
    assert set(made.layer.features["status"]) == {FOUND}
    assert set(made.layer.features["source"]) == {"tiny"}
    red = made.layer.edge_color[list(made.layer.features["class"]).index("RBC")]
    np.testing.assert_allclose(red, [0xE6 / 255, 0x19 / 255, 0x4B / 255, 1], atol=1e-3)
    assert viewer.layers[-1] is made.layer
    viewer.layers.selection.active = other
    again = DetectionLayer(viewer, source, detections(20), COLOURS)
    assert viewer.layers.index(again.layer) == viewer.layers.index(source) + 1
    assert viewer.layers.selection.active is other, "the user is at another image by now"


def test_threshold_filters_and_can_be_lowered_again(viewer):
    found = detections(100)
    made = DetectionLayer(viewer, image(viewer), found, COLOURS)
    made.set_filter(0.9)
    assert len(made.layer.data) == len(found.above(0.9))
    made.set_filter(0.02)
    assert len(made.layer.data) == 100
    made.set_filter(1.1)
    assert len(made.layer.data) == 0
    made.set_filter(np.arange(100) % 2 == 0)
    assert shown_ids(made) == set(range(0, 100, 2))


def test_edges_stay_thin_when_zooming(viewer, until):
    made = DetectionLayer(viewer, image(viewer), detections(30), COLOURS)
    before, zoom = made.layer.edge_width[0], viewer.camera.zoom
    viewer.camera.zoom = 10 * zoom
    until(lambda: made.layer.edge_width[0] < 0.2 * before)
    assert made.layer.edge_width[0] == pytest.approx(before / 10, rel=0.05)
    mesh = made.layer._data_view._mesh
    assert np.abs(mesh.vertices - mesh.vertices_centers).max() < before / 5


def test_of_very_many_those_in_view_are_shown(viewer, until):
    made = DetectionLayer(viewer, image(viewer, 4000), detections(5000, 4000), COLOURS)
    said = []
    made.message_changed.connect(said.append)
    made.set_filter(0.02)
    assert len(made.layer.data) == box_shapes.MAX_DRAWN_BOXES
    assert said[-1] == "2,000 of 5,000 shown; zoom in to see all."
    assert made.layer.features["confidence"].min() == pytest.approx(
        np.sort(made.store.scores)[-2000], abs=1e-5
    )
    viewer.camera.center, viewer.camera.zoom = (500, 500), 4
    until(lambda: said[-1] == "")
    half = np.array(viewer.canvas.size) / 4 / 2
    inside = np.all(np.abs(made.store.xyxy[:, :2] + 2.5 - 500) < half[::-1] - 5, axis=1)
    assert set(np.flatnonzero(inside)) <= shown_ids(made)
    assert len(made.layer.data) < 1000


def test_labels_only_where_few_are_in_view(viewer, until):
    made = DetectionLayer(viewer, image(viewer), detections(1000), COLOURS)
    made.set_filter(0.02)
    made.set_labels_visible(True)
    assert not made.layer.text.visible
    viewer.camera.zoom *= 5
    until(lambda: made.layer.text.visible)
    row = made.layer.features.iloc[0]
    assert made.layer.text.values[0] == f"{row['class']} {row['confidence']:.2f}"
    made.set_labels_visible(False)
    assert not made.layer.text.visible


def test_stacks_remember_each_plane(viewer, until):
    source = viewer.add_image(np.full((3, 100, 100, 3), 200, np.uint8), name="stack")
    viewer.dims.current_step = (1, 0, 0)
    made = DetectionLayer(viewer, source, detections(10, 100), COLOURS, index=(1,))
    made.set_filter(0.02)
    assert made.layer.ndim == 3
    assert {corner[0] for shape in made.layer.data for corner in shape} == {1.0}
    viewer.dims.current_step = (2, 0, 0)
    until(lambda: len(made.layer.data) == 0)
    made.set_detections(detections(5, 100), index=(2,))
    assert len(made.layer.data) == 5
    viewer.dims.current_step = (1, 0, 0)
    until(lambda: len(made.layer.data) == 10)
    assert made.store is made.stores[(1,)]


# --- the user's hand -----------------------------------------------------------------------------


def test_moved_deleted_and_added_boxes_outlast_the_filter(viewer):
    made = DetectionLayer(viewer, image(viewer), detections(40), COLOURS)
    assert not made.edited
    data = made.layer.data
    data[0] = data[0] + 30
    made.layer.data = data
    made.layer.remove([1])
    made.layer.add_rectangles(np.array([[100.0, 100], [150, 180]]))
    assert made.edited
    made.set_filter(0.95)
    made.set_filter(0.99999)
    back = made.read_back()
    assert list(back.features["status"]) == [EDITED, ADDED]
    np.testing.assert_allclose(back.xyxy[1], [100.5, 100.5, 180.5, 150.5])
    made.set_filter(0.02)
    assert 1 not in shown_ids(made)
    assert {0, 40} <= shown_ids(made)


def test_a_renamed_class_is_kept_and_coloured(viewer):
    made = DetectionLayer(viewer, image(viewer), detections(5), COLOURS)
    table = made.layer.features.copy()
    table.loc[0, "class"] = "blast"
    made.layer.features = table
    assert made.edited
    made.set_filter(0.02)
    assert made.layer.features["class"][0] == "blast"
    assert not np.allclose(made.layer.edge_color[0], made.layer.edge_color[1])
    assert made.read_back().names == ["RBC", "WBC", "blast"]


def test_filtering_and_zooming_are_no_edits(viewer, until):
    made = DetectionLayer(viewer, image(viewer, 4000), detections(5000, 4000), COLOURS)
    made.set_labels_visible(True)
    for confidence in (0.5, 0.02, 0.9, 0.3):
        made.set_filter(confidence)
    before = len(made.layer.data)
    viewer.camera.zoom *= 8
    until(lambda: len(made.layer.data) < before)
    assert not made.edited


def test_a_selected_box_stays_selected_and_shown(viewer, until):
    made = DetectionLayer(viewer, image(viewer, 4000), detections(5000, 4000), COLOURS)
    made.set_filter(0.02)
    made.layer.selected_data = {7}
    chosen = made.layer.features["id"][7]
    viewer.camera.center, viewer.camera.zoom = (3900, 3900), 30
    until(lambda: len(made.layer.data) < 100)
    rows = list(made.layer.selected_data)
    assert made.layer.features["id"][rows[0]] == chosen


def test_deleting_the_layer_is_survived(viewer, qtbot):
    made = DetectionLayer(viewer, image(viewer), detections(40), COLOURS)
    heard = []
    made.removed.connect(lambda: heard.append(True))
    viewer.layers.remove(made.layer)
    assert heard == [True]
    assert not made.alive
    made.set_filter(0.5)
    made.set_labels_visible(True)
    made.remove()
    viewer.camera.zoom *= 2
    qtbot.wait(100)
    again = DetectionLayer(viewer, viewer.layers[0], detections(40), COLOURS)
    assert again.alive


def test_user_made_boxes_take_the_defaults(viewer):
    made = DetectionLayer(viewer, image(viewer), detections(4), COLOURS)
    made.layer.add_rectangles(np.array([[10.0, 10], [50, 60]]))
    assert made.edited
    row = made.layer.features.iloc[-1]
    assert (row["status"], row["source"], row["id"]) == (ADDED, "user", 4)


def test_a_pasted_copy_is_a_box_of_its_own():
    store = BoxStore(detections(3))
    shown = np.arange(3)
    table = {name: np.append(v, v[:1]) for name, v in store.features(shown).items()}
    boxes = np.concatenate([store.xyxy, store.xyxy[:1] + 5])
    rows = commit_edits(store, shown, store.xyxy[:3].copy(), boxes, table)
    assert list(rows) == [0, 1, 2, 3]
    assert store.status[3] == ADDED


def test_a_layer_goes_on_showing_what_is_in_view_by_itself(viewer, until):
    layer = DetectionLayer(viewer, image(viewer, 4000), detections(5000, 4000), COLOURS).layer
    gc.collect()
    before = len(layer.data)
    viewer.camera.zoom *= 10
    until(lambda: len(layer.data) < before)


# --- how fast ------------------------------------------------------------------------------------


def test_ten_thousand_boxes_do_not_stall_the_window(viewer, qtbot, stalls):
    source = image(viewer, 4000)
    made = DetectionLayer(viewer, source, detections(1), COLOURS)
    found = detections(10_000, 4000)
    qtbot.wait(500)
    with stalls.watched():
        made.set_detections(found)
        qtbot.wait(300)
    print(f"10 000 boxes: longest stall {1e3 * stalls.longest:.0f} ms")
    for confidence in np.linspace(0.02, 0.9, 10):
        made.set_filter(float(confidence))
        store, passing = made.filtered()
        assert passing.sum() == (store.scores >= np.float32(confidence)).sum()
