"""The model of the panel: chosen, loaded off the GUI thread, described and shared."""

from __future__ import annotations

from typing import Any

from qtpy.QtCore import Signal
from qtpy.QtWidgets import QVBoxLayout, QWidget

from napari_beerlanet.core.checkpoint import packaged_models
from napari_beerlanet.core.progress import Report
from napari_beerlanet.ui.detect_work import load
from napari_beerlanet.ui.model_card import ModelCard
from napari_beerlanet.ui.model_choice import ModelChoice
from napari_beerlanet.ui.runbar import RunBar


class ModelPart(QWidget):
    """Card and state of the chosen model; `choice` is placed by the panel.

    `ready` tells that a model is loaded, or that the choice changed. A model that cannot be loaded
    is told in one sentence, and the choice goes back to the last that could.
    """

    ready = Signal()

    def __init__(self, panel: Any, session: Any) -> None:
        super().__init__()
        self._panel, self._session = panel, session
        self.task = panel.task()
        self.choice = ModelChoice()
        self.card = ModelCard()
        self.runbar = RunBar(self.task)
        self.runbar.cancel.setMaximumWidth(0)  # loading is short and cannot be stopped half-way
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addWidget(self.card)
        layout.addWidget(self.runbar)
        self._last = ""
        self.choice.chosen.connect(self._chosen)
        session.model_changed.connect(self._shared)

    @property
    def loaded(self) -> Any:
        """The chosen model, None as long as it is not loaded."""
        return self._session.model if self._session.model_key == self.choice.key else None

    def begin(self) -> None:
        """Choose the model of the viewer's other panels, or a packaged one, and load it."""
        names = packaged_models()
        key = self._session.model_key or (names[0] if names else "")
        self.choice.show_choice(str(key))
        if self._session.model is not None:
            self._shared(self._session.model)
        elif key:
            self._load(str(key))

    def took(self, model: Any, key: str) -> None:
        """A run loaded the model, or moved it to another device."""
        if model is not self._session.model:
            self._session.put_model(model, key)

    def _chosen(self, key: str) -> None:
        if key and key != self._session.model_key:
            self._load(key)
        self.ready.emit()

    def _load(self, key: str) -> None:
        device = self._panel.form.chosen_device

        def work(report: Report) -> Any:
            from napari_beerlanet.core.device import available_devices

            return load(key, device, report), available_devices()

        self.task.start(work, lambda made: self._put(key, *made), self._failed)

    def _put(self, key: str, model: Any, devices: list[str]) -> None:
        self._panel.form.offer_devices(devices)
        self._session.put_model(model, key)

    def _failed(self, error: BaseException) -> None:
        self.choice.show_choice(self._last)
        self.ready.emit()

    def _shared(self, model: Any) -> None:
        """This panel or another one has put a model into the session."""
        if model is None:
            return
        from napari_beerlanet.core.device import describe_device

        self._last = str(self._session.model_key or "")
        self.choice.show_choice(self._last)
        if self._last:
            self.choice.used(self._last)
        self.card.show_info(model.info, describe_device(model.device))
        self.ready.emit()

    def close_part(self) -> None:
        """Hear nothing more of the session."""
        self._session.model_changed.disconnect(self._shared)
