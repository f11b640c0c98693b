"""What the buttons of the Annotate panel do."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from napari.layers import Image, Layer, Shapes
from qtpy.QtCore import QObject, QTimer, Signal

from napari_beerlanet.core.boxes.annotations import CONFIRMED, Annotations
from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.common.messages import count_of
from napari_beerlanet.core.common.progress import Report, report_progress
from napari_beerlanet.core.images.files import ImageFile
from napari_beerlanet.core.project.crop_files import AddedImage
from napari_beerlanet.core.project.crops import choose_crop_size, padding_grey
from napari_beerlanet.core.project.import_annotations import import_dataset, import_for_image
from napari_beerlanet.core.project.project import Project
from napari_beerlanet.ui.annotate.annotated_image import (
    AnnotatedImage,
    LazyImageSource,
    image_sources,
)
from napari_beerlanet.ui.annotate.annotation_layer import copy_of_detections
from napari_beerlanet.ui.annotate.autosave import SavedAnnotations
from napari_beerlanet.ui.annotate.classes import model_classes
from napari_beerlanet.ui.annotate.project_bar import SPLIT_NAMES
from napari_beerlanet.ui.annotate.store import (
    PreviousVersion,
    SavedPlanes,
    Sources,
    adopt_previous,
    annotation_store,
    find_saved_planes,
)
from napari_beerlanet.ui.common.notifications import notify_error
from napari_beerlanet.ui.common.panel import Panel
from napari_beerlanet.ui.common.recent import save_preference, user_data_folder
from napari_beerlanet.ui.common.session import get_session
from napari_beerlanet.ui.common.tasks import TaskOutcome
from napari_beerlanet.ui.detections.image_detections import (
    detection_scale,
    hide_detections,
    visible_detections,
)
from napari_beerlanet.ui.viewer.box_shapes import plane_index_of_shape, read_shape_regions
from napari_beerlanet.ui.viewer.layers import transform_kwargs
from napari_beerlanet.ui.viewer.planes import PlaneIndex, current_plane

DEFAULT_TRAINING_SIZE = 640
"""Side of a training image in pixels if neither a model nor the project defines it."""

_SAME_BOX_IOU = 0.5  # from which a new box counts as annotated already
_MAX_NOTES = 6  # of an import
_LASSO_COLOUR = "#00c8c8"  # that of regions; it is there for a moment

Unreviewed = Literal["ask", "use", "hide"]
"""What to do with boxes that were copied from detections and not reviewed."""


@dataclass(frozen=True, eq=False)
class ChangedFile:
    """An image whose file has changed since it was annotated, until the user has decided.

    `sources`, `saved`, and the earlier version in the project or among the drafts, by plane.
    """

    image: Image
    plane: PlaneIndex
    sources: Sources
    saved: dict[PlaneIndex, SavedAnnotations]
    previous: dict[PlaneIndex, PreviousVersion]


class AnnotationActions(QObject):
    """The steps of annotating; `image` is the chosen layer.

    `message` carries the result of a step in a sentence. `started` is emitted when an image has its
    layers, `file_changed` when there is a decision to make about `changed_file`, `unreviewed_found`
    when there is one about copies that nobody has reviewed: their number, that of all boxes, and of
    types that are a classifier's at other boxes.
    """

    message = Signal(str)
    started = Signal()
    file_changed = Signal()
    unreviewed_found = Signal(int, int, int)

    def __init__(self, panel: Panel) -> None:
        super().__init__(panel)
        self.viewer = panel.viewer
        self.store = annotation_store(panel.viewer)
        self.image: Image | None = None
        self.changed_file: ChangedFile | None = None
        self.lookup_task, self.project_task = panel.task(), panel.task()
        self._waiting: list[tuple[Image, Callable[[AnnotatedImage], None]]] = []
        self.importing = False  # whether the project task is, or was last, an import
        self.started.connect(self._do_what_waits)
        self.project_task.ended.connect(self._project_task_ended)
        panel.connect_event(self.store.projects.changed, self._project_changed)

    @property
    def annotated(self) -> AnnotatedImage | None:
        """The chosen image's annotations, None before it has any."""
        return self.store.of(self.image)

    @property
    def plane(self) -> PlaneIndex:
        """The plane that is displayed."""
        assert self.image is not None
        return current_plane(self.image, self.viewer).index

    @property
    def in_project(self) -> bool:
        """Whether the project has training crops of the image with its present annotations."""
        annotated, project = self.annotated, self.store.project
        if annotated is None or project is None or annotated.changed_since_added:
            return False
        plane = self.plane
        source, saved = annotated.sources[plane].resolved, annotated.saved.get(plane)
        return source is not None and saved is not None and project.is_added(source, saved)

    # --- starting ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Create the image's layers with its saved annotations, or activate them."""
        if self.image is None:
            self._report_problem("There is no image to annotate; open a colour image first.")
        elif self.annotated is not None:
            self._continue(self.annotated)
        elif self._ensure_classes():
            image, plane, project = self.image, self.plane, self.store.project
            sources, drafts = image_sources(image), self.store.autosave.drafts
            self.message.emit("Looking for saved annotations of this image …")
            self.lookup_task.start(
                lambda report: find_saved_planes(sources, plane, project, drafts),
                lambda result: self._looked_up(image, plane, sources, result),
                self._report_problem,
            )

    def _looked_up(
        self, image: Image, plane: PlaneIndex, sources: Sources, result: SavedPlanes
    ) -> None:
        if image not in self.viewer.layers:
            return
        shown = self.store.of(image)
        if shown is not None:  # by itself, while it was looked up
            self._continue(shown)
            self.started.emit()
            return
        same = self.store.same_image(sources[plane])
        if same is not None:
            self._report_problem(
                f"This image is already being annotated as “{same.name}”; choose that one."
            )
        elif result.previous:
            self.changed_file = ChangedFile(image, plane, sources, result.saved, result.previous)
            self.message.emit(f"“{image.name}” has changed since it was annotated.")
            self.file_changed.emit()
        else:
            self._show_layers(image, plane, result.saved, sources)

    def _continue(self, annotated: AnnotatedImage) -> None:
        self.store.take_up(annotated)
        self.activate(annotated.boxes.layer)

    def use_existing_annotations(self) -> None:
        """Of a changed file: continue with the annotations of its earlier version."""
        changed, self.changed_file = self.changed_file, None
        project, drafts = self.store.project, self.store.autosave.drafts
        if changed is None:
            return

        def done(adopted: dict[PlaneIndex, SavedAnnotations]) -> None:
            if changed.image in self.viewer.layers and self.store.of(changed.image) is None:
                saved = changed.saved | adopted
                self._show_layers(changed.image, changed.plane, saved, changed.sources)

        self.lookup_task.start(
            lambda report: adopt_previous(changed.sources, changed.previous, project, drafts),
            done,
            self._report_problem,
        )

    def start_anew(self) -> None:
        """Of a changed file: annotate it as a new image; the earlier version's boxes are kept."""
        changed, self.changed_file = self.changed_file, None
        if changed is not None and changed.image in self.viewer.layers:
            self._show_layers(changed.image, changed.plane, changed.saved, changed.sources)

    def _project_changed(self, project: Project | None) -> None:
        if self.changed_file is not None:
            self.changed_file = None
            self.file_changed.emit()

    def _show_layers(
        self,
        image: Image,
        plane: PlaneIndex,
        saved: dict[PlaneIndex, SavedAnnotations],
        sources: Sources,
    ) -> None:
        annotated = self.store.start(image, saved, plane, sources=sources)
        count = sum(len(one.annotations) for one in saved.values())
        self.activate(annotated.boxes.layer)
        loaded = f"{count_of(count, 'saved box', 'saved boxes')} loaded." if count else ""
        self.message.emit(f"Draw a box around each cell. {loaded}".strip())
        self.started.emit()

    def _ensure_classes(self) -> bool:
        """Classes of the project or else of the model; without any, the user has to add some."""
        if not self.store.classes.names:
            self.add_model_classes()
        if not self.store.classes.names:
            self._report_problem("There are no classes yet: type a name, or load a model.")
        return bool(self.store.classes.names)

    def add_model_classes(self) -> None:
        """Add the loaded model's classes, with its colours."""
        names, colours = model_classes(get_session(self.viewer).model)
        self.store.classes.add(names, colours)

    def activate(self, layer: Layer) -> None:
        """Let the user draw rectangles on a layer, which is added again if it was deleted."""
        if layer not in self.viewer.layers:
            self.viewer.add_layer(layer)
        layer.visible = True
        self.viewer.layers.selection.active = layer
        layer.mode = "add_rectangle"
        self.viewer.window._qt_viewer.canvas.native.setFocus()

    # --- regions ----------------------------------------------------------------------------------

    def mark_whole_image(self) -> None:
        """Mark all of the plane as annotated."""
        annotated = self.annotated
        if annotated is not None:
            annotated.mark_whole_image(self.plane)
            self.activate(annotated.boxes.layer)

    def draw_regions(self) -> None:
        """Let the user draw the annotated regions."""
        annotated = self.annotated
        if annotated is not None:
            annotated.start_drawing_regions(self.plane)
            self.activate(annotated.regions.layer)
            self.message.emit(
                "Draw rectangles or polygons around the regions that are completely annotated."
            )

    # --- boxes ------------------------------------------------------------------------------------

    def select_in_region(self) -> None:
        """Let the user draw around boxes, which are selected then."""
        annotated = self.annotated
        if annotated is None or self.image is None:
            return
        layer = Shapes(
            ndim=self.image.ndim,
            name="select in region",
            edge_color=_LASSO_COLOUR,
            edge_width=annotated.boxes.width,
            face_color="transparent",
            **transform_kwargs(self.image),
        )
        if annotated.boxes.layer not in self.viewer.layers:
            self.viewer.add_layer(annotated.boxes.layer)
        self.viewer.add_layer(layer)
        layer.mode = "add_polygon_lasso"
        layer.current_edge_width = annotated.boxes.width
        layer.events.data.connect(partial(self._region_drawn, annotated, layer))
        self.message.emit("Draw around the boxes to select; then press the key of their type.")

    def _region_drawn(self, annotated: AnnotatedImage, layer: Shapes, event: Any) -> None:
        if str(getattr(event, "action", "")) == "added":  # a turn later: napari still draws it
            QTimer.singleShot(0, partial(self._select_drawn, annotated, layer))

    def _select_drawn(self, annotated: AnnotatedImage, layer: Shapes) -> None:
        if layer not in self.viewer.layers or not layer.nshapes or layer._is_creating:
            return
        plane = plane_index_of_shape(layer.data[-1])
        regions, _ = read_shape_regions(layer.data[-1:], layer.shape_type[-1:], plane)
        self.viewer.layers.remove(layer)
        self.viewer.layers.selection.active = annotated.boxes.layer
        count = annotated.boxes.select_inside(regions[0], plane) if regions else 0
        self.message.emit(f"{count_of(count, 'box', 'boxes')} selected.")

    def copy_detections(self, confidence: float, only_first: bool = False) -> None:
        """Copy the image's visible detections, with the user's edits, to its annotations.

        The image gets its layers first if needed. `only_first`: not if it has boxes by then.
        """
        if self.image is None:
            return
        viewer, image, plane = self.viewer, self.image, self.plane
        detections = visible_detections(viewer, image, plane)
        if detections is None:
            self._report_problem("There are no detections of this image; find cells in it first.")
            return
        confident = detections[detections.scores >= np.float32(confidence)]

        def copy(annotated: AnnotatedImage) -> None:
            if only_first and any(annotated.boxes.counts().values()):
                return
            copies = copy_of_detections(confident, self.store.classes, annotated.shape)
            hide_detections(viewer, image)
            self._add(annotated, copies, plane, "copy detections")
            annotated.boxes.layer.mode = "select"  # they are there to be corrected

        self._when_started(copy)

    def correct_detections(self, confidence: float) -> None:
        """Copy the detections to an image without boxes, which gets its layers first if needed."""
        self.copy_detections(confidence, only_first=True)

    def add_confirmed(self, detections: Detections, plane: PlaneIndex, what: str) -> None:
        """Add boxes that the user has confirmed; the image gets its layers first if needed."""

        def add(annotated: AnnotatedImage) -> None:
            new = copy_of_detections(detections, self.store.classes, annotated.shape)
            self._add(annotated, replace(new, status=[CONFIRMED] * len(new)), plane, what)

        if self.annotated is None:
            self.store.classes.add(detections.names)
        self._when_started(add)

    def _when_started(self, then: Callable[[AnnotatedImage], None]) -> None:
        """Do something with the image once it has its layers, with what is saved of it."""
        if self.annotated is not None:
            then(self.annotated)
        elif self.image is not None:
            self._waiting.append((self.image, then))
            self.start()

    def _do_what_waits(self) -> None:
        waiting, self._waiting = self._waiting, []
        for image, then in waiting:
            annotated = self.store.of(image)
            if annotated is not None:
                then(annotated)

    def import_boxes(self, path: str) -> None:
        """Add the boxes of a file to the image, which gets its layers first if needed."""
        if self.image is None:
            return
        file, plane = Path(path), self.plane
        source = self.image.source.path
        name = Path(source).name if source else self.image.name

        def read(annotated: AnnotatedImage) -> None:
            def done(result: tuple[Annotations, list[str]]) -> None:
                if annotated in self.store.images:
                    annotations, notes = result
                    self._add(annotated, annotations, plane, "import", notes)

            shape, names = annotated.shape, self.store.classes.names
            self.lookup_task.start(
                lambda report: import_for_image(file, shape, names, name),
                done,
                self._report_problem,
            )

        self._when_started(read)

    def _add(
        self,
        annotated: AnnotatedImage,
        new: Annotations,
        plane: PlaneIndex,
        what: str,
        notes: Sequence[str] = (),
    ) -> None:
        """Add boxes that are not annotated yet, and report the result."""
        from napari_beerlanet.core.boxes.matching import match_boxes  # numba comes with it

        boxes = annotated.boxes
        classes, types = list(boxes.classes.names), list(boxes.types.names)
        duplicate = match_boxes(new.xyxy, boxes.of_plane(plane).xyxy, _SAME_BOX_IOU) >= 0
        count = boxes.append(new[~duplicate], plane, what)
        sentences = [f"{count_of(count, 'box', 'boxes')} added."]
        if duplicate.any():
            sentences.append(f"{int(duplicate.sum())} were already annotated.")
        new_classes = [name for name in boxes.classes.names if name not in classes]
        if new_classes:
            sentences.append(f"New classes: {', '.join(new_classes)}.")
        new_types = [name for name in boxes.types.names if name not in types]
        if new_types:
            sentences.append(f"New types: {', '.join(new_types)}.")
        self.message.emit(" ".join([*sentences, *notes]))

    # --- project ----------------------------------------------------------------------------------

    def add_to_project(self, unreviewed: Unreviewed = "ask") -> None:
        """Cut the annotated regions into training crops, off the GUI thread.

        Boxes that were copied, and types that are a classifier's, are used, hidden, or asked about
        first, as long as nobody has reviewed them.
        """
        annotated = self.annotated
        if annotated is None or self.image is None:
            self._report_problem("There are no annotations of this image yet; press Annotate.")
            return
        project = self._writable_project()
        if project is None:
            return
        plane = self.plane
        source, annotations = annotated.sources[plane], annotated.annotations(plane)
        copies = int((~annotations.reviewed).sum())
        types = int((annotations.reviewed & ~annotations.type_reviewed).sum())
        if unreviewed == "ask" and (copies or types):
            self.unreviewed_found.emit(copies, len(annotations), types)
            return
        if unreviewed != "ask":
            save_unreviewed_answer(unreviewed)
        info, scale = self._model_info(), detection_scale(self.viewer, self.image)
        self.importing = False

        def done(addition: ProjectAddition) -> None:
            annotated.saved[plane] = annotations.to_json()
            unchanged = annotated.annotations(plane).to_json() == annotated.saved[plane]
            annotated.changed_since_added = not unchanged
            notes = [*annotated.boxes.notes, *annotated.regions.read(plane)[1]]
            self.message.emit("\n".join([*addition.sentences(), *notes]))

        self.project_task.start(
            lambda report: add_image_to_project(
                source, annotations, project, info, scale, report, unreviewed == "hide"
            ),
            done,
        )

    def remove_from_project(self, ids: Sequence[str], names: Sequence[str]) -> None:
        """Take images out of the training data, off the GUI thread; their annotations stay."""
        project = self._writable_project()
        if project is None or not ids:
            return
        self.importing = False

        def work(report: Report) -> None:
            for number, one in enumerate(ids):
                report_progress(report, number, len(ids), names[number])
                project.remove_image(one)

        def done(_: None) -> None:
            which = f"“{names[0]}” was" if len(ids) == 1 else f"{len(ids)} images were"
            self.message.emit(
                f"{which} removed from the training data. The annotations are kept: open the "
                "image and add it to the project again to bring it back."
            )

        self.project_task.start(work, done)

    def import_dataset(self, path: str) -> None:
        """Import the annotated images of a folder or dataset file into the project."""
        project = self._writable_project()
        if project is None:
            return
        info, self.importing = self._model_info(), True
        self.store.autosave.flush()
        self.message.emit("")
        self.project_task.start(
            lambda report: import_into_project(Path(path), project, info, report),
            lambda summary: self.message.emit("\n".join(summary)),
        )

    def _project_task_ended(self, outcome: TaskOutcome) -> None:
        """What was done before an import or a removal failed or was cancelled stays done."""
        project = self.store.project
        if project is None or self.project_task.running:
            return
        if self.importing:
            self.store.classes.place_first(project.classes)
            self.store.types.place_first(project.types)
            self.store.compare_with_project()
        self.store.projects.notify_updated()

    def _writable_project(self) -> Project | None:
        project = self.store.project
        if project is None:
            self._report_problem("There is no project yet; create or open one above.")
        elif project.read_only:
            self._report_problem(project.read_only)
        else:
            return project
        return None

    def _model_info(self) -> Mapping[str, Any]:
        model = get_session(self.viewer).model
        return model.info if model is not None else {}

    def _report_problem(self, problem: BaseException | str) -> None:
        self.message.emit(notify_error(problem))


# --- off the GUI thread ---------------------------------------------------------------------------


@dataclass(frozen=True)
class ProjectAddition:
    """The result of adding an image with `boxes`; the size of its crops, and why that size.

    `project_notes` are about the whole project and shown elsewhere. `reviewed_only` as of
    `Project.add_image`.
    """

    added: AddedImage
    boxes: int
    crop_size: int
    crop_size_reason: str
    new_classes: list[str]
    project_notes: list[str]
    reviewed_only: bool = False

    def sentences(self) -> list[str]:
        """The result for people."""
        added = self.added
        split = SPLIT_NAMES.get(added.split, added.split)
        all_of = f"{added.used} of " if added.unused else ""
        boxes = f"{all_of}{count_of(self.boxes, 'box', 'boxes')}"
        crops = count_of(added.crops, f"{'overlapping ' * (added.crops > 1)}crop")
        size = f"{self.crop_size} pixels ({self.crop_size_reason})"
        unused = ", ".join(f"{count} {reason}" for reason, count in added.unused.items())
        rest = f"; not used: {unused}" if unused else ""
        sentences = [f"Added to the {split} data: {boxes} in {crops} of up to {size}{rest}."]
        if added.types:
            types = ", ".join(f"{count} {name}" for name, count in added.types.items())
            sentences.append(f"Cells with a type: {types}.")
        if added.unreviewed_types:
            left_out = " and left out" if self.reviewed_only else ""
            count = count_of(added.unreviewed_types, "type is", "types are")
            sentences.append(f"{count} a classifier's, not reviewed{left_out}.")
        if self.new_classes:
            sentences.append(f"New in the project: {', '.join(self.new_classes)}.")
        said = ("left out", "not used for training")
        notes = [note for note in added.notes if not any(words in note for words in said)]
        return [*sentences, *(note for note in notes if note not in self.project_notes)]


def add_image_to_project(
    lazy_source: LazyImageSource,
    annotations: Annotations,
    project: Project,
    info: Mapping[str, Any],
    scale: float | None,
    report: Report,
    reviewed_only: bool = False,
) -> ProjectAddition:
    """Cut the annotated regions of an image into training crops."""
    used = [name for name, count in annotations.counts().items() if count]
    new_classes = [name for name in used if name not in project.classes]
    if new_classes:
        project.add_classes(new_classes)
    source, training_size = lazy_source.resolve(), _training_size(info, project)
    crop_size, reason = choose_crop_size(info, annotations, training_size, source.pixel_size, scale)
    added = project.add_image(
        source,
        lazy_source.plane.lazy(),
        annotations,
        training_size,
        crop_size=crop_size,
        grey=padding_grey(info),
        reviewed_only=reviewed_only,
        report=report,
    )
    notes = project.split_notes()
    return ProjectAddition(
        added, len(annotations), crop_size, reason, new_classes, notes, reviewed_only
    )


def import_into_project(
    path: Path, project: Project, info: Mapping[str, Any], report: Report
) -> list[str]:
    """Import a dataset; sentences on what was imported and what was left out."""
    classes, training_size = project.classes, _training_size(info, project)

    def crop_size(annotations: Annotations, image: ImageFile) -> int:
        return choose_crop_size(info, annotations, training_size, image.pixel_size)[0]

    imported = import_dataset(
        project, path, training_size, crop_size=crop_size, grey=padding_grey(info), report=report
    )
    splits = Counter(SPLIT_NAMES.get(added.split, added.split) for added in imported.added)
    images = count_of(len(imported.added), "image")
    by_split = ", ".join(f"{number} for {split}" for split, number in splits.items())
    boxes = count_of(sum(added.boxes for added in imported.added), "box", "boxes")
    crops = count_of(sum(added.crops for added in imported.added), "crop")
    summary = [f"Imported {images} ({by_split}): {boxes} in {crops}."]
    new_classes = [name for name in project.classes if name not in classes]
    if new_classes:
        summary.append(f"New in the project: {', '.join(new_classes)}.")
    notes = [note for note in imported.notes if note not in project.split_notes()]
    more = len(notes) - _MAX_NOTES
    return [*summary, *notes[:_MAX_NOTES], *([f"… and {more} more."] if more > 0 else [])]


def unreviewed_answer() -> Unreviewed:
    """What the user has last decided about copies that were not reviewed."""
    try:
        answer = json.loads(_answer_file().read_text(encoding="utf-8"))["unreviewed"]
    except (OSError, ValueError, KeyError, TypeError):
        return "ask"
    return "hide" if answer == "hide" else "use"


def save_unreviewed_answer(answer: Unreviewed) -> None:
    """Remember it as the default; ignored where the user's folder cannot be written to."""
    save_preference(_answer_file(), {"unreviewed": answer})


def _answer_file() -> Path:
    return user_data_folder() / "annotate.json"


def _training_size(info: Mapping[str, Any], project: Project) -> int:
    return int(info.get("image_size") or project.training_size or DEFAULT_TRAINING_SIZE)
