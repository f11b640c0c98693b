"""The panel "Classify cells": types of detections and of annotations, colours, counts, undo."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import tifffile
from qtpy.QtCore import QMimeData, QPointF, Qt, QUrl
from qtpy.QtGui import QDropEvent

import napari_beerlanet as nb
from napari_beerlanet.core.boxes.annotations import Annotations
from napari_beerlanet.core.boxes.classes import class_colours, wilson_interval
from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.classification import crops
from napari_beerlanet.core.stains import slide_pixels
from napari_beerlanet.ui.annotate.annotated_image import AnnotatedImage
from napari_beerlanet.ui.annotate.classes import ClassList, TypeList
from napari_beerlanet.ui.classify.widget import ClassChoice, ClassifyWidget
from napari_beerlanet.ui.common.model_picker import get_reader
from napari_beerlanet.ui.common.recent import recent_models
from napari_beerlanet.ui.common.session import get_session
from napari_beerlanet.ui.detect.widget import DetectWidget
from napari_beerlanet.ui.detections.detection_layer import DetectionLayer
from napari_beerlanet.ui.viewer import planes
from tinyclasses import TYPES, cell, tiny_backbone, tiny_classifier

pytestmark = pytest.mark.window

NAMES = ["RBC", "WBC"]


@pytest.fixture(scope="module")
def clf():
    return tiny_classifier(info={"applies_to": ["wbc"], "unknown": {"blasts": ["pale"]}})


def field(count=12) -> tuple[np.ndarray, Detections]:
    """Cells in rows of six with their boxes; the classes take turns, the confidence falls."""
    image = np.full((40 * -(-count // 6) + 4, 244, 3), (228, 222, 232), np.uint8)
    boxes = []
    for k in range(count):
        y, x = 5 + 40 * (k // 6), 5 + 40 * (k % 6)
        image[y : y + 30, x : x + 30] = cell(TYPES[k % 2], k)
        boxes.append([x + 4.5, y + 4.5, x + 25.5, y + 25.5])
    labels = np.arange(count) // 2 % 2
    scores = np.linspace(0.9, 0.05, count)
    return image, Detections(np.array(boxes).reshape(-1, 4), labels, scores, NAMES)


@pytest.fixture
def opened(shared_viewer, clf):
    """The panel in a viewer with an image, its detections, and a loaded classifier."""

    def make(count=12, model=clf, confidence=0.25):
        viewer = shared_viewer()
        image, found = field(count)
        source = viewer.add_image(image, name="smear")
        session = get_session(viewer)
        layer = DetectionLayer(
            viewer, source, found.above(confidence), class_colours(2), confidence=confidence
        )
        session.set_detections(source, layer.detections, layer)
        if model is not None:
            session.set_classifier(model, "tiny")
        panel = ClassifyWidget(viewer)
        viewer.window.add_dock_widget(panel, name="Classify cells")
        return viewer, panel, layer, image, found

    return make


@pytest.fixture
def classify(until):
    def press(panel) -> None:
        panel.run_button.click()
        assert panel.classify_task.running
        until(lambda: not panel.classify_task.running)
        shown = []
        panel.when_shown(lambda: shown.append(True))
        until(lambda: bool(shown))

    return press


def test_types_of_all_candidates_of_the_chosen_classes(opened, classify, clf, until):
    _viewer, panel, layer, image, found = opened()
    assert panel.classes.chosen == ["WBC"]  # what the classifier says it is for, whatever the case
    assert panel.model.card.summary.text().endswith("runs on CPU")
    ended = []
    panel.classify_task.ended.connect(ended.append)
    classify(panel)
    assert len(ended) == 1
    expected = clf.classify(image, found)
    white = found.labels == 1
    names = np.where(white, np.array(TYPES, object)[expected.labels], "")
    typed = layer.detections
    assert len(typed) == 12
    assert typed.columns["type"].tolist() == names.tolist()
    np.testing.assert_allclose(
        typed.columns["probability"][white], expected.confidence[white], atol=1e-5
    )
    assert np.isnan(typed.columns["probability"][~white]).all()
    # Features of the boxes that are drawn, those above the threshold.
    shown = found.scores >= np.float32(0.25)
    assert layer.layer.features["type"].tolist() == names[shown].tolist()
    np.testing.assert_allclose(
        layer.layer.features["P(dark)"][white[shown]],
        expected.scores[white & shown, 0],
        atol=1e-5,
    )
    assert layer.colour_by == "type"
    assert "boxes classified in" in panel.progress_bar.text
    assert "on CPU" in panel.progress_bar.text
    assert "Does not know blasts; may call them pale." in panel.counts.limits.text()


def test_a_run_says_how_many_of_its_boxes_are_counted(opened, classify):
    _, panel, layer, *_ = opened()
    classify(panel)
    classified = int((layer.store.type_codes > 0).sum())
    counted = sum(panel.counts.class_counts.types.values())
    assert 0 < counted < classified
    assert panel.progress_bar.text.startswith(f"{classified} boxes classified in")
    assert f", {counted} of them above the confidence threshold." in panel.progress_bar.text


@pytest.mark.parametrize("width", [110, 320, 600])
def test_names_of_classes_are_not_cut(shared_viewer, qtbot, width):
    counts = {"RBC": 12, "immature granulocyte & precursors": 7, "x" * 200: 3, "WBC": 0}
    choice = ClassChoice()
    qtbot.addWidget(choice)
    choice.offer(counts)
    choice.resize(width, 200)
    choice.show()
    for (name, count), box in zip(counts.items(), choice.boxes.values(), strict=True):
        assert box.sizeHint().width() <= box.width()
        assert box.geometry().right() < width
        text = box.text().replace("&&", "&")
        assert text.endswith(f" ({count:,})")
        whole = len(name) < 5 or (width > 300 and len(name) < 50)
        assert text.startswith(name) is whole
        assert name in box.toolTip()
    choice.offer({"RBC": 3, "WBC": 2})
    qtbot.wait(1)
    assert [box.text() for box in choice.boxes.values()] == ["RBC (3)", "WBC (2)"]
    assert len({box.y() for box in choice.boxes.values()}) == (2 if width < 120 else 1)


def test_only_boxes_above_the_threshold_tell_the_share_of_infected_cells(opened, classify):
    info = {"applies_to": ["WBC", "RBC"], "prevalence": 0.05, "temperature": 0.05}
    clf = tiny_classifier(names=["uninfected", "ring"], info=info)
    _, panel, layer, image, found = opened(model=clf, confidence=0.6)
    classify(panel)
    counted = found.scores >= np.float32(0.6)
    assert 0 < counted.sum() < len(found)
    p = layer.detections.columns["P(ring)"]
    expected = clf.classify(image, found, counted=counted).scores[:, 1]
    np.testing.assert_allclose(p, expected, atol=1e-5)
    told_by_all = clf.classify(image, found).scores[:, 1]
    assert np.abs(p - told_by_all).min() > 1e-3  # every probability would be another


def test_what_a_run_says_stays_when_other_layers_come(opened, classify):
    viewer, panel, *_ = opened()
    classify(panel)
    said = panel.progress_bar.text
    assert said
    viewer.add_points([[1, 1]], name="landmarks")
    assert panel.progress_bar.text == said


def test_counts_follow_the_confidence_with_their_intervals(opened, classify, clf, until):
    _viewer, panel, layer, image, found = opened()
    for name in NAMES:
        panel.classes.boxes[name].setChecked(True)
    classify(panel)
    labels = clf.classify(image, found).labels
    for confidence in (0.25, 0.05, 0.6):
        layer.set_filter(confidence)
        chosen = found.scores >= np.float32(confidence)
        expected = dict(zip(TYPES, np.bincount(labels[chosen], minlength=2).tolist(), strict=True))
        until(lambda expected=expected: panel.counts.class_counts.types == expected)
        total = int(chosen.sum())
        assert f"Of {total} classified cells" in panel.counts.basis.text()
        low, high = wilson_interval(expected["dark"], total)
        assert f"({100 * low:.1f}–{100 * high:.1f})" in panel.counts.table.text()
    panel.copy_summary()
    panel.copy_table()


def test_colours_are_those_of_types_or_of_classes(opened, classify):
    viewer, panel, layer, _, _found = opened()
    by_class = layer.layer.edge_color.copy()
    classify(panel)
    session = get_session(viewer)
    shades = dict(zip(["", *TYPES], ["#8c8c8c", *session.type_palette.colours(TYPES)], strict=True))
    assert shades["dark"] == class_colours(2)[0]  # colour-blind safe, and the same every time

    def colours() -> list[str]:
        eight = np.rint(255 * layer.layer.edge_color[:, :3]).astype(int)
        return ["#{:02x}{:02x}{:02x}".format(*rgb) for rgb in eight]

    assert colours() == [shades[name] for name in layer.layer.features["type"]]
    panel.colour_by.setCurrentIndex(0)
    panel.colour_by.activated.emit(0)
    assert layer.colour_by == "class"
    np.testing.assert_allclose(layer.layer.edge_color, by_class, atol=1e-6)
    layer.set_labels_visible(True)
    layer.set_colour_by("type")
    texts = [str(text) for text in layer.layer.text.values]
    assert texts[0].startswith("RBC 0.90")
    assert texts[2].startswith(layer.layer.features["type"][2])


def test_a_run_is_undone_and_done_again_and_edits_stay(opened, classify):
    _viewer, panel, layer, _, _found = opened()
    table = layer.layer.features.copy()
    table.loc[0, "class"] = "WBC"
    layer.layer.features = table
    classify(panel)
    types = layer.layer.features["type"].tolist()
    assert types[0]  # what the user calls a white cell is one
    assert (panel.undo_run.text(), panel.undo_run.isVisibleTo(panel)) == ("Undo run", True)
    panel.undo_run.click()
    assert "type" not in layer.layer.features
    assert layer.layer.features["class"][0] == "WBC"
    assert not panel.counts.isVisibleTo(panel)
    assert panel.undo_run.text() == "Redo run"
    panel.undo_run.click()
    assert layer.layer.features["type"].tolist() == types
    # The key on the layer does the same.
    layer.layer.keymap[next(k for k in layer.layer.keymap if "Z" in str(k))](layer.layer)
    assert layer.types_undone


def test_a_drawn_box_is_classified_and_one_outside_is_left_out(opened, classify):
    _viewer, panel, layer, _image, _found = opened()
    layer.layer.add_rectangles([np.array([[9.0, 129], [9, 150], [30, 150], [30, 129]])])
    layer.layer.add_rectangles([np.array([[-60.0, -60], [-60, -40], [-40, -40], [-40, -60]])])
    table = layer.layer.features.copy()
    table.loc[len(table) - 2 :, "class"] = "WBC"
    layer.layer.features = table
    classify(panel)
    assert layer.layer.features["type"].tolist()[-2] in TYPES
    assert layer.layer.features["type"].tolist()[-1] == ""
    assert "1 box has no area in the image and no type." in panel.progress_bar.text


def test_cancelled_nothing_has_changed(opened, until):
    _, panel, layer, _, _ = opened()
    panel.run_button.click()
    panel.classify_task.cancel()
    until(lambda: not panel.classify_task.running)
    assert panel.progress_bar.text == "Cancelled; nothing has changed."
    assert not layer.has_types
    assert not panel.undo_run.isVisibleTo(panel)


def test_boxes_that_are_found_again_meanwhile_keep_what_they_have(opened, until):
    _, panel, layer, _, found = opened()
    panel.run_button.click()
    layer.set_detections(found[:3])
    until(lambda: not panel.classify_task.running)
    assert not layer.has_types
    assert "classify them again" in panel.progress_bar.text


def test_another_classifier_replaces_the_types(opened, classify):
    viewer, panel, layer, _, _ = opened()
    classify(panel)
    names = ["x", "y", "z"]
    other = tiny_classifier(tiny_backbone(3), names, info={"applies_to": ["Platelets"]})
    get_session(viewer).set_classifier(other, "other")
    assert panel.classes.chosen == NAMES  # there are none of those it is meant for: all
    classify(panel)
    assert layer.detections.types == names
    assert "P(dark)" not in layer.layer.features
    assert sum(panel.counts.class_counts.types.values()) == panel.counts.class_counts.total == 9
    layer.undo_types()
    assert layer.detections.types == TYPES


def test_types_that_the_user_gave_stay_whatever_a_classifier_says(opened, classify):
    viewer, panel, layer, image, found = opened(confidence=0.05)
    classify(panel)
    said = layer.detections.columns["type"].copy()
    white = np.flatnonzero(found.labels == 1)
    corrected, accepted, drawn = white[0], white[1], 12
    status, labels = np.zeros(12, np.uint8), found.labels.copy()
    status[[corrected, accepted]] = 1
    types = layer.detections.type_labels.copy()
    types[corrected] = 1 - types[corrected]
    layer.apply_review(status, ["unreviewed", "accepted"], labels, NAMES, types, TYPES)
    layer.layer.add_rectangles([np.array([[9.0, 129], [9, 150], [30, 150], [30, 129]])])
    table = layer.layer.features.copy()
    table.loc[drawn, ["class", "type"]] = "WBC", "odd"
    layer.layer.features = table
    other = tiny_classifier(seed=3, info={"applies_to": ["WBC"]})
    get_session(viewer).set_classifier(other, "other")
    classify(panel)
    assert "3 boxes keep the types that you gave." in panel.progress_bar.text
    now = layer.layer.features["type"].tolist()
    assert now[corrected] == TYPES[types[corrected]] != said[corrected]
    assert now[accepted] == said[accepted]
    assert now[drawn] == "odd"
    answers = other.classify(image, found)
    others = white[2:]
    assert [now[k] for k in others] == [TYPES[k] for k in answers.labels[others]]
    assert panel.counts.class_counts.types["odd"] == 1
    # The classifier's own answers are in the detections, and its probability of the user's types.
    assert layer.detections.columns["type"][corrected] == TYPES[answers.labels[corrected]]
    shown = layer.layer.features["probability"]
    assert shown[corrected] == pytest.approx(answers.scores[corrected, types[corrected]], abs=1e-5)
    assert np.isnan(shown[drawn])
    # With other types, too.
    third = tiny_classifier(tiny_backbone(3), ["x", "y", "z"], info={"applies_to": ["WBC"]})
    get_session(viewer).set_classifier(third, "third")
    classify(panel)
    now = layer.layer.features["type"].tolist()
    assert (now[corrected], now[drawn]) == (TYPES[types[corrected]], "odd")
    assert {now[k] for k in others} <= {"x", "y", "z"}


@pytest.mark.parametrize("fit", ["crop", "image"])
def test_the_cells_of_a_slide_are_those_of_the_same_image_in_memory(
    shared_viewer, classify, tmp_path, monkeypatch, fit
):
    image, found = field(36)
    path = tmp_path / "slide.svs"
    with tifffile.TiffWriter(path) as file:
        for step in (1, 2):
            level = np.ascontiguousarray(image[::step, ::step])
            file.write(level, photometric="rgb", tile=(64, 64), subfiletype=int(step > 1))
    monkeypatch.setattr(planes, "SLIDE_PIXELS_LAZY", 1000)
    viewer = shared_viewer()
    (layer,) = viewer.open(path, plugin="napari-beerlanet")
    assert planes.current_plane(layer, viewer).is_slide
    shown = DetectionLayer(viewer, layer, found.above(0.05), class_colours(2), confidence=0.05)
    get_session(viewer).set_detections(layer, shown.detections, shown)
    model = tiny_classifier(fit=fit, info={"applies_to": NAMES})
    get_session(viewer).set_classifier(model, "tiny")
    panel = ClassifyWidget(viewer)
    viewer.window.add_dock_widget(panel, name="Classify cells")
    read = []
    monkeypatch.setattr(crops, "_BLOCK_SIDE", 80)
    monkeypatch.setattr(
        slide_pixels.SlidePixels, "__getitem__", _counting(slide_pixels.SlidePixels, read)
    )
    classify(panel)
    expected = model.classify(image, found)
    typed = shown.detections
    assert typed.columns["type"].tolist() == [TYPES[k] for k in expected.labels]
    np.testing.assert_allclose(typed.columns["probability"], expected.confidence, atol=1e-4)
    if fit == "crop":
        assert max(read) < image.size / 2, "a part of the slide at a time"


def _counting(kind, read):
    get = kind.__getitem__

    def counted(self, index):
        pixels = get(self, index)
        read.append(pixels.size)
        return pixels

    return counted


def test_types_of_a_classifier_are_unreviewed_until_the_user_says_so(opened, classify):
    viewer, panel, _, _, found = opened()
    white = found[found.labels == 1]
    boxes = Annotations.empty(NAMES, (84, 244)).with_detections(white)
    status = ["copied", "drawn", "confirmed", "drawn", "corrected", "drawn"][: len(white)]
    types = ["", "", "", "mine", "", ""][: len(white)]
    annotated = AnnotatedImage(viewer.layers["smear"], viewer, ClassList(), types=TypeList())
    annotated.put(replace(boxes, status=status, types=types), ())
    drawn = annotated.boxes
    panel.update_targets()
    panel.boxes.setCurrentText("Annotations")
    panel.boxes.activated.emit(1)
    classify(panel)
    table = drawn.layer.features
    assert table["type"].tolist()[3] == "mine", "what the user gave stays"
    assert table["status"].tolist() == [
        *("copied", "classified", "classified", "drawn", "classified", "classified"),
    ]
    assert "1 box keeps the type that you gave." in panel.progress_bar.text
    assert drawn.unreviewed() == (1, 4)
    faint = np.array(drawn.layer.face_color)[:, 3] > 0
    assert faint.tolist() == [True, True, True, False, True, True]
    annotations = annotated.annotations(())
    assert annotations.reviewed.tolist() == [False, True, True, True, True, True]
    assert annotations.type_reviewed.tolist() == [False, False, False, True, False, False]
    # Confirming or correcting makes a type the user's; another run leaves it alone.
    drawn.layer.selected_data = {1}
    drawn.confirm()
    drawn.layer.selected_data = {2}
    drawn.types.add(TYPES)
    drawn.set_type(next(name for name in TYPES if name != table["type"][2]))
    drawn.layer.selected_data = {4}
    drawn.set_class("RBC")  # which says nothing about the type
    kept = drawn.layer.features["type"].tolist()[1:3]
    assert drawn.layer.features["status"].tolist()[1:5] == [
        *("confirmed", "corrected", "drawn", "classified"),
    ]
    assert drawn.unreviewed() == (1, 2)
    get_session(viewer).set_classifier(tiny_classifier(seed=3), "other")
    classify(panel)
    assert drawn.layer.features["type"].tolist()[1:3] == kept
    panel.undo_run.click()
    assert drawn.layer.features["type"].tolist()[1:4] == [*kept, "mine"]
    annotated.close()


def test_annotations_get_the_types_as_theirs(opened, classify, until):
    viewer, panel, layer, _, found = opened()
    white = found[found.labels == 1]
    annotated = AnnotatedImage(viewer.layers["smear"], viewer, ClassList(), types=TypeList())
    assert panel.boxes.findText("Annotations") < 0  # there is a layer, and no box in it yet
    annotated.put(Annotations.empty(NAMES, annotated.shape).with_detections(white), ())
    drawn = annotated.boxes.layer
    until(lambda: panel.boxes.findText("Annotations") >= 0)
    panel.boxes.setCurrentText("Annotations")
    panel.boxes.activated.emit(1)
    classify(panel)
    types = list(annotated.annotations(()).types)
    assert types == drawn.features["type"].tolist()
    assert set(types) <= set(TYPES)
    assert panel.counts.class_counts.types == dict(Counter(types))
    assert not layer.has_types
    # A type that was set by hand since stays.
    drawn.selected_data = {0}
    annotated.boxes.types.add(["mine"])
    annotated.boxes.set_type("mine")
    panel.undo_run.click()
    assert list(annotated.annotations(()).types) == ["mine"] + [""] * (len(white) - 1)
    panel.undo_run.click()
    assert list(annotated.annotations(()).types) == ["mine", *types[1:]]
    # The layer's own undo knows the run, too.
    annotated.boxes.undo()
    assert list(annotated.annotations(()).types)[1:] == [""] * (len(white) - 1)
    annotated.close()


def test_what_there_is_to_do_without_boxes_or_model(shared_viewer, opened):
    viewer = shared_viewer()
    panel = ClassifyWidget(viewer)
    viewer.window.add_dock_widget(panel)
    assert panel.empty.isVisibleTo(panel)
    image, _ = field()
    viewer.add_image(image)
    assert "find cells first" in panel.run_reason.text()
    panel.run()
    assert not panel.classify_task.running
    assert not panel.classes.isVisibleTo(panel)


def test_no_box_of_the_chosen_classes(opened):
    _, panel, layer, _, _ = opened(2)  # two red cells
    panel.run_button.click()
    assert not panel.classify_task.running
    assert panel.progress_bar.text == "There are no boxes of WBC to classify."
    assert not layer.has_types


def test_models_of_the_other_kind_are_refused_and_lead_to_their_panel(opened, until, tmp_path):
    path = tmp_path / "types.safetensors"
    # A backbone of our own is in no file; one of torchvision is.
    from tinyclasses import SMALL

    nb.save_checkpoint(tiny_classifier(SMALL), path)
    viewer, panel, _, _, _ = opened()
    panel.choose_model("blood-cells")
    until(lambda: not panel.model.task.running)
    assert panel.model.progress_bar.text == (
        "blood-cells: a detector, which finds cells; choose it in “Find cells”, and here a "
        "classifier."
    )
    assert panel.model.picker.key == "tiny"
    mime = QMimeData()
    mime.setUrls([QUrl.fromLocalFile(str(path))])
    left, none = Qt.MouseButton.LeftButton, Qt.KeyboardModifier.NoModifier
    panel.dropEvent(QDropEvent(QPointF(5, 5), Qt.DropAction.CopyAction, mime, left, none))
    until(lambda: get_session(viewer).classifier_key == str(path))
    assert recent_models("classifier")[0] == path.resolve()
    assert recent_models() == []
    cells = DetectWidget(viewer)
    viewer.window.add_dock_widget(cells)
    until(lambda: not cells.model.task.running)
    before = cells.model.picker.key
    cells.choose_model(str(path))
    until(lambda: not cells.model.task.running)
    assert "a classifier, which classifies cells; choose it in “Classify cells”" in (
        cells.model.progress_bar.text
    )
    assert cells.model.picker.key == before
    assert get_reader(str(path)) is not None
