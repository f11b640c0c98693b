"""The panel "Find cells" with a real viewer and the packaged model."""

import numpy as np
import pytest
from app_model.types import KeyBinding
from napari.layers import Shapes
from PIL import Image
from qtpy.QtCore import QMimeData, QPointF, Qt, QUrl
from qtpy.QtGui import QDropEvent
from qtpy.QtWidgets import QApplication, QComboBox, QDoubleSpinBox, QPushButton, QSlider

import napari_beerlanet as nb
from napari_beerlanet.core.boxes.classes import class_colours
from napari_beerlanet.core.detection.detector import Detector
from napari_beerlanet.ui.common.recent import FoundSizes, recent_models
from napari_beerlanet.ui.common.session import get_session
from napari_beerlanet.ui.detect.widget import DetectWidget
from napari_beerlanet.ui.stains.widget import DecomposeWidget
from napari_beerlanet.ui.viewer.fast_shapes import fast_shapes_supported
from napari_beerlanet.ui.viewer.layers import role_of, source_image

pytestmark = pytest.mark.window


@pytest.fixture(scope="module")
def model():
    fast_shapes_supported()
    return nb.load_checkpoint("blood-cells", device="cpu")


@pytest.fixture
def viewer(shared_viewer):
    return shared_viewer()


def docked(viewer) -> DetectWidget:
    """As napari opens it."""
    made = DetectWidget(viewer)
    viewer.window.add_dock_widget(made, name="Find cells")
    return made


@pytest.fixture
def panel(viewer, smear, model):
    """Open, on a smear, with the model loaded."""
    viewer.add_image(smear, name="smear")
    get_session(viewer).set_model(model, "blood-cells")
    return docked(viewer)


@pytest.fixture
def find(until):
    """Press the button and wait."""

    def press(panel) -> None:
        panel.run_button.click()
        assert panel.detect_task.running
        until(lambda: not panel.detect_task.running)

    return press


def boxes(viewer) -> list[Shapes]:
    return [layer for layer in viewer.layers if role_of(layer) == "detections"]


# --- the way through -----------------------------------------------------------------------------


def test_one_button_boxes_the_cells(panel, find, viewer, model, smear):
    find(panel)
    (layer,) = boxes(viewer)
    expected = model.detect(smear)
    assert len(layer.data) == len(expected) > 5
    assert panel.counts.class_counts.counts == expected.counts()
    assert panel.progress_bar.text.startswith("Done in")
    assert "on CPU" in panel.progress_bar.text
    assert "Assumed cell size" in panel.form.size_note.text()
    assert not panel.counts.warnings.isVisible()
    assert (
        get_session(viewer).detections[panel.image.layer]
        is get_session(viewer).detection_layers[panel.image.layer].detections
    )


def test_slider_filters_boxes_and_counts_without_a_run(panel, find, viewer, until):
    find(panel)
    before = panel.counts.class_counts.total
    panel.form.confidence_slider.value = 0.8
    until(lambda: panel.counts.class_counts.total < before)
    (layer,) = boxes(viewer)
    assert len(layer.data) == panel.counts.class_counts.total
    assert layer.features["confidence"].min() >= 0.8
    assert panel.counts.class_counts.facts["confidence"] == "0.80"
    assert not panel.detect_task.running
    panel.form.confidence_slider.value = 0.01
    until(lambda: panel.counts.class_counts.total > before)


def test_counts_can_be_copied(panel, find):
    find(panel)
    panel.counts.copy.click()
    lines = dict(line.split("\t") for line in QApplication.clipboard().text().splitlines())
    assert lines["image"] == "smear"
    assert int(lines["RBC"]) == panel.counts.class_counts.counts["RBC"]
    panel.counts.copy_summary_button.click()
    assert QApplication.clipboard().text() == panel.counts.class_counts.text()


def test_running_again_replaces_an_untouched_layer(panel, find, viewer):
    find(panel)
    (first,) = boxes(viewer)
    first.name = "mine to name"
    find(panel)
    assert boxes(viewer) == [first]
    assert first.name == "mine to name"


def test_an_edited_layer_is_kept_and_the_new_one_has_another_name(panel, find, viewer):
    find(panel)
    (first,) = boxes(viewer)
    first.remove([0])
    kept = len(first.data)
    find(panel)
    assert len(boxes(viewer)) == 2
    assert [layer.name for layer in boxes(viewer)] == [
        "smear · detections (edited)",
        "smear · detections (new run)",
    ]
    assert len(first.data) == kept
    panel.form.confidence_slider.value = 0.9
    panel.result.set_confidence(0.9)
    assert len(first.data) == kept, "the user's layer is not touched any more"


@pytest.mark.parametrize("blending", [0, 1], ids=["opaque", "multiplicative"])
def test_boxes_are_seen_on_the_image_also_after_decomposing_it(
    shared_viewer, smear, model, until, find, blending
):
    viewer = shared_viewer(show=True)
    source = viewer.add_image(smear, name="smear")
    get_session(viewer).set_model(model, "blood-cells")
    panel, stains = docked(viewer), DecomposeWidget(viewer)
    viewer.window.add_dock_widget(stains, name="Stain decomposition")
    stains.form.blending_buttons.buttons()[blending].click()
    stains.run()
    until(lambda: stains.live.idle and stains.layers is not None and stains.layers.complete)
    stains.result_panel.residual_button.click()
    until(lambda: any(role_of(layer) == "residual" for layer in viewer.layers))
    before = {layer.name: layer.visible for layer in viewer.layers}
    source_alone = picture(viewer, [source])
    for layer in viewer.layers:
        layer.visible = before[layer.name]

    find(panel)
    (layer,) = boxes(viewer)
    until(lambda: layer.visible)
    now = {one.name: one.visible for one in viewer.layers}
    shown = picture(viewer)
    edges = (shown != source_alone).any(-1)
    assert 0.002 < edges.mean() < 0.2, "the boxes' edges and nothing else"
    np.testing.assert_array_equal(shown, picture(viewer, [source, layer]))
    assert [name for name, visible in now.items() if visible] == ["smear", layer.name]

    viewer.layers.remove(layer)  # then everything is as the user had it
    assert {one.name: one.visible for one in viewer.layers} == before
    find(panel)
    stains.run()  # the user wants to see stains again
    until(lambda: stains.live.idle and stains.layers.complete)
    visible = {layer.name for layer in viewer.layers if layer.visible}
    assert visible == {name for name in before if before[name]} | {boxes(viewer)[0].name}


def test_a_result_of_an_image_that_is_no_longer_chosen_is_not_shown_as_this_ones(
    panel, find, viewer, smear, until
):
    first = panel.image.layer
    panel.run_button.click()
    assert panel.detect_task.running
    second = viewer.add_image(smear[:, ::-1].copy(), name="second")
    assert panel.image.layer is second
    until(lambda: not panel.detect_task.running)
    (layer,) = boxes(viewer)
    assert source_image(viewer, layer) is first
    assert panel.image.layer is second, "the user is not taken away from it"
    assert viewer.layers.selection.active is second
    assert list(viewer.layers) == [first, layer, second], "and sees no boxes of another image on it"
    assert panel.counts.class_counts is None, "these are not the counts of the second"
    assert panel.progress_bar.text.startswith("“smear”: Done in")
    assert panel.form.size_note.text() == ""
    viewer.layers.selection.active = first
    assert panel.counts.class_counts.total == len(layer.data)


def test_an_image_over_the_searched_one_is_named_and_stays_unless_the_user_hides_it(
    panel, find, viewer, smear
):
    source = panel.image.layer
    other = viewer.add_image(255 - smear, name="other")
    viewer.add_image(smear, name="beside", translate=(0, 400))
    viewer.layers.selection.active = source
    find(panel)
    (layer,) = boxes(viewer)
    order = [one.name for one in viewer.layers]
    assert order == ["smear", "other", "beside", layer.name], "images stay where they are"
    assert all(one.visible for one in viewer.layers[:3])
    covered = panel.counts.covered
    assert covered.isVisibleTo(panel.counts)
    assert "“other” lies above “smear”, which the boxes belong to." in covered.text()
    colour = covered.palette().color(covered.foregroundRole()).name()
    assert f'style="color: {colour}"' in covered.text(), "Qt's blue cannot be read on dark"
    covered.linkActivated.emit("hide")
    assert not other.visible
    assert not covered.isVisibleTo(panel.counts)
    other.visible = True
    assert covered.isVisibleTo(panel.counts)
    other.opacity = 0.5
    assert not covered.isVisibleTo(panel.counts), "both are seen"
    other.opacity = 1
    viewer.layers.move(0, 2)  # the source above the other
    assert not covered.isVisibleTo(panel.counts)


def picture(viewer, layers=None) -> np.ndarray:
    """The canvas, of these layers alone if any are given."""
    if layers is not None:
        for layer in viewer.layers:
            layer.visible = layer in layers
    QApplication.processEvents()
    return viewer.screenshot(canvas_only=True, flash=False)


def test_user_edits_are_counted(panel, find, viewer, until):
    find(panel)
    before = panel.counts.class_counts.total
    boxes(viewer)[0].remove([0, 1])
    until(lambda: panel.counts.class_counts.total == before - 2)


def test_what_the_model_does_not_know_stands_beside_the_counts(panel, find):
    find(panel)
    text = "Does not know parasites; may call them WBC or Platelets."
    assert text in panel.counts.limits.text()
    assert panel.counts.limits.isVisibleTo(panel)
    assert text in panel.model.card.details.text()
    assert "href" not in panel.counts.limits.text(), "nothing here could count infected cells"


def test_a_deleted_layer_comes_again(panel, find, viewer, until):
    find(panel)
    viewer.layers.remove(boxes(viewer)[0])
    until(lambda: not panel.counts.isVisibleTo(panel))
    find(panel)
    assert len(boxes(viewer)) == 1


def test_density_layers_on_demand(panel, find, viewer, until, model, smear):
    panel.form.stains.value = True
    find(panel)
    active = int(model.decompose(smear).active.sum())
    until(lambda: len(viewer.layers) == 2 + active)
    names = [layer.name for layer in viewer.layers]
    assert sum(name.startswith("Model channel ") for name in names) == active
    seen = [layer.name for layer in viewer.layers if layer.visible]
    assert seen == ["smear", "smear · detections"], "the stains do not cover the image"
    shown = next(layer for layer in viewer.layers if layer.name.startswith("Model channel "))
    shown.visible = True
    assert shown.visible, "but the user may look at them"


def test_labels_follow_the_box(panel, find, viewer):
    find(panel)
    panel.form.labels.value = True
    assert boxes(viewer)[0].text.visible
    panel.form.labels.value = False
    assert not boxes(viewer)[0].text.visible


# --- where ---------------------------------------------------------------------------------------


def test_current_view_only(panel, find, viewer):
    panel.form.where.value = "view"
    viewer.camera.center, viewer.camera.zoom = (120, 80), 6
    window = panel._job(panel.image.layer).windows[0]
    find(panel)
    found = get_session(viewer).detections[panel.image.layer]
    rows, columns = window
    assert (rows.stop - rows.start) * (columns.stop - columns.start) < 240 * 320
    inside = found.candidates.xyxy
    assert inside[:, 0].min() >= columns.start - 1
    assert inside[:, 2].max() <= columns.stop + 1
    assert found.image_shape == (240, 320)


def look_at(viewer, centre=(120, 80), zoom=6) -> None:
    viewer.scene.camera.center, viewer.scene.camera.zoom = centre, zoom


def press_undo(layer) -> None:
    layer.keymap[KeyBinding.from_str("Ctrl+Z")](layer)


def ids_outside(xyxy, window) -> set[tuple[float, ...]]:
    """Boxes that do not touch a window."""
    rows, columns = window
    apart = (xyxy[:, 0] >= columns.stop) | (xyxy[:, 2] <= columns.start)
    apart |= (xyxy[:, 1] >= rows.stop) | (xyxy[:, 3] <= rows.start)
    return {tuple(box) for box in xyxy[apart].tolist()}


def test_searching_the_view_keeps_the_boxes_elsewhere_and_can_be_undone(panel, find, viewer):
    find(panel)
    session, source = get_session(viewer), panel.image.layer
    whole, total = session.detections[source], panel.counts.class_counts.total
    assert not panel.counts.searched.isVisibleTo(panel)
    assert not panel.counts.undo_run.isVisibleTo(panel)
    panel.form.where.value = "view"
    look_at(viewer)
    (window,) = panel._job(source).windows
    elsewhere = ids_outside(whole.xyxy, window)
    assert 0 < len(elsewhere) < total
    find(panel)
    (layer,) = boxes(viewer)
    merged = session.detections[source]
    assert elsewhere <= {tuple(box) for box in merged.xyxy.tolist()}
    assert len(layer.data) == panel.counts.class_counts.total == len(merged) > len(elsewhere)
    text = panel.counts.searched.text()
    assert text.startswith("Current view: ")
    numbers = [int(word.strip(",")) for word in text.split() if word.strip(",").isdigit()]
    assert sum(numbers) == len(merged)
    assert panel.counts.class_counts.facts["searched"] == "current view"

    panel.counts.undo_run.click()
    assert session.detections[source] is whole
    assert panel.counts.class_counts.total == total == len(layer.data)
    assert panel.counts.undo_run.text() == "Redo run"
    viewer.layers.selection.active = layer
    press_undo(layer)  # redoes it as the button does
    panel.result.count()
    assert len(layer.data) == len(merged)
    assert panel.counts.undo_run.text() == "Undo run"


def test_a_part_searched_with_another_model_has_a_layer_of_its_own(
    panel, find, viewer, model, smear
):
    find(panel)
    (first,) = boxes(viewer)
    count = len(first.data)
    get_session(viewer).set_model(Detector(model.network, model.info | {"name": "mine"}), "mine")
    panel.form.where.value = "view"
    look_at(viewer)
    find(panel)
    assert [layer.name for layer in boxes(viewer)] == [
        "smear · detections (blood-cells)",
        "smear · detections (mine, current view)",
    ]
    assert len(first.data) == count
    assert panel.counts.searched.text().startswith("Current view only")
    assert panel.counts.class_counts.total == len(boxes(viewer)[1].data) < count


def test_ctrl_z_does_not_take_away_what_was_edited_since(panel, find, viewer):
    find(panel)
    find(panel)
    (layer,) = boxes(viewer)
    layer.remove([0])
    left = len(layer.data)
    press_undo(layer)
    assert len(layer.data) == left
    assert "edited" in viewer.status
    panel.counts.undo_run.click()
    assert len(layer.data) == left + 1
    panel.counts.undo_run.click()
    assert len(layer.data) == left, "the edit is still there"


def test_view_beside_the_image_is_told(panel, viewer):
    panel.form.where.value = "view"
    viewer.camera.center = (9000, 9000)
    panel.run_button.click()
    assert not panel.detect_task.running
    assert "“smear” is not in the current view" in panel.progress_bar.text
    assert len(viewer.layers) == 1


def test_under_selected_shapes(panel, find, viewer):
    panel.form.where.value = "shapes"
    panel.run_button.click()
    assert "No shape is selected" in panel.progress_bar.text
    image = panel.image.layer
    image.scale = (0.5, 0.5)
    drawn = viewer.add_shapes(
        [np.array([[0, 0], [60, 80.0]]), np.array([[50, 70.0], [119, 159]])], shape_type="rectangle"
    )
    drawn.selected_data = {0, 1}
    job = panel._job(image)
    assert job.windows == ((slice(0, 121), slice(0, 161)), (slice(100, 239), slice(140, 319)))
    find(panel)
    assert get_session(viewer).detections[image].report["windows"] == 2
    assert len(drawn.data) == 2


def test_empty_or_distant_shapes_are_told(panel, viewer):
    panel.form.where.value = "shapes"
    far = viewer.add_shapes([np.array([[900, 900], [990, 990.0]])], shape_type="rectangle")
    far.selected_data = {0}
    panel.run_button.click()
    assert "outside of “smear”" in panel.progress_bar.text
    assert not panel.detect_task.running


def test_a_box_over_one_cell_gives_the_size(panel, viewer, until):
    image = panel.image.layer
    image.scale, image.rotate = (0.5, 0.5), 30
    panel.form.draw.click()
    ruler = panel.ruler.layer
    assert ruler in viewer.layers
    assert ruler.mode == "add_rectangle"
    ruler.add_rectangles(np.array([[10.0, 10], [50, 100]]))
    until(lambda: panel.ruler.layer is None)
    assert panel.form.object_size == pytest.approx(60, abs=1)
    assert not panel.form.draw.isChecked()
    assert len(viewer.layers) == 1
    panel.form.draw.click()
    panel.form.draw.click()
    assert len(viewer.layers) == 1, "a second press takes the layer away"


def test_typed_size_is_used(panel, find, viewer):
    panel.form.size_auto.value = False
    panel.form.cell_size.value = 44
    find(panel)
    assert "Assumed cell size: 44 px (" in panel.form.size_note.text()


def test_a_size_that_was_found_is_tried_first_in_the_same_folder(
    viewer, smear, model, find, tmp_path
):
    get_session(viewer).set_model(model, "blood-cells")
    for name in ("first.png", "second.png"):
        Image.fromarray(smear if name == "first.png" else smear[::-1]).save(tmp_path / name)
    panel = docked(viewer)
    viewer.open(tmp_path / "first.png")
    assert panel._job(panel.image.layer).size_hint is None
    find(panel)
    size = get_session(viewer).detections[panel.image.layer].report["object_size"]
    viewer.open(tmp_path / "second.png")
    panel.image.choose(viewer.layers[-1])
    assert panel._job(panel.image.layer).size_hint == size
    find(panel)
    shape = f"{smear.shape[0]} × {smear.shape[1]} pixels"
    assert "(as found before)" in panel.form.size_note.text()
    saved = FoundSizes().find("blood-cells", tmp_path / "second.png", shape)
    assert saved == pytest.approx(size, rel=0.03), "as measured in it"
    panel.form.size_auto.value = False
    panel.form.cell_size.value = 44
    find(panel)
    assert FoundSizes().find("blood-cells", tmp_path / "second.png", shape) == saved


def test_rotated_and_scaled_image(panel, find, viewer):
    image = panel.image.layer
    image.scale, image.translate, image.rotate = (0.2, 0.2), (5, 7), 40
    find(panel)
    (layer,) = boxes(viewer)
    for name in ("scale", "translate", "rotate"):
        np.testing.assert_allclose(getattr(layer, name), getattr(image, name))


def test_stack_searches_the_current_plane(viewer, model, until, smear):
    get_session(viewer).set_model(model, "blood-cells")
    viewer.add_image(np.stack([np.full_like(smear, 230), smear]), name="stack")
    panel = docked(viewer)
    viewer.dims.current_step = (1, 0, 0)
    panel.run()
    until(lambda: not panel.detect_task.running)
    (layer,) = boxes(viewer)
    assert {corner[0] for shape in layer.data for corner in shape} == {1.0}
    assert panel.counts.class_counts.total == len(layer.data)
    assert panel.progress_bar.text.startswith("Plane 1: "), "another may be in view by then"
    viewer.dims.current_step = (0, 0, 0)
    until(lambda: panel.counts.class_counts is None)
    panel.run()
    until(lambda: not panel.detect_task.running)
    assert boxes(viewer) == [layer]
    viewer.dims.current_step = (1, 0, 0)
    until(lambda: panel.counts.class_counts is not None and panel.counts.class_counts.total > 5)


# --- models --------------------------------------------------------------------------------------


def test_starter_is_loaded_off_the_thread_and_described(viewer, smear, until):
    viewer.add_image(smear)
    panel = docked(viewer)
    until(lambda: panel.model.loaded is not None)
    assert panel.model.picker.key == "blood-cells"
    assert "RBC" in panel.model.card.classes.text()
    assert all(colour in panel.model.card.classes.text() for colour in class_colours(3))
    assert "runs on" in panel.model.card.summary.text()
    for word in ("8 components", "292 images", "mAP50 96.7", "320 pixels", "Size of WBC"):
        assert word in panel.model.card.details.text()
    assert panel.form.device.choices[-1] == "cpu"
    other = docked(viewer)
    assert other.model.loaded is panel.model.loaded


def dropped(panel, path) -> QDropEvent:
    mime = QMimeData()
    mime.setUrls([QUrl.fromLocalFile(str(path))])
    event = QDropEvent(
        QPointF(5, 5),
        Qt.DropAction.CopyAction,
        mime,
        Qt.MouseButton.LeftButton,
        Qt.KeyboardModifier.NoModifier,
    )
    event.mime = mime  # Qt does not keep it
    panel.dropEvent(event)
    return event


def test_a_dropped_model_is_loaded_and_offered_again(panel, model, tmp_path, until):
    path = tmp_path / "mine.safetensors"
    nb.save_checkpoint(model, path)
    dropped(panel, path)
    until(lambda: get_session(panel.viewer).model_key == str(path))
    assert recent_models() == [path.resolve()]
    assert panel.model.picker.list.currentText() == "mine.safetensors"
    path.unlink()
    panel.model.picker.refresh()
    texts = [panel.model.picker.list.itemText(i) for i in range(panel.model.picker.list.count())]
    assert "mine.safetensors (not found)" in texts
    item = panel.model.picker.list.model().item(texts.index("mine.safetensors (not found)"))
    assert not item.isEnabled()
    assert "does not exist any more" in item.toolTip()


@pytest.mark.parametrize("content", [b"", b"nonsense" * 100, None])
def test_a_bad_model_is_told_and_the_last_one_stays(panel, find, tmp_path, content, until):
    path = tmp_path / "bad.safetensors"
    if content is not None:
        path.write_bytes(content)
    panel.choose_model(str(path))
    until(lambda: not panel.model.task.running)
    assert "bad.safetensors" in panel.model.progress_bar.text
    assert panel.model.picker.key == "blood-cells"
    assert recent_models() == []
    find(panel)
    assert panel.counts.class_counts.total > 5


def test_a_model_removed_before_the_run_is_told(viewer, smear, model, tmp_path, until, monkeypatch):
    path = tmp_path / "gone.safetensors"
    nb.save_checkpoint(model, path)
    viewer.add_image(smear, name="smear")
    panel = docked(viewer)
    until(lambda: not panel.model.task.running)
    get_session(viewer).model_key = "something else"
    panel.model.picker.set_key(str(path))
    path.unlink()
    panel.run()
    until(lambda: not panel.detect_task.running)
    assert "gone.safetensors: there is no such file" in panel.progress_bar.text
    assert len(viewer.layers) == 1


# --- what goes wrong -----------------------------------------------------------------------------


def test_without_an_image_the_panel_says_what_it_needs(viewer, model, until):
    get_session(viewer).set_model(model, "blood-cells")
    panel = docked(viewer)
    viewer.add_image(np.zeros((50, 50)), name="grey")
    assert panel.empty.isVisibleTo(panel)
    assert not panel.detect_section.isVisibleTo(panel)
    assert "“grey” has no colours" in panel.empty.text.text()
    panel.run()
    assert not panel.detect_task.running
    panel.empty.sample.click()
    until(lambda: panel.image.layer is not None)
    assert panel.detect_section.isVisibleTo(panel)


def test_nan_is_one_sentence(viewer, model, until):
    get_session(viewer).set_model(model, "blood-cells")
    image = np.full((60, 60, 3), 0.5, np.float32)
    image[3, 3] = np.nan
    viewer.add_image(image, name="holes", rgb=True)
    panel = docked(viewer)
    panel.run()
    until(lambda: not panel.detect_task.running)
    assert panel.progress_bar.text.count(".") >= 1
    assert "Traceback" not in panel.progress_bar.text
    assert len(viewer.layers) == 1
    assert panel.run_button.isEnabled()


def test_cancelled_in_the_middle_nothing_changes(panel, viewer, until, monkeypatch):
    started = []

    def slow(job, report):
        from napari_beerlanet.core.common.progress import Progress

        started.append(True)
        for _ in range(10_000):
            report(Progress(1, 10, "working"))
            import time

            time.sleep(0.005)
        raise AssertionError("never cancelled")

    monkeypatch.setattr("napari_beerlanet.ui.detect.widget.run_job", slow)
    panel.run_button.click()
    until(lambda: bool(started))
    assert not panel.run_button.isEnabled()
    panel.progress_bar.cancel.click()
    until(lambda: not panel.detect_task.running)
    assert panel.progress_bar.text == "Cancelled; nothing has changed."
    assert len(viewer.layers) == 1
    assert panel.run_button.isEnabled()


def test_image_removed_or_renamed_meanwhile(panel, viewer, until, smear):
    panel.run_button.click()
    panel.image.layer.name = "renamed"
    until(lambda: not panel.detect_task.running)
    assert boxes(viewer)[0].name == "renamed · detections"
    viewer.layers.clear()
    viewer.add_image(smear, name="other")
    panel.run_button.click()
    viewer.layers.clear()
    until(lambda: not panel.detect_task.running)
    assert len(viewer.layers) == 0
    assert "removed meanwhile" in panel.progress_bar.text


def test_out_of_memory_steps_down_and_says_so(panel, find, monkeypatch):
    from napari_beerlanet.core.detection.inference import InferenceRunner

    whole, calls = InferenceRunner._infer_batch, []

    def short(self, cut, *rest):
        calls.append(len(cut))
        if len(calls) == 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: out of memory")
        return whole(self, cut, *rest)

    monkeypatch.setattr(InferenceRunner, "_infer_batch", short)
    panel.form.size_auto.value = False
    panel.form.cell_size.value = 31
    find(panel)
    assert "Memory did not suffice for larger tiles than" in panel.progress_bar.text
    assert panel.counts.class_counts.total > 0


def test_strange_images_are_warned_of(viewer, model, until, smear):
    get_session(viewer).set_model(model, "blood-cells")
    viewer.add_image(255 - smear, name="inverted")
    panel = docked(viewer)
    panel.run()
    until(lambda: not panel.detect_task.running)
    assert "of full intensity" in panel.counts.warnings.text()


# --- the panel itself ----------------------------------------------------------------------------


def test_every_control_has_a_tooltip_and_the_panel_is_narrow(panel, find):
    find(panel)
    panel.form.more.header.setChecked(True)
    kinds = (QPushButton, QComboBox, QSlider, QDoubleSpinBox)
    silent = [w for kind in kinds for w in panel.findChildren(kind) if not w.toolTip()]
    assert silent == []
    assert panel.detect_section.minimumSizeHint().width() <= 384
    assert panel.model.minimumSizeHint().width() <= 384


def test_closing_ends_the_work_and_leaves_the_layers(panel, find, viewer, qtbot):
    find(panel)
    panel.run_button.click()
    viewer.window.remove_dock_widget(panel)
    qtbot.wait(200)
    assert len(boxes(viewer)) == 1
    viewer.camera.zoom *= 2
    again = docked(viewer)
    assert again.counts.class_counts is not None, "what was found before is counted"


def test_two_viewers_do_not_mix(make_napari_viewer, model, smear, until):
    first, second = make_napari_viewer(), make_napari_viewer()
    for viewer in (first, second):
        get_session(viewer).set_model(model, "blood-cells")
        viewer.add_image(smear, name="smear")
    panels = [docked(first), docked(second)]
    panels[0].run()
    until(lambda: not panels[0].detect_task.running)
    assert len(boxes(first)) == 1
    assert boxes(second) == []
    assert panels[1].counts.class_counts is None


def test_the_confidence_of_a_preset_stays_with_its_image(viewer, panel, smear, until):
    first = panel.image.layer
    second = viewer.add_image(smear[::-1], name="second")
    viewer.layers.selection.active = first
    panel.run(confidence=0.15)
    viewer.layers.selection.active = second
    until(lambda: not panel.detect_task.running)
    assert panel.form.confidence == 0.25, "nobody has moved the slider"
    viewer.layers.selection.active = first
    until(lambda: panel.image.layer is first)
    assert panel.form.confidence == panel.result.detection_layer.confidence == 0.15
    panel.form.confidence_slider.value = 0.6
    until(lambda: panel.result.detection_layer.confidence == 0.6)
    viewer.layers.selection.active = second
    until(lambda: panel.image.layer is second)
    assert panel.form.confidence == 0.6, "the user's own choice is for all images"
