"""The entries of napari's Plugins menu, each of which leads to the one workspace.

napari makes an instance of an entry's class and puts it into a new dock, under the entry's name.
Here that instance is the panel in the workspace, and the dock holds a `TabHandle` in its place: an
empty widget whose dock is never seen. So every entry, and `Window.add_plugin_dock_widget`, leads to
the one workspace and still returns a dock and the panel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from qtpy.QtCore import QEvent, QTimer
from qtpy.QtWidgets import QDockWidget, QWidget

from napari_beerlanet.ui.common.panel import DockedWidget, unwrap_viewer
from napari_beerlanet.ui.workspace.workspace import (
    ANNOTATE,
    BATCH,
    CELLS,
    CLASSIFY,
    COMPARE,
    DOCK_NAME,
    REVIEW,
    STAINS,
    TRAIN,
    Tab,
    Workspace,
    open_workspace,
)

if TYPE_CHECKING:
    from napari.viewer import Viewer


class TabHandle(QWidget):
    """Takes the place of a panel in the dock that napari makes for a menu entry.

    Showing that dock opens the tab.
    """

    def __init__(self, widget: DockedWidget, workspace: Workspace, tab: Tab | None) -> None:
        super().__init__()
        # What napari's `Window.dock_widgets` returns for the dock.
        self._magic_widget: Any = widget
        self._workspace, self._tab = workspace, tab
        self._name = f"{DOCK_NAME}: {tab.title if tab is not None else 'workspace'}"

    def event(self, event: QEvent | None) -> bool:
        """Hide the dock as soon as napari makes it."""
        if event is not None and event.type() == QEvent.Type.ParentChange:
            dock: Any = self.parent()
            if dock is None:
                self.deleteLater()
            else:
                del self._magic_widget.native
                # napari registers a dock by its name after this. Under a name of ours, the entry is
                # called again the next time, and napari does not just show this dock.
                dock.name = self._name
                dock.hide()
                QTimer.singleShot(0, self._remove_from_window)
        elif event is not None and event.type() == QEvent.Type.Show and not self._workspace.closed:
            QTimer.singleShot(0, self._open)
        return super().event(event)

    def _remove_from_window(self) -> None:
        """Give the dock's space back to the others."""
        dock = self.parent()
        if isinstance(dock, QDockWidget):
            self._workspace.viewer.window._qt_window.removeDockWidget(dock)
            dock.setFixedSize(0, 0)

    def _open(self) -> None:
        dock = self.parentWidget()
        if dock is not None:
            dock.hide()
        open_workspace(self._workspace.viewer, self._tab)


class MenuEntry(QWidget):
    """Base of the entries: calling the class opens the workspace and returns the panel."""

    tab: ClassVar[Tab | None] = None

    def __new__(cls, napari_viewer: Viewer) -> Any:
        """Python does not initialise what is no instance of this class."""
        workspace = open_workspace(unwrap_viewer(napari_viewer), cls.tab)
        widget: Any = workspace if cls.tab is None else workspace.open_tab(cls.tab)
        workspace.remove_handle(cls.tab)
        # napari docks the attribute `native` of a widget that has one.
        widget.native = workspace.handles[cls.tab] = TabHandle(widget, workspace, cls.tab)
        return widget

    def __init__(self, napari_viewer: Viewer) -> None:
        """By these parameters napari knows that it has to pass the viewer."""


class WorkspaceEntry(MenuEntry):
    """Opens the workspace at the tab that was open last."""


class StainsEntry(MenuEntry):
    """Opens “Stains”."""

    tab = STAINS


class CellsEntry(MenuEntry):
    """Opens “Cells”."""

    tab = CELLS


class ClassifyEntry(MenuEntry):
    """Opens “Classify”."""

    tab = CLASSIFY


class AnnotateEntry(MenuEntry):
    """Opens “Annotate”."""

    tab = ANNOTATE


class TrainEntry(MenuEntry):
    """Opens “Train”."""

    tab = TRAIN


class ReviewEntry(MenuEntry):
    """Opens “Review”."""

    tab = REVIEW


class BatchEntry(MenuEntry):
    """Opens “Batch”."""

    tab = BATCH


class CompareEntry(MenuEntry):
    """Opens “Compare normalizations”."""

    tab = COMPARE
