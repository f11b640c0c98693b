"""What the buttons of the Annotate panel do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from napari.layers import Image
from qtpy.QtCore import QObject, Signal

from napari_beerlanet.core.annotations import CONFIRMED, Annotations
from napari_beerlanet.core.boxes import Detections, matches
from napari_beerlanet.core.importing import read_onto
from napari_beerlanet.ui.annotate_adding import Addition, add_image
from napari_beerlanet.ui.annotate_classes import of_model
from napari_beerlanet.ui.annotate_detections import hide_detections, scale_of, shown_detections
from napari_beerlanet.ui.annotate_images import AnnotatedImage, Sourced, sourced_planes
from napari_beerlanet.ui.annotate_shapes import Plane
from napari_beerlanet.ui.annotate_store import annotating, look_up
from napari_beerlanet.ui.notices import complain
from napari_beerlanet.ui.planes import current_plane
from napari_beerlanet.ui.session import session

_SAME = 0.5  # intersection over union from which a box is annotated already


class AnnotateFlow(QObject):
    """Steps of annotating one viewer's images; `image` is the chosen layer.

    `said` tells what a step came to, `began` that an image has its layers.
    """

    said = Signal(str)
    began = Signal()

    def __init__(self, panel: Any) -> None:
        super().__init__(panel)
        self.viewer = panel.viewer
        self.store = annotating(panel.viewer)
        self.image: Image | None = None
        self.finding, self.running = panel.task(), panel.task()
        self._confirmed: tuple[Detections, str] | None = None
        self.began.connect(self._take_waiting)

    @property
    def annotated(self) -> AnnotatedImage | None:
        """The chosen image's annotations, None before it has any."""
        return self.store.of(self.image)

    @property
    def plane(self) -> Plane:
        """The plane that is shown."""
        assert self.image is not None
        return current_plane(self.image, self.viewer).index

    # --- layers -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Make the image's layers with what was saved of it, or go back to them."""
        if self.image is None:
            self._refuse("There is no image to annotate; open a colour image first.")
        elif self.annotated is not None:
            self.activate(self.annotated.boxes.layer)
        elif self._has_classes():
            image, plane, project = self.image, self.plane, self.store.project
            planes, drafts = sourced_planes(image), self.store.autosave.drafts
            self.said.emit("Looking for earlier annotations of this image …")
            self.finding.start(
                lambda report: look_up(planes, plane, project, drafts),
                lambda found: self._found(image, found, planes[plane]),
                lambda error: self._refuse(error),
            )

    def _found(self, image: Image, found: dict[Plane, Any], shown: Sourced) -> None:
        if image not in self.viewer.layers or self.store.of(image) is not None:
            return
        twin = self.store.twin(shown)
        if twin is not None:
            self._refuse(f"The same image is being annotated already: “{twin.name}”; choose that.")
            return
        made = self.store.begin(image, found, shown.plane.index)
        count = sum(len(saved.annotations) for saved in found.values())
        self.activate(made.boxes.layer)
        earlier = f"{_boxes(count)} from earlier." if count else ""
        self.said.emit(f"Draw a box around each object. {earlier}".strip())
        self.began.emit()

    def _has_classes(self) -> bool:
        """Classes of the project, or else of the model; without any, they are asked for."""
        if not self.store.classes.names:
            self.take_model_classes()
        if not self.store.classes.names:
            self._refuse("There are no classes yet: type a name, or load a model.")
        return bool(self.store.classes.names)

    def take_model_classes(self) -> None:
        """Add the loaded model's classes, with its colours."""
        names, colours = of_model(session(self.viewer).model)
        self.store.classes.add(names, colours)

    def activate(self, layer: Any) -> None:
        """Let the user draw rectangles on a layer, which is put back if it was deleted."""
        if layer not in self.viewer.layers:
            self.viewer.add_layer(layer)
        layer.visible = True
        self.viewer.layers.selection.active = layer
        layer.mode = "add_rectangle"
        self.viewer.window._qt_viewer.canvas.native.setFocus()

    def mark_whole(self) -> None:
        """All of the plane is annotated."""
        made = self.annotated
        if made is not None:
            if made.regions.layer not in self.viewer.layers:
                self.viewer.add_layer(made.regions.layer)
            made.whole(self.plane)
            self.activate(made.boxes.layer)

    def draw_regions(self) -> None:
        """Let the user draw what is annotated."""
        made = self.annotated
        if made is not None:
            made.draw_parts(self.plane)
            self.activate(made.regions.layer)
            self.said.emit("Draw rectangles or polygons around what you have annotated fully.")

    # --- boxes ------------------------------------------------------------------------------------

    def copy_detections(self, confidence: float) -> None:
        """Copy what was found in the image, as its layer shows it, to the annotations."""
        made = self.annotated
        if made is None or self.image is None:
            return
        found = shown_detections(self.viewer, self.image, self.plane)
        if found is None:
            self._refuse("There are no detections of this image; find objects in it first.")
            return
        sure = found[found.scores >= np.float32(confidence)]
        before = Annotations.empty(self.store.classes.names, made.shape)
        hide_detections(self.viewer, self.image)
        self._add(made, before.with_copied(sure), self.plane, "copy detections")

    def take(self, found: Detections, what: str) -> None:
        """Add boxes that a person has confirmed; the image gets its layers first if it has none."""
        made = self.annotated
        if made is None:
            self._confirmed = found, what
            self.store.classes.add(found.names)
            self.begin()
            return
        new = Annotations.empty(self.store.classes.names, made.shape).with_copied(found)
        confirmed = replace(new, status=[CONFIRMED] * len(new))
        self._add(made, confirmed, self.plane, what)

    def _take_waiting(self) -> None:
        waiting, self._confirmed = self._confirmed, None
        if waiting is not None and self.annotated is not None:
            self.take(*waiting)

    def import_file(self, path: str) -> None:
        """Put the boxes of a file onto the image."""
        made, file = self.annotated, Path(path)
        if made is None or self.image is None:
            return
        shape, plane, names = made.shape, self.plane, self.store.classes.names
        source = self.image.source.path
        name = Path(source).name if source else self.image.name
        self.finding.start(
            lambda report: read_onto(file, shape, names, name),
            lambda read: self._imported(made, read, plane),
            lambda error: self._refuse(error),
        )

    def _imported(self, made: AnnotatedImage, read: Any, plane: Plane) -> None:
        annotations, notes = read
        if made in self.store.images:
            self._add(made, annotations, plane, "import", notes)

    def _add(
        self,
        made: AnnotatedImage,
        new: Annotations,
        plane: Plane,
        what: str,
        notes: Sequence[str] = (),
    ) -> None:
        """Add boxes that are not annotated yet, and tell what came of it."""
        before = list(made.boxes.classes.names)
        known = matches(new.xyxy, made.boxes.of_plane(plane).xyxy, _SAME) >= 0
        count = made.boxes.append(new[~known], plane, what)
        told = [f"{_boxes(count)} added."]
        if known.any():
            told.append(f"{int(known.sum())} are annotated already.")
        classes = [name for name in made.boxes.classes.names if name not in before]
        if classes:
            told.append(f"New classes: {', '.join(classes)}.")
        self.said.emit(" ".join([*told, *notes]))

    # --- project ----------------------------------------------------------------------------------

    def add_to_project(self) -> None:
        """Cut the annotated regions into pieces to learn from, off the GUI thread."""
        made, project = self.annotated, self.store.project
        if made is None or self.image is None:
            self._refuse("There are no annotations of this image yet; press Annotate.")
        elif project is None:
            self._refuse("There is no project yet; make or open one above.")
        elif project.read_only:
            self._refuse(project.read_only)
        else:
            plane, model = self.plane, session(self.viewer).model
            sourced, annotations = made.sourced[plane], made.annotations(plane)
            info, scale = (model.info if model else {}), scale_of(self.viewer, self.image)
            self.running.start(
                lambda report: add_image(sourced, annotations, project, info, scale, report),
                lambda done: self._added(made, plane, annotations, done),
            )

    def _added(self, made: AnnotatedImage, plane: Plane, annotations: Any, done: Addition) -> None:
        made.saved[plane] = annotations.write()
        self.store.projects.tell_updated()
        notes = [*made.boxes.notes, *made.regions.read(plane)[1]]
        self.said.emit("\n".join([*done.sentences(), *notes]))

    def _refuse(self, problem: Any) -> None:
        self.said.emit(complain(problem))


def _boxes(count: int) -> str:
    return "1 box" if count == 1 else f"{count} boxes"
