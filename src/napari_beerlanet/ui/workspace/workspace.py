"""The workspace: a dock with the image to work on, a tab for every panel, and progress below."""

from __future__ import annotations

import importlib
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import numpy as np
from napari._app_model import get_app_model
from qtpy.QtCore import QPoint, QSize, Qt, QTimer
from qtpy.QtGui import QCursor
from qtpy.QtWidgets import (
    QDockWidget,
    QHBoxLayout,
    QLabel,
    QMenu,
    QTabWidget,
    QToolButton,
    QVBoxLayout,
    QWidget,
)
from superqt.utils import qdebounced

from napari_beerlanet.core.boxes.classes import applicable_classes
from napari_beerlanet.core.checkpoints.checkpoint import packaged_models
from napari_beerlanet.core.checkpoints.info import DETECTOR
from napari_beerlanet.core.common.device import collections_paused, import_torch
from napari_beerlanet.core.common.progress import Report, report_progress
from napari_beerlanet.core.common.threads import kernels_being_compiled
from napari_beerlanet.core.detection.compile_kernels import (
    compile_for_decomposition,
    is_compiled,
    start_compiling,
    stop_compiling,
)
from napari_beerlanet.ui.common.controls import (
    DisabledReason,
    button,
    hint,
    not_none,
    wrapping_label,
)
from napari_beerlanet.ui.common.panel import DockedWidget, Panel, unwrap_viewer
from napari_beerlanet.ui.common.progress_bar import Activity
from napari_beerlanet.ui.common.recent import drafts_folder
from napari_beerlanet.ui.common.session import (
    get_project_store,
    get_session,
    last_open_project,
)
from napari_beerlanet.ui.viewer.fast_shapes import triangulate_compiled, triangulate_in_python
from napari_beerlanet.ui.viewer.layers import (
    ImagePicker,
    Role,
    guard_software_opengl,
    prepare_shapes,
    read_units,
    role_of,
    show_in_place_of_others,
    show_picker,
    source_image,
    units_are_ready,
    use_units,
)
from napari_beerlanet.ui.viewer.planes import unsupported_reason
from napari_beerlanet.ui.viewer.viewport import WholeImageView
from napari_beerlanet.ui.workspace.footer import Footer, Situation, Step, next_step
from napari_beerlanet.ui.workspace.presets import MalariaPreset

if TYPE_CHECKING:
    from napari.layers import Image
    from napari.viewer import Viewer

    from napari_beerlanet.core.boxes.detections import Detections
    from napari_beerlanet.core.classification.classifier import Classifier
    from napari_beerlanet.core.project.project import Project

DOCK_NAME = "BeerLaNet"
_WIDTH_PX = 390
_DEBOUNCE_MS = 100
_STEP_MS = 10  # in which the window answers while a panel comes
# So long the mouse rests before models' libraries are loaded: a click meanwhile takes longer.
_IDLE_POLL_MS, _IDLE_POLLS = 1000, 10
_COMPILE_POLL_MS = 500
_ALSO_COMPILED = "napari_beerlanet.ui.viewer.fast_shapes:fast_shapes_supported"
_FIRST_IMAGE_NEEDS = "scipy.ndimage"
_FIRST_COPY_NEEDS = "napari_beerlanet.core.boxes.matching"
_ONE_BOX = np.array([[0.0, 0.0, 1.0, 1.0]])
_FIRST_MODEL_NEEDS = "napari_beerlanet.core.detection.detector"
"""Loaded with the first model, or while nobody works: who only decomposes stains needs no torch."""

_NOTED_NAME = 16  # characters
_OPEN_COMMAND = "napari.window.file.open_files_dialog"


@dataclass(frozen=True)
class Tab:
    """A tab: `label` on the tab itself, `title` of its panel in the Plugins menu.

    `panel` is where its class is found, in a module that is imported off the GUI thread. With
    `own_dock` the panel is in a dock beside the workspace: the row of tabs is full.
    """

    label: str
    title: str
    tooltip: str
    panel: str
    own_dock: bool = False

    def load(self) -> type[Panel]:
        """The panel's class; the first import of its module takes long."""
        panel: type[Panel] = resolve_name(f"napari_beerlanet.ui.{self.panel}")
        return panel

    @property
    def is_loaded(self) -> bool:
        """Whether `load` returns at once."""
        module = sys.modules.get(f"napari_beerlanet.ui.{self.panel.partition(':')[0]}")
        return module is not None and not getattr(module.__spec__, "_initializing", False)


STAINS = Tab(
    "Stains",
    "Stain decomposition",
    "See the stains of the image separately.",
    "stains.widget:DecomposeWidget",
)
CELLS = Tab(
    "Cells",
    "Find cells",
    "Find and count the cells of the image with a model.",
    "detect.widget:DetectWidget",
)
CLASSIFY = Tab(
    "Classify",
    "Classify cells",
    "Classify the detected or annotated cells, and count their types.",
    "classify.widget:ClassifyWidget",
)
ANNOTATE = Tab(
    "Annotate",
    "Annotate",
    "Correct boxes or draw them, and add the image to a project to train on.",
    "annotate.widget:AnnotateWidget",
)
TRAIN = Tab(
    "Train",
    "Fine-tune",
    "Fine-tune a model on a project's images, compare it with the previous one, keep it.",
    "finetune.widget:FineTuneWidget",
)
REVIEW = Tab(
    "Review",
    "Review detections",
    "Go through the detections one by one, compare them with annotations, write a report.",
    "review.widget:ReviewWidget",
)
BATCH = Tab(
    "Batch",
    "Run on folder",
    "Process many images with the same settings.",
    "batch.widget:BatchWidget",
)

COMPARE = Tab(
    "Normalize",
    "Compare normalizations",
    "See what stain normalization methods make of the image, side by side.",
    "normalize.widget:CompareWidget",
    own_dock=True,
)

TABS = (STAINS, CELLS, CLASSIFY, ANNOTATE, TRAIN, REVIEW, BATCH)
"""From left to right."""

ALL_TABS = (*TABS, COMPARE)
"""Also the one in a dock of its own."""


class Workspace(DockedWidget):
    """All panels of one viewer, in tabs. A panel is made when its tab is first opened.

    Some are in docks beside the tabs (`Tab.own_dock`). `image` is the picker that all panels
    follow. A tab can be moved to a dock of its own with `float_tab`, and back with `put_back`.
    """

    def __init__(self, napari_viewer: Viewer) -> None:
        super().__init__(napari_viewer)
        guard_software_opengl(self.viewer)
        self._compile_task = self.task()
        self._compile_timer = QTimer(self)
        self._compile_timer.setInterval(_COMPILE_POLL_MS)
        self._compile_timer.timeout.connect(self._look_whether_compiled)
        self._compile_task.start(lambda report: _compile_kernels(), self._compiling)
        self.image = ImagePicker(self)
        self.tabs, self.footer = QTabWidget(), Footer()
        self.pages = {tab: TabPage(tab, self) for tab in ALL_TABS}
        self.handles: dict[Tab | None, QWidget] = {}
        self._build()
        self._saved_task, self._load_task, self._units_task = (self.task() for _ in range(3))
        self._to_load: list[Tab] = []
        self._coming: list[TabPage] = []  # whose panels are waited for
        self._step_timer = QTimer(self)
        self._step_timer.setSingleShot(True)
        self._step_timer.setInterval(_STEP_MS)
        self._step_timer.timeout.connect(self._take_step)
        self._cursor, self._idle_polls = QCursor.pos(), 0
        self._idle_timer = QTimer(self)
        self._idle_timer.setInterval(_IDLE_POLL_MS)
        self._idle_timer.timeout.connect(self._look_whether_idle)
        self._idle_timer.start()
        self._load_task.progressed.connect(self._panels_loaded)
        self._load_task.ended.connect(self._panels_loaded)
        self._whole_view = WholeImageView(self)
        self._whole_view.keep(self.image.layer)  # the dock takes a part of the canvas
        self.image.chosen.connect(self._show_chosen)
        self.image.refused.connect(self._show_refused)
        self.image.chosen.connect(self._prepare_annotations)
        self._prepare_annotations(self.image.layer)
        self.tabs.currentChanged.connect(self._tab_opened)
        self.footer.tab_requested.connect(self._open_place)
        self._follow_situation()

    def _build(self) -> None:
        bar = self.tabs.tabBar()
        assert bar is not None
        bar.setUsesScrollButtons(False)
        bar.setElideMode(Qt.TextElideMode.ElideNone)
        bar.setContextMenuPolicy(Qt.ContextMenuPolicy.CustomContextMenu)
        bar.customContextMenuRequested.connect(self._show_tab_menu)
        self.tabs.setDocumentMode(True)
        bar.setDrawBase(False)  # napari's style draws it as a bright line
        bar.setExpanding(True)  # what is left of the row would look like a tab without a name
        for tab, page in self.pages.items():
            if tab.own_dock:
                page.setParent(self)
                page.hide()
                continue
            index = self.tabs.addTab(page, tab.label)
            self.tabs.setTabToolTip(index, tab.tooltip)
        self.float_button = QToolButton()
        self.float_button.setText("⇱")
        self.float_button.setToolTip("Move this tab to a window of its own.")
        self.float_button.clicked.connect(lambda *_: self.float_tab(self.current_tab))
        header = QHBoxLayout()
        header.setContentsMargins(8, 6, 8, 4)
        header.setSpacing(6)
        header.addWidget(QLabel("Image"))
        header.addWidget(self.image, 1)
        header.addWidget(self.float_button)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(0)
        layout.addLayout(header)
        layout.addWidget(self.tabs, 1)
        layout.addWidget(self.footer)

    def sizeHint(self) -> QSize:
        """As wide as a panel needs, as high as there is space."""
        return QSize(_WIDTH_PX, super().sizeHint().height())

    # --- tabs -------------------------------------------------------------------------------------

    @property
    def current_tab(self) -> Tab:
        """The tab in front."""
        return TABS[self.tabs.currentIndex()]

    def open_tab(self, tab: Tab) -> Panel:
        """Bring a tab to the front, or the dock that it was moved to; returns its panel."""
        panel = self._filled(self.pages[tab])
        self.show_tab(tab)
        return panel

    def show_tab(self, tab: Tab, then: Callable[[Any], None] | None = None) -> None:
        """As `open_tab`, without waiting: `then` is called with the panel when it is there."""
        page = self.pages[tab]
        if not tab.own_dock:
            self.tabs.setCurrentWidget(page)
        elif not page.is_floating:
            page.release(self._filled(page))
        dock = page.panel.parentWidget() if page.panel is not None and page.is_floating else None
        for widget in (self.parentWidget(), dock):
            if isinstance(widget, QDockWidget):
                widget.show()
                widget.raise_()
        if then is not None and (page.panel is not None or tab.is_loaded):
            then(self._filled(page))
        elif page.panel is None:
            self._let_come(page, then)

    def _open_place(self, place: int) -> None:
        self.show_tab(ALL_TABS[place])

    def panel(self, tab: Tab) -> Panel | None:
        """The panel of a tab, None where it was not opened yet."""
        return self.pages[tab].panel

    def _tab_opened(self, index: int) -> None:
        page = self.pages[TABS[index]]
        if page.panel is None:
            self._let_come(page)

    def load_panels(self) -> None:
        """Import the modules of all panels off the GUI thread, the one that is waited for first.

        Before those that nobody waits for, prepare what the first image and the first click need.
        """
        if self._load_task.running:
            return
        to_load = self._to_load = [tab for tab in TABS if not tab.is_loaded]
        decomposes = self.current_tab is STAINS

        def work(report: Report) -> None:
            prepared = False
            with collections_paused():
                packaged_models(DETECTOR)  # which panels list; read once for all of them
                while to_load or not prepared:
                    if to_load and (prepared or self._is_awaited(to_load[0])):
                        to_load.pop(0).load()
                        report_progress(report, len(TABS) - len(to_load), len(TABS))
                    else:
                        prepared = True
                        _prepare_first_steps(decomposes)

        if to_load:
            self._load_task.start(work)
        if not units_are_ready() and not self._units_task.running:
            self._units_task.start(lambda report: read_units(), use_units)

    def _is_awaited(self, tab: Tab) -> bool:
        """Whether somebody looks at a tab that has no panel yet."""
        return any(page.tab is tab for page in tuple(self._coming))

    def _compiling(self, running: bool) -> None:
        if running and not self.closed:
            self._compile_timer.start()

    def _look_whether_compiled(self) -> None:
        """Once the kernels are compiled, load and use them."""
        if not kernels_being_compiled() and not self._compile_task.running:
            self._compile_timer.stop()
            triangulate_compiled()
            self._compile_task.start(lambda report: _load_compiled())

    def _look_whether_idle(self) -> None:
        """Load what the first model needs once the mouse has rested for a while."""
        here = QCursor.pos()
        self._idle_polls = self._idle_polls + 1 if here == self._cursor else 0
        self._cursor = here
        if _FIRST_MODEL_NEEDS in sys.modules:
            self._idle_timer.stop()
        elif self._idle_polls >= _IDLE_POLLS and not self._load_task.running:
            self._idle_timer.stop()
            self._load_task.start(lambda report: import_torch(_FIRST_MODEL_NEEDS))

    def _let_come(self, page: TabPage, then: Callable[[Any], None] | None = None) -> None:
        """Make the panel of a page in steps, between which the window answers."""
        page.loading_note.show()
        if then is not None:
            page.when_filled.append(then)
        if page not in self._coming:
            self._coming.append(page)
        if page.tab.is_loaded:
            self._step_timer.start()
            return
        self.load_panels()
        with suppress(ValueError):  # it is being loaded
            self._to_load.remove(page.tab)
            self._to_load.insert(0, page.tab)

    def _panels_loaded(self, event: object = None) -> None:
        self._step_timer.start()

    def _take_step(self) -> None:
        """Make a panel, or give it the theme's style, or show it.

        What could not be imported is imported again here, so that the error is told.
        """
        over = not self._load_task.running
        ready = [page for page in self._coming if over or page.tab.is_loaded]
        if self.closed or not ready:
            return
        page = ready[0]
        self._coming.remove(page)
        if page.panel is None and page.made is None:
            page.made = self._make_panel(page.tab)
        elif page.panel is None and page.made is not None and page.made.parent() is not page:
            page.made.hide()
            not_none(page.layout()).addWidget(page.made)
        else:
            self._filled(page)
        if page.panel is None:
            self._coming.insert(0, page)
        self._step_timer.start()

    def _make_panel(self, tab: Tab) -> Panel:
        panel = tab.load()(self.viewer)
        for picker in panel.findChildren(ImagePicker):
            picker.bind(self.image)
        return panel

    def _filled(self, page: TabPage) -> Panel:
        if page.panel is None:
            panel, page.made = page.made or self._make_panel(page.tab), None
            page.take(panel)
            for reason in panel.findChildren(DisabledReason):
                reason.updated.connect(self._situation_changed)
            if page.tab is ANNOTATE:
                annotate: Any = panel
                annotate.store.changed.connect(self._situation_changed)
                annotate.add_question.changed.connect(self._situation_changed)
            if page.tab is CLASSIFY:
                self._add_presets(panel)
            if page.tab is CELLS:
                cells: Any = panel
                cells.counts.count_malaria = self.count_malaria
            self.footer.watch(ALL_TABS.index(page.tab), page.tab.label, panel)
            waiting, page.when_filled = page.when_filled, []
            for call in waiting:
                call(panel)
        return page.panel  # type: ignore[return-value]

    def _add_presets(self, panel: Any) -> None:
        preset = MalariaPreset(
            panel, lambda then: self.show_tab(CELLS, then), lambda: self.show_tab(CLASSIFY)
        )
        panel.presets.addWidget(preset)

    def count_malaria(self) -> None:
        """Start the preset of the tab *Classify*."""
        self.show_tab(CLASSIFY, lambda classify: classify.findChild(MalariaPreset).run())

    def _show_chosen(self, image: Image | None) -> None:
        if image is not None:
            show_in_place_of_others(self.viewer, image)
            self._whole_view.keep(image)

    def _show_refused(self, layer: Image | None) -> None:
        """Say that the image which the user has selected is not the one to work on."""
        chosen = self.image.layer
        if layer is None or chosen is None:
            self.footer.show_note("")
            return
        why = "cannot be used" if layer.rgb else "is not RGB"
        names = [_shortened(one.name) for one in (layer, chosen)]
        self.footer.show_note(
            f"“{names[0]}” {why}; “{names[1]}” stays selected.", unsupported_reason(layer) or ""
        )

    def _prepare_annotations(self, image: object) -> None:
        """Make the panel that shows an image's saved annotations, where there are any.

        It takes long to import, so that is done off the GUI thread.
        """
        page = self.pages[ANNOTATE]
        if image is None or page.panel is not None or self._saved_task.running:
            return

        def work(report: Report) -> bool:
            saved = last_open_project() is not None or any(drafts_folder().glob("[!.]*.json"))
            return saved and bool(ANNOTATE.load())

        def done(saved: bool) -> None:
            if saved and not self.closed:
                self._filled(page)

        self._saved_task.start(work, done)

    # --- the next step ----------------------------------------------------------------------------

    def _follow_situation(self) -> None:
        """Update the next step a moment after anything that it may depend on."""
        self.update_next = qdebounced(self._update_next, timeout=_DEBOUNCE_MS, parent=self)
        session, projects = get_session(self.viewer), get_project_store(self.viewer)
        layers = self.viewer.layers.events
        for emitter in (
            session.model_changed,
            session.classifier_changed,
            session.detections_changed,
            projects.changed,
            projects.updated,
            layers.inserted,
            layers.removed,
        ):
            self.connect_event(emitter, self._situation_changed)
        self.image.chosen.connect(self._situation_changed)
        self.footer.changed.connect(self._situation_changed)
        self.tabs.currentChanged.connect(self._situation_changed)
        self.footer.next_button.clicked.connect(self.take_next_step)
        self._update_next()

    def _situation_changed(self, event: Any = None) -> None:
        self.update_next()

    def _update_next(self) -> None:
        if not self.closed:
            self.footer.show_step(next_step(self.situation))

    @property
    def situation(self) -> Situation:
        """What the next step depends on, as it is now."""
        image, session = self.image.layer, get_session(self.viewer)
        cells: Any = self.panel(CELLS)
        classify: Any = self.panel(CLASSIFY)
        annotate: Any = self.panel(ANNOTATE)
        train: Any = self.panel(TRAIN)
        layer: Any = session.detection_layers.get(image) if image is not None else None
        detections = layer.detections if layer is not None and layer.alive else None
        kept = self._kept_model()
        name = session.model.info.get("name") if session.model is not None else None
        return Situation(
            image=image is not None,
            finding=cells is not None and cells.detect_task.running,
            detected=detections is not None,
            empty=detections is not None and not len(detections) and not layer.layer.nshapes,
            outdated=kept is not None
            and detections is not None
            and detections.report.get("model") != name,
            classifiable=detections is not None
            and not detections.types
            and _is_meant_for(session.classifier, detections),
            classifying=classify is not None and classify.classify_task.running,
            boxes=_annotation_count(self.viewer, image),
            asked=annotate is not None and annotate.add_question.about is not None,
            adding=annotate is not None and annotate.annotation_actions.project_task.running,
            added=annotate is not None and annotate.annotation_actions.in_project,
            training=train is not None and train.run_view.running,
            decide=train is not None and train.comparison.pending,
            learned=kept is not None and _is_newer(kept, get_project_store(self.viewer).project),
            at_start=train is not None
            and self.current_tab is TRAIN
            and train.start_button.isEnabled(),
        )

    def _kept_model(self) -> Path | None:
        """The file of the loaded model, if it is one that was kept in the open project."""
        project, key = get_project_store(self.viewer).project, get_session(self.viewer).model_key
        path = Path(key) if key else None
        inside = project is not None and path is not None and path.is_relative_to(project.path)
        return path if inside else None

    def take_next_step(self) -> None:
        """Do what the button says, or open the tab at the control for it."""
        step = next_step(self.situation)
        self.footer.show_step(step)
        if step in (Step.OPEN, Step.OPEN_ANOTHER):
            self._open_menu()
        elif step in (Step.FIND, Step.FIND_AGAIN):
            self.show_tab(CELLS, lambda cells: cells.run())
        elif step is Step.CLASSIFY:
            self.show_tab(CLASSIFY, lambda classify: classify.run_on_detections())
        elif step is Step.ADD:
            self.show_tab(ANNOTATE, lambda annotate: annotate.add_image())
        elif step is Step.ANSWER:
            self.show_tab(ANNOTATE, lambda annotate: annotate.point_to_question())
        elif step is Step.CORRECT:
            self.show_tab(
                ANNOTATE,
                lambda panel: panel.annotation_actions.correct_detections(panel.confidence.value()),
            )
        elif step is Step.DRAW:
            self.show_tab(ANNOTATE, lambda annotate: annotate.annotation_actions.start())
        elif step is Step.TRAIN:
            self.show_tab(TRAIN, lambda train: train.reveal(train.start_button))
        elif step is Step.START:
            self.show_tab(TRAIN, lambda train: train.start())
        elif step is Step.KEEP:
            self.show_tab(TRAIN, lambda train: train.reveal(train.comparison.keep_button))
        self.update_next()

    def _open_menu(self) -> None:
        menu = QMenu(self)
        menu.addAction("Open an image …", self._open_image)
        menu.addAction("Open a sample", self._open_sample)
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        button = self.footer.next_button
        menu.popup(button.mapToGlobal(QPoint(0, -menu.sizeHint().height())))

    def _open_image(self) -> None:
        get_app_model().commands.execute_command(_OPEN_COMMAND)

    def _open_sample(self) -> None:
        self.show_tab(CELLS, lambda cells: cells.empty.open_sample())

    # --- docks of their own -----------------------------------------------------------------------

    def float_tab(self, tab: Tab) -> None:
        """Move a tab to a dock of its own, where it has its own image picker."""
        page = self.pages[tab]
        if not page.is_floating:
            page.release(self._filled(page))

    def put_back(self, tab: Tab) -> None:
        """Move a tab from its dock back here."""
        page = self.pages[tab]
        if page.panel is not None and page.is_floating:
            dock = page.panel.parentWidget()
            page.take(page.panel)
            if isinstance(dock, QDockWidget):
                self.viewer.window.remove_dock_widget(dock)

    def _show_tab_menu(self, position: Any) -> None:
        bar = self.tabs.tabBar()
        index = bar.tabAt(position) if bar is not None else -1
        if bar is None or index < 0:
            return
        tab = TABS[index]
        menu = QMenu(self)
        if self.pages[tab].is_floating:
            menu.addAction("Put back here", lambda: self.put_back(tab))
        else:
            menu.addAction("Move to a window of its own", lambda: self.float_tab(tab))
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        menu.popup(bar.mapToGlobal(position))

    def remove_handle(self, tab: Tab | None) -> None:
        """Remove the dock that a menu entry has made, see `MenuEntry`."""
        handle = self.handles.pop(tab, None)
        dock = handle.parentWidget() if handle is not None else None
        if isinstance(dock, QDockWidget):
            self.viewer.window.remove_dock_widget(dock)

    def on_closed(self) -> None:
        """Close the panels, too; one in a dock of its own stays, and is independent from now on."""
        self._idle_timer.stop()
        self._compile_timer.stop()
        others = (weak() for weak in _workspaces.values())
        if all(other is None or other is self or other.closed for other in others):
            stop_compiling()
            triangulate_compiled()
        self.footer.close_down()
        for tab in list(self.handles):
            self.remove_handle(tab)
        for page in self.pages.values():
            if page.made is not None:
                page.made.shut_down()
            if page.panel is None:
                continue
            if page.panel.parentWidget() is None:  # its dock has just been closed, too
                page.panel.shut_down()
                page.panel.deleteLater()
            elif page.is_floating:
                page.panel.take_back = None
                if page.tab is CELLS:
                    floating: Any = page.panel
                    floating.counts.count_malaria = None
                for picker in page.panel.findChildren(ImagePicker):
                    picker.unbind()
            else:
                page.panel.shut_down()


class TabPage(QWidget):
    """The content of a tab: its panel, or a note where that is in a dock of its own."""

    def __init__(self, tab: Tab, workspace: Workspace) -> None:
        super().__init__()
        self.tab, self.panel = tab, None  # type: Tab, Panel | None
        self.made: Panel | None = None  # while it comes, see `Workspace._take_step`
        self.when_filled: list[Callable[[Any], None]] = []
        self._workspace = weakref.ref(workspace)
        self.put_back_button = button(
            "Put back", "Move it from its window back here.", self._put_back
        )
        self.floating_note = QWidget()
        note = QVBoxLayout(self.floating_note)
        note.addWidget(wrapping_label(f"“{tab.label}” is in a window of its own."))
        note.addWidget(self.put_back_button)
        note.addStretch(1)
        self.floating_note.hide()
        self.loading_note = hint(f"Loading “{tab.label}” …")
        self.loading_note.setAlignment(Qt.AlignmentFlag.AlignTop)
        self.loading_note.setMargin(8)
        self.loading_note.hide()
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addWidget(self.floating_note)
        layout.addWidget(self.loading_note)

    @property
    def is_floating(self) -> bool:
        """Whether the panel is in a dock of its own."""
        return self.panel is not None and self.panel.parentWidget() is not self

    def take(self, panel: Panel) -> None:
        """Show the panel here; the workspace's image picker stands for its own."""
        self.panel = panel
        panel.take_back = None
        self._share(True)
        layout = self.layout()
        assert layout is not None
        layout.addWidget(panel)
        panel.show()
        self.floating_note.hide()
        self.loading_note.hide()

    def release(self, panel: Panel) -> None:
        """Move the panel to a dock of its own."""
        self._share(False)
        panel.take_back = self._put_back
        corner, size = self.mapToGlobal(QPoint(0, 0)), self.size()
        own = self.tab.own_dock
        add: Any = panel.viewer.window.add_dock_widget
        dock = add(panel, name=self.tab.title, area="right", tabify=own)
        if not own:  # beside the workspace neither would have enough space
            dock.setFloating(True)
            dock.move(corner - QPoint(size.width() // 2, 0))
            dock.resize(size)
        panel.show()
        self.floating_note.show()

    def _share(self, shared: bool) -> None:
        """Whether the workspace shows image and progress in place of the panel."""
        if self.panel is not None:
            for picker in self.panel.findChildren(ImagePicker):
                show_picker(picker, not shared)
            for activity in self.panel.findChildren(Activity):
                activity.show_in_footer(shared)

    def _put_back(self) -> None:
        workspace = self._workspace()
        if workspace is not None and not workspace.closed and self.panel is not None:
            if self.panel.parentWidget() is None:  # its dock was closed
                self.take(self.panel)
            else:
                workspace.put_back(self.tab)


def _shortened(name: str) -> str:
    """A layer's name that leaves space for a sentence about it in the same line."""
    return name if len(name) <= _NOTED_NAME else f"{name[: _NOTED_NAME - 1]}…"


def _annotation_count(viewer: Viewer, image: Image | None) -> int:
    """The number of annotated boxes of an image."""
    return sum(
        len(layer.data)
        for layer in viewer.layers
        if role_of(layer) == Role.ANNOTATIONS and source_image(viewer, layer) is image
    )


def _is_meant_for(classifier: Classifier | None, detections: Detections) -> bool:
    """Whether a classifier says that it is meant for a class of these detections."""
    if classifier is None or not len(detections):
        return False
    meant = [str(name) for name in classifier.info.get("applies_to") or ()]
    present = [name for name, count in detections.counts().items() if count]
    return bool(meant) and bool(applicable_classes(meant, present))


def _is_newer(model: Path, project: Project | None) -> bool:
    """Whether a model was saved after the project's training data were last changed."""
    from napari_beerlanet.core.project.files import CROPS_FILE  # loaded with the project

    try:
        crops = project.path / CROPS_FILE if project is not None else None
        return crops is not None and model.stat().st_mtime >= crops.stat().st_mtime
    except OSError:
        return False


def _prepare_first_steps(decompose: bool) -> None:
    """What the first image of napari would wait for, and the first click, on *Decompose* or not."""
    importlib.import_module(_FIRST_IMAGE_NEEDS)
    if not _compile_kernels():
        _load_compiled(decompose)


def _compile_kernels() -> bool:
    """Have the kernels compiled in a process, if they never were; whether that is going on."""
    running = start_compiling(_ALSO_COMPILED)
    if running:
        triangulate_in_python()
    return running


def _load_compiled(decompose: bool = True) -> None:
    """Load functions from the disk: of the GUI thread and, if so asked, the first decomposition.

    Who opens another panel would wait for the latter, which are loaded when they are needed.
    """
    prepare_shapes()
    matching: Any = importlib.import_module(_FIRST_COPY_NEEDS)
    matching.match_boxes(_ONE_BOX, _ONE_BOX, 0.5)
    if decompose and is_compiled(_ALSO_COMPILED):
        compile_for_decomposition()  # which only loads them then


_workspaces: weakref.WeakKeyDictionary[Any, weakref.ref[Workspace]] = weakref.WeakKeyDictionary()


def open_workspace(viewer: Viewer, tab: Tab | None = None) -> Workspace:
    """The workspace of a viewer, made if there is none; at a tab, or as it was left.

    The panel of a tab that is named is there when this returns.
    """
    viewer = unwrap_viewer(viewer)
    weak = _workspaces.get(viewer)
    workspace = weak() if weak is not None else None
    if workspace is None or workspace.closed:
        workspace = Workspace(viewer)
        _workspaces[viewer] = weakref.ref(workspace)
        dock = viewer.window.add_dock_widget(workspace, name=DOCK_NAME, area="right")
        viewer.window._qt_window.resizeDocks([dock], [_WIDTH_PX], Qt.Orientation.Horizontal)
    if tab is None:
        workspace.show_tab(workspace.current_tab)
    else:
        workspace.open_tab(tab)
    workspace.load_panels()
    return workspace
