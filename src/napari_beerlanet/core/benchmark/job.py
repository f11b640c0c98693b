"""One job of a benchmark: a method on a task with one seed; train and measure.

Every step leaves what it has done on disk: the training epoch by epoch, and at last the record,
which says that the job is done. Methods that train the same network share its run folder.

    records/TASK-METHOD-seedN.json    what was measured, and how
    runs/TASK-RECIPE-seedN-HASH/      the training; see `core.training.runs`
    pictures/TASK-METHOD-seedN-K.png  what the network sees of an image of laboratory K
    work/                             normalizers that a job needs until it is done
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from napari_beerlanet._version import __version__
from napari_beerlanet.core.benchmark.data import (
    LabelledData,
    Pixels,
    Template,
    fingerprint,
    fit_template,
    image_files,
    laboratory_data,
    read_data,
    read_pixels,
    templates,
)
from napari_beerlanet.core.benchmark.settings import (
    METHODS,
    BenchmarkSettings,
    Method,
    TaskSettings,
)
from napari_beerlanet.core.common.device import device_for_worker
from napari_beerlanet.core.common.events import EventTail
from napari_beerlanet.core.common.jobs import RECORDS_FOLDER, attempt_job
from napari_beerlanet.core.common.locking import LockedError
from napari_beerlanet.core.common.messages import slug
from napari_beerlanet.core.common.progress import Report, report_progress, subprogress
from napari_beerlanet.core.common.storage import (
    atomic_path,
    file_hash,
    read_json_or_empty,
    remove_path,
    settings_hash,
    write_json,
)
from napari_beerlanet.core.formats.dataset import Dataset

if TYPE_CHECKING:  # torch comes with them
    from napari_beerlanet.core.classification.classifier import Classifier
    from napari_beerlanet.core.detection.detector import Detector

RUNS_FOLDER, PICTURES_FOLDER, WORK_FOLDER = "runs", "pictures", "work"
RECORD_KIND, RECORD_VERSION = "napari-beerlanet benchmark record", 1
_NORMALIZER = "normalizer.safetensors"
_PICTURE_SIDE = 320
_WAIT_INTERVAL_S = 0.5
_PAPER_EPOCHS = {"detect": 50, "classify": 20}
_TRAINING_FIELDS = ("kind", "backbone", "epochs", "image_size", "batch", "detector", "object_class")
_WORK = "napari_beerlanet.core.benchmark.job:do_job"


@dataclass(frozen=True)
class BenchmarkJob:
    """A task, a method and a seed."""

    settings: BenchmarkSettings
    task: TaskSettings
    method: Method
    seed: int

    @property
    def name(self) -> str:
        """Of its record and pictures."""
        return f"{slug(self.task.name)}-{self.method.name}-seed{self.seed}"

    @property
    def title(self) -> str:
        """For messages."""
        return f"{self.task.name}, {self.method.title}, seed {self.seed}"

    def as_task(self, out: Path) -> dict[str, Any]:
        """As workers take it."""
        return {
            "work": _WORK,
            "title": self.title,
            "gpu": True,
            "out": str(out),
            "settings": self.settings.as_dict(),
            "task": self.task.name,
            "method": self.method.name,
            "seed": self.seed,
        }

    @classmethod
    def of_task(cls, task: Mapping[str, Any]) -> BenchmarkJob:
        """The job that `as_task` gave."""
        settings = BenchmarkSettings(**task["settings"])
        method = METHODS[task["method"]]
        return cls(settings, settings.task(task["task"]), method, int(task["seed"]))

    # --- what its results depend on ---

    def training_hash(self, data: str) -> str:
        """Of all that the trained network depends on; `data` is the training data's fingerprint."""
        task = self.task
        chosen: dict[str, Any] = {name: getattr(task, name) for name in _TRAINING_FIELDS}
        chosen |= {"options": task.options, "seed": self.seed, "recipe": self.method.recipe}
        chosen |= {"data": data, "weights": _hash_of_file(task.weights)}
        if self.method.normalizer:
            chosen["template"] = self._template_hash()
        return settings_hash(chosen)

    def hash(self, data: str, tests: tuple[str, ...]) -> str:
        """Of all that its results depend on; `data` and `tests` are fingerprints."""
        names = [test.name for test in self.task.tests]
        chosen: dict[str, Any] = {"training": self.training_hash(data), "tests": tests}
        chosen["names"] = names
        chosen |= {"method": self.method.name, "task": self.task.name}
        chosen |= {"ordered": self.task.ordered}
        if self.method.translator:
            chosen["staingan"] = self.settings.staingan
        return settings_hash(chosen)

    def _template_hash(self) -> str | None:
        given = self.settings.template
        return given if given == "random" else _hash_of_file(given)


def _hash_of_file(path: str | None) -> str | None:
    """Of its content, so that a file may be moved; of a name that is no file the name."""
    if path is None:
        return None
    return file_hash(Path(path)) if Path(path).is_file() else path


class TaskData:
    """A task's training data and test sets, read once, with their fingerprints."""

    def __init__(self, task: TaskSettings) -> None:
        self.task = task

    @cached_property
    def training(self) -> LabelledData:
        """The training data."""
        return read_data(self.task.kind, self.task.train)

    @cached_property
    def tests(self) -> tuple[LabelledData, ...]:
        """The test sets, each in one split `val`."""
        return tuple(laboratory_data(self.task, k) for k in range(len(self.task.tests)))

    @cached_property
    def fingerprints(self) -> tuple[str, tuple[str, ...]]:
        """Of the training data, and of the test sets."""
        return fingerprint(self.training), tuple(map(fingerprint, self.tests))


def record_path(out: Path, job: BenchmarkJob) -> Path:
    """Where a job's record is."""
    return out / RECORDS_FOLDER / f"{job.name}.json"


def find_record(out: Path, job: BenchmarkJob, data: TaskData) -> dict[str, Any] | None:
    """The record of a job that is done with these settings and data."""
    record = read_json_or_empty(record_path(out, job))
    if record.get("version") != RECORD_VERSION or record.get("hash") != job.hash(
        *data.fingerprints
    ):
        return None
    return record


def do_job(task: Mapping[str, Any], report: Report | None = None) -> dict[str, Any]:
    """Do a job and return its outcome: a record, or an error in one sentence."""
    out = Path(task["out"])

    def work() -> dict[str, Any]:
        job = BenchmarkJob.of_task(task)
        data = TaskData(job.task)
        record = find_record(out, job, data)
        if record is not None:
            return {"status": "skipped", "record": record}
        device = device_for_worker(job.settings.device, int(task.get("worker", 0)))
        with limited_threads(job.settings.threads):
            run = _JobRun(job, data, out, device, report)
            return {"record": run.run(), "notes": run.notes}

    return attempt_job(work, out)


@contextmanager
def limited_threads(count: int | None) -> Iterator[None]:
    """So many threads of torch; None leaves it as it is."""
    import torch

    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass
class _JobRun:
    """A job at work."""

    job: BenchmarkJob
    data: TaskData
    out: Path
    device: str
    report: Report | None
    notes: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    template: Template | None = None

    @property
    def work(self) -> Path:
        """A folder for what is needed until the job is done."""
        digest = self.job.hash(*self.data.fingerprints)
        return self.out / WORK_FOLDER / f"{self.job.name}-{digest[:8]}"

    @property
    def _normalizer(self) -> Path | None:
        """Where the method's own normalizer is."""
        return self.work / _NORMALIZER if self.job.method.normalizer else None

    def run(self) -> dict[str, Any]:
        """Do all of it; returns the record, which is on disk."""
        job, method = self.job, self.job.method
        parts = (0.1, 0.5, 1.0) if method.translator else (0.1, 0.85, 1.0)
        if method.normalizer:
            self._fit_normalizer()
        model, curve = self._trained_model(subprogress(self.report, 0.0, parts[1]))
        results, pictures = {}, [self._picture(model, 0, self.data.training)]
        count = len(job.task.tests)
        for number, test in enumerate(job.task.tests):
            first, last = (
                parts[1] + (parts[2] - parts[1]) * k / count for k in (number, number + 1)
            )
            part = subprogress(self.report, first, last)
            data = self.data.tests[number]
            tested = self._tested_model(model, number, subprogress(part, 0.0, 0.7))
            with self._timed("evaluate"):
                found, notes = measure_model(
                    job.task, tested, data, self.device, subprogress(part, 0.7, 1.0)
                )
            results[test.name] = found
            self.notes += [f"{method.title}, {test.name}: {note}" for note in notes]
            pictures.append(self._picture(tested, number + 1, data))
        record = self._record(results, curve, pictures)
        path = record_path(self.out, job)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, record)
        remove_path(self.work)
        with suppress(OSError):  # others may still be at work there
            self.work.parent.rmdir()
        report_progress(self.report, 1, 1, "done")
        return record

    @contextmanager
    def _timed(self, step: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[step] = self.seconds.get(step, 0.0) + time.monotonic() - started

    # --- images ---

    def _fit_normalizer(self) -> None:
        from napari_beerlanet.core.normalization.methods import save_normalizer

        normalizer, self.template = normalizer_of(self.job, self.data.training)
        self.notes += self.template.notes
        self.work.mkdir(parents=True, exist_ok=True)
        save_normalizer(normalizer, self.work / _NORMALIZER)

    def _tested_model(self, model: Any, number: int, report: Report | None) -> Any:
        """The model as the method shows it the images of a test set."""
        if self.job.method.adapts:
            from napari_beerlanet.core.evaluation.batch_statistics import adapt_batch_statistics

            return adapt_batch_statistics(model, image_files(self.data.tests[number]))
        if not self.job.method.translator:
            return model
        network = copy.deepcopy(model.network)
        network.normalizer = self._translator(number, report)
        return type(model)(network, model.info, model.device)

    def _translator(self, number: int, report: Report | None) -> Any:
        """A network from a test laboratory's images to the training laboratory's."""
        from napari_beerlanet.core.training.staingan import train_staingan

        with self._timed("staingan"):
            return train_staingan(
                image_files(self.data.tests[number]),
                self._training_images(),
                self.work / f"staingan{number}",
                resume=True,
                seed=self.job.seed,
                device=self.device,
                report=report,
                **self.job.settings.staingan,
            )

    def _staingan_settings(self) -> dict[str, Any] | None:
        if not self.job.method.translator:
            return None
        from napari_beerlanet.core.training.staingan import StainGanSettings

        return StainGanSettings(**self.job.settings.staingan).model_dump()

    def _training_images(self) -> list[Path]:
        training = self.data.training
        return image_files(training, ["train"] if "train" in training.splits else None)

    # --- the network ---

    def _trained_model(self, report: Report | None) -> tuple[Detector | Classifier, list[Any]]:
        """The trained model and its curve; trained before, resumed, or by another job just now."""
        from napari_beerlanet.core.checkpoints.checkpoint import load_checkpoint

        job = self.job
        digest = job.training_hash(self.data.fingerprints[0])
        recipe = "-".join(part for part in job.method.recipe if part)
        folder = (
            self.out / RUNS_FOLDER / (f"{slug(job.task.name)}-{recipe}-seed{job.seed}-{digest[:8]}")
        )
        while not _is_finished(folder):
            try:
                with self._timed("train"):
                    train_network(job, folder, self.device, self._normalizer, report)
            except LockedError:  # a job with the same network trains it
                report_progress(report, 0, 1, "waiting for the same training")
                time.sleep(_WAIT_INTERVAL_S)
        for leftover in ("state.pt", "last.safetensors"):
            (folder / leftover).unlink(missing_ok=True)
        curve, warnings = training_events(folder, job.task.kind)
        if job.method.normalizer:
            self.notes += [f"{job.method.title}, training: {warning}" for warning in warnings]
        return load_checkpoint(folder / "best.safetensors", self.device), curve

    # --- what is kept ---

    def _picture(self, model: Any, number: int, data: LabelledData) -> dict[str, Any]:
        """What the network sees of the first image of a laboratory, as a file."""
        path = image_files(data)[0]
        pixels = _behind_front_end(model, model.network.normalize(_shrunk(read_pixels(path))))
        name = f"{self.job.name}-{number}.png"
        folder = self.out / PICTURES_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_path(folder / name) as unfinished:
            Image.fromarray(pixels).save(unfinished)
        laboratory = self.job.task.tests[number - 1].name if number else "training"
        return {"file": name, "image": path.name, "laboratory": laboratory}

    def _record(
        self, results: dict[str, Any], curve: list[Any], pictures: list[dict[str, Any]]
    ) -> dict[str, Any]:
        from napari_beerlanet.core.training.monitor import package_versions

        job = self.job
        training, tests = self.data.fingerprints
        template = None
        if self.template is not None:
            path = self.template.path
            template = {"file": path.name, "sha256": file_hash(path)}
        return {
            "kind": RECORD_KIND,
            "version": RECORD_VERSION,
            "software": f"napari-beerlanet {__version__}",
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "hash": job.hash(training, tests),
            "task": job.task.name,
            "method": job.method.name,
            "seed": job.seed,
            "results": results,
            "curve": curve,
            "template": template,
            "staingan": self._staingan_settings(),
            "pictures": pictures,
            "data": {
                "training": training,
                **{test.name: digest for test, digest in zip(job.task.tests, tests, strict=True)},
            },
            "images": {
                "training": len(self._training_images()),
                **{
                    test.name: len(image_files(data))
                    for test, data in zip(job.task.tests, self.data.tests, strict=True)
                },
            },
            "notes": self.notes,
            "seconds": {name: round(value, 2) for name, value in self.seconds.items()},
            "versions": package_versions(),
        }


def normalizer_of(job: BenchmarkJob, training: LabelledData) -> tuple[Any, Template]:
    """A job's normalizer, fitted to its template."""
    from napari_beerlanet.core.normalization.methods import fitted_normalizer

    def fit(pixels: Pixels) -> Any:
        return fitted_normalizer(job.method.name, pixels)

    return fit_template(templates(training, job.seed, job.settings.template), fit)


def measure_model(
    task: TaskSettings,
    model: Any,
    data: LabelledData,
    device: str,
    report: Report | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """All metrics of a model on a test set (split `val`), without curves; notes on its images."""
    from napari_beerlanet.core.checkpoints.checkpoint import load_detector
    from napari_beerlanet.core.evaluation.classification import evaluate_classifier
    from napari_beerlanet.core.evaluation.dataset import detect_split, measure

    if isinstance(data, Dataset):
        pairs = detect_split(model, data, "val", report=report)
        found = measure(pairs, model.classes)
        notes = [note for detections, _ in pairs for note in detections.report["notes"]]
    else:
        found = evaluate_classifier(
            model,
            data,
            "val",
            ordered=task.ordered or None,
            detector=load_detector(task.detector, device) if task.detector else None,
            object_class=task.object_class,
            report=report,
        )
        notes = [note for note in found["notes"] if note not in data.notes]
    kept = {key: value for key, value in found.items() if key not in ("curves", "split")}
    return kept, list(dict.fromkeys(notes))


def training_arguments(job: BenchmarkJob, device: str) -> dict[str, Any]:
    """What a job's training is asked for, besides data and normalizer."""
    task, method = job.task, job.method
    chosen: dict[str, Any] = {
        "front_end": method.front_end,
        "jitter": method.jitter,
        "epochs": task.epochs or _PAPER_EPOCHS[task.kind],
        "seed": job.seed,
        "device": device,
        **({"batch": task.batch} if task.batch else {}),
        **({"weights": task.weights} if task.weights else {}),
    }
    if task.kind == "detect":
        chosen["image_size"] = task.image_size
    else:
        chosen |= {"backbone": task.backbone, "detector": task.detector}
        chosen |= {"object_class": task.object_class}
        chosen |= {"input_size": task.image_size} if task.image_size else {}
    return chosen | task.options


def train_network(
    job: BenchmarkJob,
    folder: Path,
    device: str,
    normalizer: Path | None = None,
    report: Report | None = None,
) -> None:
    """Train a job's network into a run folder, from where an earlier attempt was on."""
    from napari_beerlanet.core.training.fine_tune import train_detector
    from napari_beerlanet.core.training.train_classifier import train_classifier

    train = train_detector if job.task.kind == "detect" else train_classifier
    train(
        job.task.train,
        folder,
        normalizer=normalizer,
        resume=True,
        report=report,
        **training_arguments(job, device),
    )


def _is_finished(folder: Path) -> bool:
    run = read_json_or_empty(folder / "run.json")
    return run.get("state") == "finished" and (folder / "best.safetensors").is_file()


def training_events(folder: Path, kind: str) -> tuple[list[list[float]], list[str]]:
    """[epoch, score of the validation] of each epoch: mAP50, or accuracy; and the warnings."""
    key = "mAP50" if kind == "detect" else "accuracy"
    tail, scores, warnings = EventTail(folder), {}, []
    while events := tail.read():
        for event in events:
            value = (event.get("metrics") or {}).get(key) if event["event"] == "epoch" else None
            if value is not None:
                scores[int(event["epoch"])] = float(value)
            if event["event"] == "warning":
                warnings.append(str(event["message"]))
    return [[epoch, scores[epoch]] for epoch in sorted(scores)], list(dict.fromkeys(warnings))


def _shrunk(pixels: Pixels) -> Pixels:
    height, width = pixels.shape[:2]
    scale = _PICTURE_SIDE / max(height, width)
    if scale >= 1:
        return pixels
    size = (max(round(width * scale), 1), max(round(height * scale), 1))
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BOX))


def _behind_front_end(model: Any, pixels: Pixels) -> Pixels:
    """(H, W, 3) what layer 0 of a model's network gets of an image."""
    import torch

    network = model.network
    planes = torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))[None]
    device = next(network.parameters()).device
    with torch.no_grad():
        seen = network.apply_front_end((planes.float() / 255).to(device))[0]
    scaled = (seen.clamp(0, 1) * 255).round().byte().cpu().numpy()
    return np.ascontiguousarray(scaled.transpose(1, 2, 0))
