"""Find, classify, correct ten, train, classify again: one way through the tabs of the workspace."""

from collections import Counter

import numpy as np
import pytest
from qtpy.QtCore import Qt

from discs import disc_detector, draw
from napari_beerlanet.core.boxes.annotations import CONFIRMED
from napari_beerlanet.core.checkpoints.checkpoint import save_checkpoint
from napari_beerlanet.core.common.events import RunState
from napari_beerlanet.ui.common.session import get_project_store, get_session
from napari_beerlanet.ui.detections.image_detections import detection_layer_of
from napari_beerlanet.ui.finetune import run_view
from napari_beerlanet.ui.workspace.footer import Step
from napari_beerlanet.ui.workspace.workspace import (
    ANNOTATE,
    CELLS,
    CLASSIFY,
    REVIEW,
    TRAIN,
    open_workspace,
)
from tinyclasses import SMALL, TYPES, tiny_classifier

pytestmark = [pytest.mark.window, pytest.mark.slow]

ROWS, COLUMNS, PITCH = 4, 6, 60
CORRECTED = 10


def field() -> np.ndarray:
    """Discs in rows; every other one is pale in its middle."""
    places = [
        (PITCH * (k % COLUMNS + 0.5), PITCH * (k // COLUMNS + 0.5)) for k in range(ROWS * COLUMNS)
    ]
    image = draw((PITCH * ROWS, PITCH * COLUMNS), [(x, y, 40) for x, y in places])
    for x, y in places[::2]:
        image[int(y) - 6 : int(y) + 6, int(x) - 6 : int(x) + 6] = (215, 180, 205)
    return image


def test_find_classify_correct_train_and_classify_again(
    shared_viewer, qtbot, until, tmp_path, monkeypatch
):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(run_view, "lower_priority", lambda process: None)
    first = tmp_path / "first.safetensors"
    save_checkpoint(tiny_classifier(SMALL, info={"applies_to": ["RBC"]}), first)
    viewer = shared_viewer(show=True)
    session = get_session(viewer)
    session.set_model(disc_detector(components=8, iterations=10), "blood-cells")
    image = viewer.add_image(field(), name="field")
    workspace = open_workspace(viewer, CELLS)
    button = workspace.footer.next_button

    def press():
        qtbot.mouseClick(button, Qt.MouseButton.LeftButton)

    # Find.
    cells = workspace.panel(CELLS)
    cells.form.size_auto.value = False
    cells.form.cell_size.value = 40
    until(lambda: button.text() == Step.FIND)
    press()
    until(lambda: image in session.detection_layers and not cells.detect_task.running)
    layer = detection_layer_of(viewer, image)
    count = ROWS * COLUMNS
    assert len(layer.layer.data) == count
    until(lambda: cells.counts.class_counts is not None)
    assert cells.counts.class_counts.counts["RBC"] == count
    assert f"<b>{count}</b>" in cells.counts.table.text()

    # Classify: the button says so once a classifier is loaded that is meant for these cells.
    classify = workspace.open_tab(CLASSIFY)
    classify.choose_model(str(first))
    until(lambda: session.classifier_key == str(first))
    until(lambda: button.text() == Step.CLASSIFY)
    press()
    until(lambda: layer.has_types and not classify.classify_task.running)
    until(lambda: classify.counts.class_counts is not None)
    said = layer.layer.features["type"].tolist()
    assert set(said) <= set(TYPES)
    assert {k: n for k, n in classify.counts.class_counts.types.items() if n} == Counter(said)
    assert f"{count} boxes classified" in classify.progress_bar.text
    until(lambda: button.text() == Step.CORRECT)

    # Correct ten: the other type, at a key; the counts follow.
    review = workspace.open_tab(REVIEW)
    until(lambda: review.review is not None and len(review.rows) == count)
    until(lambda: not review.autosave.task.running)
    assert review.keys_set.currentText() == "type"
    ten = [int(row) for row in review.rows[:CORRECTED]]
    right = {}
    for row in ten:
        right[row] = TYPES[1 - TYPES.index(review.review.type_of(row))]
        review.go_to(row)
        review.keys[str(1 + review.key_names.index(right[row]))]()
    assert review.progress.format() == f"{CORRECTED} of {count} reviewed"

    def types():
        return dict(zip(layer.layer.features["id"], layer.layer.features["type"], strict=True))

    assert {row: types()[row] for row in ten} == right
    now = Counter(types().values())
    assert now != Counter(said)
    until(lambda: Counter(classify.counts.class_counts.types) == now)

    # The corrections become training data.
    projects = get_project_store(viewer)
    annotate = workspace.open_tab(ANNOTATE)
    annotate.project.create_project(tmp_path / "our types")
    until(lambda: projects.project is not None)
    review.export.add_accepted_to_project()
    until(lambda: annotate.annotation_actions.annotated is not None)
    annotated = annotate.annotation_actions.annotated
    until(lambda: len(annotated.annotations(())) == CORRECTED)
    assert set(annotated.annotations(()).status) == {CONFIRMED}
    assert not annotate.unreviewed.isVisibleTo(annotate)
    annotate.whole_image.click()
    annotate.add.click()
    until(lambda: bool(projects.project.cells))
    taught = Counter(right.values())
    listed = ", ".join(f"{taught[name]} {name}" for name in projects.project.types)
    until(lambda: f"Cells with a type: {listed}." in annotate.message.text())
    assert all(cell.reviewed for cell in projects.project.cells)

    # Train, and keep what was trained.
    train = workspace.open_tab(TRAIN)
    train.train_classifier.click()
    until(lambda: train.start_button.isEnabled())
    assert f"{CORRECTED}" in train.data_line.text()
    offered = train.classifier_choice.list
    offered.setCurrentIndex(offered.findText("tiny (loaded)"))
    until(lambda: train.start_button.isEnabled())
    train.classifier_form.epochs.value = 1
    train.start()
    until(lambda: train.run_view.running)
    until(lambda: not train.run_view.running)
    assert train.run_view.process.end.state is RunState.FINISHED
    until(lambda: button.text() == Step.KEEP)
    until(lambda: train.comparison.comparison is not None)
    train.comparison.name.setText("ours")
    train.comparison.keep()
    kept = tmp_path / "our types" / "models" / "ours.safetensors"
    until(lambda: session.classifier_key == str(kept))

    # The kept classifier is offered, and leaves the corrections as they are.
    classify = workspace.open_tab(CLASSIFY)
    until(lambda: classify.model.loaded is session.classifier)
    assert classify.model.picker.key == str(kept)
    assert classify.target.kind == "Detections"
    classify.run_button.click()
    until(lambda: layer.report.get("classifier") == "ours")
    until(lambda: not classify.classify_task.running)
    until(lambda: f"{CORRECTED} boxes keep the types that you gave." in classify.progress_bar.text)
    again = types()
    assert {row: again[row] for row in ten} == right
    answers = session.classifier.classify(image.data, layer.store.xyxy)
    others = [k for k in again if k not in right]
    assert {k: again[k] for k in others} == {
        k: session.classifier.classes[answers.labels[k]] for k in others
    }
    until(lambda: review.review.detections.report.get("classifier") == "ours")
    until(lambda: not review.autosave.task.running)
    assert {row: review.review.type_of(row) for row in ten} == right, "in the review, too"
    assert review.progress.format() == f"{CORRECTED} of {count} reviewed"
