"""The model section of a panel: choose a model, load it, describe it, share it."""

from __future__ import annotations

import html
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magicgui.widgets import ComboBox
from qtpy.QtCore import Qt, Signal
from qtpy.QtWidgets import QLabel, QVBoxLayout, QWidget

from napari_beerlanet.core.boxes.classes import class_colours
from napari_beerlanet.core.checkpoints.checkpoint import (
    CheckpointError,
    model_kind,
    packaged_models,
    read_info,
)
from napari_beerlanet.core.checkpoints.info import CLASSIFIER, DETECTOR
from napari_beerlanet.core.checkpoints.model_card import headline, model_facts
from napari_beerlanet.core.common.device import import_torch
from napari_beerlanet.core.common.progress import Cancelled, Report, report_progress
from napari_beerlanet.core.detection.settings import DetectSettings, OpenVinoMode
from napari_beerlanet.ui.common.controls import CollapsibleGroup, expand
from napari_beerlanet.ui.common.model_picker import PANELS, ModelPicker, dropped_model
from napari_beerlanet.ui.common.panel import Panel
from napari_beerlanet.ui.common.progress_bar import TaskProgressBar
from napari_beerlanet.ui.common.session import Session

if TYPE_CHECKING:
    from napari.viewer import Viewer

_AUTO_DEVICE = ("Automatic", "auto")
_MAX_NAMED_CLASSES = 12
_WAIT_S = 0.05  # after which one who waits for a model looks whether that was cancelled
_WHAT_IT_DOES = {DETECTOR: "finds cells", CLASSIFIER: "classifies cells"}


class DevicePicker(ComboBox):
    """Where a model runs."""

    def __init__(self) -> None:
        super().__init__(
            choices=[_AUTO_DEVICE],
            tooltip="Where the model runs. Automatic uses a GPU if there is one.",
        )
        expand(self)

    @property
    def chosen(self) -> str:
        """A name for `pick_device`."""
        return str(self.value)

    def offer(self, names: list[str]) -> None:
        """Offer the devices of this machine; the chosen one stays if it is among them."""
        chosen = self.chosen
        self.choices = []  # or magicgui keeps old entries first
        self.choices = [_AUTO_DEVICE, *((name, name) for name in names)]
        self.value = chosen if chosen in names else "auto"


_loading: dict[tuple[int, str, str, str], Future[Any]] = {}
_loading_lock = threading.Lock()


def load_model(
    key: str, device: str, report: Report, kind: str = DETECTOR, owner: object = None
) -> Any:
    """The `Detector` or `Classifier` of a name or path, ready to run; for a worker thread.

    One that is being loaded for the same `owner`, the session of a window, is waited for: a first
    click comes while the panel loads its model, and to load it twice at once would take twice as
    long. Windows do not share models, which one of them may move to another device.
    """
    report_progress(report, 0, 1, "loading the model")
    if owner is None:
        return _load_model(key, device, report, kind)
    place = id(owner), key, device, kind
    while True:
        with _loading_lock:
            others = _loading.get(place)
            if others is None:
                mine = _loading[place] = Future[Any]()
                break
        while not others.done():
            wait([others], timeout=_WAIT_S)
            report_progress(report, 0, 1, "loading the model")
        with suppress(Cancelled):  # the other was: then we load it
            return others.result()
    model, failure = None, None
    try:
        model = _load_model(key, device, report, kind)
    except BaseException as error:
        failure = error
    with _loading_lock:  # before the others hear of it, or they would find this one again
        del _loading[place]
    if failure is None:
        mine.set_result(model)
    else:
        mine.set_exception(failure)
    return mine.result()


def _load_model(key: str, device: str, report: Report, kind: str) -> Any:
    import_torch("napari_beerlanet.core.checkpoints.serialize")
    from napari_beerlanet.core.checkpoints.checkpoint import load_classifier, load_detector

    _check_kind(key, kind)
    model: Any = (load_classifier if kind == CLASSIFIER else load_detector)(key, device)
    report_progress(report, 1, 2, "loading the model")
    return make_ready(model)


def make_ready(model: Any) -> Any:
    """Have a loaded model fused and OpenVINO prepared; for a worker thread.

    Otherwise that is done when it is first asked about, by a panel that shows what it runs on, or
    at the first image.
    """
    prepare = getattr(model.runner, "prepare", None)  # a classifier's has nothing to prepare
    if prepare is not None:
        prepare()
    return model


def _check_kind(key: str, kind: str) -> None:
    """A model of the other kind is a `CheckpointError` that says where it belongs."""
    is_pt = key.lower().endswith(".pt")
    found = DETECTOR if is_pt and Path(key).is_file() else kind
    found = found if is_pt else model_kind(read_info(key))
    if found != kind:
        raise CheckpointError(
            f"{Path(key).name}: a {found}, which {_WHAT_IT_DOES[found]}; choose it in "
            f"“{PANELS[found]}”, and here a {kind}."
        )


def place_model(model: Any, device: str) -> Any:
    """A loaded model on the chosen device: itself, if it is there already."""
    from napari_beerlanet.core.common.device import pick_device

    chosen = pick_device(device)
    same = chosen.type == model.device.type
    if same and (chosen.index or 0) == (model.device.index or 0):
        return model
    return model.to(chosen)


class ModelSection(QWidget):
    """Card and loading state of the chosen model; the panel places `picker`.

    `kind`: "detector" or "classifier". `ready` is emitted when a model is loaded or another one is
    chosen. If a model cannot be loaded, that is reported in one sentence, and the choice returns to
    the last one that could.
    """

    ready = Signal()

    def __init__(
        self,
        panel: Panel,
        session: Session,
        device: DevicePicker,
        kind: str = DETECTOR,
        openvino: Callable[[], OpenVinoMode] = lambda: DetectSettings.default("openvino"),
    ) -> None:
        """`openvino` tells how a detector runs on the CPU."""
        super().__init__()
        self._openvino = openvino
        self._session, self._device, self.kind = session, device, kind
        self.task = panel.task()
        self.picker = ModelPicker(kind)
        self.card = ModelCard()
        self.progress_bar = TaskProgressBar(self.task, can_cancel=False)  # loading is short
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addWidget(self.card)
        layout.addWidget(self.progress_bar)
        self._last_key = ""
        self.picker.chosen.connect(self._chosen)
        self._changed.connect(self._session_model_changed)

    # --- the session's model of this kind ---

    @property
    def _model(self) -> Any:
        return self._session.classifier if self.kind == CLASSIFIER else self._session.model

    @property
    def _key(self) -> str | None:
        session = self._session
        return session.classifier_key if self.kind == CLASSIFIER else session.model_key

    @property
    def _changed(self) -> Any:
        session = self._session
        return session.classifier_changed if self.kind == CLASSIFIER else session.model_changed

    def _share(self, model: Any, key: str) -> None:
        session = self._session
        (session.set_classifier if self.kind == CLASSIFIER else session.set_model)(model, key)

    @property
    def loaded(self) -> Any:
        """The chosen model, None while it is not loaded."""
        return self._model if self._key == self.picker.key else None

    def load_initial(self) -> None:
        """Choose the model of the viewer's other panels or the first packaged one, and load it."""
        names = packaged_models(self.kind)
        key = self._key or (names[0] if names else "")
        self.picker.set_key(str(key))
        if self._model is not None:
            self._session_model_changed(self._model)
        elif key:
            self._load(str(key))

    def share_model(self, model: Any, key: str) -> None:
        """Share a model that a run has loaded or moved to another device with all panels."""
        if model is not self._model:
            self._share(model, key)

    def _chosen(self, key: str) -> None:
        if key and key != self._key:
            self._load(key)
        self.ready.emit()

    def _load(self, key: str) -> None:
        device, kind, session = self._device.chosen, self.kind, self._session

        def work(report: Report) -> tuple[Any, list[str]]:
            from napari_beerlanet.core.common.device import available_devices

            return load_model(key, device, report, kind, session), available_devices()

        self.task.start(work, lambda loaded: self._loaded(key, *loaded), self._failed)

    def _loaded(self, key: str, model: Any, devices: list[str]) -> None:
        self._device.offer(devices)
        self._share(model, key)

    def _failed(self, error: BaseException) -> None:
        self.picker.set_key(self._last_key)
        self.ready.emit()

    def _session_model_changed(self, model: Any) -> None:
        """This panel or another one has set the model of the session."""
        if model is None:
            return
        self._last_key = str(self._key or "")
        self.picker.set_key(self._last_key)
        if self._last_key:
            self.picker.add_recent(self._last_key)
        self.update_card()
        self.ready.emit()

    def update_card(self) -> None:
        """Show the model of the session again: where it runs may have changed."""
        model, classifies, session = self._model, self.kind == CLASSIFIER, self._session
        if model is None:
            return
        from napari_beerlanet.core.common.device import describe_device

        palette = session.type_palette if classifies else session.palette
        colours = palette.colours(model.classes)
        where = describe_device(model.device) if classifies else model.runs_on(self._openvino())
        self.card.show_info({**model.info, "colours": colours}, where)

    def disconnect_session(self) -> None:
        """Disconnect from the session."""
        self._changed.disconnect(self._session_model_changed)


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


class ModelPanel(Panel):
    """A panel with a model section, `model`: a model file may be dropped anywhere on it."""

    model: ModelSection

    def __init__(self, viewer: Viewer) -> None:
        super().__init__(viewer)
        self.setAcceptDrops(True)

    def choose_model(self, key: str) -> None:
        """Choose a packaged model by its name or a file by its path."""
        self.model.picker.choose(key)

    def dragEnterEvent(self, event: Any) -> None:
        """Accept model files."""
        if dropped_model(event.mimeData()):
            event.acceptProposedAction()

    def dropEvent(self, event: Any) -> None:
        """Choose the model that is dropped."""
        path = dropped_model(event.mimeData())
        if path:
            event.acceptProposedAction()
            self.choose_model(path)
