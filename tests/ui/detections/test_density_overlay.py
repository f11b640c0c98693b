"""Where boxes are too many to be drawn their density is shown; nothing of the user's is lost."""

import numpy as np
import pytest

from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.ui.detections.box_store import ADDED, EDITED
from napari_beerlanet.ui.detections.density_overlay import (
    MIN_BOXES_FOR_DENSITY,
    fade_fraction,
)
from napari_beerlanet.ui.detections.detection_layer import DetectionLayer
from napari_beerlanet.ui.viewer import box_shapes, fast_shapes
from napari_beerlanet.ui.viewer.layers import Role, role_of

pytestmark = pytest.mark.window
NAMES = ["RBC", "WBC"]
COLOURS = ["#e6194b", "#4363d8"]
SIDE = 20_000
WHOLE = 0.02


def detections(n: int = 40_000, side: int = SIDE) -> Detections:
    """WBC on the left half, RBC on the right."""
    rng = np.random.default_rng(0)
    corner = rng.uniform(0, side - 40, (n, 2))
    boxes = np.concatenate([corner, corner + rng.uniform(20, 40, (n, 2))], axis=1)
    labels = (corner[:, 0] < side / 2).astype(int)
    return Detections(boxes, labels, np.linspace(1, 0.3, n), NAMES).above(0.3)


@pytest.fixture(scope="module", autouse=True)
def compiled():
    assert fast_shapes.fast_shapes_supported()


@pytest.fixture
def viewer(shared_viewer):
    return shared_viewer()


def slide(viewer, **options):
    """A pyramid of SIDE pixels each way that takes no memory."""
    levels = [np.broadcast_to(np.uint8(200), (SIDE // k, SIDE // k, 3)) for k in (1, 64)]
    return viewer.add_image(levels, rgb=True, multiscale=True, name="slide", **options)


def look(viewer, zoom: float, y: float = SIDE / 2, x: float = SIDE / 2) -> None:
    viewer.scene.camera.center, viewer.scene.camera.zoom = (y, x), zoom


def heat_of(viewer):
    return next((layer for layer in viewer.layers if role_of(layer) == Role.CELL_DENSITY), None)


@pytest.fixture
def made(viewer, until):
    source = slide(viewer)
    look(viewer, WHOLE)
    shown = DetectionLayer(viewer, source, detections(), COLOURS)
    until(lambda: heat_of(viewer) is not None and heat_of(viewer).opacity > 0.5)
    return shown


def zoom_in(made, until) -> None:
    look(made.viewer, 1.0)
    until(lambda: 5 < len(made.layer.data) < 500)


def zoom_out(made, until) -> None:
    look(made.viewer, WHOLE)
    until(lambda: heat_of(made.viewer).opacity > 0.5)


def test_fading_is_continuous_in_the_number_of_boxes():
    steps = [fade_fraction(near, 2000) for near in range(1, 30_000, 50)]
    assert steps[0] == 0
    assert steps[-1] == 1
    assert np.diff(steps).min() >= 0
    assert np.diff(steps).max() < 0.02


def test_density_takes_over_and_says_so(made, viewer, until):
    told = []
    made.message_changed.connect(told.append)
    zoom_in(made, until)
    assert told[-1] == ""
    assert heat_of(viewer).opacity == 0
    assert not viewer.canvas.overlays.text.visible
    zoom_out(made, until)
    assert len(made.layer.data) == 0
    assert told[-1] == "40,000 cells in view; zoom in to see boxes."
    assert viewer.canvas.overlays.text.text == told[-1]
    look(viewer, 0.2)
    until(lambda: 0 < made._drawn.fade < 1)
    assert len(made.layer.data) == box_shapes.MAX_DRAWN_BOXES
    assert made.layer.edge_color[:, 3].max() == pytest.approx(1 - made._drawn.fade, abs=0.03)
    assert 0 < heat_of(viewer).opacity < 0.7


def test_density_lies_where_the_boxes_are_in_the_colours_of_their_classes(made, viewer):
    heat = heat_of(viewer)
    middle = np.array(heat.data.shape[:2]) // 2
    assert heat.data[middle[0], middle[1] // 2, 2] == 0xD8  # WBC at the left
    assert heat.data[middle[0], 3 * middle[1] // 2, 0] == 0xE6
    world = heat.data_to_world((0, 0)), heat.data_to_world(np.array(heat.data.shape[:2]) - 1)
    cell = heat.scale[0]
    np.testing.assert_allclose(world[0], (cell - 1) / 2)
    np.testing.assert_allclose(world[1], SIDE - cell / 2 - 0.5, atol=cell)
    assert viewer.layers.index(heat) == viewer.layers.index(made.layer) - 1


def test_density_follows_scale_rotation_and_plane(viewer, until):
    source = slide(viewer, scale=(0.5, 0.25), translate=(100, 200), rotate=30, units="um")
    viewer.reset_view()
    made = DetectionLayer(viewer, source, detections(), COLOURS)
    until(lambda: heat_of(viewer) is not None)
    heat = heat_of(viewer)
    at = np.array([heat.data.shape[0] // 3, heat.data.shape[1] // 4])
    cell = heat.scale[0] / 0.5
    np.testing.assert_allclose(
        heat.data_to_world(at), made.layer.data_to_world((at + 0.5) * cell - 0.5)
    )
    assert heat.units == source.units


def test_density_follows_confidence_and_class(made, viewer, until):
    before = heat_of(viewer).data
    made.set_filter(0.8)
    until(lambda: heat_of(viewer).data is not before)
    fewer = heat_of(viewer).data
    assert fewer[..., 3].sum() < 0.8 * before[..., 3].sum()
    made.set_filter(made.store.labels == 1)
    until(lambda: heat_of(viewer).data is not fewer)
    right = heat_of(viewer).data[:, heat_of(viewer).data.shape[1] // 2 + 2 :]
    assert not right[..., 3].any()


def test_edits_outlast_zooming_out_and_in(made, until):
    zoom_in(made, until)
    ids = list(made.layer.features["id"])
    data = made.layer.data
    data[0] = data[0] + 5
    made.layer.data = data
    made.layer.selected_data = {1}
    made.layer.remove_selected()
    centre = SIDE / 2
    made.layer.add_rectangles(np.array([[centre, centre], [centre + 30, centre + 20]]))
    zoom_out(made, until)
    until(lambda: len(made.layer.data) == 2)  # the user's stay in sight
    assert set(made.layer.features["status"]) == {EDITED, ADDED}
    assert (made.layer.edge_color[:, 3] == 1).all()
    zoom_in(made, until)
    there = list(made.layer.features["id"])
    assert ids[0] in there
    assert ids[1] not in there
    assert 40_000 in there
    moved = made.layer.data[there.index(ids[0])]
    np.testing.assert_allclose(moved, data[0], atol=0.01)


def test_selection_active_layer_and_visibility_outlast_the_zoom(made, viewer, until):
    zoom_in(made, until)
    assert viewer.layers.selection.active is made.layer
    made.layer.selected_data = {3}
    chosen = made.layer.features["id"][3]
    zoom_out(made, until)
    assert list(made.layer.features["id"]) == [chosen]
    assert len(made.layer.selected_data) == 1
    made.layer.visible = False
    assert not heat_of(viewer).visible
    zoom_in(made, until)
    assert not made.layer.visible
    made.layer.visible = True
    heat_of(viewer).visible = False
    zoom_out(made, until)
    assert not heat_of(viewer).visible
    assert viewer.layers.selection.active is made.layer


def test_the_users_opacity_is_kept(made, viewer, until):
    heat_of(viewer).opacity = 0.3
    zoom_in(made, until)
    look(viewer, WHOLE)
    until(lambda: heat_of(viewer).opacity > 0.2)
    assert heat_of(viewer).opacity == pytest.approx(0.3)


def test_a_density_that_the_user_deletes_stays_away(made, viewer, until):
    viewer.layers.remove(heat_of(viewer))
    until(lambda: len(made.layer.data) == box_shapes.MAX_DRAWN_BOXES)
    made.set_filter(0.5)
    zoom_in(made, until)
    look(viewer, WHOLE)
    until(lambda: len(made.layer.data) == box_shapes.MAX_DRAWN_BOXES)
    assert heat_of(viewer) is None


def test_the_density_goes_with_its_boxes(made, viewer, until):
    viewer.layers.remove(made.layer)
    until(lambda: len(viewer.layers) == 1)
    assert not viewer.canvas.overlays.text.visible


def test_few_boxes_have_none(viewer, qtbot, until):
    made = DetectionLayer(viewer, slide(viewer), detections(MIN_BOXES_FOR_DENSITY), COLOURS)
    look(viewer, WHOLE)
    until(lambda: len(made.layer.data) == box_shapes.MAX_DRAWN_BOXES)
    qtbot.wait(400)
    assert heat_of(viewer) is None
    assert len(made.layer.data) == box_shapes.MAX_DRAWN_BOXES
    assert not viewer.canvas.overlays.text.visible


def test_words_of_others_on_the_canvas_are_left_alone(viewer, until):
    viewer.canvas.overlays.text.text = "mine"
    viewer.canvas.overlays.text.visible = True
    look(viewer, WHOLE)
    made = DetectionLayer(viewer, slide(viewer), detections(), COLOURS)
    look(viewer, WHOLE)
    until(lambda: heat_of(viewer) is not None and heat_of(viewer).opacity > 0.5)
    assert viewer.canvas.overlays.text.text == "mine"
    made.remove()
    assert viewer.canvas.overlays.text.visible


def test_boxes_that_come_add_to_the_density(made, viewer, until):
    before = heat_of(viewer).data[..., 3].astype(int)
    corner = np.random.default_rng(1).uniform(0, 1000, (3000, 2))
    boxes = np.concatenate([corner, corner + 20], axis=1)
    made.extend(Detections(boxes, np.ones(3000, int), np.full(3000, 0.9), NAMES))
    until(lambda: heat_of(viewer).data[..., 3].sum() > before.sum() + 100)
    assert len(made.layer.data) == 0
