"""From a recipe to all that training needs: checked data, a network, the checkpoint's header."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .checkpoint import checkpoint_hash, load_checkpoint
from .classstain import Sampled
from .dataset import Dataset, check_dataset, data_hash, read_dataset
from .detector import Detector
from .geometry import from_centres
from .labels import DataError, Item
from .loader import read_bgr
from .network import StainDetectionModel
from .plan import Plan, small_data_defaults
from .progress import Report
from .recipe import FRESH_SIZE, Recipe
from .runfiles import RunFolder
from .sizes import pooled_sizes
from .trainer import StainTrainer
from .watching import Event, Keeper, object_sizes, versions
from .weights import describe
from .yolo import cv2

_SAMPLE = 16  # images that tell colours and stains of the data
_DOUBT = 0.1  # of mAP50-95 on one field: about its standard error


@dataclass
class Prepared:
    """A run that may begin."""

    folder: RunFolder
    recipe: Recipe
    dataset: Dataset
    network: StainDetectionModel
    info: dict[str, Any]
    sample: list[Sampled]
    notes: list[str]

    def train(
        self, state: dict[str, Any] | None, tell: Callable[[Event], None], report: Report | None
    ) -> None:
        """Train to the end, from `state` on if there is one; events go to `tell`."""
        rows = state["rows"] if state is not None else []
        if state is not None and state["data_hash"] != self.info["training"]["data_hash"]:
            self._check_classes(state["classes"])
            message = "The data has changed since the run was begun."
            tell({"event": "warning", "message": message})
        keeper = Keeper(self.folder, self.info, self.sample, tell, report, rows)
        trainer = self._trainer(keeper, state)
        if rows:  # Ultralytics removes them when a trainer is made
            self.folder.write_results(rows)
        trainer.model = self.network.to(memory_format=torch.channels_last)
        first = state["epoch"] + 2 if state is not None else 1
        tell(
            {
                "event": "start",
                "epoch": first,
                "epochs": self.recipe.epochs,
                "images": self.info["training"]["images"],
                "classes": self.dataset.names,
                "scope": self.recipe.scope,
                "device": ", ".join(self.recipe.devices),
                "resumed": state is not None,
            }
        )
        trainer.train()

    def _check_classes(self, before: list[str]) -> None:
        if before != self.dataset.names:
            raise DataError(
                f"{self.dataset.path}: the run was begun with classes {', '.join(before)}, and now "
                f"there are {', '.join(self.dataset.names)}; start anew in another folder."
            )

    def _trainer(self, keeper: Keeper, state: dict[str, Any] | None) -> StainTrainer:
        try:
            return StainTrainer(
                self.recipe.overrides(self.info["image_size"], str(self.folder.path)),
                jitter=self.recipe.stain_jitter(),
                scope=self.recipe.scope,  # type: ignore[arg-type]
                dataset=self.dataset,
                repeats=self.recipe.repeats or 1,
                keep_statistics=bool(self.recipe.keep_statistics),
                average=self.recipe.average,
                share=self.recipe.share or 1.0,
                doubt=_DOUBT / max(len(self.dataset.splits["val"]), 1) ** 0.5,
                state=state,
                watcher=keeper,
            )
        except (SyntaxError, TypeError) as error:  # what Ultralytics says to wrong arguments
            raise ValueError(" ".join(str(error).split())) from error


def settle(recipe: Recipe) -> Recipe:
    """The recipe with whatever it leaves open chosen by model and data."""
    if recipe.is_settled or recipe.model is None or recipe.data is None:
        return recipe
    dataset = read_dataset(recipe.data)
    return settled(recipe, load_checkpoint(recipe.model, device="cpu"), dataset)


def settled(recipe: Recipe, parent: Detector, dataset: Dataset) -> Recipe:
    """As `settle`: by the number of fields.

    A network that has never seen stains learns as Ultralytics would have it, and new classes learn
    at its rate.
    """
    if recipe.is_settled:
        return recipe
    if is_fresh(parent):
        return recipe.settled(Plan())
    size = recipe.batch if isinstance(recipe.batch, int) else 8
    fields = max(len(dataset.splits.get("train", ())), 1)
    plan = small_data_defaults(fields, recipe.scope, recipe.length, size)
    if parent.classes != dataset.names:
        plan = replace(plan, learning_rate=None, share=1.0)  # a new head has no way back
    return recipe.settled(plan)


def prepare(folder: RunFolder, recipe: Recipe, report: Report | None = None) -> Prepared:
    """Check the data, load the model and fit it to the data's classes."""
    assert recipe.model is not None
    assert recipe.data is not None
    dataset = read_dataset(recipe.data)
    notes = check_dataset(dataset, ("train", "val"), report)
    parent = load_checkpoint(recipe.model, device="cpu")
    recipe = settled(recipe, parent, dataset)
    size = recipe.image_size or (FRESH_SIZE if is_fresh(parent) else parent.info["image_size"])
    size = -(-size // 32) * 32  # as Ultralytics rounds it
    sample = training_sample(dataset, size)
    network = build_network(parent, dataset.names, size, recipe, sample)
    info = header(parent, network, dataset, recipe, size, folder.path.name)
    return Prepared(folder, recipe, dataset, network, info, sample, notes)


def is_fresh(detector: Detector) -> bool:
    """Whether the front end has never been trained: the file was a plain YOLO."""
    return any("front end is untrained" in note for note in detector.info.get("notes", ()))


def build_network(
    parent: Detector,
    names: list[str],
    image_size: int,
    recipe: Recipe,
    sample: list[Sampled],
) -> StainDetectionModel:
    """A copy of the parent's network, for other classes with a new head and what fits of it."""
    network: StainDetectionModel
    source = copy.deepcopy(parent.network)
    if parent.classes == names:
        network = source
    elif recipe.scope == "stain":
        raise DataError(
            f'scope="stain" keeps the head, which knows {", ".join(parent.classes)}, while the '
            f'data has {", ".join(names)}; use scope="head" or "all".'
        )
    else:
        network = _with_classes(source, parent.classes, names, recipe.seed)
    network.names = dict(enumerate(names))
    if is_fresh(parent):
        network.stain.reference_pixels = float(image_size**2)
        network.fit_mix([one.pixels for one in sample])
    return network


def _with_classes(
    source: StainDetectionModel, known: list[str], names: list[str], seed: int
) -> StainDetectionModel:
    stain: Any = source.stain
    torch.manual_seed(seed)
    network: StainDetectionModel = StainDetectionModel(
        copy.deepcopy(source.yaml),
        nc=len(names),
        light=source.light,
        head_width=source.head_width,
        components=stain.components,
        iterations=stain.iterations,
        domain=stain.domain,
        unit_spectra=stain.unit_spectra,
    )
    network.stain.reference_pixels, network.stain.padding = stain.reference_pixels, stain.padding
    source.names, network.names = dict(enumerate(known)), dict(enumerate(names))
    network.load(source, verbose=False)  # rows of classes that both have go by their names
    return network


def training_sample(dataset: Dataset, image_size: int, most: int = _SAMPLE) -> list[Sampled]:
    """At most so many training images, RGB, none larger than `image_size`, evenly over the set."""
    items = dataset.splits["train"]
    chosen = np.unique(np.linspace(0, len(items) - 1, min(most, len(items))).round())
    return [_sampled(items[int(k)], image_size) for k in chosen]


def _sampled(item: Item, image_size: int) -> Sampled:
    image = read_bgr(item.image)[..., ::-1]
    scale = image_size / max(image.shape[:2])
    if scale < 1:
        size = [max(round(side * scale), 1) for side in image.shape[1::-1]]
        image = cv2.resize(image, size, interpolation=cv2.INTER_AREA)
    xyxy = from_centres(item.cxcywh, image.shape[:2]).astype(np.float32)
    return Sampled(np.ascontiguousarray(image), xyxy, item.labels)


def header(
    parent: Detector,
    network: StainDetectionModel,
    dataset: Dataset,
    recipe: Recipe,
    image_size: int,
    name: str,
) -> dict[str, Any]:
    """The checkpoint's `info`, without what an epoch adds to it."""
    known: dict[str, Any] = {
        "pixel_size": _working_pixel_size(dataset, recipe, image_size),
        "object_sizes": _sizes(parent, dataset, image_size),
        "training": _record(dataset, recipe),
    }
    if parent.classes == dataset.names:
        known["colours"] = parent.info["colours"]
        known["densities_seen"] = parent.info.get("densities_seen")
    return describe(network, name, dataset.names, image_size, **known)


def _sizes(parent: Detector, dataset: Dataset, image_size: int) -> dict[str, Any]:
    """Of the data's boxes together with those that the parent has learned its classes from."""
    known = parent.info.get("object_sizes") or {}
    before = {name: known[name] for name in dataset.names if name in known}
    return pooled_sizes(before, object_sizes(dataset, image_size))


def _record(dataset: Dataset, recipe: Recipe) -> dict[str, Any]:
    """The training record; of paths it keeps the last two names, which say enough."""
    data = "/".join(dataset.path.resolve().parts[-2:])
    start = Path(str(recipe.model))
    settings = {**recipe.write(), "data": data, "model": start.name}
    return {
        "data_hash": data_hash(dataset),
        "data": data,
        "images": {split: len(dataset.splits[split]) for split in ("train", "val")},
        "settings": settings,
        "seed": recipe.seed,
        "scope": recipe.scope,
        "versions": versions(),
        "parent": checkpoint_hash(str(recipe.model)),
        "command": recipe.command(data, start.name),
    }


def _working_pixel_size(dataset: Dataset, recipe: Recipe, image_size: int) -> float | None:
    """Micrometres per pixel of images as long as `image_size`; None where that is not known."""
    if recipe.pixel_size is None:
        return None
    sides = [max(dataset.facts[item.image].shape) for item in dataset.splits["train"]]
    return round(recipe.pixel_size * float(np.median(sides)) / image_size, 6)
