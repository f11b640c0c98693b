"""`fine_tune`, and the same as a process of its own.

    python -m napari_beerlanet.core.training.fine_tune --config RUN/run.json [--resume]

prints one JSON object per line: `start`, then `batch` and `epoch` over and over, now and then a
`warning`, `compare` while the new model is compared with the one before, and one of `end`,
`diverged`, `failed`, `cancelled` as the last. A file `stop` in the run's folder, Ctrl-C or SIGTERM
end it after the batch.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from napari_beerlanet.core.checkpoints.info import to_json_types
from napari_beerlanet.core.common.device import free_memory, is_out_of_memory, pick_device
from napari_beerlanet.core.common.events import Event, EventCallback, loaded, run_process
from napari_beerlanet.core.common.messages import error_message
from napari_beerlanet.core.common.progress import Cancelled, Progress, Report
from napari_beerlanet.core.stains.settings import FrontEnd
from napari_beerlanet.core.training.runs import (
    MEMORY_ADVICE,
    RunFolder,
    TrainingDiverged,
    read_run,
)
from napari_beerlanet.core.training.settings import (
    JitterKind,
    Length,
    RunSettings,
    Scope,
    TrainSettings,
    differences,
)

# Loaded where needed: wrong settings are refused before torch and Ultralytics have loaded.
if TYPE_CHECKING:
    from napari_beerlanet.core.detection.detector import Detector
    from napari_beerlanet.core.normalization.normalizer import Normalizer


_DEFAULTS = TrainSettings()


def fine_tune(
    model: Detector | str | os.PathLike[str] | None,
    data: str | os.PathLike[str] | None,
    output: str | os.PathLike[str],
    scope: Scope = _DEFAULTS.scope,
    epochs: int | None = _DEFAULTS.epochs,
    image_size: int | None = _DEFAULTS.image_size,
    batch: int | Literal["auto"] = _DEFAULTS.batch,
    learning_rate: float | None = _DEFAULTS.learning_rate,
    seed: int = _DEFAULTS.seed,
    device: str = _DEFAULTS.device,
    jitter: bool | JitterKind | dict[str, Any] = _DEFAULTS.jitter,
    resume: bool = False,
    report: Report | None = None,
    progress: EventCallback | None = None,
    *,
    pixel_size: float | None = _DEFAULTS.pixel_size,
    length: Length = _DEFAULTS.length,
    validate_every: int | None = _DEFAULTS.validate_every,
    repeats: int | None = _DEFAULTS.repeats,
    keep_statistics: bool | None = _DEFAULTS.keep_statistics,
    average: int | None = _DEFAULTS.average,
    share: float | None = _DEFAULTS.share,
    front_end: FrontEnd | None = _DEFAULTS.front_end,
    attention_pool: int | None = _DEFAULTS.attention_pool,
    normalizer: Normalizer | str | os.PathLike[str] | None = _DEFAULTS.normalizer,
    **advanced: Any,
) -> Detector:
    """Train a model on a dataset and return it as it was after its best epoch.

    Parameters
    ----------
    model
        A `Detector`, a checkpoint's path or name, an Ultralytics `.pt` file, which gets an
        untrained front end, or the layout of a network as Ultralytics' `.yaml`, which starts at
        random. For other classes the head is rebuilt, and what fits is kept.
    data
        A data.yaml with splits `train` and `val`, see `core.formats.dataset`.
    output
        Folder of the run, see `core.training.runs`; its best.safetensors is what is returned.
    scope
        "all"; "head": the detection head alone, not the front end; "stain": the front end alone
        (S_init, λ, γ, the 1×1 convolution), which adapts a model to another laboratory's stain.
        What is not trained stays as it is to the last bit, batch statistics included.
    epochs, length
        Passes through the training images: each shows every image once, however few there are.
        None: as many as their number asks for, see `choose_schedule`, with `length` "quick",
        "normal" or "thorough".
    validate_every
        Epochs from one validation and checkpoint to the next.
    batch, learning_rate
        "auto" takes what a GPU's memory holds. None: a rate that is gentle to a pretrained model;
        where the front end is untrained, rate and optimizer are left to Ultralytics.
    image_size
        Longer side of training images in pixels; None is the model's own, 640 for an untrained one.
        With the model's own, images in which objects would be much larger or smaller than the model
        knows them are shown smaller, or in windows.
    device
        "auto", "cpu", "cuda:0", "mps"; "0,1" trains on two GPUs.
    jitter
        "stain" or True: vary stains, strength and illumination (`StainJitter`; a dict has its
        settings); "hed": `HedJitter`; "none" or False.
    resume
        Resume after the last finished epoch of the run in `output`, with the settings that it was
        started with; `model` and `data` may be None then.
    report, progress
        Called after every batch, and with every event; `Cancelled` raised in either ends the run.
        The last event's "change", if there is one, says how the detections on the images of the
        data differ from those of the model before: a "code" and a "text".
    pixel_size
        Micrometres per pixel of the training images, if all have the same.
    repeats, keep_statistics, average, share
        See `StainTrainer`; None is what the number of images asks for.
    front_end, attention_pool
        What stands before the network, see `StainMixing`, where the model is a plain YOLO or a
        layout: "beerlanet", "none", "grey" or "lstainnorm". A trained model keeps its own.
    normalizer
        A fitted normalizer (or the path of a saved one) that every image goes through first, in
        training and wherever the model is used: it is stored in the checkpoint.
    advanced
        Ultralytics' own training arguments, for instance `mosaic=0.5`.

    Raises
    ------
    TrainingDiverged
        A `ValueError`: the loss is not finite or far above its lowest, or the metrics collapsed.
        The folder's best.safetensors, of the best epoch before, stays.
    """
    start = model if is_model(model) else None
    own, saved = normalizer_or_path(normalizer)
    settings = TrainSettings(
        model=None if model is None or start is not None else name_or_path(model),  # type: ignore[arg-type]
        data=None if data is None else os.path.abspath(data),
        scope=scope,
        epochs=epochs,
        image_size=image_size,
        batch=batch,
        learning_rate=learning_rate,
        seed=seed,
        device=device,
        jitter=jitter,
        pixel_size=pixel_size,
        advanced=advanced,
        length=length,
        validate_every=validate_every,
        repeats=repeats,
        keep_statistics=keep_statistics,
        average=average,
        share=share,
        front_end=front_end,
        attention_pool=attention_pool,
        normalizer=saved,
    )
    with RunFolder(output) as folder:
        run = _DetectorRun(folder, report, progress)
        run.normalizer = own
        trained: Detector = run.run(settings, start, resume)
        return trained


def train_detector(
    data: str | os.PathLike[str] | None,
    output: str | os.PathLike[str],
    weights: Detector | str | os.PathLike[str] | None = "yolov8n.yaml",
    front_end: FrontEnd = "beerlanet",
    normalizer: Normalizer | str | os.PathLike[str] | None = None,
    jitter: bool | JitterKind | dict[str, Any] = "stain",
    epochs: int | None = _DEFAULTS.epochs,
    image_size: int | None = _DEFAULTS.image_size,
    batch: int | Literal["auto"] = _DEFAULTS.batch,
    seed: int = _DEFAULTS.seed,
    device: str = _DEFAULTS.device,
    report: Report | None = None,
    *,
    resume: bool = False,
    progress: EventCallback | None = None,
    **settings: Any,
) -> Detector:
    """Train a new detector on a dataset and return it as it was after its best epoch.

    `weights` is what its network starts from: an Ultralytics `.pt` file, or the layout of a network
    as `.yaml` (a file, or a name that Ultralytics knows), which starts at random. All else is as
    for `fine_tune`, the folder of the run and how it resumes too: a run that was killed ends with
    the weights of one that was not.
    """
    return fine_tune(
        weights,
        data,
        output,
        epochs=epochs,
        image_size=image_size,
        batch=batch,
        seed=seed,
        device=device,
        jitter=jitter,
        resume=resume,
        report=report,
        progress=progress,
        front_end=front_end,
        normalizer=normalizer,
        **settings,
    )


class TrainingRun:
    """One run, from its settings to its last event; what is trained is up to the subclass."""

    settings_type: type[RunSettings]
    task = "detect"
    smallest_batch = 1
    normalizer: Normalizer | None = None
    """Where it is no file yet."""

    def __init__(
        self, folder: RunFolder, report: Report | None, progress: EventCallback | None
    ) -> None:
        self.folder, self.report, self.progress = folder, report, progress

    def check_startable(self, requested: Any, start: Any) -> None:
        """A `ValueError` if there is not all that it takes to start."""
        raise NotImplementedError

    def train(self, settings: Any) -> Any:
        """Train, from the folder's state on if there is one; returns the best model."""
        raise NotImplementedError

    def compare(self, settings: Any, model: Any) -> dict[str, Any]:
        """How the new model differs from the one before, for the last event."""
        return {}

    def run(self, requested: Any, start: Any, resume: bool) -> Any:
        """Train, and end with one event whatever happens."""
        settings = self._start(requested, start, resume)
        try:
            before = (self.folder.read_run() or {})["requested"]
            for note in differences(requested, before, settings) if resume else ():
                self.emit({"event": "warning", "message": note})
            model = self.train(settings)
            change = self.compare(settings, model)
        except TrainingDiverged as error:
            diverged = TrainingDiverged(f"{error}; {self._advice_after_divergence()}")
            self._end("diverged", str(diverged))
            raise diverged from error
        except Exception as error:
            cancelled = isinstance(error, Cancelled)
            self._end(
                "cancelled" if cancelled else "failed",
                error_message(error, memory_advice=MEMORY_ADVICE),
            )
            raise
        except BaseException as error:
            self._end("cancelled", type(error).__name__)
            raise
        early = str((self.folder.read_run() or {}).get("early_stop") or "")
        self._end("end", early, metrics=model.info["training"]["metrics"], **change)
        return model

    def _advice_after_divergence(self) -> str:
        best = (self.folder.read_run() or {}).get("best_epoch")
        kept = f"the model of epoch {best} is kept" if best else "there is no usable model"
        return f"{kept}. Annotate more images, or set a lower learning rate."

    def _start(self, requested: Any, start: Any, resume: bool) -> Any:
        """The settings that hold: as requested or, for a resumed run, as it was started with."""
        earlier, before = self.folder.read_run(), requested.model_dump(mode="json")
        if resume and earlier is not None:
            self._check_resumable(earlier)
            before = earlier.get("requested", earlier["settings"])
            self.folder.trim_events()
            settings = self.settings_type(**earlier["settings"]).replace(device=requested.device)
            settings = settings.replace(**self._moved_files(settings, requested))
        else:
            self.folder.check_not_overwriting()
            self.check_startable(requested, start)
            self.folder.clear()
            settings = requested
            if start is not None:
                from napari_beerlanet.core.checkpoints.checkpoint import save_checkpoint

                save_checkpoint(start, self.folder.start)
                settings = settings.replace(model=str(self.folder.start))
            if self.normalizer is not None:
                from napari_beerlanet.core.normalization.methods import save_normalizer

                save_normalizer(self.normalizer, self.folder.normalizer)
                settings = settings.replace(normalizer=str(self.folder.normalizer))
        record = {"settings": settings.model_dump(), "requested": before, "change": None}
        self.folder.write_run(**record, state="running", message="", process=os.getpid())
        return settings

    def _moved_files(self, settings: Any, requested: Any) -> dict[str, str]:
        """Where files are that are not where the run had them: as requested now."""
        gone = {n: v for n, v in settings if isinstance(v, str) and os.path.isabs(v)}
        return {
            name: now
            for name, before in gone.items()
            if not os.path.exists(before) and os.path.exists(now := getattr(requested, name) or "")
        }

    def _check_resumable(self, earlier: dict[str, Any]) -> None:
        if earlier["settings"].get("task", "detect") != self.task:
            kinds = {"detect": "a detector", "classify": "a classifier"}
            other = kinds["classify" if self.task == "detect" else "detect"]
            raise ValueError(
                f"{self.folder.path}: the run in this folder trains {other}, not "
                f"{kinds[self.task]}; choose another folder."
            )
        if earlier.get("state") == "diverged":  # the same numbers lead to the same end
            raise ValueError(
                f"{self.folder.path}: this run diverged and cannot be resumed; start a new "
                "one with more images or a lower learning rate."
            )

    def restore_records(self, state: dict[str, Any], epoch: int) -> None:
        """Write again what a kill may have come before: the table, and how far the run is."""
        self.folder.write_results(state["rows"])
        self.folder.write_run(epoch=epoch)

    def train_within_memory(
        self, settings: Any, state: dict[str, Any] | None, train: Callable[[Any, Any], None]
    ) -> Any:
        """train(settings, state) with what a GPU's memory allows; returns the settings that did.

        Where it does not suffice, the run resumes after its last finished epoch with half the
        batch, and after the smallest on the CPU with the batch that was asked for.
        """
        requested = settings.batch
        while True:
            try:
                train(settings, state)
                return settings
            except Exception as error:
                if len(settings.devices) > 1 or not is_out_of_memory(error):
                    raise
                device = pick_device(settings.devices[0])
                if device.type == "cpu":
                    raise
            # Not in the handler: there the error still holds what is in memory.
            free_memory(device)
            settings = settings.replace(batch=(self.folder.read_run() or {})["settings"]["batch"])
            size = settings.batch_size
            if size > self.smallest_batch:
                settings = settings.replace(batch=max(size // 2, self.smallest_batch))
                now = f"training resumes with {settings.batch}"
            else:
                settings = settings.replace(batch=requested, device="cpu")
                now = "training resumes on the CPU"
            message = f"Memory of {device} did not suffice for a batch of {size}; {now}."
            self.emit({"event": "warning", "message": message})
            self.folder.write_run(settings=settings.model_dump())
            state = self.folder.read_state()

    def emit(self, event: Event) -> None:
        """Write an event down and pass it on."""
        event = to_json_types(event)
        self.folder.append_event(event)
        if self.progress is not None:
            self.progress(event)

    def _end(self, event: str, message: str, **more: Any) -> None:
        epoch = (self.folder.read_run() or {}).get("epoch", 0)
        best = str(self.folder.best) if self.folder.best.exists() else None
        self.folder.write_run(state="finished" if event == "end" else event, message=message)
        self.folder.stop_file.unlink(missing_ok=True)
        with suppress(Cancelled):  # it has ended as it is
            self.emit({"event": event, "epoch": epoch, "best": best, "message": message, **more})


class _DetectorRun(TrainingRun):
    settings_type = TrainSettings

    def check_startable(self, requested: TrainSettings, start: Detector | None) -> None:
        if requested.data is None or (requested.model is None and start is None):
            raise ValueError(f"{self.folder.path}: no run to resume; give model and data.")

    def train(self, settings: TrainSettings) -> Detector:
        from napari_beerlanet.core.checkpoints.checkpoint import load_detector

        settings = self._resolve(settings)
        assert settings.epochs is not None
        state = self.folder.read_state()
        devices = settings.devices
        if state is not None:
            self.restore_records(state, (state["epoch"] + 1) * (settings.validate_every or 1))
        if state is None or (state["epoch"] + 1 < settings.rounds and not state["finished"]):
            if len(devices) > 1:
                from napari_beerlanet.core.training.distributed import train_multi_gpu

                train_multi_gpu(self.folder, len(devices), self.emit, self.report)
            else:
                from napari_beerlanet.core.training.setup import train_in_process

                settings = self.train_within_memory(
                    settings,
                    state,
                    lambda now, before: train_in_process(
                        self.folder, now, before, self.emit, self.report
                    ),
                )
        return load_detector(self.folder.best, device=settings.devices[0])

    def compare(self, settings: TrainSettings, model: Detector) -> dict[str, Any]:
        """Run the model and its parent on the images of the data; a stop ends only that."""
        from napari_beerlanet.core.checkpoints.checkpoint import load_detector
        from napari_beerlanet.core.formats.dataset import read_dataset
        from napari_beerlanet.core.training.setup import compare_with_parent, comparison_key

        assert settings.model is not None
        assert settings.data is not None
        if Path(settings.model).suffix.lower() in (".yaml", ".yml"):
            return {}

        def report(progress: Progress) -> None:
            if self.report is not None:
                self.report(Progress(1, 1, progress.message))  # the training itself is done
            if self.folder.stop_file.exists():
                raise Cancelled

        try:
            self.emit({"event": "compare"})
            dataset = read_dataset(settings.data)
            parent = load_detector(settings.model, device=str(model.device))
            change = compare_with_parent(parent, model, dataset, report)
            if change is None:
                return {}
            key = comparison_key(settings.model, self.folder.best, dataset)
            self.folder.write_run(change={"key": key, **change.to_dict()})
            return {"change": change.summary()}
        except Cancelled:
            return {}
        except Exception as error:  # what was learned is kept, whatever goes wrong here
            message = error_message(error, memory_advice=MEMORY_ADVICE)
            warning = f"The new model could not be compared with the one before: {message}"
            self.emit({"event": "warning", "message": warning})
            return {}

    def _resolve(self, settings: TrainSettings) -> TrainSettings:
        """With all defaults resolved and written down: a run is resumed as it was started."""
        if not settings.is_resolved:
            from napari_beerlanet.core.training.setup import resolve_defaults

            settings = resolve_defaults(settings)
            self.folder.write_run(settings=settings.model_dump())
        return settings


def is_model(model: object) -> bool:
    """Whether it is a model itself, and no name or path of one; told without loading torch."""
    return hasattr(model, "network") and hasattr(model, "info")


def normalizer_or_path(normalizer: Any) -> tuple[Normalizer | None, str | None]:
    """A normalizer that is no file, or the absolute path of one that is."""
    if normalizer is None or hasattr(normalizer, "state"):
        return normalizer, None
    return None, os.path.abspath(normalizer)


def name_or_path(model: str | os.PathLike[str]) -> str:
    """Absolute where it is a file, as a run may be resumed from another folder."""
    return os.path.abspath(model) if os.path.exists(model) else os.fspath(model)


# --- as a process --------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as a run.json says, with events as lines on standard output."""
    return run_config(_DetectorRun, "fine_tune", arguments)


def run_config(kind: type[TrainingRun], module: str, arguments: Sequence[str] | None = None) -> int:
    """The main function of a process that trains; returns its exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m napari_beerlanet.core.training.{module}")
    parser.add_argument("--config", required=True, type=Path, help="a run.json with settings")
    parser.add_argument(
        "--resume", action="store_true", help="resume after the last finished epoch"
    )
    options = parser.parse_args(arguments)
    received: list[int] = []

    def request_stop(signum: int, frame: object) -> None:
        if received:  # a second one does not wait
            raise KeyboardInterrupt
        received.append(signum)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, request_stop)

    def report(progress: Progress) -> None:
        if received:
            raise Cancelled(signal.Signals(received[0]).name)

    def emit(event: Event) -> None:
        if event["event"] == "batch":
            loaded()
        print_event(event)

    try:
        settings = kind.settings_type(**read_run(options.config)["settings"])
        with RunFolder(options.config.resolve().parent) as folder:
            kind(folder, report, emit).run(settings, None, options.resume)
    except (Cancelled, KeyboardInterrupt):
        return 128 + (received[0] if received else signal.SIGINT)
    except Exception as error:
        print(error_message(error, memory_advice=MEMORY_ADVICE), file=sys.stderr)
        return 1
    return 0


def print_event(event: Event) -> None:
    """One line on standard output; nobody need be listening."""
    try:
        print(json.dumps(event), flush=True)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the end


if __name__ == "__main__":
    run_process(main)
