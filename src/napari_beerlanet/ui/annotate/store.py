"""Annotation state of one viewer: it outlives the panel and ends with the window."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from napari.layers import Image
from qtpy.QtCore import QEvent, QObject, QTimer, Signal
from superqt.utils import QSignalThrottler

from napari_beerlanet.core.boxes.annotations import Annotations
from napari_beerlanet.core.common.messages import count_of, error_message
from napari_beerlanet.core.project.files import ImageSource
from napari_beerlanet.core.project.project import Project
from napari_beerlanet.ui.annotate.annotated_image import (
    WHOLE_IMAGE,
    AnnotatedImage,
    LazyImageSource,
    RegionLayer,
    image_sources,
)
from napari_beerlanet.ui.annotate.annotation_layer import AnnotationLayer
from napari_beerlanet.ui.annotate.autosave import (
    Autosave,
    Drafts,
    SavedAnnotations,
    SaveJob,
    find_saved,
    planes_with_annotations,
)
from napari_beerlanet.ui.annotate.classes import ClassList, TypeList
from napari_beerlanet.ui.annotate.key_bindings import bind_keys
from napari_beerlanet.ui.common.notifications import notify_error
from napari_beerlanet.ui.common.panel import connect_until_destroyed, unwrap_viewer
from napari_beerlanet.ui.common.session import get_project_store, get_session
from napari_beerlanet.ui.common.tasks import Task
from napari_beerlanet.ui.viewer.box_shapes import set_edge_width
from napari_beerlanet.ui.viewer.layers import hide_with_source, user_images
from napari_beerlanet.ui.viewer.planes import PlaneIndex, current_plane
from napari_beerlanet.ui.viewer.viewport import viewport_of

if TYPE_CHECKING:
    from napari import Viewer

_EDGE_WIDTH_PX = 1.8  # on the screen
_ZOOM_THROTTLE_MS = 60
_WIDTH_TOLERANCE = 0.02  # relative

Sources = dict[PlaneIndex, LazyImageSource]

PreviousVersion = str | ImageSource
"""An image's earlier version: the project's id of it, or what its draft is of."""


@dataclass(frozen=True, eq=False)
class Conflict:
    """An open image whose project has other annotations of it: `theirs`, by plane.

    `previous`: theirs were made on an earlier version of the image's file, which the project has
    under these ids; empty where the pixels are the same.
    """

    image: AnnotatedImage
    theirs: dict[PlaneIndex, Annotations]
    previous: dict[PlaneIndex, str] = field(default_factory=dict)


class AnnotationStore(QObject):
    """Images, classes and saving of one viewer; a child of its window.

    `lookup_notes` are sentences on images whose saved annotations cannot be shown by themselves.

    `changed` is emitted when images or boxes have changed, `conflict_found` when `conflicts` has a
    new entry: the user has to decide whose boxes are right.
    """

    changed = Signal()
    conflict_found = Signal()

    def __init__(self, viewer: Viewer) -> None:
        window = viewer.window._qt_window
        super().__init__(window)
        self._viewer = weakref.ref(viewer)
        self.classes = ClassList(get_session(viewer).palette)
        self.types = TypeList(get_session(viewer).type_palette)
        self.projects = get_project_store(viewer)
        self.images: list[AnnotatedImage] = []
        self.conflicts: list[Conflict] = []
        self.autosave = Autosave(self, self._save_jobs, self._mark_saved, Drafts())
        self._edges = ConstantEdgeWidth(self, viewer, self._shape_layers)
        self._lookup_task, self._adopt_task = Task(self), Task(self)
        self._show_task = Task(self)
        self._shows_saved = False
        self._looked_up: weakref.WeakSet[Image] = weakref.WeakSet()
        self._put_away: weakref.WeakSet[Image] = weakref.WeakSet()
        self.lookup_notes: weakref.WeakKeyDictionary[Image, str] = weakref.WeakKeyDictionary()
        self._colours_task = Task(self)
        connect_until_destroyed(
            self,
            (self.projects.about_to_change, self.autosave.flush),
            (self.projects.changed, self._project_changed),
            (self.projects.updated, self._save_colours),
            (self.classes.changed, self._save_colours),
            (self.types.changed, self._save_colours),
            (viewer.layers.events.removed, self._layer_removed),
            (viewer.layers.events.inserted, self._show_saved_soon),
        )
        window.installEventFilter(self)

    @property
    def viewer(self) -> Viewer | None:
        """The viewer, None when it is gone."""
        return self._viewer()

    @property
    def project(self) -> Project | None:
        """The open project."""
        return self.projects.project

    # --- images -----------------------------------------------------------------------------------

    def of(self, image: Image | None) -> AnnotatedImage | None:
        """The annotations of an image layer, None if it has none yet."""
        return next((one for one in self.images if image and one.image is image), None)

    def same_image(self, source: LazyImageSource) -> AnnotatedImage | None:
        """Another layer of the same image that is being annotated already."""
        identity, plane = source.resolve(), source.plane.index
        for annotated in self.images:
            other = annotated.sources.get(plane)
            if annotated.shape != identity.shape or other is None:
                continue
            if other.resolve().digest == identity.digest:
                return annotated
        return None

    def start(
        self,
        image: Image,
        saved: dict[PlaneIndex, SavedAnnotations],
        plane: PlaneIndex,
        only_show: bool = False,
        sources: Sources | None = None,
    ) -> AnnotatedImage:
        """Create an image's layers and show its saved annotations, looked up by these `sources`.

        `only_show`: nothing is selected, and a draft goes nowhere until the user works on it.
        """
        assert self.viewer is not None
        annotated = AnnotatedImage(
            image,
            self.viewer,
            self.classes,
            select=not only_show,
            types=self.types,
            sources=sources,
        )
        for index, one in saved.items():
            self.classes.add(one.annotations.names)
            annotated.put(one.annotations, index)
            if one.draft:
                annotated.shown_drafts.add(index)
        if annotated.coverage == WHOLE_IMAGE:
            annotated.mark_whole_by_default(plane)
        self.images.append(annotated)
        annotated.changed.connect(self._image_changed)
        bind_keys(self.viewer, annotated.boxes)
        if only_show:
            for layer in (annotated.boxes.layer, annotated.regions.layer):
                if layer in self.viewer.layers:
                    hide_with_source(self.viewer, layer)
            annotated.shown_from = describe_saved(saved, self.project)
        else:
            self.take_up(annotated)
        self._edges.update()
        self.changed.emit()
        return annotated

    def take_up(self, annotated: AnnotatedImage) -> None:
        """The user works on annotations from now on: drafts go into the project."""
        annotated.shown_from = ""
        drafts, annotated.shown_drafts = annotated.shown_drafts, set()
        if drafts and self.project is not None:
            annotated.saved |= dict.fromkeys(drafts)
        if drafts:
            self.autosave.touch()

    # --- saved annotations of images that are opened ----------------------------------------------

    def show_saved(self) -> None:
        """Show the saved annotations of every image that is open, or opened from now on."""
        self._shows_saved = True
        self._show_saved_soon()

    def _show_saved_soon(self, event: Any = None) -> None:
        if self._shows_saved:  # a turn later: a reader may still be adding layers
            QTimer.singleShot(0, self._show_next)

    def _show_next(self) -> None:
        """Look up one image after another, off the GUI thread."""
        viewer = self.viewer
        if viewer is None or self._show_task.running:
            return
        waiting = (one for one in user_images(viewer) if one not in self._looked_up)
        image = next((one for one in waiting if self.of(one) is None), None)
        if image is None:
            return
        self._looked_up.add(image)
        sources, plane = image_sources(image), current_plane(image, viewer).index
        project, drafts = self.project, self.autosave.drafts
        weak_image = weakref.ref(image)

        def failed(error: BaseException) -> None:
            QTimer.singleShot(0, self._show_next)
            self._note(weak_image(), f"Saved annotations cannot be shown: {error_message(error)}")

        self._show_task.start(
            lambda report: find_listed_planes(sources, plane, project, drafts),
            lambda found: self._show_found(weak_image(), plane, sources, found, project),
            failed,
        )

    def _show_found(
        self,
        image: Image | None,
        plane: PlaneIndex,
        sources: Sources,
        found: SavedPlanes,
        project: Project | None,
    ) -> None:
        QTimer.singleShot(0, self._show_next)
        viewer = self.viewer
        if viewer is None or image is None or image not in viewer.layers:
            return
        if self.of(image) is not None or image in self._put_away or project is not self.project:
            return
        if found.previous:
            self._note(image, f"“{image.name}” has changed since it was annotated; press Annotate.")
            return
        content = [(p, one) for p, one in found.saved.items() if _has_content(one.annotations)]
        if content and self.same_image(sources[content[0][0]]) is None:
            self.start(image, dict(content), plane, only_show=True, sources=sources)

    def _note(self, image: Image | None, text: str) -> None:
        if image is not None:
            self.lookup_notes[image] = text
            self.changed.emit()

    def _look_up_again(self) -> None:
        """Another project may have other annotations of images that nobody works on yet."""
        viewer = self.viewer
        for annotated in [one for one in self.images if one.shown_from]:
            self.images.remove(annotated)
            annotated.close()
            for layer in (annotated.boxes.layer, annotated.regions.layer):
                if viewer is not None and layer in viewer.layers:
                    viewer.layers.remove(layer)
        self.lookup_notes.clear()
        self._looked_up.clear()
        self._show_saved_soon()

    def _shape_layers(self) -> list[AnnotationLayer | RegionLayer]:
        return [layer for image in self.images for layer in (image.boxes, image.regions)]

    def _layer_removed(self, event: Any) -> None:
        """A layer of ours was removed from the viewer: its content is saved, not deleted."""
        for image in list(self.images):
            if event.value is image.boxes.layer:
                self.autosave.flush()
                image.close()
                self.images.remove(image)
                if image.image is not None:
                    self._put_away.add(image.image)
                self.changed.emit()
            elif event.value is image.regions.layer:
                # When the viewer is closed all layers go, one after the other: the user has deleted
                # this one only if the boxes are still there afterwards.
                QTimer.singleShot(0, partial(self._regions_deleted, image))

    def _regions_deleted(self, image: AnnotatedImage) -> None:
        viewer = self.viewer
        if viewer is not None and image in self.images and image.boxes.layer in viewer.layers:
            image.regions.layer_deleted()
            image.coverage = None
            self._image_changed()

    # --- the project's annotations and those drawn ------------------------------------------------

    def compare_with_project(self) -> None:
        """Look up the open images in the project; until that is done it gets nothing of them."""
        self.conflicts.clear()
        project, images = self.project, list(self.images)
        if project is None:
            return
        for image in images:
            image.held = True
        sources = [image.sources for image in images]

        def work(report: Any) -> list[tuple[dict[PlaneIndex, Annotations], dict[PlaneIndex, str]]]:
            return [project_annotations(planes, project) for planes in sources]

        def done(results: Any) -> None:
            for image, (theirs, previous) in zip(images, results, strict=True):
                self._compare(Conflict(image, theirs, previous))

        self._lookup_task.start(work, done, notify_error)

    def _project_changed(self, project: Project | None) -> None:
        if project is not None:
            self.classes.place_first(project.classes)
            self.types.place_first(project.types)
        self._look_up_again()
        self.compare_with_project()

    def _save_colours(self) -> None:
        """The project keeps the colours of its classes and types."""
        project = self.project
        if project is None:
            return
        colours = _colours_in_use(self.classes, project.classes)
        type_colours = _colours_in_use(self.types, project.types)
        changed = colours.items() - project.colours.items()
        changed |= type_colours.items() - project.type_colours.items()

        def work(report: Any) -> None:
            project.set_colours(colours)
            project.set_type_colours(type_colours)

        if changed:
            self._colours_task.start(work)

    def _compare(self, conflict: Conflict) -> None:
        image, theirs = conflict.image, conflict.theirs
        ours = {p: _comparable(image.annotations(p)) for p in image.planes()}
        drawn = any(len(image.annotations(p)) for p in ours)
        same = ours == {p: _comparable(a) for p, a in theirs.items()}
        if theirs and ((drawn and not same) or conflict.previous):
            self.conflicts.append(conflict)
            self.conflict_found.emit()
        elif same and theirs:
            self._mark_identical(image)
        elif theirs:
            self._replace(image, theirs)
        else:
            self.keep_drawn(image)

    def _mark_identical(self, image: AnnotatedImage) -> None:
        """The project has what is drawn: nothing to show anew, nothing to save, no draft needed."""
        for plane in image.planes() & image.sources.keys():
            image.saved[plane] = image.annotations(plane).to_json()
            self.autosave.drafts.remove(image.sources[plane].resolve())
        self._resolve(image)

    def keep_drawn(self, image: AnnotatedImage) -> None:
        """Write to the project what is drawn."""
        self._resolve(image)
        image.saved = dict.fromkeys(image.saved)
        self.autosave.touch()

    def use_project(self, conflict: Conflict) -> None:
        """Show the project's annotations; those drawn are kept among the drafts."""
        project, sources, previous = self.project, conflict.image.sources, conflict.previous
        if not previous or project is None:
            self._replace(conflict.image, conflict.theirs)
            return
        drafts = self.autosave.drafts

        def done(adopted: dict[PlaneIndex, SavedAnnotations]) -> None:
            theirs = {plane: saved.annotations for plane, saved in adopted.items()}
            self._replace(conflict.image, conflict.theirs | theirs)

        self._adopt_task.start(
            lambda report: adopt_previous(sources, previous, project, drafts), done, notify_error
        )

    def _replace(self, image: AnnotatedImage, theirs: dict[PlaneIndex, Annotations]) -> None:
        self.autosave.flush()
        for plane in image.planes() & image.sources.keys():
            self.autosave.drafts.archive(image.sources[plane].resolve())
        image.clear()
        image.saved.clear()
        for plane, saved in theirs.items():
            self.classes.add(saved.names)
            image.put(saved, plane)
        self._resolve(image)
        self.changed.emit()

    def _resolve(self, image: AnnotatedImage) -> None:
        image.held = False
        self.conflicts = [other for other in self.conflicts if other.image is not image]

    # --- saving -----------------------------------------------------------------------------------

    def _image_changed(self) -> None:
        for image in self.images:
            if image.shown_from and image.edited:
                self.take_up(image)
        self.autosave.touch()
        self.changed.emit()

    def _save_jobs(self) -> list[SaveJob]:
        return [job for image in self.images for job in self._image_save_jobs(image)]

    def _image_save_jobs(self, image: AnnotatedImage) -> list[SaveJob]:
        project = self.project
        writable = project is not None and not project.read_only and not image.held
        return [
            SaveJob(
                (image, plane), image.sources[plane], annotations, project if writable else None
            )
            for plane, annotations in image.unsaved().items()
            if plane in image.sources
        ]

    def _mark_saved(self, key: tuple[AnnotatedImage, PlaneIndex], annotations: Annotations) -> None:
        image, plane = key
        image.saved[plane] = annotations.to_json()

    def eventFilter(self, watched: QObject | None, event: QEvent | None) -> bool:
        """Save when the window is about to close."""
        if event is not None and event.type() == QEvent.Type.Close:
            self.autosave.flush()
        return False


_stores: weakref.WeakKeyDictionary[Viewer, AnnotationStore] = weakref.WeakKeyDictionary()


def annotation_store(viewer: Viewer) -> AnnotationStore:
    """The store of this viewer."""
    viewer = unwrap_viewer(viewer)
    if viewer not in _stores:
        _stores[viewer] = AnnotationStore(viewer)
    return _stores[viewer]


@dataclass(frozen=True)
class SavedPlanes:
    """Saved annotations of an image by plane, and the earlier version of planes without any."""

    saved: dict[PlaneIndex, SavedAnnotations]
    previous: dict[PlaneIndex, PreviousVersion]


def find_saved_planes(
    sources: Sources, current: PlaneIndex, project: Project | None, drafts: Drafts
) -> SavedPlanes:
    """What was saved of an image's planes: of the current one, and of all that may have some."""
    shape = sources[current].plane.shape
    listed = planes_with_annotations(shape, len(current), project, drafts)
    saved: dict[PlaneIndex, SavedAnnotations] = {}
    previous: dict[PlaneIndex, PreviousVersion] = {}
    for plane in sorted({current, *(listed & sources.keys())}):
        source = sources[plane].resolve()
        annotations = find_saved(source, project, drafts)
        if annotations is not None:
            saved[plane] = annotations
            continue
        writable = project is not None and not project.read_only
        earlier = project.previous_version_of(source) if project is not None and writable else ""
        version = earlier or drafts.previous_version_of(source)
        if version:
            previous[plane] = version
    return SavedPlanes(saved, previous)


def find_listed_planes(
    sources: Sources, current: PlaneIndex, project: Project | None, drafts: Drafts
) -> SavedPlanes:
    """As `find_saved_planes`, without reading the pixels of an image that has none for certain."""
    shape = sources[current].plane.shape
    listed = planes_with_annotations(shape, len(current), project, drafts)
    if not listed & sources.keys():
        return SavedPlanes({}, {})
    return find_saved_planes(sources, current, project, drafts)


def describe_saved(saved: dict[PlaneIndex, SavedAnnotations], project: Project | None) -> str:
    """How many boxes were saved where, and when."""
    count = sum(len(one.annotations) for one in saved.values())
    boxes = count_of(count, "saved box", "saved boxes")
    times = [one.time for one in saved.values() if one.time is not None]
    when = f", {max(times):%d %b %Y %H:%M}" if times else ""
    if all(one.draft for one in saved.values()):
        goes = f"; they go into {project.path.name} when you continue" if project else ""
        return f"{boxes} of this image, from a draft{when}{goes}."
    name = project.path.name if project is not None else "the project"
    return f"{boxes} of this image, from {name}{when}."


def _colours_in_use(classes: ClassList, names: Iterable[str]) -> dict[str, str]:
    return {name: classes.colour(name) for name in names if name in classes.names}


def _has_content(annotations: Annotations) -> bool:
    return bool(len(annotations) or annotations.regions)


def project_annotations(
    sources: Sources, project: Project
) -> tuple[dict[PlaneIndex, Annotations], dict[PlaneIndex, str]]:
    """A project's annotations of an image's planes, and ids of those of an earlier version."""
    shapes = {s.shape for s in project.sources().values()}
    listed = {s.plane for s in project.sources().values()}
    found, previous = {}, {}
    for plane, lazy_source in sources.items():
        if lazy_source.plane.shape not in shapes or plane not in listed:
            continue
        source = lazy_source.resolve()
        annotations = project.load_annotations(source)
        name = "" if annotations is not None else project.previous_version_of(source)
        if name and not project.read_only:
            previous[plane] = name
            annotations = project.load_annotations(project.sources()[name])
        if annotations is not None:
            found[plane] = annotations
    return found, previous


def adopt_previous(
    sources: Sources,
    previous: Mapping[PlaneIndex, PreviousVersion],
    project: Project | None,
    drafts: Drafts,
) -> dict[PlaneIndex, SavedAnnotations]:
    """Make the annotations of an earlier version of an image's file those of its present one."""
    adopted = {}
    for plane, version in previous.items():
        source = sources[plane].resolve()
        if isinstance(version, ImageSource):
            adopted[plane] = SavedAnnotations(drafts.reuse(source, version), draft=True)
        elif project is not None:
            annotations = project.reuse_annotations(source, version)
            adopted[plane] = SavedAnnotations(annotations, draft=False)
    return adopted


def _comparable(annotations: Annotations) -> Any:
    """What two states are compared by; classes without boxes do not count."""
    content = annotations.to_json()
    return sorted(map(str, content["objects"])), sorted(map(str, content["regions"]))


class ConstantEdgeWidth(QObject):
    """Keeps edges equally thin on the screen at any zoom; `layers` returns those to update."""

    def __init__(
        self,
        parent: QObject,
        viewer: Viewer,
        layers: Callable[[], Iterable[AnnotationLayer | RegionLayer]],
    ) -> None:
        super().__init__(parent)
        self._viewer, self._layers = weakref.ref(viewer), layers
        self._throttle = QSignalThrottler(QSignalThrottler.EmissionPolicy.Trailing, self)
        self._throttle.setTimeout(_ZOOM_THROTTLE_MS)
        self._throttle.triggered.connect(self.update)
        connect_until_destroyed(
            self,
            (viewer.scene.camera.events.zoom, self._update_soon),
            (viewer.layers.events.inserted, self._update_soon),
        )

    def _update_soon(self, event: Any = None) -> None:
        self._throttle.throttle()

    def update(self) -> None:
        """Set all edges to the width for the current zoom."""
        viewer = self._viewer()
        if viewer is None:
            return
        for annotated in self._layers():
            layer = annotated.layer
            if layer not in viewer.layers:
                continue
            if layer._is_creating or layer._is_moving:
                self._throttle.throttle()
                continue
            viewport = viewport_of(layer, viewer)
            if viewport is not None:
                _set_edge_width(annotated, _EDGE_WIDTH_PX * viewport.pixel_size)


def _set_edge_width(annotated: AnnotationLayer | RegionLayer, width: float) -> None:
    if abs(width - annotated.width) > _WIDTH_TOLERANCE * annotated.width:
        annotated.width = width
        set_edge_width(annotated.layer, width)
        annotated.layer.current_edge_width = width
