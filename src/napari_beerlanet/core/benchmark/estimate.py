"""How long a benchmark will take, from a few real training steps of each kind of network.

Nothing is guessed from other machines: a few images of the task are normalized, trained on and
measured, with as many threads as each job will have. Jobs that are done tell better.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from napari_beerlanet.core.benchmark.data import (
    CopyNotes,
    LabelledData,
    copy_training_data,
    image_files,
    read_pixels,
    with_items,
)
from napari_beerlanet.core.benchmark.job import (
    BenchmarkJob,
    TaskData,
    limited_threads,
    measure_model,
    train_network,
    trained_epochs,
)
from napari_beerlanet.core.common.device import pick_device
from napari_beerlanet.core.common.events import Event
from napari_beerlanet.core.common.messages import count_of, format_duration
from napari_beerlanet.core.common.progress import Report, report_progress
from napari_beerlanet.core.common.threads import thread_count
from napari_beerlanet.core.formats.class_folders import WHOLE
from napari_beerlanet.core.formats.dataset import Dataset

_STEPS, _IMAGES_PER_STEP = 4, 2  # of a timed training
_TIMED_IMAGES = 2  # that are normalized, or measured on
_STAINGAN_STEPS = 3
_VALIDATION_SHARE = 0.4  # of the time that a training step takes with an image
_HELD_OUT = 0.2  # of crops that have no split


@dataclass(frozen=True)
class NetworkTiming:
    """Seconds to load and end, of a training step per image, and of a measured image."""

    overhead: float
    step: float
    test: float


@dataclass(frozen=True)
class BenchmarkEstimate:
    """Seconds of each job that is left, by its name; `done` jobs need no more.

    `seconds` is the sum, `wall_seconds` with so many workers.
    """

    jobs: Mapping[str, float]
    done: int
    workers: int
    notes: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Of all jobs, one after the other."""
        return sum(self.jobs.values())

    @property
    def wall_seconds(self) -> float:
        """With the workers side by side; no job is shorter for it."""
        longest = max(self.jobs.values(), default=0.0)
        return max(self.seconds / max(min(self.workers, len(self.jobs)), 1), longest)

    def sentence(self) -> str:
        """For people."""
        if not self.jobs:
            many = f"All {count_of(self.done, 'job')} are done."
            return many if self.done != 1 else "It is done."
        before = f", {self.done} are done" if self.done else ""
        side = f" with {count_of(self.workers, 'worker')}" if self.workers > 1 else ""
        return (
            f"{count_of(len(self.jobs), 'job')} to do{before}: about "
            f"{format_duration(self.wall_seconds)}{side}, if nothing else uses this machine."
        )


def estimate_jobs(
    jobs: Sequence[BenchmarkJob],
    done: Sequence[tuple[BenchmarkJob, Mapping[str, Any]]],
    data: Mapping[str, TaskData],
    workers: int = 1,
    report: Report | None = None,
) -> BenchmarkEstimate:
    """Seconds of each of `jobs`; `done` are jobs with their records."""
    measured: dict[tuple[str, str], list[float]] = {}
    for job, record in done:
        seconds = sum((record.get("seconds") or {}).values())
        if (record.get("seconds") or {}).get("train"):  # not of a network that another job trained
            measured.setdefault((job.task.name, job.method.name), []).append(seconds)
    kinds = {(job.task.name, job.method.name): job for job in jobs}
    timed = [job for key, job in kinds.items() if key not in measured]
    probe = _Probe(data, workers)
    trained = {(job.task.name, job.method.recipe, job.seed) for job, _ in done}
    expected: dict[str, float] = {}
    for number, job in enumerate(timed):
        report_progress(report, number, len(timed), f"timing {job.task.name}, {job.method.title}")
        probe.time(job)
    for job in jobs:
        recipe = (job.task.name, job.method.recipe, job.seed)
        mine = measured.get((job.task.name, job.method.name))
        expected[job.name] = fmean(mine) if mine else probe.seconds(job, recipe in trained)
        trained.add(recipe)
    report_progress(report, 1, 1, "done")
    return BenchmarkEstimate(expected, len(done), max(workers, 1))


class _Clock:
    """Seconds as they would pass if nothing else used the machine.

    On a CPU the time that this process computes, where that is less than what has passed: others
    may be at work now that will not be later. With several threads it is more than has passed.
    """

    def __init__(self, device: str) -> None:
        self._on_cpu = pick_device(device).type == "cpu"
        self._last = time.perf_counter(), time.process_time()
        self._total = 0.0

    def seconds(self) -> float:
        """Since it was made."""
        now = time.perf_counter(), time.process_time()
        passed, computed = (b - a for a, b in zip(self._last, now, strict=True))
        self._last = now
        self._total += min(passed, computed) if self._on_cpu else passed
        return self._total


class _Probe:
    """Times networks and normalizers, each kind once."""

    def __init__(self, data: Mapping[str, TaskData], workers: int) -> None:
        self._data = data
        self._default_threads = max(thread_count() // max(workers, 1), 1)
        self._networks: dict[tuple[str, str], NetworkTiming] = {}
        self._normalizers: dict[tuple[str, str], float] = {}
        self._translators: dict[str, float] = {}

    def time(self, job: BenchmarkJob) -> None:
        """Time what is not known yet of such a job."""
        task, method = job.task.name, job.method
        with limited_threads(job.settings.threads or self._default_threads):
            if (task, method.front_end) not in self._networks:
                self._networks[task, method.front_end] = self._time_network(job)
            if method.normalizer and (task, method.name) not in self._normalizers:
                self._normalizers[task, method.name] = self._time_normalizer(job)
            if method.translator and task not in self._translators:
                self._translators[task] = self._time_translator(job)

    def seconds(self, job: BenchmarkJob, is_trained: bool) -> float:
        """What a job takes; its network may have been trained by another."""
        data, method = self._data[job.task.name], job.method
        network = self._networks[job.task.name, method.front_end]
        train, val = _split_sizes(data.training)
        tests = sum(len(_items(test)) for test in data.tests)
        images = sum(len(image_files(test)) for test in data.tests)
        total = tests * network.test
        if not is_trained:
            epoch = train * network.step + val * network.step * _VALIDATION_SHARE
            total += network.overhead + trained_epochs(job.task) * epoch
            if method.normalizer:
                images += len(image_files(data.training))
        if method.normalizer:
            total += images * self._normalizers[job.task.name, method.name]
        if method.translator:
            total += len(data.tests) * self._translators[job.task.name]
        if method.adapts:
            total += images * network.step * _VALIDATION_SHARE
        return total

    def _time_network(self, job: BenchmarkJob) -> NetworkTiming:
        """Train on a few images for an epoch, and measure on a few."""
        from napari_beerlanet.core.checkpoints.checkpoint import load_checkpoint

        data, clock = self._data[job.task.name], _Clock(job.settings.device)
        times: list[float] = []

        def note(event: Event) -> None:
            if event["event"] == "batch":
                times.append(clock.seconds())

        with tempfile.TemporaryDirectory(prefix="beerlanet-estimate-") as place:
            folder, started = Path(place), clock.seconds()
            few = copy_training_data(
                _few(data.training), folder / "data", lambda pixels: (pixels, ()), CopyNotes()
            )
            shorter: dict[str, Any] = {"epochs": 1, "batch": _IMAGES_PER_STEP, "progress": note}
            train_network(job, str(few), folder / "run", job.settings.device, **shorter)
            ended = clock.seconds()
            model = load_checkpoint(folder / "run" / "best.safetensors", job.settings.device)
            some = data.tests[0]
            part = with_items(some, {"val": _items(some)[:_TIMED_IMAGES]})
            measure_model(job.task, model, part, job.settings.device)  # the first compiles
            middle = clock.seconds()
            measure_model(job.task, model, part, job.settings.device)
            test = (clock.seconds() - middle) / len(_items(part))
        gaps = [b - a for a, b in pairwise(times)]
        step = median(gaps) / _IMAGES_PER_STEP if gaps else (ended - started) / _STEPS
        overhead = max(ended - started - sum(gaps), 0.0)
        return NetworkTiming(overhead, step, test)

    def _time_normalizer(self, job: BenchmarkJob) -> float:
        from napari_beerlanet.core.benchmark.job import normalizer_of

        data, clock = self._data[job.task.name].training, _Clock("cpu")
        normalizer, _ = normalizer_of(job, data)
        images = [read_pixels(path) for path in image_files(data)[:_TIMED_IMAGES]]
        normalizer.apply(images[0])  # the first compiles
        started = clock.seconds()
        for pixels in images:
            normalizer.apply(pixels)
        return (clock.seconds() - started) / len(images)

    def _time_translator(self, job: BenchmarkJob) -> float:
        """Seconds of a StainGAN: its steps, and what comes before and after them."""
        from napari_beerlanet.core.training.staingan import StainGanSettings, train_staingan

        data, clock = self._data[job.task.name], _Clock(job.settings.device)
        chosen = StainGanSettings(**job.settings.staingan)
        times: list[float] = []
        with tempfile.TemporaryDirectory(prefix="beerlanet-estimate-") as place:
            started = clock.seconds()
            train_staingan(
                image_files(data.tests[0])[:_IMAGES_PER_STEP],
                image_files(data.training)[:_IMAGES_PER_STEP],
                place,
                report=lambda progress: times.append(clock.seconds()),
                **{
                    **job.settings.staingan,
                    "steps": _STAINGAN_STEPS,
                    "device": job.settings.device,
                },
            )
            ended = clock.seconds()
        gaps = [b - a for a, b in pairwise(times[:_STAINGAN_STEPS])]
        step = median(gaps) if gaps else 0.0
        return max(ended - started - _STAINGAN_STEPS * step, 0.0) + chosen.steps * step


def _items(data: LabelledData) -> list[Any]:
    return [item for items in data.splits.values() for item in items]


def _split_sizes(data: LabelledData) -> tuple[int, int]:
    """Images that are trained on, and validated on, in an epoch."""
    if list(data.splits) == [WHOLE]:
        count = len(data.splits[WHOLE])
        return round(count * (1 - _HELD_OUT)), round(count * _HELD_OUT)
    held = data.splits.get("val") or data.splits.get("test") or []
    return len(data.splits["train"]), len(held)


def _few(data: LabelledData) -> LabelledData:
    """A few images to train and validate on, with boxes or of two classes."""
    count = _STEPS * _IMAGES_PER_STEP
    items: list[Any] = list(data.splits.get("train") or data.splits[WHOLE])
    if isinstance(data, Dataset):
        boxed = [item for item in items if len(item.labels)]
        others = [item for item in data.splits["val"] if len(item.labels)]
        return with_items(data, {"train": boxed[:count], "val": others[:_TIMED_IMAGES]})
    labels = sorted({item.label for item in items})[:2]
    by_class = [[item for item in items if item.label == label] for label in labels]
    some = [item for mine in by_class for item in mine[: count // 2 + 1]]
    return with_items(data, {WHOLE: some})  # of which training holds out a part
