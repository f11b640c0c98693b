"""Viewers that tests take turns with: making and closing one costs more than most tests do.

Between two tests a viewer is cleared, and it is checked that nothing of the first is left: no layer
or dock, no Qt object of ours in the window, none of our methods connected to its events, no thread
at work, and every setting of its model as in a new viewer. What is left is a failure of the test
that left it, and its viewer is closed.
"""

import gc
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import numpy as np
from app_model import Application
from napari import Viewer
from napari._app_model._app import NapariApplication, _napari_names
from napari._qt._qapp_model.qactions import init_qactions
from napari._qt.dialogs.qt_notification import NapariQtNotification
from napari._qt.qt_main_window import _QtMainWindow
from napari._qt.qt_viewer import QtViewer
from napari.plugins import _initialize_plugins
from napari.settings import get_settings
from napari.utils.events import EventedModel
from psygnal import SignalGroup, SignalInstance
from pytestqt.exceptions import capture_exceptions
from qtpy.QtCore import QCoreApplication, QEvent, QObject, QThreadPool
from qtpy.QtWidgets import QApplication, QDockWidget, QWidget

from napari_beerlanet.ui.common.notifications import WORKER_THREAD_NAME
from napari_beerlanet.ui.common.panel import open_panels
from napari_beerlanet.ui.common.session import ProjectStore
from napari_beerlanet.ui.viewer.layers import guard_software_opengl

_PACKAGE = "napari_beerlanet"
_PATIENCE_S = 600
_MAX_USES = 25  # napari, vispy and OpenGL keep a little of every layer
_OF_THE_MOUSE = ("mouse_over_canvas", "cursor.position", "cursor._view_direction")
"""What follows the pointer, which is wherever the display has it."""


class SharedViewers:
    """The viewers of this process: `take` one, `give_back` all of them at the end of a test."""

    def __init__(self) -> None:
        self._idle: list[_SharedViewer] = []
        self._taken: list[_SharedViewer] = []
        self._environment: ExitStack | None = None
        self._failed = False  # then tracebacks keep alive what they like

    def take(self, show: bool) -> Viewer:
        """A viewer as new; one that has never been shown is never mixed with one that has."""
        fitting = [one for one in self._idle if one.show is show]
        if fitting:
            shared = fitting[0]
            self._idle.remove(shared)
        else:
            shared = self._make(show)
        shared.wake_up()
        self._taken.append(shared)
        return shared.viewer

    def give_back(self, check: bool = True) -> list[str]:
        """Clear what was taken; what is wrong with it afterwards, in sentences.

        Without `check`, after a test that has failed, they are closed.
        """
        taken, self._taken = self._taken, []
        problems: list[str] = []
        for shared in taken:
            if shared.closed:  # by the test
                continue
            found = _clear(shared) if check else ["the test has failed"]
            if found:
                self._failed = True
                shared.close()
                problems += found
            elif shared.uses == _MAX_USES:
                shared.close()
            else:
                self._idle.append(shared)
        return problems if check else []

    def close(self) -> None:
        """Close all; napari's own check that no viewer is kept alive."""
        if self._environment is None:
            return
        for shared in self._idle:
            shared.close()
        self._idle.clear()
        _delete_pending()
        gc.unfreeze()
        gc.collect()
        kept_alive = len(QtViewer._instances)
        QtViewer._instances.clear()
        self._environment.close()
        self._environment = None
        gc.collect()
        gc.freeze()  # what libraries have made is no garbage; napari collects at every layer
        assert kept_alive == 0 or self._failed, f"{kept_alive} shared viewers are kept alive"

    def _make(self, show: bool) -> "_SharedViewer":
        if self._environment is None:
            self._environment = _environment()
        shared = _SharedViewer(show)
        # Garbage collections need not look at its 100,000 objects again and again.
        gc.collect()
        gc.freeze()
        return shared


def reset_settings(settings: EventedModel | None = None) -> None:
    """As `get_settings().reset()`, which sets and tells also what is the default already."""
    model = get_settings() if settings is None else settings
    for name, default in model._defaults.items():
        value = getattr(model, name)
        if isinstance(value, EventedModel):
            reset_settings(value)
        elif value != default and not type(model).model_fields[name].frozen:
            setattr(model, name, default)


def _clear(shared: "_SharedViewer") -> list[str]:
    """Clear a viewer; what is wrong with it afterwards, exceptions among it."""
    with capture_exceptions() as raised:  # those that Qt would print
        try:
            found = shared.clear()
        except Exception:
            found = [traceback.format_exc()]
    return found + [repr(error) for _, error, _ in raised]


def _close_notifications() -> None:
    """Those that went with their window, too: napari keeps them in its list."""
    for notification in list(NapariQtNotification._instances):
        try:
            notification.close()
        except RuntimeError:  # Qt has deleted it
            NapariQtNotification._instances.remove(notification)


def _environment() -> ExitStack:
    """What `make_napari_viewer` has in a test: an application model, no console, no thread."""

    def no_console(viewer: QtViewer) -> QWidget:
        console = QWidget()
        console._update_theme = lambda *_: None
        return console

    stack = ExitStack()
    _initialize_plugins.cache_clear()
    init_qactions.cache_clear()
    app = NapariApplication("shared_test_app")
    app.injection_store.namespace = _napari_names
    stack.callback(_initialize_plugins.cache_clear)
    stack.callback(init_qactions.cache_clear)
    stack.callback(Application.destroy, "shared_test_app")
    for target, name, value in (
        (NapariApplication, "get_app_model", lambda: app),
        (QtViewer, "_get_console", no_console),
    ):
        stack.enter_context(patch.object(target, name, value))
    checker = "napari._qt.threads.status_checker.StatusChecker.start"
    stack.enter_context(patch(checker, lambda *_: None))
    return stack


class _SharedViewer:
    def __init__(self, show: bool) -> None:
        self.show, self.uses = show, 0
        self.viewer = Viewer(show=show, show_welcome_screen=False)
        guard_software_opengl(self.viewer)
        self.qt_window, qt_viewer = self.viewer.window._qt_window, self.viewer.window._qt_viewer
        _process_events()
        self._size = self.qt_window.size()
        self._parts: tuple[Any, ...] = (self.viewer.window, self.qt_window, qt_viewer)
        self._attributes = [set(vars(part)) for part in self._parts]
        self._values = dict(_values(self.viewer))
        self._keymap = dict(self.viewer.keymap)
        self._mouse = {name: list(getattr(self.viewer, name)) for name in _MOUSE_CALLBACKS}
        self._docks = set(self.qt_window.findChildren(QDockWidget))
        self._visible_docks = {dock for dock in self._docks if not dock.isHidden()}

    @property
    def closed(self) -> bool:
        return not hasattr(self.viewer.window, "_qt_window")

    def wake_up(self) -> None:
        """Make it the current viewer."""
        self.uses += 1
        if self.qt_window not in _QtMainWindow._instances:
            _QtMainWindow._instances.append(self.qt_window)
            QApplication.instance().installEventFilter(self.qt_window)
        if self.show and not self.qt_window.isVisible():
            self.viewer.window.show()

    def _rest(self) -> None:
        """Until it is taken, it is neither the current viewer nor does it see events."""
        _QtMainWindow._instances.remove(self.qt_window)
        QApplication.instance().removeEventFilter(self.qt_window)

    def close(self) -> None:
        _close_notifications()
        if not self.closed:
            with patch.object(self.qt_window, "_save_current_window_settings"):
                self.viewer.close()
        del self.qt_window, self._parts, self._docks, self._visible_docks, self.viewer

    def clear(self) -> list[str]:
        """Undo what a test has done; what is left all the same."""
        viewer, window = self.viewer, self.viewer.window
        self.show = self.show or self.qt_window.isVisible()  # from now on it has been shown
        self.qt_window.hide()  # nothing need be drawn any more
        _close_notifications()
        for dock in self._own_docks():  # not "all", which are those of different names
            window.remove_dock_widget(dock)
        _delete_pending()
        problems = [f"{type(panel).__name__} is open" for panel in open_panels(viewer)]
        for owned in self._own_objects():  # what lives as long as the window
            owned.deleteLater()
        _delete_pending()
        viewer.layers.selection.clear()
        viewer.layers.clear()
        _forget(viewer)
        for part, names in zip(self._parts, self._attributes, strict=True):
            for name in set(vars(part)) - names:
                delattr(part, name)
        reset_settings()
        problems += _wait_for_threads()
        _process_events()
        _delete_pending()
        self._restore()
        _process_events()
        gc.collect()
        return problems + self._left_over()

    def _own_objects(self) -> list[QObject]:
        return [one for one in self.qt_window.findChildren(QObject) if _is_ours(type(one))]

    def _own_docks(self) -> list[QDockWidget]:
        """Those that a new viewer has not."""
        docks = self.qt_window.findChildren(QDockWidget)
        return [dock for dock in docks if dock not in self._docks]

    def _restore(self) -> None:
        viewer = self.viewer
        viewer.keymap.clear()
        viewer.keymap.update(self._keymap)
        for name, callbacks in self._mouse.items():
            getattr(viewer, name)[:] = callbacks
        for dock in self._docks:
            dock.setFloating(False)
            dock.setHidden(dock not in self._visible_docks)
        if self.qt_window.size() != self._size:
            self.qt_window.resize(self._size)
        for _, emitter, package, callback, _ in list(_connected(viewer)):  # the test's own
            if not package or package.startswith(("test", "conftest")):
                emitter.disconnect(callback)
        for _ in range(2):  # some values follow others
            for path, (model, name, value) in dict(_values(viewer)).items():
                was = self._values[path][2]
                if not _equal(value, was):
                    setattr(model, name, was)

    def _left_over(self) -> list[str]:
        """What is not as it was in the beginning."""
        viewer, found = self.viewer, []
        found += [f"layer {layer.name!r}" for layer in viewer.layers]
        found += [f"dock {dock.windowTitle()!r}" for dock in self._own_docks()]
        found += [f"{type(one).__name__} in the window" for one in self._own_objects()]
        for event, _, package, _, name in _connected(viewer):
            if package == _PACKAGE:
                found.append(f"{name} is connected to {event}")
        for path, (_, _, value) in dict(_values(viewer)).items():
            if not _equal(value, self._values[path][2]) and path not in _OF_THE_MOUSE:
                found.append(f"viewer.{path} is {value!r}")
        for top in QApplication.topLevelWidgets():
            if top.isVisible() and not isinstance(top, _QtMainWindow):
                found.append(f"{type(top).__name__} {top.windowTitle()!r} is open")
        if not found:
            self._rest()
        return [f"left in a shared viewer: {one}" for one in found]


_MOUSE_CALLBACKS = (
    "mouse_move_callbacks",
    "mouse_drag_callbacks",
    "mouse_wheel_callbacks",
    "mouse_double_click_callbacks",
)


def _process_events() -> None:
    for _ in range(3):
        QCoreApplication.processEvents()


def _delete_pending() -> None:
    """Delete what `deleteLater` was called for, as the event loop does."""
    for _ in range(3):
        QCoreApplication.sendPostedEvents(None, QEvent.Type.DeferredDelete.value)


def _forget(viewer: Viewer) -> None:
    """End what our modules keep for this viewer, by the viewer."""
    for name, module in list(sys.modules.items()):
        if name.startswith(_PACKAGE):
            for value in vars(module).values():
                if isinstance(value, WeakKeyDictionary) and viewer in value:
                    kept = value.pop(viewer)
                    if isinstance(kept, ProjectStore):  # a folder has one writer
                        kept.release()


def _wait_for_threads() -> list[str]:
    QThreadPool.globalInstance().waitForDone(_PATIENCE_S * 1000)
    left = []
    for thread in threading.enumerate():
        if thread.name == WORKER_THREAD_NAME:
            thread.join(_PATIENCE_S)
            if thread.is_alive():
                left.append("a task's thread is at work")
    return left


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == _PACKAGE


def _models(model: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """A model of napari's and those in it, with their paths."""
    yield path, model
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, EventedModel):
            yield from _models(value, f"{path}{name}.")
        elif name == "overlays":
            for key in value:
                yield from _models(value[key], f"{path}{name}.{key}.")


def _values(viewer: Viewer) -> Iterator[tuple[str, tuple[Any, str, Any]]]:
    """The values of a viewer's models: path, then model, name and value."""
    for path, model in _models(viewer):
        for name, field in type(model).model_fields.items():
            value = getattr(model, name)
            if not (field.frozen or name in ("layers", "overlays", "id")):
                yield path + name, (model, name, value)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return one is other or bool(np.all(one == other))


def _connected(viewer: Viewer) -> Iterator[tuple[str, Any, str, Any, str]]:
    """All that is connected to a viewer: event, its emitter, package, callback, its name."""
    groups = [*_models(viewer), ("layers.", viewer.layers)]
    groups.append(("layers.selection.", viewer.layers.selection))
    for path, model in groups:
        events = model.events
        if isinstance(events, SignalGroup):
            emitters = {**events.signals, "all": events.all}
        else:
            emitters = {**events.emitters, "all": events}
        for name, emitter in emitters.items():
            for callback in _callbacks(emitter):
                owner = getattr(callback, "__self__", callback)
                module = owner.__module__ if hasattr(owner, "__module__") else ""
                package = str(module).partition(".")[0]
                named = getattr(callback, "__qualname__", repr(callback))
                yield f"{path}events.{name}", emitter, package, callback, named


def _callbacks(emitter: Any) -> list[Any]:
    """What is connected, of an emitter of napari's or a signal of psygnal's."""
    if isinstance(emitter, SignalInstance):
        found = [slot.dereference() for slot in emitter._slots]
        return [callback for callback in found if callback is not None]
    found = []
    for callback in emitter.callbacks:
        if isinstance(callback, tuple):  # an object that may be gone, and the name of a method
            owner = callback[0]()
            if owner is None:
                continue
            callback = getattr(owner, callback[1])
        found.append(callback)
    return found
