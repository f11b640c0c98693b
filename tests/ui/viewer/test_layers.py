"""Where layers of ours lie, the choice of an image, panels that open and close, the session."""

import gc
import threading
import time
from types import SimpleNamespace

import numpy as np
import pint
import pytest
from napari.layers import Image, Shapes
from napari.layers.shapes._shapes_models import Rectangle, shape
from pint.registry import LazyRegistry
from qtpy.QtCore import QCoreApplication, QEvent
from qtpy.QtWidgets import QLabel

from napari_beerlanet.core.common.progress import Progress
from napari_beerlanet.ui.common.panel import Panel
from napari_beerlanet.ui.common.session import get_session
from napari_beerlanet.ui.viewer.empty_state import EmptyState
from napari_beerlanet.ui.viewer.fast_shapes import triangulate_compiled, triangulate_in_python
from napari_beerlanet.ui.viewer.layers import (
    ImagePicker,
    Role,
    UpdateGuard,
    grid_transform,
    is_stepped_back,
    move_to_top,
    read_units,
    role_metadata,
    role_of,
    source_image,
    stain_images,
    step_back,
    step_forward,
    transform_kwargs,
    units_are_ready,
    use_units,
)

RGB = np.zeros((48, 64, 3), np.uint8)


def test_a_layer_with_the_same_transform_lies_at_the_same_place():
    affine = np.array([[1.0, 0.2, 3.0], [0.1, 1.0, -2.0], [0.0, 0.0, 1.0]])
    place = {"scale": (0.5, 0.25), "translate": (3, 4), "rotate": 30, "shear": [0.1]}
    more = {"units": ("um", "um"), "axis_labels": ("down", "right")}
    source = Image(RGB, rgb=True, affine=affine, **place, **more)
    other = Image(np.zeros((8, 9)), **transform_kwargs(source))
    for point in ((0, 0), (7, 3), (2, 8)):
        assert np.allclose(source.data_to_world(point), other.data_to_world(point))
    assert other.units == source.units
    assert other.axis_labels == source.axis_labels


def test_of_a_stack_all_axes_or_the_last_two():
    source = Image(
        np.zeros((4, 8, 9, 3), np.uint8), rgb=True, scale=(5, 0.5, 0.25), translate=(1, 2, 3)
    )
    whole = Shapes(ndim=3, **transform_kwargs(source))
    assert np.allclose(whole.data_to_world((2, 3, 4)), source.data_to_world((2, 3, 4)))
    flat = Image(np.zeros((8, 9)), **transform_kwargs(source, planar=True))
    assert np.allclose(flat.data_to_world((3, 4)), source.data_to_world((0, 3, 4))[-2:])


def test_what_we_made_is_marked():
    assert role_of(Image(RGB, rgb=True)) is None
    assert role_of(Image(RGB, rgb=True, metadata={"napari-beerlanet": "mine"})) is None
    assert role_of(Image(RGB, rgb=True, metadata=role_metadata(Role.RESIDUAL))) == "residual"


# --- in a window ---------------------------------------------------------------------------------


class Example(Panel):
    """A panel with an image choice that notes what it hears."""

    def __init__(self, viewer):
        super().__init__(viewer)
        self.choice, self.heard, self.ends = ImagePicker(self), [], 0
        self.choice.chosen.connect(self.heard.append)
        self.body.addWidget(self.choice)
        self.work = self.task()

    def on_closed(self):
        self.ends += 1


@pytest.fixture
def example(shared_viewer):
    viewer = shared_viewer()
    panel = Example(viewer)
    viewer.window.add_dock_widget(panel)
    return viewer, panel


def offered(panel):
    return [panel.choice.itemText(i) for i in range(panel.choice.count())]


@pytest.mark.window
def test_the_choice_follows_the_layers(example):
    viewer, panel = example
    assert panel.choice.layer is None
    assert not panel.choice.isEnabled()
    viewer.add_image(np.zeros((8, 9)), name="grey")
    first = viewer.add_image(RGB, name="first")
    second = viewer.add_image(RGB, name="second")
    viewer.add_image(RGB, name="ours", metadata=role_metadata(Role.RESIDUAL))
    assert offered(panel) == ["first", "second"]
    assert panel.choice.layer is second, "what was opened last is selected"
    panel.choice.choose(first)
    assert panel.choice.layer is first
    panel.choice.choose(second)
    first.name = "renamed"
    assert offered(panel) == ["renamed", "second"]
    assert panel.choice.layer is second
    viewer.layers.remove(second)
    assert panel.choice.layer is first
    viewer.layers.clear()
    assert panel.choice.layer is None
    assert panel.heard == [first, second, first, second, first, None]


@pytest.mark.window
def test_long_names_that_differ_at_their_ends_can_be_told_apart(example):
    viewer, panel = example
    panel.choice.setFixedWidth(180)
    shown = []
    for end in ("one", "two"):
        viewer.add_image(RGB, name=f"0be0c633-8b02-593f-960c-33ad7568db85-{end}")
        shown.append(panel.choice.grab().toImage())
        assert panel.choice.elided_text(150).endswith(end)
        assert panel.choice.full_tooltip().startswith(f"{panel.choice.layer.name}\n")
    assert shown[0] != shown[1]


@pytest.mark.window
def test_layers_are_renamed_with_the_image_that_they_are_called_after(example):
    viewer, _ = example
    image = viewer.add_image(RGB, name="field")
    other = viewer.add_image(RGB, name="field · 2")
    made = [
        viewer.add_shapes(name=name, metadata=role_metadata(Role.DETECTIONS, source))
        for name, source in (
            ("field · detections", image),
            ("my own name", image),
            ("field · 2 · detections", other),
            ("fieldwork · detections", image),
        )
    ]
    users = viewer.add_shapes(name="field · mine")
    image.name = "patient 7"
    names = ["patient 7 · detections", "my own name", "field · 2 · detections"]
    assert [layer.name for layer in made] == [*names, "fieldwork · detections"]
    assert users.name == "field · mine"
    image.name = "patient 8"
    assert made[0].name == "patient 8 · detections"
    made[0].name = "best run"
    image.name = "patient 9"
    assert made[0].name == "best run"


@pytest.mark.window
def test_results_follow_an_image_that_is_moved_or_scaled(example):
    """As when the pixel size is set, or corrected, after cells were found."""
    viewer, _ = example
    image = viewer.add_image(RGB, name="smear")
    place = transform_kwargs(image)
    boxes = Shapes([[[4, 4], [9, 9]]], metadata=role_metadata(Role.DETECTIONS, image), **place)
    density = Image(
        np.zeros((6, 8)),
        metadata=role_metadata(Role.CELL_DENSITY, image),
        **place | grid_transform(image, 8),
    )
    unlinked = viewer.add_image(RGB, name="other")
    for layer in (boxes, density):
        viewer.add_layer(layer)
    image.scale = (0.25, 0.5)
    image.units = ("um", "um")
    image.translate = (10, 20)
    image.rotate = 30
    image.affine = np.array([[1.0, 0.2, 3.0], [0.1, 1.0, -2.0], [0.0, 0.0, 1.0]])
    for point in ((0, 0), (7, 3)):
        assert np.allclose(boxes.data_to_world(point), image.data_to_world(point))
        pixel = 8 * np.array(point) + 3.5  # the centre of that cell
        assert np.allclose(density.data_to_world(point), image.data_to_world(pixel))
    assert boxes.units == density.units == image.units
    assert tuple(unlinked.scale) == (1, 1)


@pytest.mark.window
def test_a_layer_comes_above_all_images_and_not_above_other_shapes(shared_viewer):
    viewer = shared_viewer()
    viewer.add_image(RGB, name="source")
    boxes = viewer.add_shapes(name="boxes")
    for name in ("first", "second"):
        viewer.add_image(RGB, name=name)
    viewer.add_shapes(name="mine")
    move_to_top(viewer, boxes)
    names = ["source", "first", "second", "boxes", "mine"]
    assert [layer.name for layer in viewer.layers] == names
    move_to_top(viewer, boxes)
    assert [layer.name for layer in viewer.layers] == names


@pytest.mark.window
def test_what_covers_an_image_steps_back_and_forward_as_it_was(shared_viewer):
    viewer = shared_viewer()
    source, other = (viewer.add_image(RGB, name=name) for name in ("source", "other"))
    grey = np.zeros(RGB.shape[:2])
    made = {
        name: viewer.add_image(
            grey, name=name, metadata=role_metadata(role, of), blending=blending, visible=visible
        )
        for name, role, of, blending, visible in (
            ("stain 1", Role.STAIN_DENSITY, source, "multiplicative", True),
            ("stain 2", Role.STAIN_DENSITY, source, "multiplicative", False),
            ("residual", Role.RESIDUAL, source, "opaque", True),
            ("other's stain", Role.STAIN_DENSITY, other, "opaque", True),
        )
    }
    source.visible = False  # as with stains that are blended
    step_back(viewer, source)
    assert source.visible
    assert [name for name, layer in made.items() if layer.visible] == ["other's stain"]
    assert [name for name, layer in made.items() if is_stepped_back(layer)] == [
        "stain 1",
        "residual",
    ]
    step_back(viewer, source)  # a second time nothing more is to be remembered
    made["residual"].visible = True  # by the user
    assert not is_stepped_back(made["residual"])
    step_forward(viewer, source)
    assert [name for name, layer in made.items() if layer.visible] == [
        "stain 1",
        "residual",
        "other's stain",
    ]
    assert not source.visible
    source.visible = True
    step_forward(viewer, source)
    assert source.visible


@pytest.mark.window
def test_results_stay_with_their_image_whatever_it_is_called(example):
    viewer, panel = example
    images = [viewer.add_image(RGB, name=name) for name in ("one", "two")]
    boxes, stains, saved = [], [], []
    for image in images:
        boxes.append(Shapes(name="boxes", metadata=role_metadata(Role.DETECTIONS, image)))
        stains.append(Image(RGB[..., 0], metadata=role_metadata(Role.STAIN_DENSITY, image)))
        # as boxes from a file, which can name their image only
        own = {"role": "boxes", "source": image.name}
        saved.append(Shapes(name="file", metadata={"napari-beerlanet": own}))
    for layer in (*boxes, *stains, *saved):
        viewer.add_layer(layer)

    def check():
        for k, image in enumerate(images):
            for layer in (boxes[k], stains[k], saved[k], image):
                assert source_image(viewer, layer) is image
                viewer.layers.selection.active = layer
                assert panel.choice.layer is image
            assert stain_images(viewer, image) == [stains[k]]

    check()
    images[0].name = "of last week"
    check()
    images[1].name = "one"  # as the first was called
    images[0].name = "two"
    check()
    viewer.layers.remove(images[0])
    assert source_image(viewer, boxes[0]) is None, "it is not that of the layer with the old name"
    assert stain_images(viewer, images[1]) == [stains[1]]
    again = viewer.add_image(RGB, name="two")
    assert source_image(viewer, boxes[0]) is again, "an image that was opened again"


def wait(report):
    while True:
        report(Progress(0, 1))
        time.sleep(0.002)


@pytest.mark.window
@pytest.mark.parametrize("way", ["dock", "x", "viewer"])
def test_closing_ends_the_work(example, until, way):
    viewer, panel = example
    viewer.add_image(RGB)
    panel.work.start(wait)
    if way == "viewer":
        viewer.close()
    elif way == "x":
        panel.parent().destroyOnClose()
    else:
        viewer.window.remove_dock_widget(panel)
    if way != "viewer":
        assert panel.ends == 1
    QCoreApplication.sendPostedEvents(None, QEvent.Type.DeferredDelete)
    until(lambda: not any(t.name == "napari-beerlanet" for t in threading.enumerate()))
    if way != "viewer":
        viewer.add_image(RGB)  # nobody listens any more
        panel = None


@pytest.mark.window
def test_a_closed_panel_is_freed(example):
    viewer, panel = example
    gone = []
    panel.destroyed.connect(lambda *_: gone.append(True))
    viewer.window.remove_dock_widget(panel)
    QCoreApplication.sendPostedEvents(None, QEvent.Type.DeferredDelete)
    assert gone == [True]
    viewer.add_image(RGB)  # a listener that is left would call what is no more
    assert panel.ends == 1


@pytest.mark.window
def test_panels_of_one_viewer_share_a_session_and_others_do_not(make_napari_viewer_proxy):
    proxy = make_napari_viewer_proxy()
    one, other = proxy, make_napari_viewer_proxy()
    assert get_session(one) is get_session(proxy.__wrapped__)
    assert get_session(one) is not get_session(other)
    heard = []
    get_session(one).model_changed.connect(heard.append)
    model = SimpleNamespace(info={}, classes=[])
    get_session(one).set_model(model, "key")
    assert heard == [model]
    assert get_session(other).model is None


@pytest.mark.window
def test_results_are_forgotten_with_their_layer(example):
    viewer, panel = example
    layer = viewer.add_image(RGB)
    results = get_session(viewer).detections
    get_session(viewer).set_detections(layer, "cells")
    assert results[layer] == "cells"
    viewer.layers.remove(layer)
    panel.heard.clear()
    del layer
    QCoreApplication.sendPostedEvents(None, QEvent.Type.DeferredDelete)
    gc.collect()
    assert len(results) == 0


@pytest.mark.window
def test_the_empty_state_says_what_is_missing_and_opens_the_sample(example, until):
    viewer, panel = example
    empty = EmptyState(panel)
    panel.body.addWidget(empty)
    assert "An RGB image" in empty.text.text()
    viewer.add_image(np.zeros((8, 9)), name="grey")
    empty.update_text()
    assert "“grey” has no colours" in empty.text.text()
    empty.sample.click()
    until(lambda: len(viewer.layers) == 2)
    assert panel.choice.layer is viewer.layers[1]
    assert empty.sample.isEnabled()


@pytest.mark.window
def test_a_short_panel_scrolls(example):
    panel = example[1]
    for i in range(60):
        panel.body.addWidget(QLabel(f"line {i}"))
    panel.resize(400, 200)
    assert panel.minimumSizeHint().height() < 300


def test_a_change_of_our_own_ends_with_the_outermost_block_however_that_ends():
    updating = UpdateGuard()
    assert not updating
    with updating:
        with pytest.raises(ZeroDivisionError), updating:
            _ = 1 / int(not updating)
        assert updating, "the outer block goes on"
    assert not updating


def test_units_are_read_ahead_only_where_napari_has_read_none(monkeypatch):
    application = pint.get_application_registry()
    assert application.pixel is not None  # as the first layer does
    used = application.get()
    assert units_are_ready()
    use_units(read_units())
    assert application.get() is used, "units of two registries do not go together"
    monkeypatch.setattr(application, "_registry", LazyRegistry())
    assert not units_are_ready()
    read = read_units()
    use_units(read)
    assert application.get() is read
    assert application.micrometer.is_compatible_with("mm")


def test_boxes_are_drawn_the_same_while_napari_does_without_numba():
    corners = np.array([[1, 2], [1, 30], [20, 30], [20, 2]], np.float32)

    def mesh():
        """The corners of all triangles of the edges, in an order that does not matter."""
        box = Rectangle(corners, edge_width=2)
        vertices = box._edge_vertices + box.edge_width * box._edge_offsets
        return vertices[np.lexsort(vertices.round(3).T)]

    compiled, numba_function = mesh(), shape.remove_path_duplicates
    assert hasattr(numba_function, "py_func")
    triangulate_in_python()
    try:
        triangulate_in_python()  # twice is as good as once
        assert not hasattr(shape.remove_path_duplicates, "py_func")
        plain = mesh()
    finally:
        triangulate_compiled()
    assert shape.remove_path_duplicates is numba_function
    np.testing.assert_allclose(plain, compiled, atol=1e-5)
