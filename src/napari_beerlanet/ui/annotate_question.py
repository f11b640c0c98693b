"""A question in the panel: a sentence and a button for each answer."""

from __future__ import annotations

from collections.abc import Callable

from qtpy.QtWidgets import QFrame, QVBoxLayout

from napari_beerlanet.ui.controls import button, heading, row

Answer = tuple[str, str, Callable[[], None]]
"""The button's text, its tool tip, what it does."""


class Question(QFrame):
    """Hidden until there is something to ask; asking again replaces the question."""

    def __init__(self) -> None:
        super().__init__()
        self.setFrameShape(QFrame.Shape.StyledPanel)
        self.text = heading("")
        self.text.setWordWrap(True)
        self.about: object = None
        self.buttons = row()
        self.body = QVBoxLayout(self)
        self.body.setContentsMargins(8, 6, 8, 6)
        self.body.addWidget(self.text)
        self.body.addWidget(self.buttons)
        self.hide()

    def ask(self, about: object, text: str, *answers: Answer) -> None:
        """Show a question; any answer hides it."""
        self.about = about
        self.text.setText(text)
        made = [button(label, tip, self._answering(act)) for label, tip, act in answers]
        old, self.buttons = self.buttons, row(*made)
        self.body.replaceWidget(old, self.buttons)
        old.hide()
        old.deleteLater()
        self.show()

    def withdraw(self) -> None:
        """Ask nothing."""
        self.about = None
        self.hide()

    def _answering(self, act: Callable[[], None]) -> Callable[[], None]:
        def answer() -> None:
            self.withdraw()
            act()

        return answer
