"""Training: `fine_tune`, and the same as a process of its own.

    python -m napari_beerlanet.core.train --config RUN/run.json [--resume]

prints one JSON object per line: `start`, then `batch` and `epoch` over and over, now and then a
`warning`, and one of `end`, `failed`, `cancelled` as the last. A file `stop` in the run's folder,
Ctrl-C or SIGTERM end it after the batch.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .header import plain
from .progress import Cancelled, Progress, Report
from .recipe import Recipe
from .runfiles import RunFolder, read_run
from .several import train_on_several
from .training import Event, Tell, explain, train_here

# Loaded where needed: what is wrong with settings is told before torch and Ultralytics have loaded.
if TYPE_CHECKING:
    from .detector import Detector


def fine_tune(
    model: Detector | str | os.PathLike[str] | None,
    data: str | os.PathLike[str] | None,
    output: str | os.PathLike[str],
    scope: str = "all",
    epochs: int | None = None,
    image_size: int | None = None,
    batch: int | str = 8,
    learning_rate: float | None = None,
    seed: int = 0,
    device: str = "auto",
    jitter: bool | dict[str, Any] = True,
    resume: bool = False,
    report: Report | None = None,
    progress: Tell | None = None,
    *,
    pixel_size: float | None = None,
    length: str = "normal",
    repeats: int | None = None,
    keep_statistics: bool | None = None,
    average: int | None = None,
    share: float | None = None,
    **advanced: Any,
) -> Detector:
    """Train a model on a dataset and return it as it was after its best epoch.

    Parameters
    ----------
    model
        A `Detector`, a checkpoint's path or name, or a `.pt` of Ultralytics, which gets a fresh
        front end. For other classes the head is rebuilt, and what fits is kept.
    data
        A data.yaml with splits `train` and `val`, see `dataset`.
    output
        Folder of the run, see `runfiles`; best.safetensors in it is what is returned.
    scope
        "all"; "head": the detection head alone, not the front end; "stain": the front end alone
        (S_init, λ, γ, the 1×1 convolution), which adapts a model to another laboratory's stain.
        What is not trained stays as it is to the last bit, batch statistics included.
    epochs, length
        Passes through the data. None: as many as the number of fields asks for, see `plan`, with
        `length` "quick", "normal" or "thorough".
    batch, learning_rate
        "auto" takes what a GPU's memory holds. None: a rate that is gentle to a trained model;
        where none is trained yet, rate and optimizer are left to Ultralytics.
    image_size
        Longer side of training images in pixels; None is the model's own, 640 for a fresh one.
    device
        "auto", "cpu", "cuda:0", "mps"; "0,1" trains on two GPUs.
    jitter
        Vary stains, strength and light (`StainJitter`; a dict has its settings).
    resume
        Go on after the last finished epoch of the run in `output`, with the settings that it was
        begun with; `model` and `data` may be None then.
    report, progress
        Called after every batch, and with every event; `Cancelled` raised in either ends the run.
    pixel_size
        Micrometres per pixel of the training images, if all have the same.
    repeats, keep_statistics, average, share
        See `StainTrainer`; None is what the number of fields asks for.
    advanced
        Ultralytics' own training arguments, for instance `mosaic=0.5`.
    """
    start = model if _is_detector(model) else None
    named = None if model is None or start is not None else _name_or_path(model)  # type: ignore[arg-type]
    where = None if data is None else os.path.abspath(data)
    rest = (batch, learning_rate, seed, device, jitter, pixel_size, advanced)
    gentle = (length, repeats, keep_statistics, average, share)
    recipe = Recipe(named, where, scope, epochs, image_size, *rest, *gentle)
    recipe.check()
    with RunFolder(output) as folder:
        return _Run(folder, report, progress).go(recipe, start, resume)  # type: ignore[arg-type]


class _Run:
    """One run, from its recipe to its last event."""

    def __init__(self, folder: RunFolder, report: Report | None, progress: Tell | None) -> None:
        self.folder, self.report, self.progress = folder, report, progress

    def go(self, given: Recipe, start: Detector | None, resume: bool) -> Detector:
        """Train, and end with one event whatever happens."""
        recipe = self._begin(given, start, resume)
        try:
            for note in given.differences(recipe) if resume else ():
                self.tell({"event": "warning", "message": note})
            detector = self._train(recipe)
        except Exception as error:
            cancelled = isinstance(error, Cancelled)
            self._end("cancelled" if cancelled else "failed", explain(error))
            raise
        except BaseException as error:
            self._end("cancelled", type(error).__name__)
            raise
        self._end("end", "", metrics=detector.info["training"]["metrics"])
        return detector

    def _begin(self, given: Recipe, start: Detector | None, resume: bool) -> Recipe:
        """What holds: as given, or, where a run goes on, as it was begun."""
        begun = self.folder.read_run()
        if resume and begun is not None:
            self.folder.trim_events()
            recipe = replace(Recipe.read(begun["settings"]), device=given.device)
        else:
            self.folder.refuse_to_lose()
            if given.data is None or (given.model is None and start is None):
                raise ValueError(
                    f"{self.folder.path}: there is no run to go on with; give model and data."
                )
            self.folder.clear()
            recipe = given
            if start is not None:
                from .checkpoint import save_checkpoint

                save_checkpoint(start, self.folder.start)
                recipe = replace(given, model=str(self.folder.start))
        self.folder.write_run(
            settings=recipe.write(), state="running", message="", process=os.getpid()
        )
        return recipe

    def tell(self, event: Event) -> None:
        """Write an event down and pass it on."""
        event = plain(event)
        self.folder.append_event(event)
        if self.progress is not None:
            self.progress(event)

    def _end(self, event: str, message: str, **more: Any) -> None:
        epoch = (self.folder.read_run() or {}).get("epoch", 0)
        best = str(self.folder.best) if self.folder.best.exists() else None
        self.folder.write_run(state="finished" if event == "end" else event, message=message)
        self.folder.stop_file.unlink(missing_ok=True)
        with suppress(Cancelled):  # it has ended as it is
            self.tell({"event": event, "epoch": epoch, "best": best, "message": message, **more})

    def _train(self, recipe: Recipe) -> Detector:
        recipe = self._settled(recipe)
        assert recipe.epochs is not None
        state = self.folder.read_state()
        devices = recipe.devices
        if state is not None:  # a kill may have come between it and these
            self.folder.write_results(state["rows"])
            self.folder.write_run(epoch=state["epoch"] + 1)
        if state is None or (state["epoch"] + 1 < recipe.epochs and not state["finished"]):
            if len(devices) > 1:
                train_on_several(self.folder, len(devices), self.tell, self.report)
            else:
                train_here(self.folder, recipe, state, self.tell, self.report)
        from .checkpoint import load_checkpoint

        return load_checkpoint(self.folder.best, device=devices[0])

    def _settled(self, recipe: Recipe) -> Recipe:
        """With everything decided, and that written down: a run goes on as it was begun."""
        if not recipe.is_settled:
            from .preparing import settle

            recipe = settle(recipe)
            self.folder.write_run(settings=recipe.write())
        return recipe


def _is_detector(model: object) -> bool:
    return hasattr(model, "network") and hasattr(model, "info")


def _name_or_path(model: str | os.PathLike[str]) -> str:
    """Absolute where it is a file, as a run may go on from another folder."""
    return os.path.abspath(model) if os.path.exists(model) else os.fspath(model)


# --- as a process --------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as a run.json says, with events as lines on standard output."""
    parser = argparse.ArgumentParser(prog="python -m napari_beerlanet.core.train")
    parser.add_argument("--config", required=True, type=Path, help="a run.json with settings")
    parser.add_argument("--resume", action="store_true", help="go on after the last epoch")
    options = parser.parse_args(arguments)
    asked: list[int] = []

    def note(signum: int, frame: object) -> None:
        if asked:  # a second one does not wait
            raise KeyboardInterrupt
        asked.append(signum)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)

    def report(progress: Progress) -> None:
        if asked:
            raise Cancelled(signal.Signals(asked[0]).name)

    try:
        recipe = Recipe.read(read_run(options.config)["settings"])
        with RunFolder(options.config.resolve().parent) as folder:
            _Run(folder, report, print_event).go(recipe, None, options.resume)
    except (Cancelled, KeyboardInterrupt):
        return 128 + (asked[0] if asked else signal.SIGINT)
    except Exception as error:
        print(explain(error), file=sys.stderr)
        return 1
    return 0


def print_event(event: Event) -> None:
    """One line on standard output; nobody need be listening."""
    try:
        print(json.dumps(event), flush=True)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the end


if __name__ == "__main__":
    sys.exit(main())
