"""A project: annotated images, the training crops cut from them, and the train/validation split.

    project = Project.create(folder, ["RBC", "WBC"])
    source = ImageSource.from_image(rgb, "smear 1.tif")
    project.save_annotations(source, annotations)           # on disk when it returns
    project.add_image(source, rgb, annotations, training_size=320)
    project.summary(), project.split_notes()

One program writes to a project; others may open it `read_only`. Every change is one transaction: it
is made whole or not at all, whatever ends the program.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from napari_beerlanet.core.boxes.annotations import Annotations
from napari_beerlanet.core.boxes.classes import parse_colour
from napari_beerlanet.core.common.locking import FolderLock
from napari_beerlanet.core.common.messages import count_of, name_list, shortened
from napari_beerlanet.core.common.progress import Report, report_progress, subprogress
from napari_beerlanet.core.common.storage import DataError, FileError, atomic_path
from napari_beerlanet.core.images.rgb import PADDING_GREY
from napari_beerlanet.core.project.crop_files import (
    AddedImage,
    CropUpdate,
    count_unused_boxes,
    describe_unused_boxes,
    split_group,
    split_group_of_crop,
    stage_cell_table,
    stage_cells,
    stage_crops,
    stage_update,
)
from napari_beerlanet.core.project.crops import plan_crops, split_for_validation
from napari_beerlanet.core.project.files import (
    ANNOTATIONS_DIR,
    DATA_FILE,
    PROJECT_FILE,
    CellRecord,
    CropRecord,
    ImageSource,
    ProjectError,
    annotations_digest,
    clean_class_names,
    clean_names,
    encode_annotations,
    encode_data_yaml,
    encode_manifest,
    encode_with_renamed_classes,
    encode_with_renamed_types,
    explain_disk_errors,
    read_annotations,
    read_cell_records,
    read_crop_records,
    read_image_source,
    read_manifest,
)
from napari_beerlanet.core.project.folder import (
    create_project_folder,
    has_unfinished_transaction,
    open_project_folder,
    replay_journal,
    transaction,
)
from napari_beerlanet.core.project.split import TRAIN, VAL, describe_split

_PIXEL_SIZE_TOLERANCE = 0.05  # by which pixel sizes of images may differ and still be one


class Project:
    """An open project.

    `read_only` is the reason why nothing can be changed, or ""; `notes` are sentences on files that
    are damaged.
    """

    # --- opening and closing ---

    def __init__(self, path: Path, lock: FolderLock | None, read_only: str) -> None:
        self.path, self.read_only, self._lock = path, read_only, lock
        self.notes: list[str] = []
        self._change_lock = threading.RLock()
        self.reload()

    @classmethod
    def create(cls, path: str | os.PathLike[str], classes: Sequence[str], seed: int = 0) -> Project:
        """Make a project in a folder that is new, empty, or at least has no project."""
        root = Path(path).absolute()
        create_project_folder(root, classes, seed)
        return cls.open(root)

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], read_only: bool = False, break_lock: bool = False
    ) -> Project:
        """Open a project, to change it or to read it only.

        A `LockedError` where another program has it open. A folder that cannot be written to, or
        is of a newer version, is opened `read_only`. `break_lock` is for a disk without locks on
        which another computer has left its mark.
        """
        root = Path(path).absolute()
        lock, reason = open_project_folder(root, read_only, break_lock)
        try:
            return cls(root, lock, reason)
        except BaseException:
            if lock is not None:
                lock.release()
            raise

    def reload(self) -> None:
        """Read again what is on the disk."""
        with explain_disk_errors(self.path, "read the project"):
            self._manifest = read_manifest(self.path)
            self._crops = read_crop_records(self.path)
            self._cells = read_cell_records(self.path)
            self._sources: dict[str, ImageSource] = {}
            self.notes = []
            for file in sorted((self.path / ANNOTATIONS_DIR).glob("[!.]*.json")):
                try:
                    self._sources[file.stem] = read_image_source(file)
                except FileError as error:
                    self.notes.append(str(error))

    def close(self) -> None:
        """Let others change the project."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        self.read_only = self.read_only or f"{self.path}: the project is closed."

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *why: object) -> None:
        self.close()

    # --- what it holds ---

    @property
    def classes(self) -> list[str]:
        """Names of the classes, by label."""
        return list(self._manifest.classes)

    @property
    def types(self) -> list[str]:
        """Names of the cell types, in the order of their keys."""
        return list(self._manifest.types)

    @property
    def cells(self) -> list[CellRecord]:
        """The cells of added images that have a type: what a classifier learns from."""
        return list(self._cells)

    @property
    def colours(self) -> dict[str, str]:
        """ "#rrggbb" by class, of those that have one."""
        return dict(self._manifest.colours)

    @property
    def type_colours(self) -> dict[str, str]:
        """ "#rrggbb" by cell type, of those that have one."""
        return dict(self._manifest.type_colours)

    @property
    def data(self) -> Path:
        """The data.yaml to train with."""
        return self.path / DATA_FILE

    @property
    def seed(self) -> int:
        """Random seed of the train/validation split."""
        return self._manifest.seed

    @property
    def training_size(self) -> int:
        """The size for which images were added last; 0 if none was."""
        return self._manifest.training_size

    @property
    def crops(self) -> list[CropRecord]:
        """Where each training crop comes from."""
        return list(self._crops)

    @property
    def pixel_size(self) -> float | None:
        """Micrometres per pixel of the crops, for `TrainSettings`; None unless all images agree.

        Crops of different lengths are resized to one: what must agree is the size after that.
        """
        sources = [self._sources.get(crop.source) for crop in self._crops]
        sizes = [source.pixel_size for source in sources if source and source.pixel_size]
        if not sizes or len(sizes) < len(sources):
            return None
        sides = np.array([crop.side for crop in self._crops], np.float64)
        lengths = sides * [float(np.sqrt(np.prod(size))) for size in sizes]
        middle = float(np.median(lengths))
        if np.abs(lengths / middle - 1).max() > _PIXEL_SIZE_TOLERANCE:
            return None
        return round(middle / float(np.median(sides)), 6)

    def sources(self) -> dict[str, ImageSource]:
        """All images with saved annotations, by id."""
        return dict(self._sources)

    def id_of(self, source: ImageSource) -> str:
        """The id of an image in this project, found by its pixels, wherever its file lies."""
        if source.id in self._sources:
            return source.id
        for name, other in list(self._sources.items()):
            if (other.digest, other.plane) == (source.digest, source.plane):
                return name
        return source.id

    def previous_version_of(self, source: ImageSource) -> str:
        """The id of an image that lay in the same file and was as large, "" if there is none.

        If it is the same picture, `reuse_annotations` transfers its annotations.
        """
        if self.id_of(source) in self._sources:
            return ""
        earlier = (n for n, o in list(self._sources.items()) if source.is_changed_version_of(o))
        return next(earlier, "")

    def is_added(self, source: ImageSource, content: Mapping[str, Any]) -> bool:
        """Whether its crops are of these pixels and annotations (as `Annotations.to_json` has)."""
        name = self.id_of(source)
        if name not in self._manifest.added or not any(c.source == name for c in self._crops):
            return False
        digest = annotations_digest(source, content, self.classes, self.types)
        return self._manifest.added[name] == digest

    def check_ready_to_train(self) -> None:
        """A `DataError` that says what is missing for training."""
        if not self._crops:
            raise DataError("No image has been added yet: annotate one and add it to the project.")
        if not any(crop.boxes for crop in self._crops):
            raise DataError("None of the images has a box: there is nothing to train on yet.")

    def summary(self) -> dict[str, Any]:
        """Numbers: images, crops and boxes (per class) of each split, and all in a sentence."""
        splits: dict[str, Any] = {}
        for split in (TRAIN, VAL):
            crops = [crop for crop in self._crops if crop.split == split]
            counts = dict.fromkeys(self.classes, 0)
            for label, count in (pair.split(":") for crop in crops for pair in crop.counts.split()):
                if int(label) < len(self.classes):
                    counts[self.classes[int(label)]] += int(count)
            images = {crop.source for crop in crops}
            splits[split] = {"images": len(images), "crops": len(crops), "boxes": counts}
            typed = Counter(cell.type for cell in self._cells if cell.split == split)
            splits[split]["types"] = {name: typed[name] for name in self.types}
        total = len({crop.source for crop in self._crops})
        boxes = sum(sum(part["boxes"].values()) for part in splits.values())
        sentence = (
            f"{count_of(total, 'image')} in {count_of(len(self._crops), 'crop')} with "
            f"{count_of(boxes, 'box', 'boxes')}; {len(self._sources)} annotated."
        )
        if self._cells:
            sentence += f" {count_of(len(self._cells), 'cell has', 'cells have')} a type."
        return {"images": total, "annotated": len(self._sources), **splits, "sentence": sentence}

    def split_notes(self) -> list[str]:
        """Sentences on which images validate, and where that is too little."""
        boxed = {crop.source for crop in self._crops if crop.boxes}
        if self._crops and not boxed:
            return ["No image that was added has boxes, so there is nothing to train on."]
        splits = [split for name, split in self._manifest.split.items() if name in boxed]
        return describe_split(splits, self._manifest.one)

    # --- annotations ---

    def save_annotations(self, source: ImageSource, annotations: Annotations) -> Path:
        """Write an image's annotations; they are on the disk when this returns."""
        self._check_writable("save annotations")
        name = self.id_of(source)
        path = self._annotation_path(name)
        with explain_disk_errors(self.path, "save annotations"), atomic_path(path) as unfinished:
            unfinished.write_bytes(encode_annotations(source, annotations))
        self._sources[name] = source
        return path

    def load_annotations(self, source: ImageSource) -> Annotations | None:
        """An image's annotations as saved last, None if there are none."""
        path = self._annotation_path(self.id_of(source))
        with explain_disk_errors(self.path, "read annotations"):
            return read_annotations(path, source) if path.exists() else None

    def reuse_annotations(self, source: ImageSource, previous: str) -> Annotations:
        """Transfer the annotations of `previous`, see `previous_version_of`, to the changed file.

        The image keeps the id of `previous`, and so its crops are replaced when it is added again.
        """
        annotations = self.load_annotations(self._sources[previous])
        if annotations is None:
            raise ProjectError(f"{previous}: its annotations are gone from the project.")
        before = self._sources[previous]
        self._sources[previous] = source
        try:
            self.save_annotations(source, annotations)
        except BaseException:
            self._sources[previous] = before
            raise
        return annotations

    def _annotation_path(self, name: str) -> Path:
        return self.path / ANNOTATIONS_DIR / f"{name}.json"

    # --- classes ---

    def add_classes(self, names: Sequence[str]) -> list[str]:
        """Add those that are new, behind the others; returns all."""
        self._prepare_change("add a class")
        wanted = clean_class_names([*self.classes, *(n for n in names if n not in self.classes)])
        if wanted != self.classes:
            self._write_classes(wanted, {})
        return self.classes

    def rename_class(self, old: str, new: str) -> None:
        """Give a class another name, in saved annotations, too."""
        self._prepare_change("rename a class")
        if old not in self.classes:
            raise ProjectError(
                f"There is no class {shortened(old)}; there are {name_list(self.classes)}."
            )
        names = clean_class_names([new if name == old else name for name in self.classes])
        self._write_classes(names, {old: " ".join(new.split())})

    def add_types(self, names: Sequence[str]) -> list[str]:
        """Add the cell types that are new, behind the others; returns all."""
        wanted = clean_names([*self.types, *(n for n in names if n not in self.types)], "type")
        if wanted != self.types:
            self._prepare_change("add a type")
            self._write_types(wanted, {})
        return self.types

    def rename_type(self, old: str, new: str) -> None:
        """Give a cell type another name, in saved annotations, too."""
        self._prepare_change("rename a type")
        if old not in self.types:
            raise ProjectError(
                f"There is no type {shortened(old)}; there are {name_list(self.types)}."
            )
        names = clean_names([new if name == old else name for name in self.types], "type")
        self._write_types(names, {old: " ".join(new.split())})

    def _write_types(self, names: list[str], renamed: dict[str, str]) -> None:
        with self._change_lock:
            colours = {renamed.get(name, name): c for name, c in self.type_colours.items()}
            manifest = replace(self._manifest, types=names, type_colours=colours)
            cells = [replace(c, type=renamed.get(c.type, c.type)) for c in self._cells]
            doing = "write the types"
            with explain_disk_errors(self.path, doing), transaction(self.path) as change:
                for name in list(self._sources) if renamed else ():
                    content = encode_with_renamed_types(self._annotation_path(name), renamed)
                    if content is not None:
                        change.write(f"{ANNOTATIONS_DIR}/{name}.json", content)
                stage_cell_table(change, cells, self._cells)
                change.write(PROJECT_FILE, encode_manifest(manifest))
            self._manifest, self._cells = manifest, cells

    def set_colours(self, colours: Mapping[str, str]) -> None:
        """Store the colours "#rrggbb" of classes, so that they stay in every viewer and model."""
        self._write_colours("colours", colours)

    def set_type_colours(self, colours: Mapping[str, str]) -> None:
        """Store the colours "#rrggbb" of cell types."""
        self._write_colours("type_colours", colours)

    def _write_colours(self, of: str, colours: Mapping[str, str]) -> None:
        for colour in colours.values():
            parse_colour(colour)
        before = getattr(self._manifest, of)
        merged: Any = {**before, **colours}
        if merged == before:
            return
        self._prepare_change("change a colour")
        with self._change_lock:
            manifest = replace(self._manifest, **{of: merged})
            doing = "write the colours"
            with explain_disk_errors(self.path, doing), transaction(self.path) as change:
                change.write(PROJECT_FILE, encode_manifest(manifest))
            self._manifest = manifest

    def _write_classes(self, names: list[str], renamed: dict[str, str]) -> None:
        doing = "write the classes"
        with self._change_lock:
            colours = {renamed.get(name, name): c for name, c in self.colours.items()}
            manifest = replace(self._manifest, classes=names, colours=colours)
            with explain_disk_errors(self.path, doing), transaction(self.path) as change:
                for name in list(self._sources) if renamed else ():
                    content = encode_with_renamed_classes(self._annotation_path(name), renamed)
                    change.write(f"{ANNOTATIONS_DIR}/{name}.json", content)
                change.write(PROJECT_FILE, encode_manifest(manifest))
                change.write(DATA_FILE, encode_data_yaml(manifest))
            self._manifest = manifest

    # --- images to train on ---

    def add_image(
        self,
        source: ImageSource,
        rgb: Any,
        annotations: Annotations,
        training_size: int,
        *,
        crop_size: int | None = None,
        grey: int = PADDING_GREY,
        reviewed_only: bool = False,
        report: Report | None = None,
    ) -> AddedImage:
        """Cut the annotated regions of an image (H, W, 3 or 4) into training crops.

        `crop_size` image pixels become `training_size` in training, see `choose_crop_size`; as many
        by default. `reviewed_only` hides boxes that were copied and not reviewed: they are neither
        objects nor background; cells whose type is a classifier's, not reviewed, are not stored
        with it. An image that was added before is brought up to date. Whatever
        happens meanwhile, the project has either the crops it had or the new ones.

        Cells that have a type are stored for `train_classifier`, in regions or not.
        """
        self.save_annotations(source, annotations)
        doing = "add the image"
        with self._change_lock:
            self._prepare_change(doing)
            content = annotations.to_json()
            if tuple(rgb.shape[:2]) != source.shape:
                raise ProjectError(f"{source.name}: not the image that was annotated, by its size.")
            annotations = replace(annotations, image_shape=source.shape)
            unused = {f"with {has}": int(n.sum()) for has, n in annotations.unusable().items()}
            used, notes = annotations.trainable()
            used = self._with_project_classes(used)
            hidden = used[~used.reviewed].xyxy if reviewed_only else np.empty((0, 4))
            used = used[used.reviewed] if reviewed_only else used
            typed = annotations[np.isin(annotations.object_ids, used.object_ids)].typed()
            by_model = int((~typed.type_reviewed).sum())
            typed = typed[typed.type_reviewed] if reviewed_only else typed
            name = self.id_of(source)
            old, others = self._crops_of(name)
            crop_size = crop_size or training_size
            planned = plan_crops(used, crop_size)
            if not planned:
                raise ProjectError(
                    f"{source.name}: no region of it is marked as annotated; mark where you have "
                    "annotated every object, or the whole image."
                )
            group = split_group(source.name, source.path, source.plane, name)
            if not any(crop.boxes and split_group_of_crop(crop) != group for crop in others):
                planned = split_for_validation(planned, used, crop_size)
            with explain_disk_errors(self.path, doing), transaction(self.path) as change:
                new = stage_crops(
                    change,
                    name,
                    source,
                    rgb,
                    used,
                    planned,
                    crop_size=crop_size,
                    grey=grey,
                    existing={crop.file: crop for crop in old},
                    hidden=hidden,
                    report=subprogress(report, 0.0, 0.8),
                )
                if not new:
                    raise ProjectError(
                        f"{source.name}: nothing is visible in its annotated regions."
                    )
                cells = stage_cells(change, name, rgb, typed, subprogress(report, 0.8, 0.95))
                new_types = [n for n in typed.type_counts() if n not in self.types]
                types = clean_names([*self.types, *new_types], "type")
                digest = annotations_digest(source, content, self.classes, types)
                added = {**self._manifest.added, name: digest}
                manifest = replace(
                    self._manifest, training_size=training_size, types=types, added=added
                )
                cells += [cell for cell in self._cells if cell.source != name]
                update = stage_update(change, manifest, others, old, new, cells, self._cells)
            self._apply(update)
        report_progress(report, 1, 1, "done")
        outside = count_unused_boxes(used, new)
        unused |= {"copied from detections and not reviewed": len(hidden)}
        unused |= {"mostly outside of the annotated regions or larger than a crop": outside}
        return AddedImage(
            name,
            self._manifest.split[name],
            len(new),
            sum(crop.record.boxes for crop in new),
            [*notes, *describe_unused_boxes(outside), *update.notes, *self.split_notes()],
            len(used) - outside,
            {reason: count for reason, count in unused.items() if count},
            typed.type_counts(),
            by_model,
        )

    def remove_image(self, name: str) -> None:
        """Take an image's crops out of the project, by its id; its annotations stay."""
        doing = "remove the image"
        with self._change_lock:
            self._prepare_change(doing)
            old, others = self._crops_of(name)
            with explain_disk_errors(self.path, doing), transaction(self.path) as change:
                cells = [cell for cell in self._cells if cell.source != name]
                update = stage_update(change, self._manifest, others, old, [], cells, self._cells)
            self._apply(update)

    def _crops_of(self, name: str) -> tuple[list[CropRecord], list[CropRecord]]:
        """The crops of an image, and all others."""
        mine = [crop for crop in self._crops if crop.source == name]
        return mine, [crop for crop in self._crops if crop.source != name]

    def _with_project_classes(self, annotations: Annotations) -> Annotations:
        try:
            return annotations.with_classes(self.classes)
        except ValueError as error:
            raise ProjectError(str(error)) from error

    def _apply(self, update: CropUpdate) -> None:
        self._manifest, self._crops = update.manifest, update.records
        self._cells = update.cells

    # --- before a change ---

    def _check_writable(self, doing: str) -> None:
        if self.read_only:
            raise ProjectError(f"{self.read_only} It is not possible to {doing}.")
        with explain_disk_errors(self.path, doing):
            # Where a drive is gone, no new folder may take its place.
            (self.path / PROJECT_FILE).stat()

    def _prepare_change(self, doing: str) -> None:
        """For a change of several files: first, finish one that was started."""
        self._check_writable(doing)
        with self._change_lock, explain_disk_errors(self.path, doing):
            if has_unfinished_transaction(self.path):
                replay_journal(self.path)
                self.reload()
