"""Open files in the viewer with this plugin's readers, without a question.

napari chooses a reader by the name of a file, and asks the user wherever two plugins claim it,
before either has seen the file. So the manifest leaves to napari what it can read itself (.tif,
.csv, folders), and a window with one of our panels looks into a file first: what is ours (a slide,
a table of boxes, annotated images) is opened as such, and all else as if we were not there.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import napari
from napari.layers import Layer
from napari.layers._source import layer_source
from napari.plugins._npe2 import get_readers
from napari.plugins.utils import get_preferred_reader
from npe2 import PluginManager
from qtpy.QtWidgets import QFileDialog

from napari_beerlanet.core.common.storage import FileError
from napari_beerlanet.ui.common.notifications import notify_error

if TYPE_CHECKING:
    from napari.viewer import Viewer

PLUGIN = "napari-beerlanet"
"""The name in the manifest."""

LayerDatas = Sequence[tuple[Any, ...]]
"""What readers return: (data, settings, kind) of each layer, or [(None,)] where there is none."""


def route_opened_files(viewer: Viewer) -> None:
    """Ask our readers first for files that are dropped on this window or opened from its menu.

    A reader that the user has chosen in napari's preferences comes before that.
    """
    qt_viewer = getattr(getattr(viewer, "window", None), "_qt_viewer", None)
    # Looked up on the class: a second panel of the same window changes nothing.
    open_files = getattr(type(qt_viewer), "_qt_open", None)
    if qt_viewer is None or open_files is None:  # no window, or another napari
        return
    window, model = weakref.ref(qt_viewer), weakref.ref(viewer)

    def open_ours_first(
        filenames: list[str],
        stack: bool | list[list[str]] = False,
        choose_plugin: bool = False,
        plugin: str | None = None,
        **options: Any,
    ) -> None:
        qt_viewer, viewer = window(), model()
        if viewer is not None and not any((stack, choose_plugin, plugin, *options.values())):
            filenames = [path for path in filenames if not open_if_ours(viewer, path)]
        if filenames:
            open_files(qt_viewer, filenames, stack, choose_plugin, plugin, **options)

    qt_viewer._qt_open = open_ours_first


def open_if_ours(viewer: Viewer, path: str | os.PathLike[str]) -> bool:
    """Open a file or folder if it is for one of our readers; whether it was."""
    path = os.fspath(path)
    # Where napari would ask only because of us, or not offer us at all. What it would ask anyway,
    # because of a third plugin, and what it opens with us anyway, stays with it.
    claimed_by = set(get_readers(path)) - {PLUGIN}
    if claimed_by != {"napari"} or get_preferred_reader(path) not in (None, PLUGIN):
        return False
    read = _own_reader(path)
    if read is None:
        return False
    try:
        add_layers(viewer, path, read(path))
    except FileError as error:
        if Path(path).is_dir():  # its files only looked like annotations
            return False
        notify_error(error)
    return True


def _own_reader(path: str) -> Callable[[Any], LayerDatas] | None:
    manager = PluginManager.instance()
    if PLUGIN not in manager or manager.is_disabled(PLUGIN):
        return None
    for contribution in manager.get_manifest(PLUGIN).contributions.readers or ():
        read: Callable[[Any], LayerDatas] | None = manager.commands.get(contribution.command)(path)
        if read is not None:
            return read
    return None


def add_layers(viewer: Viewer, path: str, layers: LayerDatas) -> None:
    """Add what a reader has returned, as napari does: each layer knows its file."""
    with layer_source(path=path, reader_plugin=PLUGIN):
        for data, *more in layers:
            if data is not None:
                viewer.add_layer(Layer.create(data, *more))


def open_chosen_files(
    title: str, name_filter: str, read: Callable[[Any], LayerDatas], folder: bool = False
) -> None:
    """Let the user choose files, or a folder, and open them with this reader."""
    viewer = napari.current_viewer()
    if viewer is None:
        return
    parent = viewer.window._qt_window
    paths: Iterable[str]
    if folder:
        paths = [QFileDialog.getExistingDirectory(parent, title)]
    else:
        paths, _ = QFileDialog.getOpenFileNames(parent, title, "", name_filter)
    for path in filter(None, paths):
        try:
            add_layers(viewer, path, read(path))
        except FileError as error:
            notify_error(error)
