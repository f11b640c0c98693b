"""The command `train`: its arguments, and what is shown while it runs."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from napari_beerlanet.arguments import count, or_word
from napari_beerlanet.commands import UsageError, say, stop_if_asked

Event = dict[str, Any]


def add_parser(verbs: Any, finish: Callable[[argparse.ArgumentParser, Any], None]) -> None:
    """Add the command to a parser's verbs."""
    command = verbs.add_parser(
        "train",
        help="train a model on annotated images",
        description="Train a model on annotated images, as YOLO lays them out. The folder OUT gets "
        "best.safetensors and last.safetensors, results.csv, progress.jsonl and all that it takes "
        "to go on after an interruption (--resume). A file OUT/stop ends the run after the batch.",
    )
    add = command.add_argument
    add("--data", type=Path, metavar="DATA.yaml", help="images, labels and names of the classes")
    add(
        "--model",
        default="blood-cells",
        metavar="MODEL",
        help="where to start: a packaged model's name (default blood-cells), a checkpoint, or a "
        ".pt of Ultralytics such as yolov8n.pt",
    )
    add("--out", required=True, type=Path, metavar="DIR", help="folder of the run")
    add(
        "--scope",
        choices=("all", "head", "stain"),
        default="all",
        help="what learns: all, the detection head alone, or the stain front end alone, which "
        "adapts a model to another laboratory's stain",
    )
    add("--resume", action="store_true", help="go on after the last finished epoch of the run")
    _add_settings(command.add_argument_group("how to train"))
    add("--json", action="store_true", help="print one JSON object per line instead of a bar")
    add("--quiet", action="store_true", help="say nothing but errors and the summary")
    finish(command, train)


def _add_settings(group: Any) -> None:
    add = group.add_argument
    add("--epochs", type=int, metavar="N", help="default: as many as the number of images needs")
    add(
        "--length",
        choices=("quick", "normal", "thorough"),
        default="normal",
        help="how long to train where --epochs is not given (default normal)",
    )
    add("--imgsz", type=int, metavar="PIXELS", help="longer side of images (default: the model's)")
    add(
        "--batch",
        type=or_word("auto", count),
        default=8,
        metavar="N",
        help="images per step, or auto",
    )
    add("--lr", type=float, metavar="RATE", help="learning rate (default: gentle)")
    add("--seed", type=int, default=0, metavar="N", help="of all random numbers (default 0)")
    add("--device", default="auto", help="auto (default), cpu, cuda:0, mps; 0,1 for two GPUs")
    add("--pixel-size", type=float, metavar="µM", help="micrometres per pixel of the images")
    add("--no-jitter", action="store_true", help="do not vary stains and light")
    add(
        "--set",
        action="append",
        default=[],
        type=_setting,
        metavar="KEY=VALUE",
        help="further arguments of Ultralytics' training, for instance mosaic=0.5",
    )


def _setting(text: str) -> tuple[str, Any]:
    key, sign, value = text.partition("=")
    if not sign or not key.isidentifier():
        raise argparse.ArgumentTypeError(f"KEY=VALUE is needed, not {text!r}")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def train(options: argparse.Namespace) -> int:
    """Train, and say what came of it."""
    if options.data is None and not options.resume:
        raise UsageError("--data DATA.yaml is needed, or --resume to go on with a run.")
    shown = _Lines(options.out) if options.json else _Bar(options)

    from napari_beerlanet.core.progress import Cancelled
    from napari_beerlanet.core.train import fine_tune

    try:
        fine_tune(
            options.model,
            options.data,
            options.out,
            scope=options.scope,
            epochs=options.epochs,
            image_size=options.imgsz,
            batch=options.batch,
            learning_rate=options.lr,
            seed=options.seed,
            device=options.device,
            jitter=not options.no_jitter,
            resume=options.resume,
            report=lambda _: stop_if_asked(),
            progress=shown,
            pixel_size=options.pixel_size,
            length=options.length,
            **dict(options.set),
        )
    except Cancelled:
        say(f"stopped as asked; {_kept(options.out)}.")
        return 128 + signal.SIGINT
    finally:
        shown.close()
    return 0


def _kept(folder: Path) -> str:
    best = folder / "best.safetensors"
    return f"the best so far is {best}" if best.exists() else "no epoch was finished"


class _Lines:
    """Events as lines on standard output."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, event: Event) -> None:
        from napari_beerlanet.core.train import print_event

        print_event(event)

    def close(self) -> None:
        pass


class _Bar:
    """A progress bar and a line for each epoch on standard error; the result on standard output."""

    def __init__(self, options: argparse.Namespace) -> None:
        from tqdm import tqdm

        self.quiet = options.quiet
        hidden = options.quiet or not sys.stderr.isatty()
        self.bar = tqdm(unit="batch", disable=hidden, dynamic_ncols=True)

    def __call__(self, event: Event) -> None:
        kind = event["event"]
        if kind == "batch":
            self.bar.total = event["epochs"] * event["batches"]
            self.bar.n = (event["epoch"] - 1) * event["batches"] + event["batch"]
            losses = " ".join(f"{k[:3]} {v:.3f}" for k, v in event["losses"].items())
            self.bar.set_postfix_str(f"epoch {event['epoch']} of {event['epochs']}, {losses}")
        elif kind == "end":
            self.close()
            print(f"{event['best']}: {_quality(event['metrics'])}", flush=True)
        elif not self.quiet and kind in ("start", "epoch", "warning"):
            self.bar.clear()
            say(_TEXT[kind](event))

    def close(self) -> None:
        self.bar.close()


def _start(event: Event) -> str:
    images = " and ".join(f"{count} {split}" for split, count in event["images"].items())
    word = f"going on with epoch {event['epoch']}" if event["resumed"] else "training"
    return f"{word} of {event['epochs']} epochs: {images} images, on {event['device']}."


def _epoch(event: Event) -> str:
    best = ", the best so far" if event["best"] else ""
    return f"epoch {event['epoch']} of {event['epochs']}: {_quality(event['metrics'])}{best}."


def _quality(metrics: dict[str, Any]) -> str:
    known = {key: metrics.get(key) for key in ("mAP50", "mAP50-95")}
    return ", ".join(f"{key} {value:.3f}" for key, value in known.items() if value is not None)


_TEXT: dict[str, Callable[[Event], str]] = {
    "start": _start,
    "epoch": _epoch,
    "warning": lambda event: str(event["message"]),
}
