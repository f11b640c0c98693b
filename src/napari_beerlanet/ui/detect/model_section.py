"""The model section of the panel: choose a model, load it, describe it, share it."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qtpy.QtCore import Qt, Signal
from qtpy.QtWidgets import QLabel, QVBoxLayout, QWidget

from napari_beerlanet.core.boxes.classes import class_colours
from napari_beerlanet.core.checkpoints.checkpoint import packaged_models
from napari_beerlanet.core.checkpoints.info import limits_text
from napari_beerlanet.core.checkpoints.model_card import headline, training_facts
from napari_beerlanet.core.common.progress import Report
from napari_beerlanet.ui.common.controls import CollapsibleGroup
from napari_beerlanet.ui.common.model_picker import ModelPicker
from napari_beerlanet.ui.common.panel import Panel
from napari_beerlanet.ui.common.progress_bar import TaskProgressBar
from napari_beerlanet.ui.common.session import Session
from napari_beerlanet.ui.detect.form import DetectForm
from napari_beerlanet.ui.detect.job import load_model

if TYPE_CHECKING:
    from napari_beerlanet.core.detection.detector import Detector

_MAX_NAMED_CLASSES = 12


class ModelSection(QWidget):
    """Card and loading state of the chosen model; the panel places `picker`.

    `ready` is emitted when a model is loaded or another one is chosen. If a model cannot be loaded,
    that is reported in one sentence, and the choice returns to the last one that could.
    """

    ready = Signal()

    def __init__(self, panel: Panel, session: Session, form: DetectForm) -> None:
        super().__init__()
        self._session, self._form = session, form
        self.task = panel.task()
        self.picker = ModelPicker()
        self.card = ModelCard()
        self.progress_bar = TaskProgressBar(self.task, can_cancel=False)  # loading is short
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addWidget(self.card)
        layout.addWidget(self.progress_bar)
        self._last_key = ""
        self.picker.chosen.connect(self._chosen)
        session.model_changed.connect(self._session_model_changed)

    @property
    def loaded(self) -> Detector | None:
        """The chosen model, None while it is not loaded."""
        return self._session.model if self._session.model_key == self.picker.key else None

    def load_initial(self) -> None:
        """Choose the model of the viewer's other panels or the first packaged one, and load it."""
        names = packaged_models("detector")
        key = self._session.model_key or (names[0] if names else "")
        self.picker.set_key(str(key))
        if self._session.model is not None:
            self._session_model_changed(self._session.model)
        elif key:
            self._load(str(key))

    def share_model(self, model: Detector, key: str) -> None:
        """Share a model that a run has loaded or moved to another device with all panels."""
        if model is not self._session.model:
            self._session.set_model(model, key)

    def _chosen(self, key: str) -> None:
        if key and key != self._session.model_key:
            self._load(key)
        self.ready.emit()

    def _load(self, key: str) -> None:
        device = self._form.chosen_device

        def work(report: Report) -> tuple[Detector, list[str]]:
            from napari_beerlanet.core.common.device import available_devices

            return load_model(key, device, report), available_devices()

        self.task.start(work, lambda loaded: self._loaded(key, *loaded), self._failed)

    def _loaded(self, key: str, model: Detector, devices: list[str]) -> None:
        self._form.offer_devices(devices)
        self._session.set_model(model, key)

    def _failed(self, error: BaseException) -> None:
        self.picker.set_key(self._last_key)
        self.ready.emit()

    def _session_model_changed(self, model: Detector | None) -> None:
        """This panel or another one has set the model of the session."""
        if model is None:
            return
        from napari_beerlanet.core.common.device import describe_device

        self._last_key = str(self._session.model_key or "")
        self.picker.set_key(self._last_key)
        if self._last_key:
            self.picker.add_recent(self._last_key)
        colours = self._session.palette.colours(model.classes)
        self.card.show_info({**model.info, "colours": colours}, describe_device(model.device))
        self.ready.emit()

    def disconnect_session(self) -> None:
        """Disconnect from the session."""
        self._session.model_changed.disconnect(self._session_model_changed)


class ModelCard(QWidget):
    """Classes with their colours, and a collapsed section of other information."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = _rich_text_label()
        self.summary = _rich_text_label()
        self.details = _rich_text_label()
        self.fold = CollapsibleGroup("About this model")
        self.fold.header.setToolTip("What the model was trained on, and its accuracy.")
        self.fold.body.addWidget(self.details)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(2)
        for widget in (self.classes, self.summary, self.fold):
            layout.addWidget(widget)
        self.show_info(None)

    def show_info(self, info: Mapping[str, Any] | None, device: str = "") -> None:
        """Fill the card from a checkpoint's `info`; None keeps its space until there is one."""
        self.fold.setEnabled(info is not None)
        if info is None:
            self.classes.setText("&nbsp;")
            self.summary.setText("No model is loaded yet.<br>&nbsp;")
            return
        self.classes.setText(class_chips(info["classes"], info.get("colours")))
        self.classes.setToolTip("The classes of this model, in the colours of the boxes.")
        self.summary.setText(html.escape(summary_line(info, device)))
        self.summary.setToolTip("When it was trained, its accuracy, and where it runs.")
        rows = "".join(
            f"<tr><td style='padding-right:8px'>{html.escape(name)}</td>"
            f"<td>{html.escape(value)}</td></tr>"
            for name, value in model_facts(info, device)
        )
        self.details.setText(f"<table>{rows}</table>")


def _rich_text_label() -> QLabel:
    label = QLabel()
    label.setWordWrap(True)
    label.setTextFormat(Qt.TextFormat.RichText)
    label.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
    return label


def class_chips(classes: Sequence[str], colours: Sequence[str] | None) -> str:
    """Class names, each after a square of its colour, as rich text."""
    used = colours or class_colours(len(classes))
    parts = [
        f"<span style='color:{colour}'>■</span>&nbsp;{html.escape(name)}"
        for name, colour in list(zip(classes, used, strict=False))[:_MAX_NAMED_CLASSES]
    ]
    more = len(classes) - _MAX_NAMED_CLASSES
    return " &nbsp; ".join(parts) + (f" … and {more} more" if more > 0 else "")


def summary_line(info: Mapping[str, Any], device: str = "") -> str:
    """Training date, accuracy and device."""
    training = info.get("training") or {}
    parts = [f"trained {str(training['date'])[:10]}"] if training.get("date") else []
    score = headline(info)
    parts += [score] if score else []
    parts += [f"runs on {device}"] if device else []
    return " · ".join(parts) or "No information on its training."


def model_facts(info: Mapping[str, Any], device: str = "") -> list[tuple[str, str]]:
    """Name and value of everything worth knowing."""
    facts = [("Name", str(info.get("name") or "—"))]
    if device:
        facts.append(("Runs on", device))
    facts.append(("Stains", f"{info['components']} components, {info['iterations']} iterations"))
    facts += training_facts(info)
    if limits_text(info):
        facts.append(("Limits", limits_text(info)))
    facts.append(("Image size", f"{info['image_size']} pixels"))
    if info.get("pixel_size"):
        facts.append(("Pixel size", f"{info['pixel_size']:.3g} µm"))
    for name, size in (info.get("object_sizes") or {}).items():
        range_ = f"{size['median']:.0f} pixels ({size['low']:.0f} to {size['high']:.0f})"
        facts.append((f"Size of {name}", f"{range_}, {size['count']:.0f} annotated"))
    return facts + [("Note", str(note)) for note in info.get("notes") or []]
