"""When the viewer is closed while a run goes on, the user decides what becomes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from qtpy.QtCore import QEvent, QObject
from qtpy.QtWidgets import QMessageBox

from napari_beerlanet.ui.followed_process import FollowedProcess

Answer = Literal["go on", "stop", "stay"]
TRAINING = "Training goes on", "A model is being trained. Shall the training go on"


class ClosingQuestion(QObject):
    """Sees the main window's close event first. `ask` may be replaced; "stay" keeps it open.

    `process` tells the run that is followed, if there is one; `words` are a title and a question.
    """

    def __init__(
        self,
        window: Any,
        process: Callable[[], FollowedProcess | None],
        parent: QObject,
        words: tuple[str, str] = TRAINING,
    ) -> None:
        super().__init__(parent)
        self._window, self._process = window, process
        self.ask: Callable[[], Answer] = lambda: ask(window, *words)
        if window is not None:
            window.installEventFilter(self)

    def eventFilter(self, watched: QObject | None, event: QEvent | None) -> bool:
        """Qt's own name."""
        if event is None or event.type() != QEvent.Type.Close:
            return False
        process = self._process()
        answer = self.ask() if process is not None and process.running else "go on"
        if answer == "stay":
            event.ignore()
        elif process is not None and answer == "stop":
            process.stop()
        elif process is not None:
            process.resume()  # nobody would be there to do it
        return answer == "stay"

    def end(self) -> None:
        """Ask no more."""
        if self._window is not None:
            self._window.removeEventFilter(self)
            self._window = None


def ask(window: Any, title: str, question: str) -> Answer:
    """A box with three buttons; Escape keeps the viewer open."""
    box = QMessageBox(window)
    box.setWindowTitle(title)
    box.setText(f"{question} without the viewer?")
    box.setInformativeText("If it goes on, it is found again when the panel is opened next time.")
    go_on = box.addButton("Let it go on", QMessageBox.ButtonRole.AcceptRole)
    stop = box.addButton("Stop it", QMessageBox.ButtonRole.DestructiveRole)
    stay = box.addButton("Keep the viewer open", QMessageBox.ButtonRole.RejectRole)
    box.setDefaultButton(go_on)
    box.setEscapeButton(stay)
    box.exec()
    clicked = box.clickedButton()
    return "go on" if clicked is go_on else "stop" if clicked is stop else "stay"
