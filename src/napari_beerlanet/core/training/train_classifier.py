"""`train_classifier`, and the same as a process of its own.

    python -m napari_beerlanet.core.training.train_classifier --config RUN/run.json [--resume]

Run folder, events and ways to stop are those of `fine_tune`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator

from napari_beerlanet.core.boxes.annotations import MIN_CLASS_BOXES
from napari_beerlanet.core.classification.settings import ClassifierSettings
from napari_beerlanet.core.common.events import EventCallback, run_process
from napari_beerlanet.core.common.messages import name_list, quoted
from napari_beerlanet.core.common.progress import Report, subprogress
from napari_beerlanet.core.common.storage import DataError
from napari_beerlanet.core.formats.class_folders import (
    WHOLE,
    CropDataset,
    check_crop_dataset,
    read_crop_dataset,
    unreviewed_notes,
    with_classes,
    with_validation,
)
from napari_beerlanet.core.stains.settings import FrontEnd
from napari_beerlanet.core.training.fine_tune import (
    TrainingRun,
    is_model,
    name_or_path,
    normalizer_or_path,
    run_config,
)
from napari_beerlanet.core.training.runs import RunFolder
from napari_beerlanet.core.training.settings import JitterKind, RunSettings

# Loaded where needed: wrong settings are refused before torch has loaded.
if TYPE_CHECKING:
    from torch import nn

    from napari_beerlanet.core.classification.classifier import Classifier
    from napari_beerlanet.core.normalization.normalizer import Normalizer

DEFAULT_BACKBONE = "resnet18"
_OWN = "own"  # as `OWN_BACKBONE`, known without torch
_DATA_CHECK_FRACTION = 0.05  # of the reported progress, for checking the data
_MIN_PROJECT_FILL = 0.5  # with room for jitter in what a project stores around a cell
_FEW_CROPS = 400  # below which a parent's batch statistics are kept, and half of its weights
_PLAIN: dict[str, Any] = {"keep_statistics": False, "share": 1.0, "cosine": False, "warm_up": 0}
_PLAIN |= {"head_factor": 1.0, "weight_decay": 0.0, "averaging": 0.0, "label_smoothing": 0.0}
# The paper's own, from scratch.
_SCRATCH: dict[str, Any] = {**_PLAIN, "epochs": 20, "batch": 128, "learning_rate": 1e-4}
# From weights of the backbone; chosen across laboratories, see docs/classification.md.
_PRETRAINED: dict[str, Any] = {"epochs": 6, "batch": 32, "learning_rate": 6e-4, "cosine": True}
_PRETRAINED |= {"warm_up": 15, "head_factor": 5.0, "weight_decay": 0.05, "averaging": 0.97}
_PRETRAINED |= {"label_smoothing": 0.1, "keep_statistics": False, "share": 1.0}
_FINE_TUNE: dict[str, Any] = {**_PLAIN, "epochs": 10, "batch": 64, "learning_rate": 1e-4}
_FINE_TUNE |= {"cosine": True}
# As `fine_tune` with few images: some hundred steps at most, and no further than half the way.
_FINE_TUNE_FEW: dict[str, Any] = {**_FINE_TUNE, "batch": 16, "keep_statistics": True, "share": 0.5}
_FEW_STEPS_FACTOR, _FEW_STEPS_EXPONENT = 20, 0.35
_MIN_STEPS = 150  # of few crops without a parent


class ClassifierTrainSettings(ClassifierSettings, RunSettings):
    """The arguments of `train_classifier`, and the settings in its run.json.

    None leaves a setting to the number of crops, and to whether a classifier is there to start
    from.
    """

    # A laboratory differs from another by its camera and stray light as much as by its stain.
    default_jitter: ClassVar[dict[str, Any]] = {
        "flare": 0.3,
        "saturation": (0.6, 2.0),
        "hue": 0.25,
    }

    task: Literal["classify"] = Field("classify", description="What is trained.")
    data: str | None = Field(
        None,
        description="A folder per class, train and val folders of these, a project or a data.yaml.",
    )
    model: str | None = Field(None, description="A classifier to start from.")
    backbone: str = Field(
        DEFAULT_BACKBONE, description="A classification network of torchvision, by its name."
    )
    weights: str | None = Field(
        None, description="A file with weights of the backbone to start from, as torchvision's."
    )
    detector: str | None = Field(
        None, description="A detector whose boxes recentre and rescale crops: a name, or a path."
    )
    object_class: str | None = Field(
        None, description="The class of the detector's boxes that count; by default all."
    )
    reference: str | None = Field(
        None,
        description="Crops of types that must not be forgotten, in a folder per type; they are not "
        "trained on, both models are measured with them.",
    )
    epochs: int | None = Field(None, ge=1, description="Passes through the training crops.")
    batch: int | None = Field(None, ge=2, description="Crops per training step.")
    learning_rate: float | None = Field(None, gt=0, description="Learning rate of Adam.")
    balanced: bool = Field(True, description="Show as many crops of each class.")
    prior: dict[str, float] | None = Field(
        None,
        description="How frequent classes are in what will be classified, relative to the others "
        "(1 where none is given); training itself is balanced.",
    )
    validation: float = Field(
        0.2, gt=0, lt=1, description="Part of a class, or of images, that validates without a set."
    )
    scale_jitter: float = Field(
        0.2, ge=0, le=1, description="How much the scale of crops varies (of its logarithm)."
    )
    shift_jitter: float = Field(
        0.05, ge=0, le=0.5, description="How much the place of crops varies, in sides of a crop."
    )
    blur_jitter: float = Field(
        0.03, ge=0, le=0.2, description="Largest blur of crops (σ), in sides of a crop."
    )
    border_jitter: float = Field(
        0.25, ge=0, le=1, description="Part of the cells that are cut by a border of the image."
    )
    turn_jitter: bool = Field(
        True, description="Turn cells by any angle; crops without surroundings by quarter turns."
    )
    label_smoothing: float | None = Field(
        None, ge=0, lt=1, description="Part of a label's weight that all classes share."
    )
    weight_decay: float | None = Field(None, ge=0, lt=1, description="Weight decay of AdamW.")
    head_factor: float | None = Field(
        None, gt=0, le=100, description="Learning rate of the head, in learning rates of the rest."
    )
    averaging: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="Momentum of the average of weights over steps, which is the result; 0: none.",
    )
    warm_up: int | None = Field(
        None, ge=0, description="Steps in which the learning rate rises to its value."
    )
    keep_statistics: bool | None = Field(
        None, description="Keep the batch-norm statistics of the model that training starts from."
    )
    share: float | None = Field(
        None,
        gt=0,
        le=1,
        description="How far the weights move from the starting model to what was learned.",
    )
    cosine: bool | None = Field(None, description="Let the learning rate fall along a cosine.")

    @field_validator("prior")
    @classmethod
    def _check_prior(cls, prior: dict[str, float] | None) -> dict[str, float] | None:
        for name, value in (prior or {}).items():
            if not 0 < value <= 1e6:
                raise ValueError(f"prior of {name} must be a number above 0, not {quoted(value)}.")
        return prior

    @property
    def network_settings(self) -> ClassifierSettings:
        """What stands in front of the backbone."""
        return ClassifierSettings(
            **{name: getattr(self, name) for name in ClassifierSettings.model_fields}
        )

    def resolved(self, crops: int) -> ClassifierTrainSettings:
        """With the values that so many training crops ask for where there are none."""
        chosen = _SCRATCH if self.weights is None else _PRETRAINED
        if 0 < crops < _FEW_CROPS and self.model is None:
            chosen = {**chosen, "batch": _FINE_TUNE_FEW["batch"]}
            steps = -(-crops // (self.batch or chosen["batch"]))
            chosen["epochs"] = max(chosen["epochs"], -(-_MIN_STEPS // steps))
        chosen = chosen if self.model is None else _FINE_TUNE
        if self.model is not None and crops < _FEW_CROPS:
            batch = self.batch or _FINE_TUNE_FEW["batch"]
            steps = _FEW_STEPS_FACTOR * crops**_FEW_STEPS_EXPONENT
            chosen = {**_FINE_TUNE_FEW, "epochs": max(round(steps / -(-crops // batch)), 3)}
        open_ = {key: v for key, v in chosen.items() if getattr(self, key) is None}
        return self.replace(**open_)

    @property
    def batch_size(self) -> int:
        """Crops per step, of settings that are resolved."""
        assert self.batch is not None
        return self.batch


_DEFAULTS = ClassifierTrainSettings()


def train_classifier(
    data: str | os.PathLike[str] | None,
    output: str | os.PathLike[str],
    backbone: str | nn.Module = DEFAULT_BACKBONE,
    front_end: FrontEnd = _DEFAULTS.front_end,
    epochs: int | None = _DEFAULTS.epochs,
    report: Report | None = None,
    *,
    model: Classifier | str | os.PathLike[str] | None = None,
    weights: str | os.PathLike[str] | None = None,
    batch: int | None = _DEFAULTS.batch,
    learning_rate: float | None = _DEFAULTS.learning_rate,
    seed: int = _DEFAULTS.seed,
    device: str = _DEFAULTS.device,
    jitter: bool | JitterKind | dict[str, Any] = _DEFAULTS.jitter,
    normalizer: Normalizer | str | os.PathLike[str] | None = _DEFAULTS.normalizer,
    resume: bool = False,
    progress: EventCallback | None = None,
    **settings: Any,
) -> Classifier:
    """Train a classifier on crops and return it as it was after its best epoch.

    Parameters
    ----------
    data
        A folder per class; folders train and val (or test) of these, as Ultralytics has them; a
        project, whose cells that have a type are learned from, split as its images are (all boxes
        by their class where no cell has a type); or a data.yaml, whose boxes are.
    output
        Folder of the run, see `core.training.runs`; its best.safetensors is what is returned.
    backbone
        The name of a classification network of torchvision, or a module from (N, 3, H, W) to
        logits, which is trained in place.
    front_end
        "beerlanet"; "none": the backbone sees crops as they are; "grey"; "lstainnorm".
    epochs, batch, learning_rate
        None: as in the paper (20 epochs of 128 crops a step, Adam at 1e-4; of fewer than 400 crops
        16 a step and at least 150 steps); where the backbone
        starts from `weights`, 6 epochs of 32 at 6e-4 with averaged weights; where training
        starts from a classifier, what the number of crops asks for.
    model
        A classifier to start from. Backbone, front end and crop size are its own. With a project
        it keeps the types that it knows, also those without crops, and gets the new ones.
    weights
        A file (.pt, .pth, .safetensors) with weights of the backbone, in torchvision's format;
        nothing in it is executed. Without one the backbone starts at random.
    jitter
        "stain" or True: vary stains, strength, illumination and focus (`StainJitter`; a dict has
        its settings); "hed": `HedJitter`; "none" or False.
    normalizer
        A fitted normalizer (or the path of a saved one) that every image goes through before crops
        are cut, in training and wherever the model is used: it is stored in the checkpoint.
    resume
        Resume after the last finished epoch of the run in `output`, with the settings that it was
        started with; `data` may be None then. A backbone of your own has to be given again.
    report, progress
        Called after every batch, and with every event; `Cancelled` raised in either ends the run.
    settings
        Further `ClassifierTrainSettings`, for instance input_size=96 or normalize=True.
    """
    start = model if is_model(model) else None
    for name in {"detector", "reference"} & {key for key in settings if settings[key] is not None}:
        settings[name] = name_or_path(settings[name])
    own = None if isinstance(backbone, str) else backbone
    own_normalizer, saved = normalizer_or_path(normalizer)
    chosen = ClassifierTrainSettings(
        data=None if data is None else os.path.abspath(data),
        model=None if model is None or start is not None else name_or_path(model),  # type: ignore[arg-type]
        backbone=backbone if isinstance(backbone, str) else _OWN,
        weights=None if weights is None else os.path.abspath(weights),
        front_end=front_end,
        epochs=epochs,
        batch=batch,
        learning_rate=learning_rate,
        seed=seed,
        device=device,
        jitter=jitter,
        normalizer=saved,
        **settings,
    )
    with RunFolder(output) as folder:
        run = _ClassifierRun(folder, report, progress)
        run.own_backbone, run.normalizer = own, own_normalizer
        trained: Classifier = run.run(chosen, start, resume)
        return trained


class _ClassifierRun(TrainingRun):
    settings_type = ClassifierTrainSettings
    task = "classify"
    smallest_batch = 2  # one crop has no statistics
    own_backbone: nn.Module | None = None

    def check_startable(self, requested: ClassifierTrainSettings, start: Any) -> None:
        if requested.data is None:
            raise ValueError(f"{self.folder.path}: no run to resume; give the data.")
        if (requested.model is not None or start is not None) and requested.weights is not None:
            raise ValueError("A model has weights already; give either model or weights.")
        if requested.backbone != _OWN:
            from napari_beerlanet.core.classification.network import check_backbone_name

            check_backbone_name(requested.backbone)

    def train(self, settings: ClassifierTrainSettings) -> Classifier:
        from napari_beerlanet.core.checkpoints.checkpoint import load_classifier

        assert settings.data is not None
        if settings.backbone == _OWN and self.own_backbone is None:
            raise ValueError(
                f"{self.folder.path}: this run trains a backbone of your own; give it as backbone=…"
            )
        state = self.folder.read_state()
        dataset = training_crops(settings)
        unknown = sorted(set(settings.prior or {}) - set(dataset.names))
        if unknown:
            known = name_list(dataset.names)
            raise ValueError(
                f"prior names {quoted(unknown[0])}, which is no class; there are {known}."
            )
        checking = subprogress(self.report, 0.0, _DATA_CHECK_FRACTION)
        least = 0 if dataset.annotated else 1
        notes = check_crop_dataset(dataset, ("train", "val"), checking, least)
        few = few_crops_notes(dataset) if dataset.annotated else ()
        notes = [*unreviewed_notes(dataset), *few, *notes]
        settings = self._resolve(settings, dataset)
        if dataset.annotated and settings.fill < _MIN_PROJECT_FILL:
            raise ValueError(
                f"fill is {settings.fill:g}, and a project stores only so much around each cell "
                f"that {_MIN_PROJECT_FILL:g} is possible; use a larger fill."
            )
        dataset = self._locate(settings, dataset)
        if state is not None:
            self.restore_records(state, state["epoch"] + 1)
        assert settings.epochs is not None
        if state is None or state["epoch"] + 1 < settings.epochs:
            from napari_beerlanet.core.training.classifier_setup import train_in_process

            for note in notes:
                self.emit({"event": "warning", "message": note})
            training = subprogress(self.report, _DATA_CHECK_FRACTION, 1.0)
            more = self.emit, training, self.own_backbone
            settings = self.train_within_memory(
                settings,
                state,
                lambda now, before: train_in_process(self.folder, now, dataset, before, *more),
            )
        return load_classifier(self.folder.best, settings.devices[0], backbone=self.own_backbone)

    def _locate(self, settings: ClassifierTrainSettings, dataset: CropDataset) -> CropDataset:
        """With crops recentred by the boxes of a detector, if there is one."""
        if settings.detector is None:
            return dataset
        from napari_beerlanet.core.checkpoints.checkpoint import load_detector
        from napari_beerlanet.core.evaluation.classification import locate_cells

        found = load_detector(settings.detector, settings.devices[0])
        splits = {
            split: locate_cells(items, found, settings.fill, settings.object_class, self.report)
            for split, items in dataset.splits.items()
            if split in ("train", "val")
        }
        return replace(dataset, splits=splits)

    def _resolve(
        self, settings: ClassifierTrainSettings, dataset: CropDataset
    ) -> ClassifierTrainSettings:
        """With all defaults filled in and written down: a run is resumed as it was started."""
        if settings.model is not None:
            settings = _as_parent(settings)
        settings = settings.resolved(len(dataset.splits["train"]))
        self.folder.write_run(settings=settings.model_dump())
        return settings


def training_crops(settings: ClassifierTrainSettings) -> CropDataset:
    """The crops that a run trains on and validates with, as `train` and `val`."""
    assert settings.data is not None
    whole, known = read_crop_dataset(settings.data), ()
    if whole.annotated:  # types of the model that training starts from stay
        known = () if settings.model is None else _parents_info(settings.model)["classes"]
        whole = with_classes(whole, known)
    _check_classes(whole)
    dataset = with_classes(with_validation(whole, settings.validation, settings.seed), known)
    if len(dataset.names) < 2:
        raise DataError(f"{dataset.path}: fewer than two classes would train. {dataset.notes[-1]}")
    return dataset


def _parents_info(model: str) -> dict[str, Any]:
    """The header of the classifier that training starts from."""
    from napari_beerlanet.core.checkpoints.checkpoint import (
        CheckpointError,
        model_kind,
        read_info,
    )

    info = read_info(model)
    if model_kind(info) != "classifier":
        raise CheckpointError(f"{model}: a detector, where a classifier is needed.")
    return info


def few_crops_notes(dataset: CropDataset) -> list[str]:
    """A sentence on types with too few training crops to learn them, and on those without any."""
    counts = dataset.counts("train")
    few = {name: count for name, count in counts.items() if 0 < count < MIN_CLASS_BOXES}
    absent = [name for name, count in counts.items() if not count]
    notes = []
    if few:
        listed = ", ".join(f"{count} of {name}" for name, count in few.items())
        crops = "crop" if next(iter(few.values())) == 1 else "crops"
        notes.append(
            f"Only {listed.replace(' of ', f' {crops} of ', 1)}: about {MIN_CLASS_BOXES} crops of "
            "a type are needed to learn it; annotate more, or expect poor results for it."
        )
    if absent:
        notes.append(
            f"No training crops of {name_list(absent)}: kept as the model knows them, so only the "
            "head is trained. Crops of all types would train everything."
        )
    return notes


def _as_parent(settings: ClassifierTrainSettings) -> ClassifierTrainSettings:
    """With the backbone and front end of the model that training starts from, which stay."""
    assert settings.model is not None
    info = _parents_info(settings.model)
    names = ("backbone", *ClassifierSettings.model_fields)
    own = {name: info[name] for name in names if name in info}
    for name, value in own.items():
        asked = getattr(settings, name)
        if asked not in (value, settings.default(name)):
            raise ValueError(
                f"{name} is {quoted(value)} in the model that training starts from, and stays so; "
                f"leave out {name}={quoted(asked)}, or train without a model."
            )
    return settings.replace(**own)


def _check_classes(dataset: CropDataset) -> None:
    """Refuse what nothing can be learned from before any image is read."""
    what = "type" if dataset.annotated else "class"
    if len(dataset.names) == 1:
        raise DataError(
            f"{dataset.path}: only one {what} ({dataset.names[0]}); at least two are needed."
        )
    split = "train" if "train" in dataset.splits else WHOLE
    if split not in dataset.splits:
        raise DataError(
            f"{dataset.path}: no cell with a type is in an image that trains; add such an image."
            if dataset.annotated
            else f"{dataset.path}: there is no folder `train` in it."
        )
    counts = dataset.counts(split)
    empty = [name for name, count in counts.items() if not count]
    if empty and not dataset.annotated:
        raise DataError(
            f"{dataset.path}: there are no images of {name_list(empty)}; add some, or remove the "
            "class."
        )
    alone = [name for name, count in counts.items() if count == 1]
    if alone and not {"val", "test"} & dataset.splits.keys() and not dataset.annotated:
        raise DataError(
            f"{dataset.path}: there is one image only of {name_list(alone)}; two are needed at "
            "least, to train on one and validate on the other."
        )


# --- as a process --------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as a run.json says, with events as lines on standard output."""
    return run_config(_ClassifierRun, "train_classifier", arguments)


if __name__ == "__main__":
    run_process(main)
