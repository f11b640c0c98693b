"""A person's way through the window, how long it ever stands still, and other Qt bindings."""

import os
import subprocess
import sys

import numpy as np
import pytest
from qtpy.QtCore import Qt
from qtpy.QtWidgets import QAbstractButton, QAbstractSlider, QComboBox, QLineEdit

from napari_beerlanet.samples import blood_smear
from napari_beerlanet.ui.common.tasks import TaskOutcome
from napari_beerlanet.ui.workspace.workspace import open_workspace

pytestmark = [pytest.mark.window, pytest.mark.slow]

PLUGIN = "napari-beerlanet"
STAINS, CELLS = "Stain decomposition", "Find cells"


def click(qtbot, button):
    """With the mouse, where a person would."""
    qtbot.mouseClick(button, Qt.MouseButton.LeftButton)


def densities(viewer):
    return [layer for layer in viewer.layers if layer.name.startswith("Stain ")]


def test_open_decompose_slide_detect_filter_cancel(make_napari_viewer, qtbot, until):
    viewer = make_napari_viewer(show=True)
    _, stains = viewer.window.add_plugin_dock_widget(PLUGIN, STAINS)
    until(lambda: stains.empty.isVisible())
    click(qtbot, stains.empty.sample)
    until(lambda: stains.images.layer is not None)
    sample = viewer.layers[0]

    click(qtbot, stains.run_button)
    until(lambda: stains.live.idle and len(densities(viewer)) == 2)
    assert all(np.allclose(layer.scale, sample.scale) for layer in densities(viewer))
    before = densities(viewer)[0].data.copy()

    click(qtbot, stains.form.advanced.header)
    stains.form.gamma.slider.setFocus()
    for _ in range(25):
        qtbot.keyClick(stains.form.gamma.slider, Qt.Key.Key_Right)
    until(lambda: stains.live.idle and not np.array_equal(densities(viewer)[0].data, before))

    _, cells = viewer.window.add_plugin_dock_widget(PLUGIN, CELLS, tabify=True)
    until(lambda: cells.run_button.isEnabled())
    click(qtbot, cells.run_button)
    until(lambda: cells.result.detection_layer is not None and not cells.detect_task.running)
    shower = cells.result.detection_layer
    found = shower.layer.nshapes
    assert found >= 18  # 19 are annotated
    assert sample in viewer.layers
    assert len(densities(viewer)) == 2

    cells.form.confidence_slider.value = 0.88
    until(lambda: 0 < shower.layer.nshapes < found)
    cells.form.confidence_slider.value = 0.25
    until(lambda: shower.layer.nshapes == found)

    outcomes = []
    cells.detect_task.ended.connect(outcomes.append)
    names = [layer.name for layer in viewer.layers]
    click(qtbot, cells.run_button)
    rows = open_workspace(viewer).footer.rows
    until(lambda: cells.progress_bar.activity in rows)
    click(qtbot, rows[cells.progress_bar.activity].stop)
    until(lambda: not cells.detect_task.running)
    assert outcomes == [TaskOutcome.CANCELLED]
    assert [layer.name for layer in viewer.layers] == names
    assert cells.run_button.isEnabled()


def test_the_window_answers_while_four_megapixels_are_worked_on(make_napari_viewer, until, stalls):
    viewer = make_napari_viewer(show=True)
    viewer.add_image(blood_smear((2000, 2000), seed=5).image, name="large")
    _, stains = viewer.window.add_plugin_dock_widget(PLUGIN, STAINS)
    _, cells = viewer.window.add_plugin_dock_widget(PLUGIN, CELLS, tabify=True)
    until(lambda: cells.run_button.isEnabled())
    with stalls.watched():
        stains.run()
        until(lambda: stains.live.idle and stains.fitted is not None)
    print(f"longest stall of the GUI, decompose: {1000 * stalls.longest:.0f} ms")
    assert stalls.answers > 1
    with stalls.watched():
        cells.run()
        until(lambda: cells.result.detection_layer is not None and not cells.detect_task.running)
    print(f"longest stall of the GUI, detect: {1000 * stalls.longest:.0f} ms")
    assert stalls.answers > 1


@pytest.mark.parametrize(
    "panel",
    [
        *(STAINS, CELLS, "Annotate", "Fine-tune", "Review detections", "Run on folder"),
        "Compare normalizations",
    ],
)
def test_every_control_has_a_tooltip_and_the_panel_fits_a_narrow_dock(
    shared_viewer, qtbot, panel, smear
):
    viewer = shared_viewer(show=True)
    viewer.add_image(smear)
    _, widget = viewer.window.add_plugin_dock_widget(PLUGIN, panel)
    qtbot.wait(300)
    kinds = (QAbstractButton, QComboBox, QAbstractSlider, QLineEdit)
    silent = [
        control
        for kind in kinds
        for control in widget.findChildren(kind)
        if control.isVisibleTo(widget) and not _told(control, widget)
    ]
    assert [f"{type(c).__name__} {getattr(c, 'text', str)()}" for c in silent] == []
    assert widget.minimumSizeHint().width() <= 420


def _told(control, panel):
    """Whether resting the mouse on a control says something: its own tooltip or one around it."""
    if control.objectName().startswith("qt_") or "ScrollBar" in type(control).__name__:
        return True  # parts of Qt's own widgets
    while control is not None and control is not panel:
        if control.toolTip():
            return True
        control = control.parent()
    return False


def test_two_viewers_do_not_share_a_model(make_napari_viewer, until, smear):
    first, second = make_napari_viewer(), make_napari_viewer()
    panels = []
    for viewer in (first, second):
        viewer.add_image(smear)
        panels.append(viewer.window.add_plugin_dock_widget(PLUGIN, CELLS)[1])
    for panel in panels:
        until(lambda panel=panel: panel.run_button.isEnabled())
        panel.run()
    until(lambda: all(p.result.detection_layer is not None for p in panels))
    assert panels[0].session is not panels[1].session
    assert panels[0].session.model is not panels[1].session.model
    assert len(first.layers) == len(second.layers) == 2


# --- a process of its own ------------------------------------------------------------------------

SCRIPT = """
import os, sys
when = sys.argv[1]
before = {k: v for k, v in os.environ.items() if k.startswith("QT_")}
if when == "before":
    import napari_beerlanet.core.detection.ultralytics_api
import napari
from qtpy.QtWidgets import QApplication
viewer = napari.Viewer(show=True)
if when == "after":
    import napari_beerlanet.core.detection.ultralytics_api
after = {k: v for k, v in os.environ.items() if k.startswith("QT_")}
changed = {k for k in before.keys() | after.keys() if before.get(k) != after.get(k)}
assert not changed - {"QT_API"}, changed
import time
import pint
from napari_beerlanet.samples import blood_smear

def until(what):
    end = time.monotonic() + 240
    while not what():
        assert time.monotonic() < end
        QApplication.processEvents()
        time.sleep(0.01)

def open_image():
    return viewer.add_image(blood_smear((240, 320), cell_diameter=50).image)

if when == "after":
    open_image()
_, stains = viewer.window.add_plugin_dock_widget("napari-beerlanet", "Stain decomposition")
if when == "before":  # the units that napari's first image needs are read meanwhile
    until(lambda: type(pint.get_application_registry().get()) is pint.UnitRegistry)
    assert open_image().units[0] == pint.get_application_registry().pixel
_, cells = viewer.window.add_plugin_dock_widget("napari-beerlanet", "Find cells", tabify=True)
_, types = viewer.window.add_plugin_dock_widget("napari-beerlanet", "Classify cells", tabify=True)
for name in ("Annotate", "Fine-tune", "Review detections", "Run on folder"):
    viewer.window.add_plugin_dock_widget("napari-beerlanet", name, tabify=True)

stains.run()
until(lambda: stains.live.idle and stains.fitted is not None)
until(lambda: cells.run_button.isEnabled())
until(lambda: types.session.classifier is not None)  # torch's compiler would end the process
cells.run()
until(lambda: cells.result.detection_layer is not None and not cells.detect_task.running)
cells.form.confidence_slider.value = 0.6
until(lambda: cells.result.detection_layer.confidence == 0.6)
import qtpy
print("worked with", qtpy.API_NAME, len(viewer.layers))
viewer.close()
QApplication.processEvents()
"""


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("binding", ["pyqt6", "pyside6"])
def test_both_bindings_in_a_fresh_process(tmp_path, binding, when):
    environment = {
        **os.environ,
        "QT_API": binding,
        "YOLO_OFFLINE": "true",
        "NAPARI_CONFIG": str(tmp_path / "napari.yaml"),
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, when],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"worked with {'PyQt6' if binding == 'pyqt6' else 'PySide6'}" in done.stdout


def test_the_demonstration_saves_the_window(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "napari_beerlanet.ui.demo", "--pictures", str(tmp_path / "demo")],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    from PIL import Image

    for name in ("window-stains.png", "window-cells.png"):
        with Image.open(tmp_path / "demo" / name) as picture:
            assert min(picture.size) > 600
            assert len(picture.convert("RGB").getcolors(1 << 24)) > 1000
