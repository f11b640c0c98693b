"""Base class of the panels: scrolls, and shuts down cleanly however it is closed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeGuard

import numpy as np
from napari.utils.theme import get_theme
from qtpy.QtCore import QCoreApplication, QEvent, QObject, QSize, Qt, QTimer
from qtpy.QtGui import QKeySequence, QShowEvent
from qtpy.QtWidgets import (
    QAbstractSlider,
    QAbstractSpinBox,
    QComboBox,
    QDockWidget,
    QFrame,
    QLabel,
    QScrollArea,
    QScrollBar,
    QShortcut,
    QVBoxLayout,
    QWidget,
)

from napari_beerlanet.ui.common.file_opening import route_opened_files
from napari_beerlanet.ui.common.tasks import Task, on_destroyed

if TYPE_CHECKING:
    from napari.viewer import Viewer

PLUGIN_NAME = "napari-beerlanet"
_PREFERRED_WIDTH_PX = 370
_WHEELED = (QComboBox, QAbstractSpinBox, QAbstractSlider)  # controls that the wheel changes
_LAYOUT_MS = 30  # until a part with new content has its height
_HINT_STRENGTH = 0.8  # of the text's colour in that of hints; the rest is background
LabelKind = Literal["", "hint", "warning"]
_LABEL_STYLE = "label_style"  # the property of a `DockedWidget` with its labels' style sheet
_WARNING_ON_DARK, _WARNING_ON_LIGHT = "#e8a33d", "#7a4a00"


class Emitter(Protocol):
    """An event of napari's or a signal of psygnal's."""

    def connect(self, callback: Callable[..., Any], /) -> Any:
        """Call back whenever it is emitted."""

    def disconnect(self, callback: Callable[..., Any], /) -> Any:
        """Do so no longer."""


Connection = tuple[Emitter, Callable[..., Any]]


def connect_until_destroyed(owner: QObject, *connections: Connection) -> None:
    """Connect methods of a Qt object to events of what may outlive it."""
    weak = []
    for emitter, method in connections:
        emitter.connect(method)
        weak.append((emitter, weakref.WeakMethod(method)))
    on_destroyed(owner, lambda: _disconnect_all(weak))


class DockedWidget(QWidget):
    """What a dock of napari's holds: a panel, or the workspace with all of them.

    `task()` makes tasks that end with it, `connect_event()` connects to events of the viewer until
    then. Override `on_closed()` for what else is to be done, once, when it is closed.
    """

    def __init__(self, viewer: Viewer) -> None:
        super().__init__()
        self.viewer = unwrap_viewer(viewer)
        self._tasks: list[Task] = []
        self._connections: list[tuple[Emitter, weakref.WeakMethod[Any]]] = []
        self._docked = self._closed = False
        connections = self._connections
        on_destroyed(self, lambda: _disconnect_all(connections))
        route_opened_files(self.viewer)
        self._style_labels()
        self.connect_event(self.viewer.events.theme, self._style_labels)

    def _style_labels(self, event: Any = None) -> None:
        """Give hints and warnings colours that can be read in the viewer's theme."""
        muted, warning = label_colours(self.viewer.theme)
        style = (
            f'QLabel[hint="true"] {{ color: {muted}; }} '
            f'QLabel[warning="true"] {{ color: {warning}; }}'
        )
        self.setProperty(_LABEL_STYLE, style)
        for label in self.findChildren(ThemedLabel):
            label.apply_style()

    def task(self) -> Task:
        """A new task that is closed with the panel."""
        task = Task(self)
        self._tasks.append(task)
        return task

    def connect_event(self, emitter: Emitter, method: Callable[..., Any]) -> None:
        """Connect a bound method to an event of napari's until the panel is closed."""
        emitter.connect(method)
        self._connections.append((emitter, weakref.WeakMethod(method)))

    def disconnect_event(self, emitter: Emitter, method: Callable[..., Any]) -> None:
        """Disconnect what `connect_event` connected."""
        emitter.disconnect(method)
        self._connections[:] = [
            (other, weak)
            for other, weak in self._connections
            if other is not emitter or weak() != method
        ]

    def add_shortcut(self, keys: str, method: Callable[[], Any]) -> None:
        """Bind a key of the window, such as "Ctrl+Shift+D", while the panel is open."""
        shortcut = QShortcut(QKeySequence(keys), self)
        shortcut.setContext(Qt.ShortcutContext.WindowShortcut)
        shortcut.activated.connect(method)

    @property
    def closed(self) -> bool:
        """Whether it was shut down."""
        return self._closed

    def shut_down(self) -> None:
        """Cancel all tasks and disconnect from the viewer. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        _disconnect_all(self._connections)
        for task in self._tasks:
            task.close()
        self.on_closed()

    def on_closed(self) -> None:
        """Called once when the panel is closed."""

    def event(self, event: QEvent | None) -> bool:
        """Notice when napari removes it from its dock, which is how napari closes one."""
        if event is not None and event.type() == QEvent.Type.ParentChange:
            if self.parent() is not None:
                self._docked = True
            elif self._docked:
                self.on_undocked()
        return super().event(event)

    def on_undocked(self) -> None:
        """Shut down: the dock was closed."""
        self.shut_down()
        self.deleteLater()


class Panel(DockedWidget):
    """One step of the work, in a tab of the workspace or in a dock of its own.

    Put widgets into `self.body`, a vertical layout. `title` is the panel's name in the Plugins
    menu. `take_back` is set by the workspace while the panel belongs to it: the workspace then
    gets the panel back when its dock is closed.
    """

    title: ClassVar[str] = ""

    def __init__(self, viewer: Viewer) -> None:
        super().__init__(viewer)
        self.take_back: Callable[[], object] | None = None
        self.body = self._scrolling_body()
        self._part_to_show: Callable[[], QWidget | None] = lambda: None
        self._show_timer = QTimer(self)
        self._show_timer.setSingleShot(True)
        self._show_timer.setInterval(_LAYOUT_MS)
        self._show_timer.timeout.connect(self._show_part)
        _register(self)

    def _scrolling_body(self) -> QVBoxLayout:
        inside = QWidget()
        body = QVBoxLayout(inside)
        body.setContentsMargins(8, 6, 8, 6)
        body.setSpacing(6)
        scroll = _VerticalScrollArea()
        scroll.setWidgetResizable(True)
        scroll.setFrameShape(QFrame.Shape.NoFrame)
        scroll.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        scroll.setWidget(inside)
        outer = QVBoxLayout(self)
        outer.setContentsMargins(0, 0, 0, 0)
        outer.addWidget(scroll)
        return body

    def reveal(self, control: QWidget) -> None:
        """Scroll to a control and give it the focus."""
        self._scroll_to(control)
        control.setFocus()

    def show_soon(self, part: QWidget) -> None:
        """Scroll as far as needed to show a part whose content has just changed."""
        self._part_to_show = weakref.ref(part)
        self._show_timer.start()

    def _show_part(self) -> None:
        part = self._part_to_show()
        if part is not None and not self._closed:
            self._scroll_to(part)

    def _scroll_to(self, part: QWidget) -> None:
        area = self.findChild(_VerticalScrollArea)
        if area is not None:
            area.ensureWidgetVisible(part)

    def on_undocked(self) -> None:
        """Return to the workspace, or shut down where there is none."""
        if self.take_back is not None:
            QTimer.singleShot(0, self.take_back)  # Qt is still removing it from its dock
        else:
            super().on_undocked()


def _is_wheeled(widget: QObject | None) -> TypeGuard[QWidget]:
    """Whether a widget is a control that the wheel changes."""
    return isinstance(widget, _WHEELED) and not isinstance(widget, QScrollBar)


class _VerticalScrollArea(QScrollArea):
    """Scrolls vertically only: it is never narrower than its content.

    The wheel changes a control only after a click into it: whoever scrolls past a slider does not
    mean to set it.
    """

    def eventFilter(self, watched: QObject | None, event: QEvent | None) -> bool:
        """Follow the layout of the content, and scroll where the wheel turns over a control."""
        kind = event.type() if event is not None else None
        if kind == QEvent.Type.LayoutRequest and watched is self.widget():
            self._fit_width()
            self._guard_controls()
        elif kind == QEvent.Type.Wheel and _is_wheeled(watched) and not watched.hasFocus():
            QCoreApplication.sendEvent(self.verticalScrollBar(), event)
            return True
        return bool(super().eventFilter(watched, event))

    def showEvent(self, event: QShowEvent | None) -> None:
        """Use the theme's sizes, which are known by now."""
        super().showEvent(event)
        self._fit_width()
        self._guard_controls()

    def _guard_controls(self) -> None:
        content = self.widget()
        if content is None:
            return
        for control in (found for kind in _WHEELED for found in content.findChildren(kind)):
            if _is_wheeled(control):
                control.installEventFilter(self)  # a second time changes nothing
                if control.focusPolicy() == Qt.FocusPolicy.WheelFocus:
                    control.setFocusPolicy(Qt.FocusPolicy.StrongFocus)

    def sizeHint(self) -> QSize:
        """Wide enough to read, as high as there is space."""
        return QSize(max(_PREFERRED_WIDTH_PX, self.minimumWidth()), super().sizeHint().height())

    def _fit_width(self) -> None:
        bar, content = self.verticalScrollBar(), self.widget()
        if bar is not None and content is not None:
            width = content.minimumSizeHint().width() + bar.sizeHint().width()
            self.setMinimumWidth(width)


_panels: weakref.WeakKeyDictionary[Any, list[weakref.ref[Panel]]] = weakref.WeakKeyDictionary()


def _register(panel: Panel) -> None:
    panels, weak = _panels.setdefault(panel.viewer, []), weakref.ref(panel)
    panels.append(weak)
    on_destroyed(panel, lambda: panels.remove(weak))


def open_panels(viewer: Viewer) -> list[Panel]:
    """The panels of a viewer that are not closed, the oldest first, wherever they are docked."""
    alive = (weak() for weak in _panels.get(unwrap_viewer(viewer), []))
    return [panel for panel in alive if panel is not None and not panel.closed]


def open_panel(viewer: Viewer, title: str) -> Any:
    """Show the panel with this title: one that has a dock of its own, or that of the workspace."""
    viewer = unwrap_viewer(viewer)
    for panel in open_panels(viewer):
        dock = panel.parentWidget()
        if panel.title == title and isinstance(dock, QDockWidget):
            dock.show()
            dock.raise_()
            return panel
    return viewer.window.add_plugin_dock_widget(PLUGIN_NAME, title)[1]


def _disconnect_all(connections: list[tuple[Emitter, weakref.WeakMethod[Any]]]) -> None:
    for emitter, weak in connections:
        method = weak()
        if method is not None:
            emitter.disconnect(method)
    connections.clear()


class ThemedLabel(QLabel):
    """A text that wraps, as a hint or warning in a colour that can be read in any theme.

    It is plain unless its format is set: Qt would take a name that looks like HTML for it.

    Its style sheet is that of the `DockedWidget` around it. One sheet there for all labels would
    make Qt style every other control again.
    """

    def __init__(self, text: str = "", kind: LabelKind = "") -> None:
        super().__init__(text)
        self.setTextFormat(Qt.TextFormat.PlainText)
        self.setWordWrap(True)
        self.set_kind(kind)

    def set_kind(self, kind: LabelKind) -> None:
        """Show it as a hint, as a warning, or as plain text."""
        for name in ("hint", "warning"):
            self.setProperty(name, name == kind)
        self.apply_style()
        style = self.style()
        if style is not None:
            style.unpolish(self)
            style.polish(self)

    def apply_style(self) -> None:
        """Take the style sheet of what is around it, as soon as there is something."""
        around = self.parentWidget()
        while around is not None and around.property(_LABEL_STYLE) is None:
            around = around.parentWidget()
        style = None if around is None else around.property(_LABEL_STYLE)
        if style is not None and style != self.styleSheet():
            self.setStyleSheet(style)

    def text_colour(self) -> str:
        """The colour "#rrggbb" of its text now, for links in it."""
        self.ensurePolished()
        return self.palette().color(self.foregroundRole()).name()

    def showEvent(self, event: QShowEvent | None) -> None:
        """Nothing is around it when it is made."""
        self.apply_style()
        super().showEvent(event)


def label_colours(theme_id: str) -> tuple[str, str]:
    """The colours "#rrggbb" of hints and of warnings in a theme of napari's.

    Both have a contrast of at least 4.5:1 on the background, in napari's own themes.
    """
    theme = get_theme(theme_id)
    text, background = (
        np.array(getattr(theme, name).as_rgb_tuple(alpha=False), float)
        for name in ("text", "background")
    )
    muted = np.rint(_HINT_STRENGTH * text + (1 - _HINT_STRENGTH) * background).astype(int)
    dark = background.mean() < text.mean()
    return "#{:02x}{:02x}{:02x}".format(*muted), _WARNING_ON_DARK if dark else _WARNING_ON_LIGHT


def unwrap_viewer(viewer: Viewer) -> Viewer:
    """The viewer itself where napari hands a plugin its proxy, which hides what we need."""
    return getattr(viewer, "__wrapped__", viewer)
