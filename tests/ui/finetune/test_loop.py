"""The loop in a real window: detect, correct, train, compare, keep, detect again, and better."""

import numpy as np
import pytest
from qtpy.QtCore import Qt

from napari_beerlanet.core.boxes.annotations import Annotations
from napari_beerlanet.core.boxes.matching import match_boxes
from napari_beerlanet.core.evaluation.live import LiveEvaluation
from napari_beerlanet.samples import blood_smear
from napari_beerlanet.ui.common.session import get_session
from napari_beerlanet.ui.viewer.box_shapes import corners_from_boxes

pytestmark = [pytest.mark.window, pytest.mark.slow]

PLUGIN = "napari-beerlanet"
SHAPE = (480, 640)
PATIENT = 900_000  # milliseconds: a real training on a busy machine


def field(seed):
    """A field of another laboratory, with much of what the starter is not good at."""
    return blood_smear(
        SHAPE, seed=seed, shift=1, lab=5, platelets=0.3, white_cells=0.15, cell_diameter=70
    )


def quality(found, truth):
    names = list(truth.names)
    annotations = Annotations(truth.boxes, truth.labels, names, image_shape=SHAPE)
    return LiveEvaluation.of(found, annotations).match_at(0.25).mean.ap


def correct(boxes, truth):
    """Do to an annotation layer what a hand would: remove, draw and name boxes."""
    layer = boxes.layer
    drawn = boxes.of_plane(())
    partner = match_boxes(drawn.xyxy, truth.boxes, 0.5)
    layer.selected_data = set(np.flatnonzero(partner < 0).tolist())
    if layer.selected_data:
        layer.remove_selected()
    missing = np.setdiff1d(np.arange(len(truth.boxes)), partner)
    if len(missing):
        layer.add_rectangles(list(corners_from_boxes(truth.boxes[missing])))
    shown = boxes.of_plane(())
    partner = match_boxes(shown.xyxy, truth.boxes, 0.4)
    for label, name in enumerate(truth.names):
        wrong = [
            k
            for k in range(layer.nshapes)
            if partner[k] >= 0
            and truth.labels[partner[k]] == label
            and layer.features["class"][k] != name
        ]
        if wrong:
            layer.selected_data = set(wrong)
            boxes.set_class(name)
    layer.selected_data = set()


def test_the_loop(make_napari_viewer, qtbot, until, tmp_path):
    viewer = make_napari_viewer(show=True)
    truths = {f"field {seed}": field(seed) for seed in (1, 2)}
    layers = {name: viewer.add_image(truth.image, name=name) for name, truth in truths.items()}
    _, cells = viewer.window.add_plugin_dock_widget(PLUGIN, "Find cells")
    _, annotate = viewer.window.add_plugin_dock_widget(PLUGIN, "Annotate", tabify=True)
    until(lambda: cells.run_button.isEnabled())

    for name, layer in layers.items():
        cells.image.choose(layer)
        cells.run()
        until(
            lambda layer=layer: (
                layer in get_session(viewer).detection_layers and not cells.detect_task.running
            )
        )
        if annotate.store.project is None:
            annotate.project.create_project(tmp_path / "our laboratory")
            until(lambda: annotate.store.project is not None)
        annotate.image.choose(layer)
        qtbot.mouseClick(annotate.annotate, Qt.MouseButton.LeftButton)
        until(lambda: annotate.annotation_actions.annotated is not None)
        qtbot.mouseClick(annotate.copy, Qt.MouseButton.LeftButton)
        boxes = annotate.annotation_actions.annotated.boxes
        assert boxes.layer.nshapes > 10
        correct(boxes, truths[name])
        assert sorted(boxes.counts().items()) == sorted(
            (n, int((truths[name].labels == k).sum())) for k, n in enumerate(truths[name].names)
        )
        annotate.annotation_actions.mark_whole_image()
        annotate.annotation_actions.add_to_project("use")  # as corrected
        until(lambda: not annotate.annotation_actions.project_task.running)
    assert len(list((tmp_path / "our laboratory" / "images").glob("*/*.png"))) >= 2

    third = field(3)
    before = get_session(viewer).model.detect(third.image)
    _, train = viewer.window.add_plugin_dock_widget(PLUGIN, "Fine-tune", tabify=True)
    until(lambda: train.project_choice.project is not None and train.start_button.isEnabled())
    train.form.length.value = "quick"
    train.form.batch.value = 2
    evaluate_run = train.comparison.evaluate_run
    train.comparison.evaluate_run = lambda folder: evaluate_run(folder, reference_images=1)
    train.start()
    until(lambda: train.comparison.folder is not None and not train.run_view.running, PATIENT)
    until(lambda: train.comparison.keep_button.isEnabled(), PATIENT)
    until(lambda: len(train.comparison.rows()) >= 2)

    train.comparison.name.setText("ours")
    train.comparison.keep()
    until(lambda: get_session(viewer).model.info["name"] == "ours")
    assert (tmp_path / "our laboratory" / "models" / "ours.safetensors").exists()
    record = get_session(viewer).model.info["training"]
    assert record["parent"]
    assert record["data_hash"]
    assert record["seed"] == 0

    layer = viewer.add_image(third.image, name="third")
    cells.image.choose(layer)
    cells.run()
    until(lambda: layer in get_session(viewer).detections and not cells.detect_task.running)
    after = get_session(viewer).detections[layer]
    print(f"mAP50-95 on a third field: {quality(before, third):.3f}, {quality(after, third):.3f}")
    assert quality(after, third) > quality(before, third)
