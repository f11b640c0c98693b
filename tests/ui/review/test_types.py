"""Cell types in the review panel: table, filter, gallery, histogram, keys, the way to a project."""

import numpy as np
import pytest

from napari_beerlanet.core.review.review import DetectionFilter, load_review
from napari_beerlanet.ui.common.session import get_session
from reviews import some
from tinyclasses import tiny_backbone, tiny_classifier

pytestmark = pytest.mark.window

TYPES = ["neutrophil", "monocyte", "lymphocyte"]


def typed():
    """The white cells have types, which take turns, at a probability that falls."""
    found = some()
    rows = np.flatnonzero(found.labels == 1)
    p = np.full((len(rows), 3), 0.05, np.float32)
    p[np.arange(len(rows)), np.arange(len(rows)) % 3] = np.linspace(0.95, 0.4, len(rows))
    return found.with_types(TYPES, p / p.sum(1, keepdims=True), rows=rows, classifier="white")


WHITE = np.flatnonzero(typed().labels == 1)


@pytest.fixture
def opened(open_review):
    return open_review(found=typed())


def cells(panel, name) -> list[str]:
    model = panel.table.model()
    column = model.names.index(name)
    return [model.index(k, column).data() for k in range(model.rowCount())]


def test_one_key_corrects_the_type_of_one_or_of_many(opened):
    _, panel, layer = opened
    assert panel.keys_set.currentText() == "type"  # there are types: the keys are for them
    assert "2\N{NO-BREAK SPACE}monocyte" in panel.keys_legend.text()
    panel.go_to(int(WHITE[0]))
    panel.keys["2"]()
    assert panel.review.type_of(WHITE[0]) == "monocyte"
    assert panel.review.class_of(WHITE[0]) == "WBC"
    assert layer.layer.features["type"][WHITE[0]] == "monocyte"
    assert layer.layer.features["status"][WHITE[0]] == "accepted"
    panel.table.selectAll()
    panel.keys["3"]()
    shown = len(panel.rows)
    assert (panel.review.column("type")[panel.rows] == "lymphocyte").all()
    assert set(layer.layer.features["type"]) == {"lymphocyte"}
    panel.keys["U"]()
    assert panel.review.type_of(WHITE[0]) == "monocyte"
    assert layer.layer.features["type"].tolist().count("") == shown - (shown > WHITE).sum()
    panel.keys["Shift+U"]()
    assert set(layer.layer.features["type"]) == {"lymphocyte"}
    # On the canvas, too; and the same keys for classes.
    panel.undo()
    panel.keys_set.setCurrentText("class")
    panel.keys_set.activated.emit(0)
    panel.go_to(0)
    key = next(k for k in layer.layer.keymap if str(k) == "2")
    layer.layer.keymap[key](layer.layer)
    assert (panel.review.class_of(0), panel.review.type_of(0)) == ("WBC", "")
    panel.autosave.save_now()
    again, count = load_review(panel.autosave.path, some())
    assert count == 2
    assert again.type_of(WHITE[0]) == "monocyte"


def test_a_corrected_type_has_its_own_probability_wherever_it_stands(opened, until):
    _, panel, layer = opened
    row = int(WHITE[0])
    before = layer.detections.columns["probability"].copy()
    own, other = (panel.review.detections.columns[f"P({name})"][row] for name in TYPES[:2])
    layer.set_colour_by("type")
    layer.set_labels_visible(True)

    def shown():
        """The table's cell, the feature of the box, and its label on the canvas."""
        place = layer.rows.tolist().index(row)
        feature = float(layer.layer.features["probability"][place])
        label = layer.layer.text.values[place]
        return cells(panel, "probability")[panel.rows.tolist().index(row)], feature, label

    first = (f"{own:.3f}", pytest.approx(own), f"neutrophil {own:.2f}")
    assert shown() == first
    panel.go_to(row)
    panel.keys["2"]()
    # What the classifier gives the new type; its label has no number, as the answer is a person's.
    assert shown() == (f"{other:.3f}", pytest.approx(other), "monocyte")
    assert panel.review.mask(DetectionFilter(ranges={"probability": (0.9, 1.0)}))[row] == 0
    panel.keys["U"]()
    assert shown() == first
    # A type that the classifier does not know; the model's own answer is untouched.
    panel.review.relabel_type([row], "blast")
    panel._decisions_changed()
    text, feature, label = shown()
    assert (text, np.isnan(feature), label) == ("", True, "blast")
    panel.keys["U"]()
    assert shown() == first
    np.testing.assert_array_equal(layer.detections.columns["probability"], before)


def test_table_filter_and_order(opened, until):
    _, panel, layer = opened
    assert panel.table.model().names[2] == "type"
    assert cells(panel, "type")[:4] == ["", "", "", "neutrophil"]
    panel.filter.types.setCurrentText("monocyte")
    until(lambda: set(cells(panel, "type")) == {"monocyte"})
    until(lambda: set(layer.layer.features["type"]) == {"monocyte"})
    panel.filter.types.setCurrentIndex(panel.filter.types.count() - 1)
    until(lambda: set(cells(panel, "type")) == {""})
    panel.filter.clear()
    panel.filter.order.setCurrentText("least certain type")
    until(lambda: panel.rows[0] == WHITE[-1])
    assert cells(panel, "probability")[:2] == sorted(cells(panel, "probability")[:2])
    panel.table._header.sectionClicked.emit(2)  # sorted by type, those without one first
    until(lambda: cells(panel, "type")[0] == "")
    assert cells(panel, "type") == sorted(cells(panel, "type"))


def test_the_gallery_says_types_in_their_colours(opened, until):
    viewer, panel, _ = opened
    panel.tabs.setCurrentIndex(1)
    until(lambda: len(panel.gallery.rows) > 0)
    place = panel.gallery.place_of(int(WHITE[0]))
    colour = get_session(viewer).type_palette.colours(TYPES)[0]
    assert panel.gallery.caption(place) == "neutrophil"
    assert panel.gallery.caption_colour(place).name() == colour
    assert "neutrophil (probability 0." in panel.gallery.tooltip_text(place)
    assert panel.gallery.caption(panel.gallery.place_of(0)) == "RBC"
    panel.gallery._selected[:] = False
    panel.gallery._selected[[place, panel.gallery.place_of(int(WHITE[1]))]] = True
    panel.relabel(2)
    assert panel.gallery.caption(place) == "lymphocyte"
    assert "probability" not in panel.gallery.tooltip_text(place)


def test_the_histogram_of_the_probability_is_by_type(opened, until):
    _, panel, _ = opened
    panel.tabs.setCurrentIndex(2)
    histogram = panel.histogram
    histogram.column.setCurrentText("probability")
    assert [label.text for _, label in histogram.plot.plotItem.legend.items] == TYPES
    panel.filter.set_range("probability", 0.0, 0.5)
    p = panel.review.column("probability")
    until(lambda: len(panel.rows) == ((p <= 0.5) & (panel.review.detections.scores >= 0.25)).sum())
    histogram.column.setCurrentText("confidence")
    assert [label.text for _, label in histogram.plot.plotItem.legend.items] == ["RBC", "WBC"]


def test_types_can_be_given_without_a_run(open_review):
    viewer, panel, layer = open_review()
    assert (panel.keys_set.currentText(), panel.filter.types_row.isVisibleTo(panel)) == (
        "class",
        False,
    )
    get_session(viewer).set_classifier(tiny_classifier(tiny_backbone(3), TYPES), "white")
    panel.keys_set.setCurrentText("type")
    panel.keys_set.activated.emit(1)
    assert panel.key_names == TYPES
    panel.go_to(3)
    panel.relabel(1)
    assert layer.layer.features["type"][3] == "monocyte"
    assert panel.table.model().names[2] == "type"
    assert panel.filter.types_row.isVisibleTo(panel)
    accepted = panel.target.accepted_detections(panel.review)
    assert accepted.columns["type"].tolist() == ["monocyte"]
