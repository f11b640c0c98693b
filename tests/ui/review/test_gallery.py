"""The gallery of crops: what is in sight is cut out, many are selected at once, one stain."""

import numpy as np
import pytest
from qtpy.QtCore import QPoint, Qt

from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.review.review import Review
from napari_beerlanet.core.stains.decompose import decompose
from napari_beerlanet.samples import blood_smear
from napari_beerlanet.ui.common.tasks import Task
from napari_beerlanet.ui.review.crops import IMAGE_COLOURS, CropLoader, CropStyles, crop_window
from napari_beerlanet.ui.review.gallery import CAPTION_HEIGHT, CropGallery
from napari_beerlanet.ui.viewer.planes import Plane

LEFT, SHIFT, CTRL = (
    Qt.MouseButton.LeftButton,
    Qt.KeyboardModifier.ShiftModifier,
    Qt.KeyboardModifier.ControlModifier,
)


def review_of(n):
    rng = np.random.default_rng(0)
    low = rng.uniform(0, 400, (n, 2))
    boxes = np.concatenate([low, low + 20], 1)
    return Review(Detections(boxes, np.zeros(n, int), np.linspace(1, 0.1, n), ["<b>RBC"]))


@pytest.fixture
def made(qtbot):
    """A gallery of n detections, four crops side by side, and the boxes that it asked for."""
    tasks = []

    def make(n):
        asked, task = [], Task()

        def read_crop(box):
            asked.append(box)
            return np.full((20, 30, 3), 200, np.uint8)

        gallery, review = CropGallery(), review_of(n)
        qtbot.addWidget(gallery)
        gallery.set_review(review, CropLoader(review.detections.xyxy, read_crop, task, gallery))
        gallery.resize(365, 300)
        gallery.show()
        gallery.show_rows(np.arange(n))
        assert gallery.columns == 4
        tasks.append(task)
        return gallery, asked

    yield make
    for task in tasks:
        task.close()


def centre(gallery, place):
    return gallery.cell(place).center()


def test_visible_crops_are_loaded_and_others_are_not(made, until):
    gallery, asked = made(100_000)
    until(
        lambda: len(asked) >= len(gallery.visible_places()) and len(gallery._loader) == len(asked)
    )
    assert len(asked) < 60
    shown = gallery.viewport().grab().toImage().pixelColor(centre(gallery, 0))
    assert shown.red() == 200
    gallery.verticalScrollBar().setValue(gallery.verticalScrollBar().maximum())
    until(lambda: bool((asked[-1] == gallery._review.detections.xyxy[-1]).all()))
    assert gallery.visible_places()[-1] == 99_999
    assert len(asked) < 120


def test_a_click_picks_ctrl_adds_and_shift_takes_all_between(made, qtbot):
    gallery, _ = made(50)
    picked = []
    gallery.picked.connect(picked.append)
    qtbot.mouseClick(gallery.viewport(), LEFT, pos=centre(gallery, 2))
    assert picked == [2]
    qtbot.mouseClick(gallery.viewport(), LEFT, CTRL, pos=centre(gallery, 5))
    assert gallery.selected_rows.tolist() == [2, 5]
    qtbot.mouseClick(gallery.viewport(), LEFT, CTRL, pos=centre(gallery, 2))
    assert gallery.selected_rows.tolist() == [5]
    qtbot.mouseClick(gallery.viewport(), LEFT, SHIFT, pos=centre(gallery, 4))
    assert gallery.selected_rows.tolist() == [2, 3, 4]


def test_a_crop_carries_its_class_in_name_and_colour(qtbot):
    rng = np.random.default_rng(0)
    low = rng.uniform(0, 400, (4, 2))
    boxes = np.concatenate([low, low + 20], 1)
    names = ["RBC", "WBC"]
    review = Review(Detections(boxes, np.array([0, 1, 0, 1]), np.linspace(1, 0.4, 4), names))
    task, gallery = Task(), CropGallery()
    qtbot.addWidget(gallery)
    loader = CropLoader(boxes, lambda box: np.full((20, 30, 3), 200, np.uint8), task, gallery)
    gallery.set_review(review, loader, ["#ff0000", "#00ff00"])
    gallery.resize(365, 300)
    gallery.show()
    gallery.show_rows(np.arange(4))

    def swatches():
        """Pixels of either colour in the line under each crop, and whether a word is beside."""
        shown = gallery.viewport().grab().toImage()
        found = []
        for place in range(4):
            cell = gallery.cell(place)
            line = [
                shown.pixelColor(x, y).getRgb()[:3]
                for x in range(cell.left(), cell.right())
                for y in range(cell.bottom() - CAPTION_HEIGHT, cell.bottom())
            ]
            red, green = line.count((255, 0, 0)), line.count((0, 255, 0))
            found.append((red > 20, green > 20, len(set(line)) > 3))
        return found

    assert swatches() == [(True, False, True), (False, True, True)] * 2
    assert [gallery.caption(k) for k in range(4)] == ["RBC", "WBC"] * 2
    review.relabel(np.array([0]), "WBC")
    gallery.update_cells()
    assert gallery.caption(0) == "WBC"
    assert swatches()[0] == (False, True, True)
    task.close()


def test_a_frame_selects_what_it_touches(made, qtbot):
    gallery, _ = made(50)
    view = gallery.viewport()
    qtbot.mousePress(view, LEFT, pos=centre(gallery, 1))
    qtbot.mouseMove(view, centre(gallery, 6) + QPoint(2, 2))
    qtbot.mouseRelease(view, LEFT, pos=centre(gallery, 6))
    assert gallery.selected_rows.tolist() == [1, 2, 5, 6]


def test_a_frame_that_leaves_the_gallery_scrolls_it(made, qtbot):
    gallery, _ = made(500)
    view = gallery.viewport()
    qtbot.mousePress(view, LEFT, pos=centre(gallery, 0))
    for _ in range(5):
        qtbot.mouseMove(view, QPoint(centre(gallery, 3).x(), view.height() + 100))
        gallery.mouseMoveEvent(_moved(QPoint(centre(gallery, 3).x(), view.height() + 100)))
    qtbot.mouseRelease(view, LEFT, pos=QPoint(5, 5))
    assert gallery.verticalScrollBar().value() >= 500
    chosen = gallery.selected_rows
    assert chosen[0] == 0
    assert len(chosen) > 30
    assert (np.diff(chosen) == 1).all()


def _moved(point):
    from qtpy.QtCore import QEvent, QPointF
    from qtpy.QtGui import QMouseEvent

    at = QPointF(point)
    none = Qt.KeyboardModifier.NoModifier
    return QMouseEvent(QEvent.Type.MouseMove, at, at, LEFT, LEFT, none)


def test_keys_go_through_the_crops(made, qtbot):
    gallery, _ = made(50)
    picked = []
    gallery.picked.connect(picked.append)
    for key in (Qt.Key.Key_Home, Qt.Key.Key_Right, Qt.Key.Key_Down, Qt.Key.Key_Left):
        qtbot.keyClick(gallery, key)
    assert picked == [0, 1, 5, 4]
    qtbot.keyClick(gallery, Qt.Key.Key_Right, SHIFT)
    assert gallery.selected_rows.tolist() == [4, 5]
    qtbot.keyClick(gallery, Qt.Key.Key_End)
    assert picked[-1] == 49
    assert gallery.place_at(centre(gallery, 49)) == 49
    assert gallery.viewport().rect().contains(centre(gallery, 49))
    qtbot.keyClick(gallery, Qt.Key.Key_A, CTRL)
    assert len(gallery.selected_rows) == 50


def test_other_rows_keep_the_current_one(made):
    gallery, _ = made(50)
    gallery.go_to(7)
    gallery.show_rows(np.array([9, 7, 3]))
    assert gallery._current == 1
    gallery.show_rows(np.array([9, 3]))
    assert gallery._current == -1
    assert not gallery.go_to(7)
    gallery.show_rows(np.empty(0, np.int64))
    assert gallery.selected_rows.tolist() == []


def test_a_crop_that_cannot_be_read_is_not_requested_again(qtbot, until):
    asked, task, review = [], Task(), review_of(3)

    def fail(box):
        asked.append(box)
        raise OSError("the slide is gone")

    gallery = CropGallery()
    qtbot.addWidget(gallery)
    gallery.set_review(review, CropLoader(review.detections.xyxy, fail, task, gallery))
    gallery.show()
    gallery.show_rows(np.arange(3))
    until(lambda: bool(asked) and not task.running)
    for _ in range(5):
        gallery.viewport().repaint()
        qtbot.wait(30)
    assert len(asked) == 1
    task.close()


@pytest.mark.parametrize("box", [(-30, -30, -10, -10), (395, 295, 420, 320), (10, 10, 10, 10)])
def test_a_crop_is_never_empty(box):
    rows, columns = crop_window(np.array(box, np.float32), (300, 400))
    assert 0 <= rows.start < rows.stop <= 300
    assert 0 <= columns.start < columns.stop <= 400


def test_the_stains_of_a_decomposition_are_shown_by_name_and_are_its_own():
    smear = blood_smear((240, 320), cell_diameter=50)
    box, plane = smear.boxes[0], Plane("smear", (smear.image,))
    d = decompose(smear.image, iterations="converge")
    _, second = d.order
    d = d.with_names({second: "azure"})
    styles = CropStyles(plane, Detections.empty(["RBC"]), model=object(), decomposition=d)
    assert styles.names == [IMAGE_COLOURS, "Stain 1", "azure"]
    shown = styles.crop_reader("azure")(box)
    strong = d.densities_of(plane.read(crop_window(box, plane.shape)))[second]
    assert np.corrcoef(strong.ravel(), 255 - shown.astype(float).mean(axis=2).ravel())[0, 1] > 0.95


def test_one_stain_is_shown_as_the_model_sees_it():
    smear = blood_smear((240, 320), cell_diameter=50)
    box = smear.boxes[0]
    plane = Plane("smear", (smear.image,))
    none = Detections.empty(["RBC"])
    columns = {"Model channel 1 mean": np.array([0.4]), "Model channel 2 mean": np.array([0.0])}
    found = Detections(np.array([box]), np.array([0]), np.array([0.9]), ["RBC"], columns)
    assert CropStyles(plane, none).names == [IMAGE_COLOURS]
    styles = CropStyles(plane, found)
    assert styles.names == [IMAGE_COLOURS, "Model channel 1"]
    rgb, stain = styles.crop_reader()(box), styles.crop_reader("Model channel 1")(box)
    assert rgb.shape == stain.shape
    assert (rgb == plane.read(crop_window(box, plane.shape))).all()
    d = styles._fit()
    strong = d.densities_of(plane.read(crop_window(box, plane.shape)))[0]
    dark = 255 - stain.astype(float).mean(axis=2)
    assert np.corrcoef(strong.ravel(), dark.ravel())[0, 1] > 0.95


def test_a_long_name_has_space_below_its_crop(qtbot):
    boxes = np.array([[0, 0, 20, 20], [30, 0, 50, 20]], np.float32)
    names = ["RBC", "segmented neutrophil"]
    review = Review(Detections(boxes, np.array([0, 0]), np.array([0.9, 0.8]), names))
    task, gallery = Task(), CropGallery()
    qtbot.addWidget(gallery)
    loader = CropLoader(boxes, lambda box: np.full((20, 30, 3), 200, np.uint8), task, gallery)
    gallery.set_review(review, loader, ["#ff0000", "#00ff00"])
    gallery.resize(365, 300)
    gallery.show_rows(np.arange(2))
    narrow = gallery.cell(0).width()
    review.relabel(np.array([1]), "segmented neutrophil")
    gallery.update_cells()
    assert gallery.cell(1).width() > narrow
    assert gallery.caption_text(1) == "segmented neutrophil"
    assert gallery.place_at(gallery.cell(1).center()) == 1
    task.close()
