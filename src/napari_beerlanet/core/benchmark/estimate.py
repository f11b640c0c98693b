"""How long a benchmark will take: as long as jobs of the kind took, or else by a timed step.

Timed are the trainings alone, see `training.estimate`; jobs that are done tell all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from napari_beerlanet.core.benchmark.job import BenchmarkJob, limited_threads, training_arguments
from napari_beerlanet.core.common.messages import count_of, format_duration
from napari_beerlanet.core.common.progress import Report, report_progress
from napari_beerlanet.core.common.threads import thread_count


@dataclass(frozen=True)
class BenchmarkEstimate:
    """Seconds of each job that is left, by its name; `done` jobs need no more.

    `seconds` is the sum, `wall_seconds` with so many workers.
    """

    jobs: Mapping[str, float]
    done: int
    workers: int

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
            f"{format_duration(self.wall_seconds)} of training{side}, if nothing else uses this "
            "machine."
        )


def estimate_jobs(
    jobs: Sequence[BenchmarkJob],
    done: Sequence[tuple[BenchmarkJob, Mapping[str, Any]]],
    workers: int = 1,
    report: Report | None = None,
) -> BenchmarkEstimate:
    """Seconds of each of `jobs`; `done` are jobs with their records."""
    measured: dict[tuple[str, str], list[float]] = {}
    for job, record in done:
        seconds = record.get("seconds") or {}
        if seconds.get("train"):  # not of a network that another job trained
            measured.setdefault((job.task.name, job.method.name), []).append(sum(seconds.values()))
    trained = {(job.task.name, job.method.recipe, job.seed) for job, _ in done}
    timed: dict[tuple[str, str], float] = {}
    expected: dict[str, float] = {}
    threads = max(thread_count() // max(workers, 1), 1)
    for number, job in enumerate(jobs):
        task, method = job.task.name, job.method
        report_progress(report, number, len(jobs), f"timing {task}, {method.title}")
        recipe = (task, method.recipe, job.seed)
        if mine := measured.get((task, method.name)):
            expected[job.name] = fmean(mine)
        elif recipe in trained:
            expected[job.name] = 0.0
        else:
            with limited_threads(job.settings.threads or threads):
                if (task, method.front_end) not in timed:
                    timed[task, method.front_end] = _training_seconds(job)
            expected[job.name] = timed[task, method.front_end]
        trained.add(recipe)
    report_progress(report, 1, 1, "done")
    return BenchmarkEstimate(expected, len(done), max(workers, 1))


def _training_seconds(job: BenchmarkJob) -> float:
    """Of a job's training, from a step that is timed."""
    from napari_beerlanet.core.training.estimate import (
        estimate_classifier_duration,
        estimate_duration,
        summarise_dataset,
    )
    from napari_beerlanet.core.training.settings import TrainSettings
    from napari_beerlanet.core.training.setup import load_parent
    from napari_beerlanet.core.training.train_classifier import (
        ClassifierTrainSettings,
        training_crops,
    )

    chosen = {"data": job.task.train, **training_arguments(job, job.settings.device)}
    if job.task.kind == "classify":
        crops = ClassifierTrainSettings(**chosen)
        return estimate_classifier_duration(crops, training_crops(crops)).seconds
    chosen["model"] = chosen.pop("weights", "yolov8n.yaml")
    own = {name: value for name, value in chosen.items() if name in TrainSettings.model_fields}
    settings = TrainSettings(**own)
    dataset = summarise_dataset(job.task.train).dataset
    return estimate_duration(settings, dataset, parent=load_parent(settings)).seconds
