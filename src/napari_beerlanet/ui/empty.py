"""What a panel shows while there is no image for it."""

from __future__ import annotations

from typing import Any

from qtpy.QtWidgets import QLabel, QVBoxLayout, QWidget

from napari_beerlanet.ui.controls import button
from napari_beerlanet.ui.planes import unfit_reason


class EmptyState(QWidget):
    """Says what is needed, what the open layers lack, and offers the sample."""

    def __init__(self, panel: Any, task: Any = None) -> None:
        super().__init__()
        self._viewer, self._task = panel.viewer, task or panel.task()
        self.text = QLabel()
        self.text.setWordWrap(True)
        self.sample = button(
            "Open the sample smear",
            "Open a synthetic blood smear to try things on.",
            self.open_sample,
        )
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addWidget(self.text)
        layout.addWidget(self.sample)
        self.update_text()

    def update_text(self) -> None:
        """Look at the viewer's layers again."""
        layers = list(self._viewer.layers)
        said = unfit_reason(layers[-1]) if layers else None
        need = (
            "A colour image (RGB or RGBA) of a stained slide is needed: open one with File › Open, "
        )
        need += "or drop it on the viewer."
        self.text.setText(f"{said}\n\n{need}" if said else need)

    def open_sample(self) -> None:
        """Make the sample off the GUI thread and put it into the viewer."""
        self.sample.setEnabled(False)
        self._task.start(_make_sample, self._add, lambda _: self.sample.setEnabled(True))

    def _add(self, made: tuple[Any, dict[str, Any]]) -> None:
        self.sample.setEnabled(True)
        image, options = made
        self._viewer.add_image(image, **options)


def _make_sample(report: Any) -> tuple[Any, dict[str, Any]]:
    from napari_beerlanet.sample_data import blood_smear_layers

    image, options, _ = blood_smear_layers()[0]
    return image, options
