"""From a classifier's settings to a running trainer: network, checkpoint info, monitor."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from napari_beerlanet.core.boxes.classes import assign_colours
from napari_beerlanet.core.checkpoints.checkpoint import checkpoint_hash, load_classifier
from napari_beerlanet.core.checkpoints.info import still_unknown
from napari_beerlanet.core.checkpoints.pt_import import read_state_dict
from napari_beerlanet.core.checkpoints.serialize import describe_classifier
from napari_beerlanet.core.classification.classifier import Classifier
from napari_beerlanet.core.classification.crops import Pixels, denoise_crop
from napari_beerlanet.core.classification.network import (
    OWN_BACKBONE,
    ClassificationNetwork,
    check_backbone_name,
    head_keys,
    match_backbone_weights,
    rebuild_head,
)
from napari_beerlanet.core.common.events import EventCallback
from napari_beerlanet.core.common.messages import error_detail, name_list
from napari_beerlanet.core.common.progress import Report
from napari_beerlanet.core.common.storage import DataError, FileError
from napari_beerlanet.core.formats.class_folders import CropDataset, crop_dataset_hash
from napari_beerlanet.core.stains.domain_shift import describe_stains
from napari_beerlanet.core.training.monitor import TrainingMonitor, package_versions
from napari_beerlanet.core.training.runs import RunFolder
from napari_beerlanet.core.training.trainer.classification import (
    Augmentation,
    ClassifierTrainer,
    TrainingCrops,
)

_SAMPLE_CROPS = 16  # whose colours and stains describe the data


def train_in_process(
    folder: RunFolder,
    settings: Any,
    dataset: CropDataset,
    state: dict[str, Any] | None,
    emit: EventCallback,
    report: Report | None = None,
    own_backbone: nn.Module | None = None,
) -> None:
    """Train as a `ClassifierTrainSettings` says, from `state` on if there is one."""
    device = torch.device(settings.devices[0])
    parent = (
        None
        if settings.model is None
        else load_classifier(settings.model, "cpu", backbone=own_backbone)
    )
    normalizer = None if parent is None else parent.network.normalizer
    if settings.normalizer is not None:
        from napari_beerlanet.core.normalization.methods import load_normalizer

        normalizer = load_normalizer(settings.normalizer)
    sample = training_sample(dataset, settings, normalizer)
    with torch.random.fork_rng(devices=[]):
        network = build_network(settings, dataset, parent, own_backbone, sample, state is None)
    network.normalizer = normalizer
    info = checkpoint_info(network, settings, dataset, parent, folder.path.name)
    if state is not None:
        _check_same_data(state, info, dataset, emit)
    rows = state["rows"] if state is not None else []
    monitor = ClassifierMonitor(folder, info, sample, emit, report, rows)
    trainer = ClassifierTrainer(
        network,
        dataset,
        settings,
        Augmentation(
            settings.image_jitter(),
            settings.scale_jitter,
            settings.shift_jitter,
            settings.blur_jitter,
            settings.border_jitter,
            settings.turn_jitter,
        ),
        device,
        monitor,
        parent=_shared_weights(parent, network, dataset.names),
        state=state,
    )
    counts = info["training"]["images"]
    emit(
        {
            "event": "start",
            "epoch": trainer.epoch + 1,
            "epochs": settings.epochs,
            "images": counts,
            "classes": dataset.names,
            "task": "classify",
            "device": str(device),
            "resumed": state is not None,
        }
    )
    trainer.train()


class ClassifierMonitor(TrainingMonitor):
    """The monitor of a `ClassifierTrainer`; `sample` are crops (size, size, 3)."""

    def read_metrics(self, trainer: Any) -> dict[str, Any]:
        """Accuracy, balanced accuracy and the like on the validation crops."""
        return dict(trainer.metrics)

    def make_model(self, trainer: Any, metrics: dict[str, Any]) -> Classifier:
        """The classifier after the epoch, calibrated."""
        network = trainer.averaged
        info = {**self.info, "temperature": round(trainer.temperature, 6)}
        info["stain_seen"] = describe_stains([network.fit_crop(crop) for crop in self.sample])
        info["training"] = self.training_record(trainer, metrics)
        return Classifier(network, info, trainer.device)


def training_sample(dataset: CropDataset, settings: Any, normalizer: Any = None) -> list[Pixels]:
    """A few training crops (size, size, 3), evenly over the set, as the network gets them."""
    crops = TrainingCrops(dataset.splits["train"], settings.network_settings, normalizer=normalizer)
    count = min(len(crops), _SAMPLE_CROPS)
    chosen = np.unique(np.linspace(0, len(crops) - 1, count).round().astype(int))
    plain = crops.plain(chosen.tolist())
    return [denoise_crop(crop) for crop in plain] if settings.denoise else plain


def build_network(
    settings: Any,
    dataset: CropDataset,
    parent: Classifier | None,
    own_backbone: nn.Module | None,
    sample: list[Pixels],
    fresh: bool,
) -> ClassificationNetwork:
    """The network that training starts with; that of a resumed run gets its weights later."""
    torch.manual_seed(settings.seed)
    names = dataset.names
    if parent is not None:
        if parent.classes == names:
            return copy.deepcopy(parent.network)
        return rebuild_head(parent.network, parent.classes, names)
    backbone = settings.backbone if own_backbone is None else own_backbone
    network = ClassificationNetwork(backbone, len(names), settings.network_settings)
    _check_outputs(network, len(names))
    if fresh and settings.weights is not None:
        _start_from_weights(network, settings, len(names))
    network.fit_front_end(sample)
    return network


def _check_outputs(network: ClassificationNetwork, classes: int) -> None:
    """Refuse a backbone that cannot take such crops, or has a head for other classes."""
    size = network.settings.input_size
    was_training = network.backbone.training
    network.backbone.eval()
    try:
        with torch.no_grad():
            shape = tuple(network.forward_mixed(torch.zeros(2, 3, size, size)).shape)
    except Exception as error:
        why = error_detail(error)
        raise ValueError(
            f"{network.backbone_name} takes no crops of {size} × {size} pixels ({why}); use a "
            "larger input_size, or another backbone."
        ) from error
    network.backbone.train(was_training)
    if shape != (2, classes):
        raise ValueError(
            f"The backbone gives {shape[1:]} numbers for a crop where {classes} classes need "
            f"({classes},)."
        )


def check_start(settings: Any) -> None:
    """Refuse a backbone that torchvision does not have, and weights that are not its own.

    For a `ClassifierTrainSettings` without a model to start from, before there is a run.
    """
    check_backbone_name(settings.backbone)
    if settings.weights is not None:
        _read_weights(settings, 2)  # how many classes there are is the head's, which is left out


def _read_weights(settings: Any, classes: int) -> dict[str, Tensor]:
    """The backbone's weights in the file of the settings, by their names; without the head's."""
    path = Path(settings.weights)
    try:
        if path.suffix.lower() == ".safetensors":
            from safetensors.torch import load_file

            tensors: Mapping[str, Tensor] = load_file(path)
        else:
            tensors = read_state_dict(path)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise FileError(f"{path}: cannot be read ({reason}).") from error
    except Exception as error:
        raise FileError(f"{path}: {error_detail(error)}.") from error
    try:
        return match_backbone_weights(settings.backbone, classes, tensors)
    except ValueError as error:
        raise FileError(f"{path}: {error}.") from error


def _start_from_weights(network: ClassificationNetwork, settings: Any, classes: int) -> None:
    if settings.backbone == OWN_BACKBONE:
        raise ValueError("A backbone of your own has its weights already; leave out weights.")
    network.backbone.load_state_dict(_read_weights(settings, classes), strict=False)


def _shared_weights(
    parent: Classifier | None, network: ClassificationNetwork, names: Sequence[str]
) -> dict[str, Tensor] | None:
    """Weights of the parent that have the same meaning in the network; NaN in rows that are new."""
    if parent is None:
        return None
    own = network.state_dict()
    shared = {
        name: value
        for name, value in parent.network.state_dict().items()
        if torch.equal(own[name], value)
    }
    # Rows of a head that is larger now go by their classes; new ones have no way back.
    known = torch.tensor([name in parent.classes for name in names])
    for name in head_keys(network) - shared.keys():
        start = own[name].clone()
        start[~known] = math.nan
        shared[name] = start
    return shared


def checkpoint_info(
    network: ClassificationNetwork,
    settings: Any,
    dataset: CropDataset,
    parent: Classifier | None,
    name: str,
) -> dict[str, Any]:
    """The checkpoint's `info`, without what an epoch adds to it."""
    known: dict[str, Any] = {"training": _training_record(dataset, settings)}
    if settings.object_class is not None:
        known["applies_to"] = [settings.object_class]
    prior = dict(settings.prior or {})
    if parent is not None and parent.info.get("prior"):
        prior = dict(zip(parent.classes, parent.info["prior"], strict=True)) | prior
    if prior:
        known["prior"] = [float(prior.get(name, 1)) for name in dataset.names]
    if parent is not None:
        inherited = dict(zip(parent.classes, parent.info["colours"], strict=True))
        colours = assign_colours(dataset.names, {}, inherited)
        known["colours"] = [colours[name] for name in dataset.names]
        known["unknown"] = still_unknown(parent.info.get("unknown"), dataset.names)
        known.setdefault("applies_to", list(parent.info.get("applies_to") or []))
    return describe_classifier(network, name, dataset.names, **known)


def _training_record(dataset: CropDataset, settings: Any) -> dict[str, Any]:
    """The training record; of paths it keeps the last two names, which say enough."""
    data = "/".join(dataset.path.resolve().parts[-2:])
    return {
        "data_hash": crop_dataset_hash(dataset),
        "data": data,
        "images": {split: len(dataset.splits[split]) for split in ("train", "val")},
        "crops": {split: dataset.counts(split) for split in ("train", "val")},
        "sources": {split: dataset.sources(split) for split in ("train", "val")},
        "crop_side": _typical_side(dataset, settings.network_settings.fill),
        "settings": settings.portable().model_dump(),
        "seed": settings.seed,
        "versions": package_versions(),
        "parent": None if settings.model is None else checkpoint_hash(settings.model),
        "command": settings.command(),
    }


def _typical_side(dataset: CropDataset, fill: float) -> int | None:
    """The median side of the training crops, in pixels of the images that they are of."""
    sides = []
    for item in dataset.splits["train"]:
        found = dataset.inspections.get(item.image)
        if found is not None and not found.problem:
            box = item.box(found.shape)
            sides.append(max(found.shape) if box is None else max(box[2:] - box[:2]) / fill)
    return round(float(np.median(sides))) if sides else None


def _check_same_data(
    state: Mapping[str, Any], info: Mapping[str, Any], dataset: CropDataset, emit: EventCallback
) -> None:
    if state["data_hash"] == info["training"]["data_hash"]:
        return
    if state["classes"] != dataset.names:
        raise DataError(
            f"{dataset.path}: the run was started with classes {name_list(state['classes'])}, and "
            f"now there are {name_list(dataset.names)}; start a new run in another folder."
        )
    emit({"event": "warning", "message": "The data has changed since the run was started."})
