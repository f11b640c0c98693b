"""What is classified: the boxes of a detections layer, or of an annotation layer."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from napari.layers import Image, Shapes

from napari_beerlanet.core.boxes.annotations import CLASSIFIED, COPIED, UNREVIEWED_TYPES
from napari_beerlanet.core.boxes.classes import ClassCounts
from napari_beerlanet.core.boxes.detections import TYPE_COLUMN
from napari_beerlanet.ui.classify.job import ClassifyJob, ClassifyResult
from napari_beerlanet.ui.common.session import get_session
from napari_beerlanet.ui.detections.box_store import BoxStore
from napari_beerlanet.ui.detections.detection_layer import DetectionLayer
from napari_beerlanet.ui.detections.image_detections import detection_layer_of
from napari_beerlanet.ui.detections.type_counts import TypeCountsView, count_boxes
from napari_beerlanet.ui.viewer.layer_data import ShapesSnapshot, read_layer_annotations
from napari_beerlanet.ui.viewer.layers import Role, role_of, source_image
from napari_beerlanet.ui.viewer.planes import current_plane, image_shape

if TYPE_CHECKING:
    from napari.viewer import Viewer

DETECTIONS, ANNOTATIONS = "Detections", "Annotations"


class ClassifyTarget(Protocol):
    """Boxes of one image that can be classified."""

    @property
    def kind(self) -> str:
        """`DETECTIONS` or `ANNOTATIONS`."""

    def class_counts(self) -> dict[str, int]:
        """How many boxes of each class the displayed plane shows."""

    def job(self, classes: Collection[str], model_key: str, model: Any, device: str) -> ClassifyJob:
        """Classify all boxes of these classes."""

    def write(self, result: ClassifyResult) -> bool:
        """Give the boxes their types; False if they are not there any more."""

    @property
    def can_undo(self) -> bool:
        """Whether a classification can be undone or redone."""

    @property
    def undone(self) -> bool:
        """Whether the last classification is undone."""

    def undo(self) -> None:
        """Bring back the types before the last classification, or redo it."""

    def show(self, view: TypeCountsView) -> None:
        """Show the counts of types."""


@dataclass(eq=False)
class DetectionTarget:
    """The detections of an image on the displayed plane, with the user's edits."""

    viewer: Viewer
    image: Image
    layer: DetectionLayer
    kind: str = field(default=DETECTIONS, init=False)
    _classified: weakref.ref[BoxStore] | None = field(default=None, init=False)

    def class_counts(self) -> dict[str, int]:
        """Of those above the threshold."""
        passing = self.layer.filtered()
        if passing is None:
            return {}
        store, mask = passing
        numbers = np.bincount(store.labels[mask], minlength=len(store.names))
        return dict(zip(store.names, numbers.tolist(), strict=True))

    def job(self, classes: Collection[str], model_key: str, model: Any, device: str) -> ClassifyJob:
        """All candidates, so that the threshold may be lowered afterwards; the sure ones first."""
        self.layer.commit_edits()
        store = self.layer.store
        assert store is not None
        chosen = np.array([name in classes for name in store.names], bool)
        rows = np.flatnonzero(store.alive & chosen[store.labels])
        self._classified = weakref.ref(store)
        passing = self.layer.filtered()
        return ClassifyJob(
            current_plane(self.image, self.viewer),
            store.xyxy[rows],
            rows,
            store.typed_by_user()[rows],
            model_key,
            model,
            device,
            store.types,
            store.model_rows,
            None if passing is None else passing[1][rows],
        )

    def write(self, result: ClassifyResult) -> bool:
        """Types, probabilities and warnings become those of the layer's boxes."""
        index = result.job.plane.index
        store = self.layer.stores.get(index)
        expected = self._classified() if self._classified is not None else None
        if not self.layer.alive or store is None or store is not expected or result.types is None:
            return False
        self.layer.set_types(result.types, index, colour_by="type")
        return True

    @property
    def can_undo(self) -> bool:
        """On the displayed plane."""
        return self.layer.can_undo_types

    @property
    def undone(self) -> bool:
        """On the displayed plane."""
        return self.layer.types_undone

    def undo(self) -> None:
        """Boxes and the user's edits of them stay."""
        self.layer.undo_types()

    def show(self, view: TypeCountsView) -> None:
        """Of the boxes above the threshold."""
        facts = {
            "image": self.image.name,
            "model": str(self.layer.report.get("model", "")),
            "classifier": str(self.layer.report.get("classifier", "")),
            "confidence": f"{self.layer.confidence:.2f}",
        }
        view.show_layer(count_boxes(self.layer, facts), self.layer)


_TypeAndStatus = tuple[str, str]


@dataclass(frozen=True)
class _AnnotationRun:
    """A classification of annotations: types and status before and after it, by id of the box."""

    before: dict[int, _TypeAndStatus]
    after: dict[int, _TypeAndStatus]
    warnings: list[str]
    limits: str
    classifier: str
    undone: bool = False


_annotation_runs: weakref.WeakKeyDictionary[Shapes, _AnnotationRun] = weakref.WeakKeyDictionary()


@dataclass(eq=False)
class AnnotationTarget:
    """The annotated boxes of an image on the displayed plane; types are their feature "type".

    A type is the classifier's until the user has reviewed it, as the boxes' status says. Those that
    the user has given stay as they are.
    """

    viewer: Viewer
    image: Image
    layer: Shapes
    kind: str = field(default=ANNOTATIONS, init=False)

    def _read(self) -> tuple[Any, list[str], list[int]]:
        """Boxes (n, 4), their classes and ids."""
        plane, shape = current_plane(self.image, self.viewer).index, image_shape(self.image)
        read = read_layer_annotations(ShapesSnapshot.of(self.layer), plane, shape)
        boxes, places = read.annotations, read.shape_indices
        ids = self.layer.features["id"].to_numpy()[places].astype(np.int64).tolist()
        return boxes.xyxy, [boxes.names[k] for k in boxes.labels], ids

    def class_counts(self) -> dict[str, int]:
        """Of the displayed plane."""
        names = self._read()[1]
        return {name: names.count(name) for name in dict.fromkeys(names)}

    def job(self, classes: Collection[str], model_key: str, model: Any, device: str) -> ClassifyJob:
        """`rows` are the ids of the boxes."""
        xyxy, names, ids = self._read()
        chosen = np.array([name in classes for name in names], bool)
        plane = current_plane(self.image, self.viewer)
        rows = np.array(ids, np.int64)[chosen]
        now = self._types()
        kept = np.array([_is_by_user(*now[i]) for i in rows.tolist()], bool)
        return ClassifyJob(plane, xyxy[chosen], rows, kept, model_key, model, device)

    def write(self, result: ClassifyResult) -> bool:
        """One step of the layer's own undo, too; boxes that were deleted meanwhile are left out."""
        if self.layer not in self.viewer.layers:
            return False
        names, now = result.type_of_row, self._types()
        # What the user has done in the meantime counts, too.
        before = {i: now[i] for i in names if i in now and not _is_by_user(*now[i])}
        after = {
            i: (names[i], COPIED if status == COPIED else CLASSIFIED)
            for i, (_, status) in before.items()
        }
        name = str(result.model.info.get("name", ""))
        _annotation_runs[self.layer] = _AnnotationRun(
            before, after, result.warnings, result.limits, name
        )
        self._set(after)
        return True

    def _types(self) -> dict[int, _TypeAndStatus]:
        table = self.layer.features
        types = table[TYPE_COLUMN].tolist() if TYPE_COLUMN in table else [""] * len(table)
        names = (name if isinstance(name, str) else "" for name in types)
        pairs = zip(names, map(str, table["status"]), strict=True)
        return dict(zip(table["id"].astype(np.int64).tolist(), pairs, strict=True))

    def _set(self, types: dict[int, _TypeAndStatus]) -> None:
        table = self.layer.features.copy()
        now = self._types() | types
        rows = [now[i] for i in table["id"].astype(np.int64).tolist()]
        table[TYPE_COLUMN] = np.array([name for name, _ in rows], object)
        table["status"] = np.array([status for _, status in rows], object)
        self.layer.features = table

    @property
    def _run(self) -> _AnnotationRun | None:
        return _annotation_runs.get(self.layer)

    @property
    def can_undo(self) -> bool:
        """Whether the layer was classified."""
        return self._run is not None

    @property
    def undone(self) -> bool:
        """Whether the last classification is undone."""
        return self._run is not None and self._run.undone

    def undo(self) -> None:
        """Boxes whose type was changed since, by hand, keep it."""
        run = self._run
        if run is None:
            return
        now, was = self._types(), run.after if not run.undone else run.before
        other = run.before if not run.undone else run.after
        self._set({i: other[i] for i in was if i in now and now[i] == was[i]})
        _annotation_runs[self.layer] = _AnnotationRun(
            run.before, run.after, run.warnings, run.limits, run.classifier, not run.undone
        )

    def show(self, view: TypeCountsView) -> None:
        """Of the displayed plane."""
        types, (_, classes, ids) = self._types(), self._read()
        names = [types[i][0] for i in ids]
        present = sorted({name for name in names if name})
        if not present:
            view.clear()
            return
        run = self._run if not self.undone else None
        counts = ClassCounts(
            {name: classes.count(name) for name in dict.fromkeys(classes)},
            {"image": self.image.name, "classifier": run.classifier if run else ""},
            {name: names.count(name) for name in present},
        )
        colours = get_session(self.viewer).type_palette.colours(present)
        said = (run.warnings, run.limits, run.classifier) if run else ([], "", "")
        view.show_types(counts, colours, *said)


def _is_by_user(name: str, status: str) -> bool:
    """Whether an annotated box has a type, and the user's, not a classifier's."""
    return bool(name) and status not in UNREVIEWED_TYPES


def classify_targets(viewer: Viewer, image: Image | None) -> list[ClassifyTarget]:
    """What of an image can be classified on the displayed plane: detections, then annotations."""
    targets: list[ClassifyTarget] = []
    if image is None or image not in viewer.layers:
        return targets
    detections = detection_layer_of(viewer, image)
    if detections is not None and detections.store is not None and len(detections.store):
        targets.append(DetectionTarget(viewer, image, detections))
    annotations = annotation_layer_of(viewer, image)
    if annotations is not None and len(annotations.data):
        targets.append(AnnotationTarget(viewer, image, annotations))
    return targets


def annotation_layer_of(viewer: Viewer, image: Image) -> Shapes | None:
    """The layer of an image's annotations, which may have no boxes yet."""
    for layer in viewer.layers:
        if (
            isinstance(layer, Shapes)
            and role_of(layer) == Role.ANNOTATIONS
            and source_image(viewer, layer) is image
        ):
            return layer
    return None
