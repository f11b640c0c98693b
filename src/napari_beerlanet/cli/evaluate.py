"""The command `evaluate`: measure a model against annotated images."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from napari_beerlanet.cli.common import (
    DEFAULT_MODEL,
    add_settings,
    echo,
    given_settings,
    load_model,
    prepare_folder,
    raise_if_interrupted,
)

if TYPE_CHECKING:
    from napari_beerlanet.core.common.progress import Progress


HELP = "measure a model against annotated images"
DESCRIPTION = (
    "Measure how well a detector detects what is annotated: average precision, precision, recall "
    "and the best threshold per class, of what `detect` would give. Of a classifier: accuracy, "
    "balanced accuracy, calibration, precision and recall per class."
)


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    from napari_beerlanet.core.batch.settings import StudySettings

    add = command.add_argument
    add(
        "--data",
        required=True,
        type=Path,
        metavar="DATA",
        help="a data.yaml with images, labels and names; for a classifier also a folder per class, "
        "or images with files of annotations that have types",
    )
    add("--split", default="val", choices=("train", "val", "test"), help="default val")
    add(
        "--ordered",
        action="append",
        default=[],
        type=lambda text: [name.strip() for name in text.split(",")],
        metavar="A,B,C",
        help="classes in their order, of which a neighbour counts for the relaxed accuracy",
    )
    names = ("model", "object_size", "device", "openvino")
    add_settings(command, StudySettings, names, {"model": DEFAULT_MODEL})
    command.set_defaults(model=DEFAULT_MODEL, device="auto")
    add("--out", type=Path, metavar="FILE.json", help="write all metrics, with curves, to a file")
    add("--quiet", action="store_true", help="show no progress")


def run(options: argparse.Namespace) -> int:
    """Measure a model and print a table."""
    from tqdm import tqdm

    from napari_beerlanet.core.detection.settings import DetectSettings
    from napari_beerlanet.core.evaluation.dataset import evaluate

    model = load_model(options.model, options.device)
    if options.out:
        prepare_folder(options.out.parent)
    with tqdm(total=1.0, disable=options.quiet or None, bar_format=_BAR_FORMAT) as bar:

        def report(progress: Progress) -> None:
            raise_if_interrupted()
            bar.update(max(progress.fraction - bar.n, 0))

        given = given_settings(options, DetectSettings)
        result = evaluate(
            model, options.data, options.split, ordered=options.ordered, report=report, **given
        )
    if "mAP50" in result:
        lines = _metrics_table(result)
    else:
        lines = _types_table(result, relaxed=bool(options.ordered))
    for line in lines:
        echo(line)
    if options.out:
        _write_result(options.out, result)
    return 0


_BAR_FORMAT = "{percentage:3.0f}%|{bar}| {elapsed}<{remaining}"


def _write_result(path: Path, result: dict[str, Any]) -> None:
    from napari_beerlanet.core.common.storage import atomic_path

    with atomic_path(path) as unfinished:
        unfinished.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _metrics_table(result: dict[str, Any]) -> list[str]:
    """Metrics per class as lines of text."""
    width = max(len(name) for name in ("all", *result["per_class"]))
    head = f"{'':<{width}}  count     AP50  AP50-95  precision   recall       F1  threshold"
    lines = [head]
    for name, row in result["per_class"].items():
        threshold = "-" if row["threshold"] is None else f"{row['threshold']:.2f}"
        lines.append(_metrics_row(name, width, row, threshold))
    total = sum(row["count"] for row in result["per_class"].values())
    means = {**result, "AP50": result["mAP50"], "AP50-95": result["mAP50-95"], "count": total}
    return [*lines, _metrics_row("all", width, means, "")]


def _metrics_row(name: str, width: int, row: dict[str, Any], threshold: str) -> str:
    from napari_beerlanet.core.common.messages import format_score

    keys = {"AP50": 7, "AP50-95": 7, "precision": 9, "recall": 7, "F1": 7}
    scores = "  ".join(f"{format_score(row[key]):>{room}}" for key, room in keys.items())
    return f"{name:<{width}}  {row['count']:>5}  {scores}  {threshold:>9}".rstrip()


def _types_table(result: dict[str, Any], relaxed: bool) -> list[str]:
    """Metrics of a classifier as lines of text, with how many crops each stands on."""
    from napari_beerlanet.core.boxes.annotations import MIN_CLASS_BOXES
    from napari_beerlanet.core.common.messages import count_of, format_score

    width = max(len(name) for name in ("all", *result["per_class"]))
    room = 22  # of a score with its interval
    lines = [f"{'':<{width}}  count  called  {'precision':>{room}}  {'recall':>{room}}  {'F1':>7}"]
    for name, row in result["per_class"].items():
        scores = "  ".join(
            f"{_with_interval(row[key], row[f'{key}_interval']):>{room}}"
            for key in ("precision", "recall")
        )
        f1 = format_score(row["F1"]) if row["count"] or row["predicted"] else "-"
        start = f"{name:<{width}}  {row['count']:>5}  {row['predicted']:>6}"
        lines.append(f"{start}  {scores}  {f1:>7}")
    few = [n for n, row in result["per_class"].items() if row["count"] < MIN_CLASS_BOXES]
    if few:
        lines.append(
            f"fewer than {MIN_CLASS_BOXES} crops of {', '.join(few)}: their numbers say little"
        )
    lines += [f"note: {note}" for note in result.get("notes", [])]
    named = {"accuracy": "accuracy", "balanced_accuracy": "balanced accuracy"}
    named |= {"relaxed_accuracy": "relaxed accuracy"} if relaxed else {}
    named |= {"roc_auc": "ROC-AUC", "ece": "calibration error"}
    known = {text: result[key] for key, text in named.items() if result[key] is not None}
    interval = {"accuracy": result["accuracy_interval"]}
    summary = ", ".join(
        f"{text} {_with_interval(value, interval[text])}"
        if text in interval
        else f"{text} {format_score(value)}"
        for text, value in known.items()
    )
    images = f", of {count_of(result['images'], 'image')}" if result.get("images") else ""
    return [*lines, f"{summary}; intervals of 95 %{images}; {result['crops']} crops"]


def _with_interval(score: float, interval: list[float] | None) -> str:
    """ "85.0 % (64 to 95 %)", "-" of nothing."""
    from napari_beerlanet.core.common.messages import format_score

    if interval is None:
        return "-"
    return f"{format_score(score)} ({100 * interval[0]:.0f} to {100 * interval[1]:.0f} %)"
