"""What the panels of one viewer share: model, class colours, detections by image, open project."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

from psygnal import Signal

from napari_beerlanet.core.boxes.classes import assign_colours, parse_colour
from napari_beerlanet.ui.common.panel import unwrap_viewer
from napari_beerlanet.ui.common.recent import (
    add_recent_project,
    save_preference,
    user_data_folder,
)
from napari_beerlanet.ui.common.tasks import on_destroyed

if TYPE_CHECKING:
    from napari.layers import Image, Shapes
    from napari.viewer import Viewer

    from napari_beerlanet.core.boxes.detections import Detections
    from napari_beerlanet.core.classification.classifier import Classifier
    from napari_beerlanet.core.detection.detector import Detector
    from napari_beerlanet.core.project.project import Project
    from napari_beerlanet.core.stains.decomposition import Decomposition


_CLASS_COLOURS, _TYPE_COLOURS = "class-colours.json", "type-colours.json"


class DetectionView(Protocol):
    """What shows the detections of an image: a `DetectionLayer`, of a room above this one."""

    layer: Shapes

    @property
    def alive(self) -> bool:
        """Whether the layer still is in the viewer."""


class ClassPalette:
    """The colours "#rrggbb" of classes by name, the same in all layers and panels of a viewer.

    Those of the open project or that the user chose come first, then those of the loaded model,
    then those of the last time; a class without any gets one that no class beside it has. `changed`
    is emitted when a class has got another colour than before.
    """

    changed = Signal()

    def __init__(self, saved: Mapping[str, str] | None = None, file: str = _CLASS_COLOURS) -> None:
        """`saved`: those of the last time; `file` in the user's folder has them for the next."""
        self._file = file
        self._chosen: dict[str, str] = {}
        self._model: dict[str, str] = {}
        self._others: dict[str, str] = dict(saved or {})
        self._in_use: dict[str, None] = {}  # names that were asked for, in order

    def colours(self, names: Sequence[str]) -> list[str]:
        """The colour of each class."""
        self._in_use |= dict.fromkeys(names)
        assigned = self._assigned()
        if any(self._others.get(name) != colour for name, colour in assigned.items()):
            self._others |= assigned
            _save_colours(self._file, self._others)
        return [assigned[name] for name in names]

    def colour(self, name: str) -> str:
        """The colour of one class."""
        return self.colours([name])[0]

    def use_model(self, colours: Mapping[str, str]) -> None:
        """Take over the colours of a model; those that were chosen stay."""
        self._update(lambda: self._model.update(_valid_colours(colours)))

    def use_project(self, colours: Mapping[str, str]) -> None:
        """Take over the colours of the project that is open now."""

        def replace_chosen() -> None:
            self._others |= self._chosen
            self._chosen = _valid_colours(colours)

        self._update(replace_chosen)

    def suggest(self, colours: Mapping[str, str]) -> None:
        """Colours that came with a file, for classes that have none yet."""
        known = self._others | self._assigned()
        new = {name: c for name, c in _valid_colours(colours).items() if name not in known}
        self._update(lambda: self._others.update(new))

    def choose(self, name: str, colour: str) -> None:
        """Give a class the colour that the user has chosen."""
        parse_colour(colour)
        self.colours([name])
        self._update(lambda: self._chosen.update({name: colour}))

    def _update(self, change: Callable[[], None]) -> None:
        before = self._assigned()
        change()
        now = self._assigned()
        self._others |= now
        if now != before:
            _save_colours(self._file, self._others)
        if any(now[name] != before[name] for name in self._in_use):
            self.changed.emit()

    def _assigned(self) -> dict[str, str]:
        """The colours of all classes that are in use or that a model or project has."""
        fixed = {**self._model, **self._chosen}
        return assign_colours([*fixed, *self._in_use], fixed, self._others)


def _valid_colours(colours: Mapping[str, str]) -> dict[str, str]:
    """Without what is no colour: a model's header may hold anything."""
    valid = {}
    for name, colour in colours.items():
        with suppress(ValueError):
            parse_colour(colour)
            valid[name] = colour
    return valid


class Session:
    """One per viewer; it ends with the viewer.

    `model` is the loaded detector or None, `model_key` the name or path that it was loaded from;
    `classifier` and `classifier_key` are those of the loaded classifier. For each image layer, as
    long as it exists: `detections` holds the last detections, `previous_detections` those before,
    `detection_layers` what shows them (`detection_layer_of` in `ui/detections` looks it up),
    `decompositions` the last decomposition. `model_changed` and `classifier_changed` are emitted
    with the model, `detections_changed` with the image layer. `palette` has the colours of classes,
    `type_palette` those of cell types.
    """

    model_changed = Signal(object)
    classifier_changed = Signal(object)
    detections_changed = Signal(object)

    def __init__(self) -> None:
        self.model: Detector | None = None
        self.model_key: str | None = None
        self.classifier: Classifier | None = None
        self.classifier_key: str | None = None
        self.detections: WeakKeyDictionary[Image, Detections] = WeakKeyDictionary()
        self.previous_detections: WeakKeyDictionary[Image, Detections] = WeakKeyDictionary()
        self.detection_layers: WeakKeyDictionary[Image, DetectionView] = WeakKeyDictionary()
        self.decompositions: WeakKeyDictionary[Image, Decomposition] = WeakKeyDictionary()
        self.palette = ClassPalette(_saved_colours(_CLASS_COLOURS))
        self.type_palette = ClassPalette(_saved_colours(_TYPE_COLOURS), _TYPE_COLOURS)

    def set_model(self, model: Detector | None, key: str | None = None) -> None:
        """Make this the model of all panels."""
        self.model, self.model_key = model, key
        if model is not None:
            colours = model.info.get("colours") or []
            self.palette.use_model(dict(zip(model.classes, colours, strict=False)))
        self.model_changed.emit(model)

    def set_classifier(self, classifier: Classifier | None, key: str | None = None) -> None:
        """Make this the classifier of all panels."""
        self.classifier, self.classifier_key = classifier, key
        if classifier is not None:
            colours = classifier.info.get("colours") or []
            self.type_palette.use_model(dict(zip(classifier.classes, colours, strict=False)))
        self.classifier_changed.emit(classifier)

    def set_detections(
        self,
        image: Image,
        detections: Detections,
        detection_layer: DetectionView | None = None,
        same_run: bool = False,
    ) -> None:
        """Share the detections of an image layer, and what shows them.

        `same_run`: the same boxes know more than before, so that the run before stays that.
        """
        changed = image in self.detections and self.detections[image] is not detections
        if changed and not same_run:
            self.previous_detections[image] = self.detections[image]
        self.detections[image] = detections
        if detection_layer is not None:
            self.detection_layers[image] = detection_layer
        self.detections_changed.emit(image)


_sessions: WeakKeyDictionary[Viewer, Session] = WeakKeyDictionary()


def get_session(viewer: Viewer) -> Session:
    """The session of this viewer."""
    viewer = unwrap_viewer(viewer)
    if viewer not in _sessions:
        _sessions[viewer] = Session()
    return _sessions[viewer]


class ProjectStore:
    """The open project of one viewer. A folder has one writer: all panels take it from here.

    `changed` is emitted with the project that is open now, or None; `about_to_change` before the
    open project is closed; `updated` when its content has changed.
    """

    about_to_change = Signal()
    changed = Signal(object)
    updated = Signal()

    def __init__(self) -> None:
        self.project: Project | None = None

    def put(self, project: Project | None) -> None:
        """Make this the open project; the one before it is closed."""
        self.about_to_change.emit()
        before, self.project = self.project, project
        if before is not None and before is not project:
            before.close()
        save_open_project(project.path if project else None)
        self.changed.emit(project)

    def release(self) -> None:
        """Close the project with the viewer; it stays the one to open next time."""
        before, self.project = self.project, None
        if before is not None:
            before.close()

    def notify_updated(self) -> None:
        """The project's content has changed: images were added, classes renamed."""
        self.updated.emit()


_project_stores: WeakKeyDictionary[Viewer, ProjectStore] = WeakKeyDictionary()


def get_project_store(viewer: Viewer) -> ProjectStore:
    """The store of this viewer."""
    viewer = unwrap_viewer(viewer)
    if viewer not in _project_stores:
        _project_stores[viewer] = store = ProjectStore()
        session = get_session(viewer)
        store.changed.connect(partial(_use_project_colours, session.palette, session.type_palette))
        weakref.finalize(viewer, store.release)
        on_destroyed(viewer.window._qt_window, store.release)
    return _project_stores[viewer]


def _use_project_colours(
    classes: ClassPalette, types: ClassPalette, project: Project | None
) -> None:
    classes.use_project({} if project is None else project.colours)
    types.use_project({} if project is None else project.type_colours)


_MAX_SAVED_COLOURS = 500  # classes


def _saved_colours(file: str) -> dict[str, str]:
    """The colours of the last time, by name."""
    try:
        content = json.loads((user_data_folder() / file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return _valid_colours(content) if isinstance(content, dict) else {}


def _save_colours(file: str, colours: Mapping[str, str]) -> None:
    """Save colours for the next start; ignored where they cannot be written."""
    newest = dict(list(colours.items())[-_MAX_SAVED_COLOURS:])
    save_preference(user_data_folder() / file, newest)


def last_open_project() -> Path | None:
    """The project that was open when the viewer was closed or killed."""
    try:
        content = json.loads(_open_project_file().read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    path = content.get("open") if isinstance(content, dict) else None
    return Path(path) if isinstance(path, str) else None


def save_open_project(path: Path | None) -> None:
    """Save which project is open, for the next start; ignored where it cannot be written."""
    if path is not None:
        add_recent_project(path)
    save_preference(_open_project_file(), {"open": str(path) if path else None})


def _open_project_file() -> Path:
    return user_data_folder() / "open.json"
