"""A benchmark's settings: tasks, methods and seeds, checked before anything is trained.

    methods: [none, reinhard, macenko, vahadane, beerlanet]
    seeds: [0, 1, 2]
    tasks:
      - name: blood cells
        kind: detect
        train: bccd/data.yaml
        tests: {other lab: other-lab/data.yaml}
        weights: yolov8n.pt
        epochs: 50
        image_size: 640

Paths in such a file are relative to it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from napari_beerlanet.core.common.messages import quoted
from napari_beerlanet.core.common.settings import Settings
from napari_beerlanet.core.common.storage import FileError, atomic_path, read_settings

SETTINGS_FILE = "benchmark.yaml"
"""In a results folder: the settings that it was made with."""

TaskKind = Literal["detect", "classify"]
Metric = Literal[
    "mAP50", "mAP50-95", "precision", "recall", "F1",
    "accuracy", "balanced_accuracy", "relaxed_accuracy",
]  # fmt: skip
METRIC_TITLES: dict[str, str] = {
    **{name: name for name in ("mAP50", "mAP50-95", "F1")},
    "precision": "Precision",
    "recall": "Recall",
    "accuracy": "Acc",
    "balanced_accuracy": "balanced Acc",
    "relaxed_accuracy": "RAcc",
}
"""What metrics are called in the table."""

_METRICS: dict[TaskKind, tuple[Metric, ...]] = {
    "detect": ("mAP50", "mAP50-95", "precision", "recall", "F1"),
    "classify": ("accuracy", "balanced_accuracy", "relaxed_accuracy"),
}


@dataclass(frozen=True)
class Method:
    """What a row of the table stands for.

    `normalizer`: all images, of training and of tests, are normalized to a template of the training
    laboratory. `translator`: images of each test laboratory are translated to the training
    laboratory's look by a network that has seen both, without labels. `front_end`, `jitter`: of the
    training. `adapts`: batch statistics are estimated anew on each test set's images.
    """

    name: str
    title: str
    description: str
    normalizer: bool = False
    translator: bool = False
    front_end: str = "none"
    jitter: str = "none"
    adapts: bool = False

    @property
    def recipe(self) -> tuple[str, str, str]:
        """What the training depends on: methods with the same one train the same network."""
        return (self.name if self.normalizer else "", self.front_end, self.jitter)


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("none", "No normalization", "images as they are"),
        Method("reinhard", "Reinhard", "mean and deviation of LAB as a template's", True),
        Method("macenko", "Macenko", "stain vectors and strength as a template's", True),
        Method("vahadane", "Vahadane", "sparse NMF, spectra and strength as a template's", True),
        Method(
            "staingan",
            "StainGAN",
            "test images translated by a CycleGAN that has seen them, without labels",
            translator=True,
        ),
        Method("lstainnorm", "LStainNorm", "trained front end", front_end="lstainnorm"),
        Method("beerlanet", "BeerLaNet", "trained front end", front_end="beerlanet"),
        Method("grey", "Grey", "images without colour", front_end="grey"),
        Method("stain-jitter", "Stain jitter", "stains varied in training", jitter="stain"),
        Method("hed-jitter", "HED jitter", "HED channels varied in training", jitter="hed"),
        Method(
            "beerlanet-jitter",
            "BeerLaNet + stain jitter",
            "trained front end, stains varied in training",
            front_end="beerlanet",
            jitter="stain",
        ),
        Method(
            "batch-statistics",
            "Batch statistics",
            "estimated anew on the test images, without labels",
            adapts=True,
        ),
    )
}
"""All methods by their names in files: in the order of the paper's table, then the baselines and
what combines two."""


def find_method(name: object) -> Method:
    """A method by its name, however its words are joined; a `ValueError` lists all."""
    key = "-".join(str(name).lower().replace("_", " ").replace("-", " ").split())
    if key not in METHODS:
        raise ValueError(f"There is no method {quoted(name)}; there are {', '.join(METHODS)}.")
    return METHODS[key]


class LaboratorySettings(Settings):
    """Images of another laboratory to measure on."""

    name: str = Field(description="What its columns are called.")
    data: str = Field(description="A data.yaml; of a classifier also a folder per class.")
    split: str | None = Field(
        None,
        description="Which part to take: test, val or all; by default the first that is there.",
    )


class TaskSettings(Settings):
    """What is learned from one laboratory, and where else it is measured."""

    name: str = Field(description="What it is called in the table.")
    kind: TaskKind = Field(description="detect or classify.")
    train: str = Field(description="Training data: a data.yaml, or a folder per class.")
    tests: tuple[LaboratorySettings, ...] = Field(
        description="Data of other laboratories: their names, and a data.yaml or a folder of each."
    )
    weights: str | None = Field(
        None, description="Weights to start from: a YOLO .pt, or a file of the backbone's."
    )
    backbone: str = Field("resnet18", description="A classification network of torchvision.")
    epochs: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Passes through the training images; by default those of the paper."
    )
    image_size: Annotated[int, Field(ge=16)] | None = Field(
        None, description="Side of the images that the network sees, in pixels."
    )
    batch: Annotated[int, Field(ge=1)] | None = Field(None, description="Images per step.")
    metrics: tuple[Metric, ...] = Field((), description="Columns of the table for each test set.")
    ordered: tuple[tuple[str, ...], ...] = Field(
        (), description="Ordered groups of classes, for the relaxed accuracy."
    )
    detector: str | None = Field(
        None, description="A detector that recentres and rescales the crops of a classifier."
    )
    object_class: str | None = Field(None, description="The class of its boxes that count.")
    options: dict[str, Any] = Field(
        default_factory=dict, description="Further settings of the training."
    )

    @model_validator(mode="before")
    @classmethod
    def _read_file_values(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        values = dict(given)
        name = str(values.get("name") or "")
        if "tests" in values:
            values["tests"] = _laboratories(values["tests"], name)
        for key in ("metrics", "ordered"):
            if isinstance(values.get(key), list):
                values[key] = _as_tuple(values[key])
        return values

    @model_validator(mode="after")
    def _check(self) -> TaskSettings:
        for metric in self.metrics:
            if metric not in _METRICS[self.kind]:
                known = ", ".join(_METRICS[self.kind])
                raise ValueError(
                    f"Task {quoted(self.name)}: {metric} is no metric of {self.kind}; there are "
                    f"{known}."
                )
        if "relaxed_accuracy" in self.metrics and not self.ordered:
            raise ValueError(
                f"Task {quoted(self.name)}: relaxed_accuracy needs `ordered`, groups of ordered "
                "classes."
            )
        for key in ("detector", "object_class", "ordered"):
            if getattr(self, key) and self.kind == "detect":
                raise ValueError(f"Task {quoted(self.name)}: {key} is for tasks of kind classify.")
        return self

    @property
    def columns(self) -> tuple[str, ...]:
        """The metrics in the table: the paper's where none are given."""
        if self.metrics:
            return self.metrics
        if self.kind == "detect":
            return ("mAP50", "mAP50-95")
        return ("accuracy", *(("relaxed_accuracy",) if self.ordered else ("balanced_accuracy",)))

    def resolved(self, folder: Path) -> TaskSettings:
        """With paths that are relative to `folder` made absolute."""
        tests = tuple(test.replace(data=os.path.abspath(folder / test.data)) for test in self.tests)
        named = {key: getattr(self, key) for key in ("weights", "detector")}
        there = {key: folder / name for key, name in named.items() if name}
        beside = {key: str(path) for key, path in there.items() if os.path.exists(path)}
        return self.replace(train=os.path.abspath(folder / self.train), tests=tests, **beside)


class BenchmarkSettings(Settings):
    """Tasks, methods and seeds: every combination is trained and measured once."""

    tasks: tuple[TaskSettings, ...] = Field(description="What is learned and measured.")
    methods: tuple[str, ...] = Field(
        tuple(METHODS), description=f"Rows of the table, of {', '.join(METHODS)}."
    )
    seeds: tuple[int, ...] = Field(
        (0, 1, 2), description="Random seeds; each is a training of its own."
    )
    template: str = Field(
        "random",
        description="The image that others are normalized to: a file, or one random training image "
        "for each seed, as in the paper.",
    )
    staingan: dict[str, Any] = Field(
        default_factory=dict,
        description="Settings of StainGAN: filters, blocks, crop, steps and others.",
    )
    device: str = Field("auto", description="auto, cpu, cuda:0 or mps.")
    threads: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="Threads of each job; by default what the machine has, divided by the workers. "
        "Results on a CPU are the same to the last digit only with the same number.",
    )

    @model_validator(mode="before")
    @classmethod
    def _read_file_values(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        values = dict(given)
        if "tasks" in values:
            values["tasks"] = _tasks(values["tasks"])
        if "methods" in values:
            named = _listed(values["methods"], "methods", "[none, macenko, beerlanet]")
            values["methods"] = tuple(dict.fromkeys(find_method(name).name for name in named))
        if "seeds" in values:
            listed = _listed(values["seeds"], "seeds", "[0, 1, 2]")
            if not all(type(s) is int and s >= 0 for s in listed):
                raise ValueError(
                    f"seeds must be whole numbers of at least 0, not {quoted(listed)}."
                )
            values["seeds"] = tuple(dict.fromkeys(listed))
        return values

    @field_validator("tasks")
    @classmethod
    def _check_names(cls, tasks: tuple[TaskSettings, ...]) -> tuple[TaskSettings, ...]:
        names = [task.name for task in tasks]
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise ValueError(
                f"Two tasks are called {quoted(twice[0])}; give each a name of its own."
            )
        return tasks

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> BenchmarkSettings:
        """Those of a YAML file; what is wrong is a `FileError` of one sentence."""
        file = Path(path)
        content = read_settings(file)
        if not isinstance(content, dict) or "tasks" not in content:
            raise FileError(f"{file}: settings of a benchmark need at least `tasks`.")
        if not all(isinstance(name, str) for name in content):
            raise FileError(f"{file}: the names of settings are texts.")
        try:
            return cls(**content).resolved(file.absolute().parent)
        except ValueError as error:
            raise FileError(f"{file}: {error}") from error

    def resolved(self, folder: Path) -> BenchmarkSettings:
        """With paths that are relative to `folder` made absolute."""
        template = self.template
        if template != "random":
            template = os.path.abspath(folder / template)
        return self.replace(
            tasks=tuple(task.resolved(folder) for task in self.tasks), template=template
        )

    def task(self, name: str) -> TaskSettings:
        """A task by its name."""
        return next(task for task in self.tasks if task.name == name)

    def write(self, folder: Path) -> Path:
        """Write them into a results folder, from where `read` takes them; returns the file."""
        import yaml

        with atomic_path(folder / SETTINGS_FILE) as unfinished:
            text = yaml.safe_dump(self.as_dict(), allow_unicode=True, sort_keys=False)
            unfinished.write_text(text, encoding="utf-8")
        return folder / SETTINGS_FILE

    def as_dict(self) -> dict[str, Any]:
        """As JSON and YAML have it; gives the same settings back."""
        return self.model_dump(mode="json")


def _tasks(given: object) -> tuple[TaskSettings, ...]:
    tasks = _listed(given, "tasks", "with name, kind, train and tests of each")
    made = []
    for number, task in enumerate(tasks, 1):
        if isinstance(task, TaskSettings):
            made.append(task)
            continue
        if not isinstance(task, Mapping):
            raise ValueError(
                f"Task {number} must have name, kind, train and tests, not {quoted(task)}."
            )
        try:
            made.append(TaskSettings(**task))
        except (TypeError, ValueError) as error:
            said = str(error)
            name = task.get("name") or number
            raise ValueError(
                said if said.startswith("Task ") else f"Task {quoted(name)}: {said}"
            ) from None
    return tuple(made)


def _laboratories(given: object, task: str) -> tuple[LaboratorySettings, ...]:
    """Test sets as {name: data}, {name: {data, split}} or as a list of {name, data, split}."""
    if isinstance(given, Mapping):
        rows: Iterable[Any] = [
            {"name": str(name), **(place if isinstance(place, Mapping) else {"data": place})}
            for name, place in given.items()
        ]
    else:
        rows = given if isinstance(given, (list, tuple)) else ()
    made = [
        row if isinstance(row, LaboratorySettings) else LaboratorySettings(**row)
        for row in rows
        if isinstance(row, (Mapping, LaboratorySettings))
    ]
    if not made:
        raise ValueError(
            f"Task {quoted(task)}: tests must name data of other laboratories, such as "
            "{other lab: other-lab/data.yaml}."
        )
    names = [one.name for one in made]
    if len(set(names)) < len(names):
        raise ValueError(f"Task {quoted(task)}: two test sets have the same name.")
    return tuple(made)


def _listed(given: object, name: str, example: str) -> Sequence[Any]:
    values = list(given) if isinstance(given, (list, tuple)) else [given] if given else []
    if not values:
        raise ValueError(f"{name} is empty: give at least one, for instance {example}.")
    return values


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value
