"""The command `train`: fine-tune a model, with a progress bar or JSON events."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from napari_beerlanet.cli.common import (
    DEFAULT_MODEL,
    UsageError,
    add_settings,
    echo,
    given_settings,
    print_message,
    raise_if_interrupted,
)
from napari_beerlanet.core.common.messages import quoted

Event = dict[str, Any]


HELP = "train a model on annotated images"
DESCRIPTION = (
    "Train a detector on annotated images in the layout of YOLO or, with --task classify, a "
    "classifier on crops: a folder per class, or the boxes of such images. The folder OUT gets "
    "best.safetensors and last.safetensors, results.csv, progress.jsonl and all that it takes to "
    "resume after an interruption (--resume). A file OUT/stop ends the run after the batch."
)


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    from napari_beerlanet.core.training.settings import JITTERS, TrainSettings
    from napari_beerlanet.core.training.train_classifier import ClassifierTrainSettings

    add = command.add_argument
    add("--task", choices=("detect", "classify"), default="detect", help="default detect")
    add_settings(command, TrainSettings, ("data", "model"))
    command.set_defaults(data=None, model=None)
    add("--out", required=True, type=Path, metavar="DIR", help="folder of the run")
    add_settings(command, TrainSettings, ["scope"])
    colours = command.add_argument_group("what the network sees")
    add_settings(colours, TrainSettings, ("front_end", "attention_pool", "normalizer"))
    colours.add_argument(
        "--jitter",
        choices=JITTERS,
        default=argparse.SUPPRESS,
        help="how colours of the training images vary: by stain and light (stain, the default), by "
        "haematoxylin, eosin and DAB (hed), or not (none)",
    )
    classifier = command.add_argument_group("classifiers (--task classify)")
    looks = ("backbone", "weights", "input_size", "fill", "fit", "views")
    switches = ("normalize", "beside_rgb", "denoise")
    add_settings(classifier, ClassifierTrainSettings, (*looks, *switches))
    add("--resume", action="store_true", help="resume after the last finished epoch of the run")
    training = command.add_argument_group("training")
    names = ("epochs", "length", "batch", "seed", "device", "pixel_size")
    add_settings(training, TrainSettings, (*names, "image_size", "learning_rate"))
    training.add_argument(
        "--no-jitter",
        dest="jitter",
        action="store_false",
        default=argparse.SUPPRESS,
        help="do not vary stains and illumination",
    )
    training.add_argument(
        "--set",
        action="append",
        default=[],
        type=_key_value,
        metavar="KEY=VALUE",
        help="further arguments of Ultralytics' training, for instance mosaic=0.5; with --task "
        "classify further settings, for instance balanced=false",
    )
    add("--json", action="store_true", help="print one JSON object per line instead of a bar")
    add("--quiet", action="store_true", help="print nothing but errors and the summary")


def _key_value(text: str) -> tuple[str, Any]:
    key, sign, value = text.partition("=")
    if not sign or not key.isidentifier():
        raise argparse.ArgumentTypeError(f"KEY=VALUE is needed, not {quoted(text)}")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def run(options: argparse.Namespace) -> int:
    """Train, and print the result."""
    if options.data is None and not options.resume:
        raise UsageError("--data is needed (a data.yaml, or crops), or --resume to resume a run.")
    train = _train_classifier if options.task == "classify" else _train_detector
    output = _JsonOutput() if options.json else _ConsoleOutput(options)

    from napari_beerlanet.core.common.progress import Cancelled

    try:
        train(options, output)
    except Cancelled:
        print_message(f"stopped as requested; {_best_so_far(options.out)}.")
        return 128 + signal.SIGINT
    finally:
        output.close()
    return 0


def _train_detector(options: argparse.Namespace, output: Callable[[Event], None]) -> None:
    from napari_beerlanet.core.training.fine_tune import fine_tune
    from napari_beerlanet.core.training.settings import TrainSettings

    given = given_settings(options, TrainSettings)
    model, data = given.pop("model") or DEFAULT_MODEL, given.pop("data")
    fine_tune(
        model,
        data,
        options.out,
        resume=options.resume,
        report=lambda _: raise_if_interrupted(),
        progress=output,
        **(given | dict(options.set)),
    )


def _train_classifier(options: argparse.Namespace, output: Callable[[Event], None]) -> None:
    from napari_beerlanet.core.training.settings import TrainSettings
    from napari_beerlanet.core.training.train_classifier import (
        ClassifierTrainSettings,
        train_classifier,
    )

    given = given_settings(options, ClassifierTrainSettings)
    others = given_settings(options, TrainSettings).keys() - given.keys()
    if others:
        name = min(others).replace("_", "-")
        raise UsageError(f"--{name} is for detectors; with --task classify leave it out.")
    given.pop("task")
    train_classifier(
        given.pop("data"),
        options.out,
        resume=options.resume,
        report=lambda _: raise_if_interrupted(),
        progress=output,
        **(given | dict(options.set)),
    )


def _best_so_far(folder: Path) -> str:
    best = folder / "best.safetensors"
    return f"the best so far is {best}" if best.exists() else "no epoch was finished"


class _JsonOutput:
    """Events as lines on standard output."""

    def __call__(self, event: Event) -> None:
        from napari_beerlanet.core.training.fine_tune import print_event

        print_event(event)

    def close(self) -> None:
        pass


class _ConsoleOutput:
    """A progress bar and a line for each epoch on standard error; the result on standard output."""

    def __init__(self, options: argparse.Namespace) -> None:
        from tqdm import tqdm

        self.quiet = options.quiet
        hidden = options.quiet or not sys.stderr.isatty()
        self.bar = tqdm(unit="batch", disable=hidden, dynamic_ncols=True)

    def __call__(self, event: Event) -> None:
        kind = event["event"]
        if kind == "batch":
            self.bar.total, self.bar.n = event["steps"], event["step"]
            losses = " ".join(f"{k[:3]} {v:.3f}" for k, v in event["losses"].items())
            self.bar.set_postfix_str(f"epoch {event['epoch']} of {event['epochs']}, {losses}")
        elif kind == "end":
            self.close()
            if event["message"]:  # it has stopped early
                print_message(event["message"])
            if text := event.get("change", {}).get("text"):
                print_message(text)
            echo(f"{event['best']}: {_describe_model(event['best'])}")
        elif not self.quiet and kind in _EVENT_TEXT:
            self.bar.clear()
            print_message(_EVENT_TEXT[kind](event))

    def close(self) -> None:
        self.bar.close()


def _describe_model(path: str) -> str:
    """What a model is headed by: never by a score on a handful of boxes."""
    from napari_beerlanet.core.checkpoints.checkpoint import read_info
    from napari_beerlanet.core.checkpoints.model_card import headline

    return headline(read_info(path))


def _describe_start(event: Event) -> str:
    images = " and ".join(f"{count} {split}" for split, count in event["images"].items())
    word = f"resuming with epoch {event['epoch']}" if event["resumed"] else "training"
    what = "crops" if event.get("task") == "classify" else "images"
    return f"{word} of {event['epochs']} epochs: {images} {what}, on {event['device']}."


def _describe_epoch(event: Event) -> str:
    best = ", the best so far" if event["best"] else ""
    return (
        f"epoch {event['epoch']} of {event['epochs']}: {_format_metrics(event['metrics'])}{best}."
    )


def _format_metrics(metrics: dict[str, Any]) -> str:
    from napari_beerlanet.core.common.messages import format_score

    named = {"mAP50": "mAP50", "mAP50-95": "mAP50-95"}
    named |= {"accuracy": "accuracy", "balanced_accuracy": "balanced accuracy"}
    known = {text: metrics.get(key) for key, text in named.items()}
    scores = {key: format_score(value) for key, value in known.items() if value is not None}
    return ", ".join(f"{key} {score}" for key, score in scores.items())


_EVENT_TEXT: dict[str, Callable[[Event], str]] = {
    "start": _describe_start,
    "epoch": _describe_epoch,
    "compare": lambda event: "comparing the new model with the one before.",
    "warning": lambda event: str(event["message"]),
}
