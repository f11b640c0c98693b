"""One dock for all panels: how it is opened, the image that the tabs share, docks of their own."""

import gc
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from napari.layers import Shapes
from napari.layers.shapes._shapes_models import shape
from qtpy.QtCore import QCoreApplication, QEvent, QPoint, QPointF, Qt
from qtpy.QtGui import QColor, QWheelEvent
from qtpy.QtWidgets import (
    QAbstractSlider,
    QApplication,
    QDockWidget,
    QLabel,
    QScrollArea,
    QScrollBar,
    QStyle,
    QStyleOptionComboBox,
)

from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.checkpoints import checkpoint
from napari_beerlanet.core.common.threads import in_numpy, kernels_being_compiled
from napari_beerlanet.core.detection import compile_kernels
from napari_beerlanet.core.detection.compile_kernels import stop_compiling
from napari_beerlanet.core.evaluation.diff import diff_detections
from napari_beerlanet.core.stains.settings import DecomposeSettings
from napari_beerlanet.ui.common.model_picker import ModelPicker
from napari_beerlanet.ui.common.panel import open_panel, open_panels
from napari_beerlanet.ui.detect import job
from napari_beerlanet.ui.detect.widget import DetectWidget
from napari_beerlanet.ui.detections.detection_layer import DetectionLayer
from napari_beerlanet.ui.stains.fitting import FitTarget, StainFitter
from napari_beerlanet.ui.viewer.fast_shapes import triangulate_compiled
from napari_beerlanet.ui.viewer.layers import ImagePicker, Role, role_metadata, role_of
from napari_beerlanet.ui.viewer.planes import current_plane
from napari_beerlanet.ui.viewer.viewport import is_whole_in_view
from napari_beerlanet.ui.workspace.workspace import (
    ANNOTATE,
    BATCH,
    CELLS,
    REVIEW,
    STAINS,
    TABS,
    TRAIN,
    Tab,
    Workspace,
    open_workspace,
)

pytestmark = pytest.mark.window

PLUGIN = "napari-beerlanet"
RGB = np.full((48, 64, 3), 200, np.uint8)


@pytest.fixture
def viewer(shared_viewer):
    return shared_viewer()


def opened(viewer, title):
    """As a script or napari's menu does."""
    return viewer.window.add_plugin_dock_widget(PLUGIN, title)


def delete_later():
    QCoreApplication.processEvents()
    QCoreApplication.sendPostedEvents(None, QEvent.Type.DeferredDelete)
    QCoreApplication.processEvents()


def workspaces(viewer):
    return viewer.window._qt_window.findChildren(Workspace)


# --- opening it -----------------------------------------------------------------------------------


def test_every_menu_entry_leads_to_the_one_workspace(make_napari_viewer, until):
    viewer = make_napari_viewer(show=True)
    for tab in (*TABS, *TABS[:2]):  # some of them again
        dock, panel = opened(viewer, tab.title)
        (workspace,) = workspaces(viewer)
        assert workspace.current_tab is tab
        assert workspace.panel(tab) is panel
        assert type(panel).__name__ == tab.panel.split(":")[1]
        assert panel.title == tab.title
        assert isinstance(dock, QDockWidget)
        QCoreApplication.processEvents()
        assert not dock.isVisible()
        assert panel.isVisible()
        assert workspace.isVisible()
    shown = [d for d in viewer.window._qt_window.findChildren(QDockWidget) if d.isVisible()]
    assert sum(d.widget() is workspace for d in shown) == 1
    assert len(open_panels(viewer)) == len(TABS)
    dock.show()  # what a script may do with the dock that it got
    workspace.open_tab(STAINS)
    dock.show()
    until(lambda: workspace.current_tab is TABS[1] and not dock.isVisible())


def test_napari_s_own_menu_opens_it_and_opens_the_tab_again(make_napari_viewer):
    from napari._app_model import get_app_model

    viewer = make_napari_viewer(show=True)
    commands = get_app_model().commands
    commands.execute_command(f"{PLUGIN}.detect").result()
    (workspace,) = workspaces(viewer)
    assert workspace.current_tab is CELLS
    workspace.open_tab(STAINS)
    commands.execute_command(f"{PLUGIN}.detect").result()
    assert workspace.current_tab is CELLS
    workspace.parentWidget().hide()
    commands.execute_command(f"{PLUGIN}.workspace").result()
    assert workspace.isVisible()
    assert workspace.current_tab is CELLS
    assert workspaces(viewer) == [workspace]


def test_a_panel_is_made_when_its_tab_is_opened(viewer, until):
    workspace = open_workspace(viewer, BATCH)
    assert [tab for tab in TABS if workspace.panel(tab)] == [BATCH]
    workspace.tabs.setCurrentIndex(TABS.index(CELLS))
    assert workspace.panel(CELLS) is None, "the click is answered first"
    page = workspace.pages[CELLS]
    assert page.loading_note.isVisibleTo(page)
    until(lambda: isinstance(workspace.panel(CELLS), DetectWidget))
    assert not page.loading_note.isVisibleTo(page)
    assert [tab for tab in TABS if workspace.panel(tab)] == [CELLS, BATCH]


def test_panels_are_imported_off_the_gui_thread_and_a_click_does_not_wait(
    viewer, until, monkeypatch
):
    gate, loaded, threads, load = threading.Event(), set(), set(), Tab.load

    def slow(tab):
        if tab not in loaded:
            threads.add(threading.current_thread())
            gate.wait()
            loaded.add(tab)
        return load(tab)

    monkeypatch.setattr(Tab, "load", slow)
    monkeypatch.setattr(Tab, "is_loaded", property(lambda tab: tab in loaded))
    searches = []
    monkeypatch.setattr(DetectWidget, "run", lambda panel: searches.append(panel.title))
    viewer.add_image(RGB)
    workspace = open_workspace(viewer)
    pages = workspace.pages
    assert pages[STAINS].loading_note.isVisibleTo(pages[STAINS])
    workspace.tabs.setCurrentIndex(TABS.index(BATCH))
    workspace.take_next_step()  # needs the panel “Cells”
    assert workspace.current_tab is CELLS
    assert not any(workspace.panel(tab) for tab in TABS), "nothing could be made yet"
    gate.set()
    until(lambda: all(workspace.panel(tab) for tab in (STAINS, BATCH, CELLS)))
    until(lambda: len(loaded) == len(TABS))
    assert threading.main_thread() not in threads
    assert len(threads) == 1, "modules are imported one after the other"
    assert workspace.panel(TRAIN) is None
    assert not pages[CELLS].loading_note.isVisibleTo(pages[CELLS])
    assert searches == [CELLS.title], "what was asked for was done"


def test_headers_of_models_are_read_off_the_gui_thread(viewer, until, monkeypatch):
    checkpoint._read_info.cache_clear()
    threads, read = [], checkpoint.read_header
    monkeypatch.setattr(
        checkpoint,
        "read_header",
        lambda *given: threads.append(threading.current_thread()) or read(*given),
    )
    loaded = set()
    load = Tab.load
    monkeypatch.setattr(Tab, "load", lambda tab: loaded.add(tab) or load(tab))
    monkeypatch.setattr(Tab, "is_loaded", property(lambda tab: tab in loaded))
    workspace = open_workspace(viewer)
    workspace.tabs.setCurrentIndex(TABS.index(CELLS))
    until(lambda: workspace.panel(CELLS) is not None and workspace.panel(STAINS) is not None)
    assert workspace.panel(CELLS).model.picker.list.count()
    assert threads
    assert threading.main_thread() not in threads


def test_libraries_of_models_are_loaded_while_the_mouse_rests(viewer, until, monkeypatch):
    place = "napari_beerlanet.ui.workspace.workspace"
    needed = "wsgiref.handlers"  # as good as any that nothing else loads
    monkeypatch.delitem(sys.modules, needed, raising=False)
    monkeypatch.setattr(f"{place}._FIRST_MODEL_NEEDS", needed)
    cursor = [QPoint(0, 0)]
    monkeypatch.setattr(f"{place}.QCursor", SimpleNamespace(pos=lambda: cursor[0]))
    workspace = open_workspace(viewer, STAINS)
    until(lambda: not workspace._load_task.running)
    for k in range(20):
        cursor[0] = QPoint(k, 0)
        workspace._idle_timer.timeout.emit()
    assert not workspace._load_task.running
    assert needed not in sys.modules, "the mouse moves"
    for _ in range(12):
        workspace._idle_timer.timeout.emit()
    until(lambda: needed in sys.modules)
    assert not workspace._idle_timer.isActive()


@pytest.mark.parametrize(("tab", "loads"), [(STAINS, [True]), (CELLS, [False])])
def test_what_the_open_panel_needs_is_loaded_before_the_other_panels(
    tab, loads, viewer, until, monkeypatch
):
    place, done = "napari_beerlanet.ui.workspace.workspace", []
    monkeypatch.setattr(Tab, "is_loaded", property(lambda self: self in (tab, *done)))
    load = Tab.load
    monkeypatch.setattr(Tab, "load", lambda self: (done.append(self), load(self))[1])
    monkeypatch.setattr(f"{place}._compile_kernels", lambda: False)
    monkeypatch.setattr(f"{place}._load_compiled", lambda decompose: done.append(decompose))
    workspace = open_workspace(viewer, tab)
    until(lambda: not workspace._load_task.running)
    loaded = [item for item in done if item is not tab]
    assert loaded[:1] == loads
    assert len(loaded) == len(TABS)


@pytest.fixture
def never_compiled(monkeypatch, tmp_path):
    """A machine on which nothing has been compiled, and where that may be done."""
    monkeypatch.setenv("NAPARI_BEERLANET_COMPILE", "1")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "numba"))
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: tmp_path / name)
    yield
    stop_compiling()
    triangulate_compiled()


def test_kernels_are_compiled_in_a_process_that_ends_with_the_window(
    viewer, until, monkeypatch, never_compiled
):
    assert hasattr(shape.remove_path_duplicates, "py_func"), "compiled by numba"
    workspace = open_workspace(viewer, STAINS)
    until(lambda: workspace._compile_timer.isActive() and not workspace._load_task.running)
    process = compile_kernels._process
    assert process.poll() is None
    assert not hasattr(shape.remove_path_duplicates, "py_func"), "no first Shapes layer waits"
    target = FitTarget((current_plane(viewer.add_image(RGB), viewer),))
    chosen = []
    monkeypatch.setattr(StainFitter, "_fit", lambda *_: chosen.append(in_numpy()))
    monkeypatch.setattr(job, "_run_job", lambda *_: chosen.append(in_numpy()))
    StainFitter().fit(target, DecomposeSettings())
    job.run_job(None, None)
    assert chosen == [True, True], "neither does a first decomposition or detection"
    workspace.parentWidget().destroyOnClose()
    assert process.poll() is not None
    assert hasattr(shape.remove_path_duplicates, "py_func")
    StainFitter().fit(target, DecomposeSettings())
    assert chosen[2:] == [False]


def test_compiled_kernels_are_used_as_soon_as_they_are_there(
    viewer, until, monkeypatch, never_compiled
):
    monkeypatch.setattr(compile_kernels, "_MODULE", "this")  # a module that does nothing
    loaded = []
    monkeypatch.setattr(f"{Workspace.__module__}._load_compiled", lambda *_: loaded.append(1))
    workspace = open_workspace(viewer, STAINS)
    until(lambda: not workspace._compile_task.running and not workspace._compile_timer.isActive())
    until(lambda: bool(loaded))
    assert hasattr(shape.remove_path_duplicates, "py_func")
    assert not kernels_being_compiled()


def test_each_viewer_has_its_own(make_napari_viewer):
    first, second = make_napari_viewer(), make_napari_viewer()
    panels = [opened(viewer, "Run on folder")[1] for viewer in (first, second)]
    assert panels[0] is not panels[1]
    assert [panel.viewer for panel in panels] == [first, second]


def test_closing_it_ends_all_tasks_and_it_can_be_opened_again(viewer):
    _, cells = opened(viewer, "Find cells")
    ends = []
    cells.detect_task.ended.connect(ends.append)
    cells.detect_task.start(lambda report: 1)
    workspace = open_workspace(viewer)
    workspace.parentWidget().destroyOnClose()
    assert len(ends) == 1
    assert cells.closed
    assert open_panels(viewer) == []
    delete_later()
    assert not [name for name in viewer.window.dock_widgets if "BeerLaNet" in name]
    del workspace, cells
    gc.collect()
    _, again = opened(viewer, "Find cells")
    assert not again.closed
    assert len(workspaces(viewer)) == 1


def test_opening_a_panel_prefers_one_that_is_docked_alone(viewer):
    alone = DetectWidget(viewer)
    viewer.window.add_dock_widget(alone)
    assert open_panel(viewer, "Find cells") is alone
    assert workspaces(viewer) == []
    batch = open_panel(viewer, "Run on folder")
    assert open_workspace(viewer).panel(BATCH) is batch


# --- the image ------------------------------------------------------------------------------------


def test_the_image_follows_what_the_user_selects_or_opens(viewer):
    workspace = open_workspace(viewer, STAINS)
    heard = []
    workspace.image.chosen.connect(heard.append)
    first = viewer.add_image(RGB, name="first")
    assert workspace.image.layer is first
    second = viewer.add_image(RGB, name="second")
    assert workspace.image.layer is second
    boxes = viewer.add_layer(Shapes(name="boxes", metadata=role_metadata(Role.DETECTIONS, first)))
    assert workspace.image.layer is first, "a result stands for its image"
    viewer.layers.selection.active = second
    assert workspace.image.layer is second
    viewer.layers.selection.active = boxes
    assert workspace.image.layer is first
    viewer.add_points(np.zeros((1, 2)))
    viewer.add_image(np.zeros((8, 8)), name="grey")
    viewer.layers.selection.clear()
    assert workspace.image.layer is first, "what is no RGB image changes nothing"
    assert heard == [first, second, first, second, first]


def test_an_image_without_colours_is_refused_in_a_sentence_and_nothing_moves(viewer, qtbot):
    workspace = open_workspace(viewer, STAINS)
    smear = viewer.add_image(np.full((40, 60, 3), 200, np.uint8), name="smear")
    note, place = workspace.footer.note, workspace.tabs.pos()
    assert not note.text().strip()
    viewer.add_image(np.zeros((40, 60)), name="a channel of a microscope")
    qtbot.wait(1)
    assert workspace.image.layer is smear
    assert note.text() == "“a channel of a …” is not RGB; “smear” stays selected."
    assert note.isVisibleTo(workspace)
    assert note.fontMetrics().horizontalAdvance(note.text()) < workspace.sizeHint().width() - 16
    assert "has no colours" in note.toolTip()
    assert workspace.tabs.pos() == place
    viewer.layers.selection.active = smear
    assert not note.text().strip()


def test_an_image_in_view_stays_in_view_as_a_whole_when_the_dock_comes(make_napari_viewer, qtbot):
    viewer = make_napari_viewer(show=True)
    viewer.window.resize(1100, 700)
    smear = viewer.add_image(np.full((480, 640, 3), 200, np.uint8), name="smear")
    qtbot.wait(200)
    viewer.reset_view()
    before = viewer.canvas.size
    open_workspace(viewer, STAINS)
    qtbot.waitUntil(lambda: viewer.canvas.size[1] < before[1] - 200)
    qtbot.waitUntil(lambda: is_whole_in_view(smear, viewer))


def test_a_view_that_the_user_has_chosen_stays_when_the_dock_comes(make_napari_viewer, qtbot):
    viewer = make_napari_viewer(show=True)
    viewer.window.resize(1100, 700)
    viewer.add_image(np.full((480, 640, 3), 200, np.uint8), name="smear")
    qtbot.wait(200)
    viewer.scene.camera.zoom = 3.0
    before = viewer.canvas.size
    open_workspace(viewer, STAINS)
    qtbot.waitUntil(lambda: viewer.canvas.size[1] < before[1] - 200)
    qtbot.wait(50)
    assert viewer.scene.camera.zoom == 3.0


def test_picking_an_image_selects_its_layer(viewer):
    first = viewer.add_image(RGB, name="first")
    second = viewer.add_image(RGB, name="second")
    workspace = open_workspace(viewer, STAINS)
    assert workspace.image.layer is second
    workspace.image.setCurrentIndex(0)
    workspace.image.activated.emit(0)  # as by the mouse
    assert viewer.layers.selection.active is first
    viewer.layers.selection.active = second
    assert workspace.image.layer is second


def test_all_tabs_work_on_the_shared_image(shared_viewer):
    viewer = shared_viewer(show=True)
    first = viewer.add_image(RGB, name="first")
    second = viewer.add_image(RGB, name="second")
    workspace = open_workspace(viewer, STAINS)
    pickers = []
    for tab in TABS:
        panel = workspace.open_tab(tab)
        pickers += panel.findChildren(ImagePicker)
    assert len(pickers) == 6
    assert all(picker.layer is second for picker in pickers)
    viewer.layers.selection.active = first
    assert all(picker.layer is first for picker in pickers)
    pickers[2].choose(second)  # as a panel does that sends another one to an image
    assert workspace.image.layer is second
    assert all(picker.layer is second for picker in pickers)
    third = viewer.add_image(RGB, name="third")
    assert all(picker.layer is third for picker in pickers)
    viewer.layers.clear()
    assert all(picker.layer is None for picker in pickers)
    fourth = viewer.add_image(RGB, name="fourth")
    assert all(picker.layer is fourth for picker in pickers)
    for tab in TABS:
        shown = workspace.open_tab(tab).findChildren(ImagePicker)
        assert not any(picker.isVisible() for picker in shown)
    assert workspace.image.isVisible()


def test_what_ends_for_an_image_that_is_hidden_is_seen_when_it_is_chosen_again(
    viewer, until, qtbot, smear, monkeypatch
):
    gate, fit = threading.Event(), StainFitter.fit

    def gated(self, target, settings, report=None, rough=False):
        gate.wait()
        return fit(self, target, settings, report, rough)

    monkeypatch.setattr(StainFitter, "fit", gated)
    second = viewer.add_image(RGB, name="second")
    first = viewer.add_image(smear, name="first")
    workspace = open_workspace(viewer, STAINS)
    stains = workspace.panel(STAINS)
    stains.run()
    until(lambda: stains.live.task.running)
    viewer.layers.selection.active = second
    found = Detections(np.array([[2, 2, 9, 9]], np.float32), [0], [0.9], ["RBC"])
    boxes = DetectionLayer(viewer, first, found)
    gate.set()
    until(lambda: sum(role_of(layer) == Role.STAIN_DENSITY for layer in viewer.layers) == 2)
    qtbot.wait(50)  # boxes become visible a turn later
    assert boxes.alive
    assert [layer for layer in viewer.layers if layer.visible] == [second]
    assert viewer.layers.selection.active is second
    viewer.layers.selection.active = first
    shown = {role_of(layer) for layer in viewer.layers if layer.visible}
    assert shown == {None, Role.STAIN_DENSITY, Role.DETECTIONS}
    assert not second.visible


def test_a_panel_alone_follows_the_selection_too(viewer):
    first = viewer.add_image(RGB, name="first")
    alone = DetectWidget(viewer)
    viewer.window.add_dock_widget(alone)
    second = viewer.add_image(RGB, name="second")
    assert alone.image.layer is second
    viewer.layers.selection.active = first
    assert alone.image.layer is first
    assert alone.image.isVisibleTo(alone)


# --- docks of their own ---------------------------------------------------------------------------


def test_a_tab_can_have_a_dock_of_its_own_and_come_back(shared_viewer, until):
    viewer = shared_viewer(show=True)
    viewer.add_image(RGB)
    workspace = open_workspace(viewer, ANNOTATE)
    panel = workspace.panel(ANNOTATE)
    ends = []
    panel.annotation_actions.lookup_task.ended.connect(ends.append)
    for way in ("button", "close"):
        workspace.float_button.click()
        page = workspace.pages[ANNOTATE]
        dock = panel.parentWidget()
        assert isinstance(dock, QDockWidget)
        assert page.is_floating
        assert dock.isFloating()
        until(lambda: panel.isVisible())
        assert panel.image.isVisible(), "in a dock of its own it has its own picker"
        assert page.floating_note.isVisible()
        workspace.float_tab(ANNOTATE)
        assert panel.parentWidget() is dock, "it is there already"
        workspace.open_tab(STAINS)
        assert opened(viewer, "Annotate")[1] is panel
        assert panel.parentWidget() is dock
        if way == "button":
            page.put_back_button.click()
        else:
            dock.destroyOnClose()
        until(lambda page=page: not page.is_floating)
        assert workspace.current_tab is ANNOTATE
        assert panel.isVisible()
        assert not panel.image.isVisible()
        assert not panel.closed
        delete_later()
        assert "Annotate" not in viewer.window.dock_widgets
    assert ends == []


def test_what_has_its_own_dock_outlives_the_workspace(viewer):
    first = viewer.add_image(RGB, name="first")
    viewer.add_image(RGB, name="second")
    workspace = open_workspace(viewer, CELLS)
    cells = workspace.panel(CELLS)
    workspace.float_tab(CELLS)
    workspace.parentWidget().destroyOnClose()
    delete_later()
    assert not cells.closed
    viewer.layers.selection.active = first
    assert cells.image.layer is first
    cells.parentWidget().destroyOnClose()
    assert cells.closed


# --- space ----------------------------------------------------------------------------------------


def shows_all_text(box):
    option = QStyleOptionComboBox()
    box.initStyleOption(option)
    part = QStyle.ComplexControl.CC_ComboBox, option, QStyle.SubControl.SC_ComboBoxEditField
    return (
        box.fontMetrics().horizontalAdvance(box.currentText())
        <= box.style().subControlRect(*part, box).width()
    )


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_nothing_is_cut_off_at_1280_by_720(shared_viewer, smear, theme, qtbot):
    viewer = shared_viewer(show=True)
    viewer.theme = theme
    viewer.add_image(smear, name="a smear with quite a long name, as cameras give them.tif")
    viewer.window.resize(1280, 720)
    workspace = open_workspace(viewer)
    for tab in TABS:
        panel = workspace.open_tab(tab)
        qtbot.wait(50)
        assert panel.minimumSizeHint().width() <= panel.width() <= 400, tab.label
        assert workspace.parentWidget().width() <= 400, tab.label
        for area in panel.findChildren(QScrollArea):
            bar = area.horizontalScrollBar()
            assert bar.maximum() == 0 or not area.isVisible(), tab.label
            inside = area.widget()
            assert inside.minimumSizeHint().width() <= area.viewport().width(), tab.label
        if tab is BATCH:
            panel.form.classify.value = True
            qtbot.wait(50)
        for picker in panel.findChildren(ModelPicker):
            assert not picker.isVisible() or shows_all_text(picker.list), (tab.label, picker.key)
    bar = workspace.tabs.tabBar()
    assert bar.tabRect(bar.count() - 1).right() < bar.width() or bar.width() <= workspace.width()
    assert bar.sizeHint().width() <= workspace.width()
    rest = bar.width() - bar.tabRect(bar.count() - 1).right()
    assert rest <= 3, "an empty end of the row looks like a tab without a name"
    window = viewer.window._qt_window
    assert (window.width(), window.height()) == (1280, 720), "no dock has forced the window open"


def test_counts_are_in_sight_below_the_settings_at_1280_by_720(shared_viewer, until, qtbot):
    viewer = shared_viewer(show=True)
    viewer.window.resize(1280, 720)
    viewer.open_sample("napari-beerlanet", "bccd")
    workspace = open_workspace(viewer, CELLS)
    cells = workspace.panel(CELLS)
    until(lambda: cells.run_button.isEnabled() and not cells.model.task.running)
    qtbot.mouseClick(cells.run_button, Qt.MouseButton.LeftButton)
    until(lambda: cells.result.detection_layer is not None and not cells.detect_task.running)
    qtbot.wait(100)
    area = cells.findChild(QScrollArea)
    assert area.verticalScrollBar().maximum() == 0, "nothing has to be scrolled"


# --- reading --------------------------------------------------------------------------------------


def luminance(rgb):
    """Relative luminance of a colour (0 … 255), as WCAG defines it."""
    part = np.array(rgb, float) / 255
    linear = np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)
    return float(linear @ (0.2126, 0.7152, 0.0722))


def contrast(first, second):
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def test_hints_warnings_and_plots_can_be_read_in_both_themes(shared_viewer, qtbot):
    from napari.utils.theme import get_theme

    viewer = shared_viewer(show=True)
    workspace = open_workspace(viewer, BATCH)
    panels = [workspace.open_tab(tab) for tab in TABS]
    review, train = workspace.panel(REVIEW), workspace.panel(TRAIN)
    curves, metrics = train.run_view.curves, review.annotation_tab.metrics
    plots = [
        curves.losses,
        review.histogram.plot,
        metrics.plot,
        workspace.panel(BATCH).results.plot,
    ]
    for name in ("light", "dark"):
        viewer.theme = name
        qtbot.wait(20)
        background = get_theme(name).background.as_rgb_tuple(alpha=False)
        for plot in plots:
            plot.setLabel("bottom", "recall")
            written = [plot.getAxis("left").textPen(), plot.getAxis("bottom").textPen()]
            colours = [pen.color() for pen in (*written, plot.getAxis("left").pen())]
            colours.append(QColor(plot.getAxis("bottom").labelStyle["color"]))
            if plot.plotItem.legend is not None:
                colours.append(plot.plotItem.legend.labelTextColor())
                for _, label in plot.plotItem.legend.items:
                    assert colours[-1].name() in label.item.toHtml().lower(), label.text
            assert plot.backgroundBrush().color().getRgb()[:3] == tuple(background)
            for colour in colours:
                assert contrast(colour.getRgb()[:3], background) >= 4.5, (name, colour.name())
        labels = [label for panel in panels for label in panel.findChildren(QLabel)]
        hints = [label for label in labels if label.property("hint") or label.property("warning")]
        assert len(hints) > 10
        for label in hints:
            label.ensurePolished()
            colour = label.palette().color(label.foregroundRole())
            assert colour.alpha() == 255
            rgb = colour.getRgb()[:3]
            assert contrast(rgb, background) >= 4.5, (name, label.text(), rgb)


def test_a_disabled_button_says_why(shared_viewer, until):
    viewer = shared_viewer(show=True)
    workspace = open_workspace(viewer, ANNOTATE)
    annotate, train = workspace.panel(ANNOTATE), workspace.open_tab(TRAIN)
    assert not annotate.add.isEnabled()
    assert annotate.add_reason.text() == "Open an image first."
    assert annotate.add_reason.text() in annotate.add.toolTip()
    assert not train.start_button.isEnabled()
    assert train.start_reason.text() == "Choose a project first."
    viewer.add_image(RGB, name="one")
    assert annotate.add_reason.text() == "Press “Annotate” first."
    cells = workspace.open_tab(CELLS)
    assert cells.run_button.isEnabled()
    tip = cells.run_button.toolTip()
    before = cells.run_button.y()
    cells.run_reason.update_button("A search is running.")
    assert "A search is running." in cells.run_button.toolTip()
    assert cells.run_button.y() == before
    cells.run_reason.update_button("")
    assert cells.run_button.toolTip() == tip


def test_notes_do_not_move_the_button(viewer, qtbot):
    viewer.add_image(RGB, name="smear")
    workspace = open_workspace(viewer, CELLS)
    cells = workspace.panel(CELLS)
    viewer.window.resize(1280, 720)
    viewer.window.show()
    qtbot.waitUntil(cells.run_button.isVisible)
    before = cells.run_button.mapTo(cells, cells.rect().topLeft()).y()
    cells.form.show_size_note("Assumed cell size: 192 px (best of 4 resolutions).")
    cells.form.show_slide_note("Resumed: 4 of 6 tiles were searched before.")
    qtbot.wait(50)
    moved = cells.run_button.mapTo(cells, cells.rect().topLeft()).y() - before
    assert abs(moved) <= 2, "pixels: less than a line"


def test_messages_are_about_the_image_that_is_shown(viewer):
    first = viewer.add_image(RGB, name="first")
    second = viewer.add_image(RGB, name="second")
    workspace = open_workspace(viewer, CELLS)
    cells, annotate = workspace.panel(CELLS), workspace.open_tab(ANNOTATE)
    cells.progress_bar.set_message("Done in 1.2 s.")
    cells.form.show_size_note("Assumed cell size: 50 pixels.")
    annotate.message.setText("5 boxes added.")
    review, comparison = workspace.open_tab(REVIEW), workspace.open_tab(TRAIN).comparison
    review.bar.set_message("All listed detections are reviewed.")
    one, two = (np.array([[k, k, k + 9, k + 9]], np.float32) for k in (2, 30))
    before, after = (Detections(boxes, [0], [0.9], ["RBC"]) for boxes in (one, two))
    comparison._show_diff(second, current_plane(second, viewer), diff_detections(before, after))
    told = comparison.compare_bar.text
    assert told.startswith("second: ")
    assert comparison.toggles.isVisibleTo(comparison)
    viewer.layers.selection.active = first
    assert review.bar.text == ""
    assert comparison.compare_bar.text == ""
    assert not comparison.toggles.isVisibleTo(comparison)
    assert cells.progress_bar.text == ""
    assert cells.form.size_note.text() == ""
    assert annotate.message.text() == ""
    annotate.message.setText("3 boxes added.")
    viewer.add_points(np.zeros((1, 2)))
    assert annotate.message.text() == "3 boxes added.", "it is the same image"
    viewer.layers.selection.active = second
    assert comparison.compare_bar.text == told, "it was compared before"
    assert comparison.toggles.isVisibleTo(comparison)


def test_a_result_is_scrolled_to_where_it_would_be_below_the_window(shared_viewer, until):
    viewer = shared_viewer(show=True)
    viewer.window.resize(1000, 480)
    viewer.add_image(RGB)
    workspace = open_workspace(viewer, ANNOTATE)
    panel = workspace.open_tab(ANNOTATE)
    until(lambda: panel.findChild(QScrollArea).verticalScrollBar().maximum() > 0)
    assert panel.message.visibleRegion().isEmpty()
    panel.annotation_actions.message.emit("Added for training: 3 boxes.")
    until(lambda: not panel.message.visibleRegion().isEmpty())


# --- one image at a time --------------------------------------------------------------------------


def test_the_chosen_image_is_shown_with_its_layers_in_place_of_others(viewer):
    workspace = open_workspace(viewer, CELLS)
    first = viewer.add_image(RGB, name="first")
    boxes = Shapes(name="boxes", metadata=role_metadata(Role.DETECTIONS, first))
    hidden = Shapes(name="hidden", visible=False, metadata=role_metadata(Role.REGIONS, first))
    apart = viewer.add_image(RGB, name="apart", translate=(500, 500))
    mine = viewer.add_points([[1, 1]], name="mine")
    viewer.add_layer(boxes)
    viewer.add_layer(hidden)
    assert workspace.image.layer is first

    second = viewer.add_image(RGB, name="second")
    assert workspace.image.layer is second
    assert not first.visible
    assert not boxes.visible
    assert second.visible
    assert apart.visible, "it is beside the others"
    assert mine.visible, "it is nobody's"

    workspace.image.choose(first)
    assert first.visible
    assert boxes.visible
    assert not hidden.visible, "as the user has left it"
    assert not second.visible

    second.visible = True  # the user wants to see both
    workspace.image.choose(second)
    workspace.image.choose(first)
    assert first.visible
    assert second.visible


def test_the_camera_goes_with_the_chosen_image(viewer):
    workspace, camera = open_workspace(viewer, CELLS), viewer.scene.camera
    first = viewer.add_image(RGB, name="first")
    camera.zoom, camera.center = 7.0, (0.0, 10.0, 12.0)
    same = viewer.add_image(RGB, name="another stain of the field")
    assert (camera.zoom, camera.center) == (7.0, (0.0, 10.0, 12.0)), "to compare them"

    small = viewer.add_image(RGB[:32, :40], name="small")
    assert camera.zoom > 7.0
    np.testing.assert_allclose(camera.center[-2:], (15.5, 19.5))
    camera.zoom = 20.0

    workspace.image.choose(same)
    assert (camera.zoom, camera.center) == (7.0, (0.0, 10.0, 12.0)), "where it was left"
    workspace.image.choose(first)
    assert (camera.zoom, camera.center) == (7.0, (0.0, 10.0, 12.0))
    workspace.image.choose(small)
    assert camera.zoom == 20.0
    viewer.layers.remove(small)
    assert camera.zoom == 7.0, "and where the image that is now in front was left"


def test_images_in_a_grid_stay_visible(viewer):
    workspace = open_workspace(viewer, CELLS)
    viewer.canvas.grid.enabled = True
    first, second = viewer.add_image(RGB, name="first"), viewer.add_image(RGB, name="second")
    assert workspace.image.layer is second
    assert first.visible


# --- the mouse wheel ------------------------------------------------------------------------------


def turn_wheel(widget):
    """Three notches down, with the pointer over the middle of a widget."""
    middle = widget.rect().center()
    for _ in range(3):
        QApplication.sendEvent(
            widget,
            QWheelEvent(
                QPointF(middle),
                QPointF(widget.mapToGlobal(middle)),
                QPoint(0, 0),
                QPoint(0, -120),
                Qt.MouseButton.NoButton,
                Qt.KeyboardModifier.NoModifier,
                Qt.ScrollPhase.NoScrollPhase,
                False,
            ),
        )


def test_the_wheel_scrolls_a_tab_and_changes_no_setting_on_the_way(
    shared_viewer, until, monkeypatch
):
    viewer = shared_viewer(show=True)
    viewer.add_image(RGB)
    workspace = open_workspace(viewer, BATCH)
    panel = workspace.open_tab(BATCH)
    viewer.window.resize(1000, 500)
    area = panel.findChild(QScrollArea)
    bar = area.verticalScrollBar()
    until(lambda: bar.maximum() > 0)
    form = panel.form
    form.set_settings({"model": "blood-cells"})
    sliders = [s for s in form.findChildren(QAbstractSlider) if not isinstance(s, QScrollBar)]
    before = form.settings(), form.workers.value
    for control in (*sliders, form.model.list, form.workers.native):
        bar.setValue(0)
        turn_wheel(control)
        assert (form.settings(), form.workers.value) == before, f"{control} was changed"
        assert bar.value() > 0, f"the tab did not scroll over {control}"
    slider = sliders[-1]
    monkeypatch.setattr(slider, "hasFocus", lambda: True)  # without a window manager none has it
    turn_wheel(slider)
    assert form.settings()["confidence"] != before[0]["confidence"], "after a click it is meant"
