"""What is being annotated in one viewer: it outlasts the panel and ends with the window."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

from napari.layers import Image
from qtpy.QtCore import QEvent, QObject, QTimer, Signal

from napari_beerlanet.core.annotations import Annotations
from napari_beerlanet.core.project import Project
from napari_beerlanet.ui.annotate_autosave import Autosave, Job
from napari_beerlanet.ui.annotate_classes import Classes
from napari_beerlanet.ui.annotate_drafts import Drafts, Found, find, planes_saved
from napari_beerlanet.ui.annotate_edges import ThinEdges
from napari_beerlanet.ui.annotate_images import WHOLE, AnnotatedImage, Sourced
from napari_beerlanet.ui.annotate_keys import bind_keys
from napari_beerlanet.ui.annotate_shapes import Plane
from napari_beerlanet.ui.last_words import when_deleted
from napari_beerlanet.ui.notices import complain
from napari_beerlanet.ui.panel import unwrapped
from napari_beerlanet.ui.project_store import projects
from napari_beerlanet.ui.tasks import Task


class AnnotateStore(QObject):
    """Images, classes and saving of one viewer; a child of its window.

    `changed` tells of images and boxes, `differs` of new entries of `pending`: images whose boxes
    are others than those in the project that was just opened, with these by plane.
    """

    changed = Signal()
    differs = Signal()

    def __init__(self, viewer: Any) -> None:
        window = viewer.window._qt_window
        super().__init__(window)
        self._viewer = weakref.ref(viewer)
        self.classes = Classes()
        self.projects = projects(viewer)
        self.images: list[AnnotatedImage] = []
        self.autosave = Autosave(self, self._jobs, self._is_saved, Drafts())
        self.edges = ThinEdges(self, viewer, self._keepers)
        self.pending: list[tuple[AnnotatedImage, dict[Plane, Annotations]]] = []
        self._looking = Task(self)
        heard = (
            (self.projects.changing, self.autosave.flush),
            (self.projects.changed, self._project_changed),
            (viewer.layers.events.removed, self._removed),
        )
        for emitter, method in heard:
            emitter.connect(method)
        window.installEventFilter(self)
        when_deleted(window, partial(_let_go, heard))

    @property
    def viewer(self) -> Any:
        """The viewer, None when it is gone."""
        return self._viewer()

    @property
    def project(self) -> Project | None:
        """The open project."""
        return self.projects.project

    def of(self, image: Image | None) -> AnnotatedImage | None:
        """The annotations of an image layer, None where it has none yet."""
        return next((made for made in self.images if image and made.image is image), None)

    def twin(self, sourced: Sourced) -> AnnotatedImage | None:
        """Another layer of the same image that is being annotated already."""
        mine, place = sourced.source(), sourced.plane.index
        for made in self.images:
            other = made.sourced.get(place)
            if made.shape == mine.shape and other and other.source().digest == mine.digest:
                return made
        return None

    def begin(self, image: Image, found: dict[Plane, Found], plane: Plane) -> AnnotatedImage:
        """Make an image's layers and put into them what was found."""
        made = AnnotatedImage(image, self.viewer, self.classes)
        for place, saved in found.items():
            self.classes.add(saved.annotations.names)
            made.put(saved.annotations, place)
            if saved.draft and self.project is not None:
                made.saved[place] = None  # a draft is to go into the project
        if made.coverage == WHOLE:
            made.mark_whole_first(plane)
        self.images.append(made)
        made.changed.connect(self._touched)
        bind_keys(self.viewer, made.boxes)
        if any(saved.draft for saved in found.values()):
            self.autosave.touch()
        self.edges.follow()
        self.changed.emit()
        return made

    def _keepers(self) -> list[Any]:
        return [part for image in self.images for part in (image.boxes, image.regions)]

    def _project_changed(self, project: Project | None) -> None:
        """See whether the project knows the images that are shown; until then it gets nothing."""
        self.pending.clear()
        if project is None:
            return
        self.classes.lead_with(project.classes)
        images = list(self.images)
        for image in images:
            image.held = True
        planes = [image.sourced for image in images]

        def done(found: list[dict[Plane, Annotations]]) -> None:
            for image, saved in zip(images, found, strict=True):
                self._switched(image, saved)

        self._looking.start(lambda report: [in_project(p, project) for p in planes], done, complain)

    def _switched(self, image: AnnotatedImage, found: dict[Plane, Annotations]) -> None:
        """A project was opened that has these annotations of an image that is shown."""
        theirs = {p: _plain(a) for p, a in found.items()}
        ours = {p: _plain(image.annotations(p)) for p in image.planes()}
        if found and any(len(image.annotations(p)) for p in ours) and ours != theirs:
            self.pending.append((image, found))
            self.differs.emit()
        elif found:
            self.take(image, found)
        else:
            self.keep(image)

    def keep(self, image: AnnotatedImage) -> None:
        """Let the project have what is drawn."""
        self._settled(image)
        image.saved = dict.fromkeys(image.saved)
        self.autosave.touch()

    def take(self, image: AnnotatedImage, found: dict[Plane, Annotations]) -> None:
        """Show what the project has instead of what is drawn, which is set aside as a draft."""
        self.autosave.flush()
        for plane in image.planes() & image.sourced.keys():
            self.autosave.drafts.set_aside(image.sourced[plane].source())
        image.clear()
        image.saved.clear()
        for plane, saved in found.items():
            self.classes.add(saved.names)
            image.put(saved, plane)
        self._settled(image)
        self.changed.emit()

    def _settled(self, image: AnnotatedImage) -> None:
        image.held = False
        self.pending = [(other, found) for other, found in self.pending if other is not image]

    def _touched(self) -> None:
        self.autosave.touch()
        self.changed.emit()

    def _jobs(self) -> list[Job]:
        return [job for image in self.images for job in self._jobs_of(image)]

    def _jobs_of(self, image: AnnotatedImage) -> list[Job]:
        project = self.project
        usable = project is not None and not project.read_only and not image.held
        return [
            Job((image, plane), image.sourced[plane], annotations, project if usable else None)
            for plane, annotations in image.unsaved().items()
            if plane in image.sourced
        ]

    def _is_saved(self, key: tuple[AnnotatedImage, Plane], annotations: Annotations) -> None:
        image, plane = key
        image.saved[plane] = annotations.write()

    def _removed(self, event: Any) -> None:
        """A layer of ours was taken out of the viewer: what it has is saved, not deleted."""
        for image in list(self.images):
            if event.value is image.boxes.layer:
                self.autosave.flush()
                image.close()
                self.images.remove(image)
                self.changed.emit()
            elif event.value is image.regions.layer:
                # All layers go when the viewer is closed, one after the other: only one that is
                # missed afterwards was deleted by hand.
                QTimer.singleShot(0, partial(self._regions_deleted, image))

    def _regions_deleted(self, image: AnnotatedImage) -> None:
        viewer = self.viewer
        if viewer is not None and image in self.images and image.boxes.layer in viewer.layers:
            image.regions.forget()
            image.coverage = None
            self._touched()

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        """Save when the window is about to close."""
        if event.type() == QEvent.Type.Close:
            self.autosave.flush()
        return False


def look_up(
    planes: dict[Plane, Sourced], now: Plane, project: Project | None, drafts: Drafts
) -> dict[Plane, Found]:
    """What was saved of an image's planes: of the one that is shown, and of all that may be."""
    known = planes_saved(planes[now].plane.shape, len(now), project, drafts)
    found = {}
    for plane in sorted({now, *(known & planes.keys())}):
        saved = find(planes[plane].source(), project, drafts)
        if saved is not None:
            found[plane] = saved
    return found


def in_project(planes: dict[Plane, Sourced], project: Project) -> dict[Plane, Annotations]:
    """What a project has of an image's planes."""
    shapes = {s.shape for s in project.sources().values()}
    listed = {s.plane for s in project.sources().values()}
    found = {}
    for plane, sourced in planes.items():
        if sourced.plane.shape in shapes and plane in listed:
            saved = project.load_annotations(sourced.source())
            if saved is not None:
                found[plane] = saved
    return found


def _plain(annotations: Annotations) -> Any:
    """What two states are compared by: classes that are not used do not count."""
    content = annotations.write()
    return sorted(map(str, content["objects"])), sorted(map(str, content["regions"]))


def _let_go(heard: Any, window: Any = None) -> None:
    """The window is gone, and all Qt objects with it."""
    for emitter, method in heard:
        emitter.disconnect(method)


_stores: weakref.WeakKeyDictionary[Any, AnnotateStore] = weakref.WeakKeyDictionary()


def annotating(viewer: Any) -> AnnotateStore:
    """The store of this viewer."""
    viewer = unwrapped(viewer)
    if viewer not in _stores:
        _stores[viewer] = AnnotateStore(viewer)
    return _stores[viewer]
