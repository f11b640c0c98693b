"""Ask what to do with an active run when the viewer is closed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from qtpy.QtCore import QEvent, QObject
from qtpy.QtWidgets import QMessageBox, QWidget

from napari_beerlanet.ui.common.background_process import BackgroundProcess

CloseAnswer = Literal["continue", "stop", "stay"]
TRAINING_QUESTION = "Training is running", "Continue training after the viewer is closed?"


class CloseConfirmation(QObject):
    """An event filter on the main window that asks before it closes. `ask` may be replaced.

    `process` returns the active run, if there is one; `question` is a title and a question. The
    answer "stay" keeps the window open.
    """

    def __init__(
        self,
        window: QWidget | None,
        process: Callable[[], BackgroundProcess | None],
        parent: QObject,
        question: tuple[str, str] = TRAINING_QUESTION,
    ) -> None:
        super().__init__(parent)
        self._window, self._process = window, process
        self.ask: Callable[[], CloseAnswer] = lambda: ask_before_closing(window, *question)
        if window is not None:
            window.installEventFilter(self)

    def eventFilter(self, watched: QObject | None, event: QEvent | None) -> bool:
        """Qt's own name."""
        if event is None or event.type() != QEvent.Type.Close:
            return False
        process = self._process()
        answer = self.ask() if process is not None and process.running else "continue"
        if answer == "stay":
            event.ignore()
        elif process is not None and answer == "stop":
            process.stop()
        elif process is not None:
            process.resume()  # nobody would be there to do it
        return answer == "stay"

    def end(self) -> None:
        """Remove the filter."""
        if self._window is not None:
            self._window.removeEventFilter(self)
            self._window = None


def ask_before_closing(window: QWidget | None, title: str, question: str) -> CloseAnswer:
    """A dialog with three buttons; Escape keeps the viewer open."""
    box = QMessageBox(window)
    box.setWindowTitle(title)
    box.setText(question)
    box.setInformativeText("A run that continues is shown again when the panel is next opened.")
    proceed = box.addButton("Continue in background", QMessageBox.ButtonRole.AcceptRole)
    stop = box.addButton("Stop", QMessageBox.ButtonRole.DestructiveRole)
    stay = box.addButton("Keep the viewer open", QMessageBox.ButtonRole.RejectRole)
    box.setDefaultButton(proceed)
    box.setEscapeButton(stay)
    box.exec()
    clicked = box.clickedButton()
    return "continue" if clicked is proceed else "stop" if clicked is stop else "stay"
