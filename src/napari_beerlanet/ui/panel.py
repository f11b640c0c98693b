"""What every panel of ours is: it scrolls when short, and ends cleanly however it is closed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from qtpy.QtCore import QEvent, QObject, QSize, Qt
from qtpy.QtGui import QKeySequence
from qtpy.QtWidgets import QFrame, QScrollArea, QShortcut, QVBoxLayout, QWidget

from napari_beerlanet.ui.last_words import when_deleted
from napari_beerlanet.ui.tasks import Task

_COMFORTABLE = 370  # pixels


def unwrapped(viewer: Any) -> Any:
    """The viewer itself where napari hands a plugin its proxy, which hides what we need."""
    return getattr(viewer, "__wrapped__", viewer)


class Panel(QWidget):
    """A panel beside the canvas. Put widgets into `self.body`, a vertical layout.

    `task()` makes tasks that end with the panel, `listen()` connects to events of the viewer until
    then. Override `ended()` for what else is to be done, once, when the panel is closed.
    """

    def __init__(self, viewer: Any) -> None:
        super().__init__()
        self.viewer = unwrapped(viewer)
        self._tasks: list[Task] = []
        self._listening: list[tuple[Any, weakref.WeakMethod[Any]]] = []
        self._docked = self._over = False
        self.body = self._scrolling_body()
        listening = self._listening
        when_deleted(self, lambda: _disconnect(listening))

    def _scrolling_body(self) -> QVBoxLayout:
        inside = QWidget()
        body = QVBoxLayout(inside)
        body.setContentsMargins(8, 6, 8, 6)
        body.setSpacing(6)
        scroll = _Scroll()
        scroll.setWidgetResizable(True)
        scroll.setFrameShape(QFrame.Shape.NoFrame)
        scroll.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        scroll.setWidget(inside)
        outer = QVBoxLayout(self)
        outer.setContentsMargins(0, 0, 0, 0)
        outer.addWidget(scroll)
        return body

    def task(self) -> Task:
        """A new task that is closed with the panel."""
        task = Task(self)
        self._tasks.append(task)
        return task

    def listen(self, emitter: Any, method: Callable[..., Any]) -> None:
        """Connect a bound method to an event emitter of napari's until the panel is closed."""
        emitter.connect(method)
        self._listening.append((emitter, weakref.WeakMethod(method)))

    def unlisten(self, emitter: Any, method: Callable[..., Any]) -> None:
        """Disconnect what `listen` connected; the panel keeps nothing of the emitter."""
        emitter.disconnect(method)
        self._listening[:] = [
            (other, weak)
            for other, weak in self._listening
            if other is not emitter or weak() != method
        ]

    def shortcut(self, keys: str, method: Callable[[], Any]) -> None:
        """Call a method on a key of the window, such as "Ctrl+Shift+D", while the panel is open."""
        made = QShortcut(QKeySequence(keys), self)
        made.setContext(Qt.ShortcutContext.WindowShortcut)
        made.activated.connect(method)

    def close_down(self) -> None:
        """End all work and hear nothing more of the viewer. A second call does nothing."""
        if self._over:
            return
        self._over = True
        _disconnect(self._listening)
        for task in self._tasks:
            task.close()
        self.ended()

    def ended(self) -> None:
        """Called once when the panel is closed."""

    def event(self, event: QEvent) -> bool:
        """Close down when napari takes the panel out of its dock, which is how it closes one."""
        if event.type() == QEvent.Type.ParentChange:
            if self.parent() is not None:
                self._docked = True
            elif self._docked:
                self.close_down()
                self.deleteLater()
        return super().event(event)


class _Scroll(QScrollArea):
    """Scrolls up and down only: it is never narrower than what it holds needs."""

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        """What it holds was laid out anew."""
        if watched is self.widget() and event.type() == QEvent.Type.LayoutRequest:
            self._widen()
        return bool(super().eventFilter(watched, event))

    def showEvent(self, event: QEvent) -> None:
        """Take the theme's sizes, which are known by now."""
        super().showEvent(event)
        self._widen()

    def sizeHint(self) -> QSize:
        """As wide as is comfortable, as high as there is room."""
        return QSize(max(_COMFORTABLE, self.minimumWidth()), super().sizeHint().height())

    def _widen(self) -> None:
        bar = self.verticalScrollBar().sizeHint().width()
        self.setMinimumWidth(self.widget().minimumSizeHint().width() + bar)


def _disconnect(listening: list[tuple[Any, weakref.WeakMethod[Any]]]) -> None:
    for emitter, weak in listening:
        method = weak()
        if method is not None:
            emitter.disconnect(method)
    listening.clear()
