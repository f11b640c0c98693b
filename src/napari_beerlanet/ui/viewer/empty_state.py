"""What a panel shows while there is no image for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qtpy.QtWidgets import QVBoxLayout, QWidget

from napari_beerlanet.ui.common.controls import button, plain_label
from napari_beerlanet.ui.viewer.planes import unsupported_reason

if TYPE_CHECKING:
    from napari_beerlanet.ui.common.panel import Panel
    from napari_beerlanet.ui.common.tasks import Task

_NEEDED = (
    "An RGB image of a stained slide is needed: open one with File › Open, "
    "or drop it on the viewer."
)


class EmptyState(QWidget):
    """Says which image is needed, why the open layer is not one, and offers the sample."""

    def __init__(self, panel: Panel, task: Task | None = None) -> None:
        super().__init__()
        self._viewer, self._task = panel.viewer, task or panel.task()
        self.text = plain_label()
        self.text.setWordWrap(True)
        self.sample = button(
            "Open the sample smear",
            "Open a blood smear (BCCD) to try the plugin on.",
            self.open_sample,
        )
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addWidget(self.text)
        layout.addWidget(self.sample)
        self.update_text()

    def update_text(self) -> None:
        """After the viewer's layers have changed."""
        layers = list(self._viewer.layers)
        reason = unsupported_reason(layers[-1]) if layers else None
        self.text.setText(f"{reason}\n\n{_NEEDED}" if reason else _NEEDED)

    def open_sample(self) -> None:
        """Read the sample off the GUI thread and put it into the viewer."""
        self.sample.setEnabled(False)
        self._task.start(_read_sample, self._add, lambda _: self.sample.setEnabled(True))

    def _add(self, sample: tuple[Any, dict[str, Any]]) -> None:
        self.sample.setEnabled(True)
        image, options = sample
        self._viewer.add_image(image, **options)


def _read_sample(report: Any) -> tuple[Any, dict[str, Any]]:
    from napari_beerlanet.samples import bccd_layers

    image, options, _ = bccd_layers()[0]
    return image, options
