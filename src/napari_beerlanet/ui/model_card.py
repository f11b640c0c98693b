"""What a model is, at a glance: what it finds, what it was trained on, how good it is."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from qtpy.QtCore import Qt
from qtpy.QtWidgets import QLabel, QVBoxLayout, QWidget

from napari_beerlanet.core.colours import class_colours
from napari_beerlanet.ui.controls import Fold

_MANY = 12  # classes that are named


class ModelCard(QWidget):
    """Classes with their colours, and what else is known of the model, folded."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = _text()
        self.summary = _text()
        self.details = _text()
        self.fold = Fold("About this model")
        self.fold.head.setToolTip("What the model was trained on, and how well it does.")
        self.fold.body.addWidget(self.details)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(2)
        for widget in (self.classes, self.summary, self.fold):
            layout.addWidget(widget)
        self.show_info(None)

    def show_info(self, info: Mapping[str, Any] | None, device: str = "") -> None:
        """Fill the card from a checkpoint's `info`; empty it for None."""
        self.setVisible(info is not None)
        if info is None:
            return
        self.classes.setText(chips(info["classes"], info.get("colours")))
        self.classes.setToolTip("What this model finds, in the colours of the boxes.")
        self.summary.setText(html.escape(one_line(info, device)))
        self.summary.setToolTip("When it was trained, how well it does, and where it runs.")
        rows = "".join(
            f"<tr><td style='padding-right:8px'>{html.escape(name)}</td>"
            f"<td>{html.escape(value)}</td></tr>"
            for name, value in facts(info, device)
        )
        self.details.setText(f"<table>{rows}</table>")


def _text() -> QLabel:
    label = QLabel()
    label.setWordWrap(True)
    label.setTextFormat(Qt.TextFormat.RichText)
    label.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
    return label


def chips(classes: Sequence[str], colours: Sequence[str] | None) -> str:
    """Class names, each after a square of its colour, as rich text."""
    shown = colours or class_colours(len(classes))
    parts = [
        f"<span style='color:{colour}'>■</span>&nbsp;{html.escape(name)}"
        for name, colour in list(zip(classes, shown, strict=False))[:_MANY]
    ]
    more = len(classes) - _MANY
    return " &nbsp; ".join(parts) + (f" … and {more} more" if more > 0 else "")


def one_line(info: Mapping[str, Any], device: str = "") -> str:
    """When, how good, where."""
    training = info.get("training") or {}
    parts = [f"trained {str(training['date'])[:10]}"] if training.get("date") else []
    best = _best(training.get("metrics") or {})
    parts += [best] if best else []
    parts += [f"runs on {device}"] if device else []
    return " · ".join(parts) or "Nothing is known of its training."


def facts(info: Mapping[str, Any], device: str = "") -> list[tuple[str, str]]:
    """Name and value of all that is worth knowing."""
    training = info.get("training") or {}
    told = [("Name", str(info.get("name") or "—"))]
    if device:
        told.append(("Runs on", device))
    told.append(("Stains", f"{info['components']} components, {info['iterations']} steps"))
    if training.get("data"):
        told.append(("Trained on", _trained_on(training)))
    for name, metrics in _tests(training.get("metrics") or {}):
        told.append((f"On {name}" if name else "Measured", metrics))
    told.append(("Image size", f"{info['image_size']} pixels"))
    if info.get("pixel_size"):
        told.append(("Pixel size", f"{info['pixel_size']:.3g} µm"))
    for name, size in (info.get("object_sizes") or {}).items():
        seen = f"{size['median']:.0f} pixels ({size['low']:.0f} to {size['high']:.0f})"
        told.append((f"Size of {name}", f"{seen}, {size['count']:.0f} seen"))
    return told + [("Note", str(note)) for note in info.get("notes") or []]


def _trained_on(training: Mapping[str, Any]) -> str:
    images = (training.get("images") or {}).get("train")
    number = f"{images} images of " if images else ""
    epochs = f", {training['epochs']} epochs" if training.get("epochs") else ""
    date = f", {str(training['date'])[:10]}" if training.get("date") else ""
    return f"{number}{training['data']}{epochs}{date}"


def _tests(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Name of the test data ("" if there is just one) and what was measured on it."""
    if "mAP50" in metrics:
        return [("", _measure(metrics))]
    return [
        (name, _measure(m))
        for name, m in metrics.items()
        if isinstance(m, Mapping) and "mAP50" in m
    ]


def _measure(metrics: Mapping[str, Any]) -> str:
    images = f" ({metrics['images']} images)" if metrics.get("images") else ""
    strict = metrics.get("mAP50-95")
    more = f", mAP50-95 {strict:.3f}" if strict is not None else ""
    return f"mAP50 {metrics['mAP50']:.3f}{more}{images}"


def _best(metrics: Mapping[str, Any]) -> str:
    """The measure on the largest test."""
    tests = [m for m in [metrics, *metrics.values()] if isinstance(m, Mapping) and "mAP50" in m]
    if not tests:
        return ""
    return f"mAP50 {max(tests, key=lambda m: m.get('images') or 0)['mAP50']:.2f}"
