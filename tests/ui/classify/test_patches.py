"""Heat maps of patches in a real window: as computed, in their place, stopped and resumed."""

import threading

import numpy as np
import pytest
import tifffile

from napari_beerlanet.core.boxes.regions import Region
from napari_beerlanet.core.classification.classifier import Classifier
from napari_beerlanet.core.classification.slide_classifier import classify_slide
from napari_beerlanet.ui.classify.patches import likely_positive, patch_layers
from napari_beerlanet.ui.classify.widget import ClassifyWidget
from napari_beerlanet.ui.common.session import get_session
from napari_beerlanet.ui.viewer import planes
from tinyclasses import TYPES, cell, tiny_classifier

pytestmark = pytest.mark.window

PATCH = 30


@pytest.fixture(scope="module")
def clf():
    return tiny_classifier()


@pytest.fixture(scope="module")
def pixels():
    """Tissue above, background below; 7 × 9 patches, those at two borders cut."""
    rows = [np.hstack([cell(TYPES[(i * j) % 2], 9 * i + j) for j in range(9)]) for i in range(7)]
    image = np.vstack(rows)[:200, :260].copy()
    image[130:] = 244
    return image


@pytest.fixture
def slide_file(pixels, tmp_path, monkeypatch):
    for name in ("SLIDE_PIXELS", "SLIDE_PIXELS_LAZY"):
        monkeypatch.setattr(planes, name, 1000)
    path = tmp_path / "slide.svs"
    tifffile.imwrite(path, pixels, photometric="rgb", tile=(64, 64))
    return path


@pytest.fixture
def opened(shared_viewer, clf, slide_file):
    def make():
        viewer = shared_viewer(show=True)
        (layer,) = viewer.open(slide_file, plugin="napari-beerlanet")
        layer.scale, layer.translate = (2, 2), (10, 30)
        get_session(viewer).set_classifier(clf, "tiny")
        panel = ClassifyWidget(viewer)
        viewer.window.add_dock_widget(panel, name="Classify cells")
        section = panel.patches
        section.header.setChecked(True)
        section.patch_size.setValue(PATCH)
        return viewer, layer, section

    return make


def rows_of(table):
    return [
        [table.item(i, j).text() for j in range(table.columnCount())]
        for i in range(table.rowCount())
    ]


def test_heat_maps_are_the_probabilities_in_their_place(opened, clf, pixels, until):
    viewer, source, section = opened()
    drawn = viewer.add_shapes(name="drawn before")
    viewer.reset_view()
    section.run_button.click()
    until(lambda: not section.patch_task.running)
    expected = classify_slide(clf, pixels, patch=PATCH)
    assert 0 < expected.classified.sum() < 63
    layers = patch_layers(viewer, source)
    assert [layer.name for layer in layers] == ["slide · dark", "slide · pale"]
    assert [layer.visible for layer in layers] == [False, True]
    assert list(viewer.layers) == [source, *layers, drawn], "regions stay on top"
    for k, layer in enumerate(layers):
        np.testing.assert_allclose(layer.data, expected.scores[..., k], atol=1e-6)
        for i, j in ((0, 0), (3, 5), (6, 8)):
            middle = np.array([i + 0.5, j + 0.5]) * PATCH - 0.5  # napari's pixels are centres
            np.testing.assert_allclose(layer.data_to_world((i, j)), source.data_to_world(middle))
        corner = (-0.5, -0.5)
        np.testing.assert_allclose(layer.data_to_world(corner), source.data_to_world(corner))
    y, x = section._feed.focus
    np.testing.assert_allclose((y, x), np.array(pixels.shape[:2]) / 2, atol=2)

    section.shown.setCurrentIndex(0)
    assert [layer.visible for layer in layers] == [True, False]
    section.threshold.set_value(0.4)
    box = np.array([[2.0, 3], [2, 100], [90, 100], [90, 3]])  # rows and columns, in pixels
    shapes = viewer.add_shapes(
        [box], shape_type="rectangle", name="ROI", scale=source.scale, translate=source.translate
    )
    until(lambda: section.table.rowCount() == 2 and not section.measure_task.running)
    region = expected.region_summary(Region.rectangle(3.5, 2.5, 100.5, 90.5), 0.4)
    name, mean, above, patches, done = rows_of(section.table)[1]
    assert (name, done) == ("ROI 1", f"{region.classified:.0%}")
    assert float(mean) == pytest.approx(region.means["dark"], abs=6e-4)
    assert above == f"{region.fractions['dark']:.1%}"
    assert float(patches) == pytest.approx(region.patches, abs=0.06)
    assert rows_of(section.table)[0][0] == "Whole slide"
    # Background is never classified: nobody must take that for a run that has not ended.
    assert rows_of(section.table)[0][4] == "75%"
    assert section.table.horizontalHeaderItem(4).text() == "Classified"
    assert "the rest is background" in section.table.toolTip()
    shapes.data = []
    until(lambda: section.table.rowCount() == 1 and not section.measure_task.running)


@pytest.fixture
def free(monkeypatch):
    """A semaphore that lets a tile through each time it is released."""
    free, score = threading.Semaphore(0), Classifier.score_crops

    def gated(self, *given):
        free.acquire()
        return score(self, *given)

    monkeypatch.setattr(Classifier, "score_crops", gated)
    return free


def test_stopped_and_resumed_by_the_next_window(opened, clf, pixels, until, free):
    viewer, source, section = opened()
    section.run_button.click()
    free.release()
    until(lambda: section.layers is not None and section._feed.done == 1)
    until(lambda: np.isfinite(patch_layers(viewer, source)[0].data).any())
    some = np.isfinite(patch_layers(viewer, source)[0].data).sum()
    section.table.setRowCount(0)

    def is_measured():
        section._measure_soon.throttle()  # as tiles do that come one after the other
        return section.table.rowCount() == 1

    until(is_measured, 20_000)
    section.progress_bar._stop()
    free.release(9)
    until(lambda: not section.patch_task.running)
    assert "“Resume” continues" in section.progress_bar.text
    assert section.run_button.text() == "Resume"
    done = section._feed.done
    viewer.layers.clear()

    (again,) = viewer.open(source.source.path, plugin="napari-beerlanet")
    until(lambda: section.run_button.text() == "Resume", 20_000)
    assert f"{done} of" in section.note.text()
    free.release(99)
    section.run_button.click()
    until(lambda: not section.patch_task.running)
    expected = classify_slide(clf, pixels, patch=PATCH)
    data = patch_layers(viewer, again)[0].data
    np.testing.assert_allclose(data, expected.scores[..., 0], atol=1e-6)
    assert 0 < some < np.isfinite(data).sum()
    assert section.run_button.text() == "Classify patches", "nothing is left to resume"
    assert section.note.text() == ""
    section.image_chosen()
    until(lambda: section.run_button.text() == "Show heat map", 20_000)


def test_what_is_stored_nowhere_cannot_be_resumed(opened, pixels, until, free, monkeypatch):
    viewer, slide, section = opened()
    monkeypatch.setattr(planes, "SLIDE_PIXELS", pixels.size)  # what is in memory is no slide
    photograph = viewer.add_image(pixels, rgb=True)
    section._image.choose(photograph)
    section.run_button.click()
    free.release()
    until(lambda: section.layers is not None and section._feed.done == 1)
    section.progress_bar._stop()
    free.release(9)
    until(lambda: not section.patch_task.running)
    assert section.progress_bar.text.startswith("Stopped after ")
    assert "Resume" not in section.progress_bar.text
    assert section.run_button.text() == "Classify patches"

    while free.acquire(blocking=False):
        pass
    section.run_button.click()
    section._image.choose(slide)  # nothing is known of it
    until(lambda: section.layers.source is photograph and section._feed.total > 0)
    section.progress_bar._stop()
    free.release(9)
    until(lambda: not section.patch_task.running)
    assert section.run_button.text() == "Classify patches"
    assert section.progress_bar.text == ""


def test_without_tissue_there_is_a_way_out(opened, until):
    _, _, section = opened()
    section.min_tissue.set_value(0.99)
    section.patch_size.setValue(400)
    section.run_button.click()
    until(lambda: not section.patch_task.running)
    assert "lower “Tissue at least”" in section.progress_bar.text


def test_the_class_that_is_shown_first():
    assert likely_positive(["healthy", "tumour"]) == "tumour"
    assert likely_positive(["tumour", "Normal"]) == "tumour"
    assert likely_positive(["a", "b"]) == "b"
    assert likely_positive(["normal"]) == "normal"
