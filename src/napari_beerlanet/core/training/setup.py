"""From settings to a running trainer: checked data, network, checkpoint info."""

from __future__ import annotations

import copy
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from napari_beerlanet.core.boxes.annotations import MIN_CLASS_BOXES
from napari_beerlanet.core.boxes.classes import assign_colours
from napari_beerlanet.core.boxes.geometry import cxcywh_to_xyxy
from napari_beerlanet.core.checkpoints.checkpoint import checkpoint_hash, load_detector
from napari_beerlanet.core.checkpoints.info import still_unknown
from napari_beerlanet.core.checkpoints.layout import check_layout, layer_shapes
from napari_beerlanet.core.checkpoints.serialize import describe_network
from napari_beerlanet.core.common.device import image_layout
from napari_beerlanet.core.common.events import EventCallback
from napari_beerlanet.core.common.messages import (
    count_of,
    error_detail,
    name_list,
    one_line,
    quoted,
)
from napari_beerlanet.core.common.progress import Report, subprogress
from napari_beerlanet.core.common.storage import DataError, FileError, read_yaml
from napari_beerlanet.core.detection.detector import Detector
from napari_beerlanet.core.detection.network import DEFAULT_ATTENTION_POOL, StainDetectionModel
from napari_beerlanet.core.detection.object_sizes import choose_reference, pool_sizes
from napari_beerlanet.core.detection.stain_statistics import AnnotatedSample
from napari_beerlanet.core.detection.ultralytics_api import cv2, parse_model
from napari_beerlanet.core.evaluation.diff import (
    ModelChange,
    compare_on_images,
    images_to_compare,
)
from napari_beerlanet.core.formats.dataset import (
    Dataset,
    LabelledImage,
    check_dataset,
    dataset_hash,
    read_dataset,
)
from napari_beerlanet.core.project.files import PROJECT_FILE, read_manifest
from napari_beerlanet.core.stains.settings import FrontEnd
from napari_beerlanet.core.training.monitor import (
    TrainingMonitor,
    package_versions,
    training_object_sizes,
)
from napari_beerlanet.core.training.runs import RunFolder
from napari_beerlanet.core.training.settings import (
    DEFAULT_IMAGE_SIZE,
    TrainingSchedule,
    TrainSettings,
    choose_schedule,
)
from napari_beerlanet.core.training.trainer.data import (
    read_item,
    shown_shape,
    training_views,
)
from napari_beerlanet.core.training.trainer.trainer import StainTrainer

_DATA_CHECK_FRACTION = 0.02  # of the reported progress, for checking the data
_SAMPLE_IMAGES = 16  # whose colours and stains describe the data
_SINGLE_IMAGE_MAP_ERROR = 0.1  # of mAP50-95 on one image: about its standard error


def train_in_process(
    folder: RunFolder,
    settings: TrainSettings,
    state: dict[str, Any] | None,
    emit: EventCallback,
    report: Report | None = None,
) -> None:
    """Train as the settings say, from `state` on if there is one; events go to `emit`."""
    with _ultralytics_warnings_as_events(emit), _restored_environment():
        setup = prepare_training(folder, settings, subprogress(report, 0.0, _DATA_CHECK_FRACTION))
        for note in setup.notes:
            emit({"event": "warning", "message": note})
        setup.train(state, emit, subprogress(report, _DATA_CHECK_FRACTION, 1.0))


def prepare_training(
    folder: RunFolder, settings: TrainSettings, report: Report | None = None
) -> TrainingSetup:
    """Check the data, load the model and fit it to the data's classes."""
    assert settings.model is not None
    assert settings.data is not None
    dataset = read_dataset(settings.data)
    notes = [*few_boxes_notes(dataset), *check_dataset(dataset, ("train", "val"), report)]
    parent = load_parent(settings)
    size = training_image_size(settings, parent)
    views = training_views(dataset, parent.info, size)
    images, windows = (sum(map(len, each.splits.values())) for each in (dataset, views))
    if windows > images:
        notes.append(
            f"Images are shown in parts: {windows} windows of {count_of(images, 'image')} have "
            "objects as large as the model knows them."
        )
    settings = resolve_defaults_for(settings, parent, views)
    sample = training_sample(views, size, normalizer=parent.network.normalizer)
    network = build_network(parent, dataset.names, size, settings, sample)
    info = checkpoint_info(parent, network, dataset, settings, size, folder.path.name, views)
    new = [name for name in dataset.names if name not in parent.classes]
    return TrainingSetup(folder, settings, views, network, info, sample, notes, new)


@dataclass
class TrainingSetup:
    """All that a run needs to start; `notes` are sentences on what is odd in the data.

    `dataset` has the images as they are shown, see `training_views`.
    `new_classes` are those that the parent does not know.
    """

    folder: RunFolder
    settings: TrainSettings
    dataset: Dataset
    network: StainDetectionModel
    info: dict[str, Any]
    sample: list[AnnotatedSample]
    notes: list[str]
    new_classes: list[str]

    def train(
        self,
        state: dict[str, Any] | None,
        emit: EventCallback,
        report: Report | None,
    ) -> None:
        """Train to the end, from `state` on if there is one; events go to `emit`."""
        rows = state["rows"] if state is not None else []
        if state is not None and state["data_hash"] != self.info["training"]["data_hash"]:
            self._check_classes(state["classes"])
            message = "The data has changed since the run was started."
            emit({"event": "warning", "message": message})
        monitor = TrainingMonitor(self.folder, self.info, self.sample, emit, report, rows)
        trainer = self._trainer(monitor, state)
        trainer.add_callback("on_train_epoch_end", self._record_batch)
        if rows:  # Ultralytics removes them when a trainer is made
            self.folder.write_results(rows)
        layout = image_layout(trainer.device)
        trainer.model = self.network.to(memory_format=layout)
        every = self.settings.validate_every or 1
        first = (state["epoch"] + 1) * every + 1 if state is not None else 1
        emit(
            {
                "event": "start",
                "epoch": first,
                "epochs": self.settings.epochs,
                "images": self.info["training"]["images"],
                "classes": self.dataset.names,
                "scope": self.settings.scope,
                "device": ", ".join(self.settings.devices),
                "resumed": state is not None,
            }
        )
        trainer.train()

    def _record_batch(self, trainer: StainTrainer) -> None:
        """Write down a batch that memory has decided: a run that goes on or is repeated has it."""
        if trainer.batch_size != self.settings.batch:
            self.settings = self.settings.replace(batch=int(trainer.batch_size))
            self.folder.write_run(settings=self.settings.model_dump())
            self.info["training"] |= _settings_record(self.settings)

    def _check_classes(self, before: list[str]) -> None:
        if before != self.dataset.names:
            raise DataError(
                f"{self.dataset.path}: the run was started with classes {name_list(before)}, and "
                f"now there are {name_list(self.dataset.names)}; start a new run in another folder."
            )

    def _trainer(self, monitor: TrainingMonitor, state: dict[str, Any] | None) -> StainTrainer:
        try:
            return StainTrainer(
                self.settings.overrides(self.info["image_size"], str(self.folder.path)),
                jitter=self.settings.image_jitter(),
                scope=self.settings.scope,
                dataset=self.dataset,
                repeats=self.settings.repeats or 1,
                validate_every=self.settings.validate_every or 1,
                keep_statistics=bool(self.settings.keep_statistics),
                new_classes=self.new_classes,
                average=self.settings.average,
                share=self.settings.share or 1.0,
                fitness_tolerance=_SINGLE_IMAGE_MAP_ERROR
                / max(len(self.dataset.splits["val"]), 1) ** 0.5,
                state=state,
                callback=monitor,
            )
        except (SyntaxError, TypeError) as error:  # what Ultralytics says to wrong arguments
            raise ValueError(one_line(error)) from error


def load_parent(settings: TrainSettings) -> Detector:
    """The model to start from, with the normalizer that the settings name."""
    assert settings.model is not None
    path = Path(settings.model)
    if path.suffix.lower() in (".yaml", ".yml"):
        parent = untrained_detector(path, settings.seed)
    else:
        parent = load_detector(settings.model, device="cpu")
    if settings.normalizer is not None:
        from napari_beerlanet.core.normalization.methods import load_normalizer

        parent.network.normalizer = load_normalizer(settings.normalizer)
    return parent


def untrained_detector(path: Path, seed: int) -> Detector:
    """A network with random weights by its layout: a file, or a name that Ultralytics knows."""
    layout: Any = str(path)
    if path.is_file():
        try:
            layout = read_yaml(path)
            scale = re.search(r"yolo[^\d]*\d+([nslmx])", path.stem)  # as Ultralytics names them
            if scale and isinstance(layout, dict):
                layout = {"scale": scale[1], **layout}
            layout = check_layout(layout)
            layer_shapes(layout, parse_model)  # before any weights are made
        except (OSError, ValueError) as error:
            reason = error_detail(error, 400).removeprefix(f"{path}: ")[:120].rstrip(".")
            raise FileError(f"{path}: no layout of a network ({reason}).") from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            network = StainDetectionModel(layout)
        except FileNotFoundError as error:
            raise FileError(f"{path}: there is no such layout of a network.") from error
        except Exception as error:  # of whatever kind: what is built is what the file says
            reason = error_detail(error)
            raise FileError(
                f"{path}: no network can be built of this layout ({reason})."
            ) from error
    classes = [str(k) for k in range(network.yaml["nc"])]
    note = "The network and its front end are untrained: it starts at random."
    info = describe_network(network, path.stem, classes, DEFAULT_IMAGE_SIZE, notes=[note])
    return Detector(network, info)


def resolve_defaults(settings: TrainSettings) -> TrainSettings:
    """Settings with the defaults that model and data decide filled in."""
    if settings.is_resolved or settings.model is None or settings.data is None:
        return settings
    dataset, parent = read_dataset(settings.data), load_parent(settings)
    views = training_views(dataset, parent.info, training_image_size(settings, parent))
    return resolve_defaults_for(settings, parent, views)


def resolve_defaults_for(
    settings: TrainSettings, parent: Detector, dataset: Dataset
) -> TrainSettings:
    """The same for a model and a dataset that are loaded: the number of images decides.

    An untrained front end is trained with Ultralytics' own schedule, and a head of which no class
    is known at its learning rate.
    """
    if settings.is_resolved:
        return settings
    if is_untrained(parent):
        return settings.resolved(TrainingSchedule())
    images = max(len(dataset.splits.get("train", ())), 1)
    schedule = choose_schedule(images, settings.scope, settings.length, settings.batch_size)
    if not set(parent.classes) & set(dataset.names):
        schedule = replace(schedule, learning_rate=None, share=1.0)  # a new head has no way back
    elif parent.classes != dataset.names:  # new rows of the head learn faster, see `StainTrainer`
        gentle = choose_schedule(images, "all", settings.length, settings.batch_size)
        schedule = replace(
            schedule,
            optimizer=gentle.optimizer,
            learning_rate=gentle.learning_rate,
            share=gentle.share,
        )
    return settings.resolved(schedule)


def class_counts(dataset: Dataset, split: str = "train") -> dict[str, int]:
    """Boxes of each class in a split, in the order of the classes."""
    labels = [item.labels for item in dataset.splits[split]]
    counts = np.bincount(np.concatenate([np.empty(0, np.int64), *labels]), minlength=1)
    padded = np.pad(counts, (0, max(len(dataset.names) - len(counts), 0)))
    return dict(zip(dataset.names, padded.tolist(), strict=False))


def few_boxes_notes(dataset: Dataset) -> list[str]:
    """A sentence on classes with too few training boxes to learn them."""
    few = {n: k for n, k in class_counts(dataset).items() if 0 < k < MIN_CLASS_BOXES}
    if not few:
        return []
    listed = ", ".join(f"{count} of {name}" for name, count in few.items())
    boxes = "box" if next(iter(few.values())) == 1 else "boxes"
    return [
        f"Only {listed.replace(' of ', f' {boxes} of ', 1)}: about {MIN_CLASS_BOXES} boxes of a "
        "class are needed to learn it; annotate more, or expect poor results for it."
    ]


def is_untrained(detector: Detector) -> bool:
    """Whether the front end has never been trained: the file was a plain YOLO, or a layout."""
    notes = detector.info.get("notes", ())
    return any("front end is untrained" in n or "front end are untrained" in n for n in notes)


def comparison_key(model: str | Path, best: Path, dataset: Dataset) -> dict[str, str]:
    """What a comparison of a run's model with its parent depends on."""
    splits = {"val": dataset.splits.get("val", []), "compared": images_to_compare(dataset)}
    data = Dataset(dataset.path, dataset.names, splits, inspections=dataset.inspections)
    return {
        "before": checkpoint_hash(model),
        "after": checkpoint_hash(best),
        "data": dataset_hash(data, list(splits)),
    }


def compare_with_parent(
    parent: Detector, model: Detector, dataset: Dataset, report: Report | None = None
) -> ModelChange | None:
    """How a model's detections differ from its parent's; None where the parent has none to show."""
    if is_untrained(parent):
        return None
    total = sum(len(items) for items in dataset.splits.values())
    return compare_on_images(parent, model, images_to_compare(dataset), total, report)


def training_image_size(settings: TrainSettings, parent: Detector) -> int:
    """Longer side of training images in pixels, rounded up as Ultralytics does."""
    own = DEFAULT_IMAGE_SIZE if is_untrained(parent) else parent.info["image_size"]
    return -(-(settings.image_size or own) // 32) * 32


def build_network(
    parent: Detector,
    names: list[str],
    image_size: int,
    settings: TrainSettings,
    sample: list[AnnotatedSample],
) -> StainDetectionModel:
    """A copy of the parent's network, for other classes with a new head and what fits of it."""
    network: StainDetectionModel
    source = copy.deepcopy(parent.network)
    front_end = _front_end(parent, settings)
    if parent.classes == names and front_end == source.front_end:
        network = source
    elif settings.scope == "stain":
        raise DataError(
            f'scope="stain" keeps the head, which knows {name_list(parent.classes)}, while the '
            f'data has {name_list(names)}; use scope="head" or "all".'
        )
    else:
        network = _rebuild(source, parent.classes, names, settings, front_end)
    network.names = dict(enumerate(names))
    if is_untrained(parent):
        network.measuring_stain.reference_pixels = float(image_size**2)
        network.fit_front_end([one.pixels for one in sample])
    return network


def _front_end(parent: Detector, settings: TrainSettings) -> FrontEnd:
    """What stands before the network; a `ValueError` where that does not go with the settings."""
    own = parent.network.front_end
    wanted = settings.front_end or own
    if wanted != own and not is_untrained(parent):
        raise ValueError(
            f"front_end is {quoted(own)} in the model that training starts from, and stays so; "
            f"leave out front_end={quoted(wanted)}, or start from a plain YOLO."
        )
    if settings.scope == "stain" and wanted in ("none", "grey"):
        raise ValueError(
            f'scope="stain" trains the front end alone, and front_end={quoted(wanted)} has nothing '
            'to train; use scope="head" or "all".'
        )
    return wanted


def _rebuild(
    source: StainDetectionModel,
    before: list[str],
    names: list[str],
    settings: TrainSettings,
    front_end: FrontEnd,
) -> StainDetectionModel:
    """A network for other classes or with another front end, with what fits of `source`."""
    stain: Any = source.measuring_stain
    pool = settings.attention_pool or (
        source.lstainnorm.pool if source.front_end == "lstainnorm" else DEFAULT_ATTENTION_POOL
    )
    torch.manual_seed(settings.seed)
    network: StainDetectionModel = StainDetectionModel(
        copy.deepcopy(source.yaml),
        nc=len(names),
        light=source.light,
        head_width=source.head_width,
        components=stain.components,
        iterations=stain.iterations,
        domain=stain.domain,
        unit_spectra=stain.unit_spectra,
        front_end=front_end,
        attention_pool=pool,
    )
    network.measuring_stain.reference_pixels = stain.reference_pixels
    network.measuring_stain.padding = stain.padding
    network.normalizer = source.normalizer
    source.names, network.names = dict(enumerate(before)), dict(enumerate(names))
    network.load(source, verbose=False)  # rows of classes that both have go by their names
    return network


def training_sample(
    dataset: Dataset, image_size: int, max_images: int = _SAMPLE_IMAGES, normalizer: Any = None
) -> list[AnnotatedSample]:
    """At most so many training images, RGB, none larger than `image_size`, evenly over the set.

    As the network gets them: normalised, if there is a `normalizer`.
    """
    items = dataset.splits["train"]
    chosen = np.unique(np.linspace(0, len(items) - 1, min(max_images, len(items))).round())
    return [_read_sample(items[int(k)], image_size, normalizer) for k in chosen]


def _read_sample(item: LabelledImage, image_size: int, normalizer: Any) -> AnnotatedSample:
    image = read_item(item, normalizer)[..., ::-1]
    scale = image_size / max(image.shape[:2])
    if scale < 1:
        size = [max(round(side * scale), 1) for side in image.shape[1::-1]]
        image = cv2.resize(image, size, interpolation=cv2.INTER_AREA)
    xyxy = cxcywh_to_xyxy(item.cxcywh, image.shape[:2]).astype(np.float32)
    return AnnotatedSample(np.ascontiguousarray(image), xyxy, item.labels)


def checkpoint_info(
    parent: Detector,
    network: StainDetectionModel,
    dataset: Dataset,
    settings: TrainSettings,
    image_size: int,
    name: str,
    views: Dataset | None = None,
) -> dict[str, Any]:
    """The checkpoint's `info`, without what an epoch adds to it.

    `views`: the dataset as it is shown, where that differs.
    """
    shown = views or dataset
    entries: dict[str, Any] = {
        "pixel_size": _working_pixel_size(shown, settings, image_size),
        **_pooled_object_sizes(parent, shown, image_size),
        "training": _training_record(dataset, settings),
    }
    if parent.classes == dataset.names:
        entries["densities_seen"] = parent.info.get("densities_seen")
    inherited = dict(zip(parent.classes, parent.info["colours"], strict=True))
    colours = assign_colours(dataset.names, _project_colours(dataset), inherited)
    entries["colours"] = [colours[name] for name in dataset.names]
    entries["unknown"] = still_unknown(parent.info.get("unknown"), dataset.names)
    return describe_network(network, name, dataset.names, image_size, **entries)


def _project_colours(dataset: Dataset) -> dict[str, str]:
    """The colours that the user sees in the project that the data are of."""
    folder = dataset.path.parent
    if not (folder / PROJECT_FILE).is_file():
        return {}
    try:
        return read_manifest(folder).colours
    except FileError:  # then it is just a folder with data
        return {}


def _pooled_object_sizes(parent: Detector, dataset: Dataset, image_size: int) -> dict[str, Any]:
    """Of the data's boxes together with those that the parent has learned its classes from."""
    sizes = parent.info.get("object_sizes") or {}
    before = {name: sizes[name] for name in dataset.names if name in sizes}
    now = training_object_sizes(dataset, image_size)
    larger = image_size / parent.info["image_size"]
    pooled = pool_sizes(before, now.classes, image_size, larger)
    return {
        "object_sizes": pooled,
        "size_spread": now.spread,
        "reference_class": choose_reference(pooled, parent.info.get("reference_class")),
    }


def _training_record(dataset: Dataset, settings: TrainSettings) -> dict[str, Any]:
    """The training record; of paths it keeps the last two names, which say enough."""
    data = "/".join(dataset.path.resolve().parts[-2:])
    random_start = Path(str(settings.model)).suffix.lower() in (".yaml", ".yml")
    return {
        "data_hash": dataset_hash(dataset),
        "data": data,
        "images": {split: len(dataset.splits[split]) for split in ("train", "val")},
        "boxes": {split: class_counts(dataset, split) for split in ("train", "val")},
        **_settings_record(settings),
        "seed": settings.seed,
        "scope": settings.scope,
        "versions": package_versions(),
        "parent": None if random_start else checkpoint_hash(str(settings.model)),
    }


def _settings_record(settings: TrainSettings) -> dict[str, Any]:
    return {"settings": settings.portable().model_dump(), "command": settings.command()}


def _working_pixel_size(dataset: Dataset, settings: TrainSettings, image_size: int) -> float | None:
    """Micrometres per pixel of images as long as `image_size`; None where that is not known."""
    if settings.pixel_size is None:
        return None
    facts = dataset.inspections
    sides = [max(shown_shape(item, facts)) for item in dataset.splits["train"]]
    return round(settings.pixel_size * float(np.median(sides)) / image_size, 6)


@contextmanager
def _ultralytics_warnings_as_events(emit: EventCallback) -> Iterator[None]:
    """Have Ultralytics' warnings emitted as events instead of printed on standard output."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            emit({"event": "warning", "message": " ".join(record.getMessage().split())})

    logger = logging.getLogger("ultralytics")
    before = logger.handlers[:]
    logger.handlers[:] = [Handler(logging.WARNING)]
    try:
        yield
    finally:
        logger.handlers[:] = before


@contextmanager
def _restored_environment() -> Iterator[None]:
    """Put back what Ultralytics sets for reproducible training."""
    names = ("CUBLAS_WORKSPACE_CONFIG", "PYTHONHASHSEED")
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
