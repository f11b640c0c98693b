"""A question in the panel: a sentence and a button for each answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qtpy.QtWidgets import QFrame, QVBoxLayout

from napari_beerlanet.ui.annotate_images import FIELD
from napari_beerlanet.ui.controls import button, heading, row

Act = Callable[[], None]
Answer = tuple[str, str, Act]
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

    def ask_whose(self, about: object, made: Any, found: Any, keep: Act, take: Act) -> None:
        """Which boxes of an image hold: those drawn, or those `found` in the project, by plane."""
        theirs, ours = sum(len(saved) for saved in found.values()), len(made.boxes.all())
        self.ask(
            about,
            f"The project has other boxes of this image ({theirs}) than are drawn here ({ours}). "
            "Which shall it keep?",
            ("Those drawn here", "Replace what the project has with what you see.", keep),
            (
                "The project's",
                "Show what the project has; what is drawn here is set aside among the drafts.",
                take,
            ),
        )

    def ask_coverage(self, about: object, made: Any, whole: Any, parts: Any) -> None:
        """Which part of an image is annotated; the panel's buttons for that are given."""
        size = made.shape[0] * made.shape[1]
        large = f"This image is larger than a field of view ({size / 1e6:.1f} megapixels). "
        self.ask(
            about,
            f"{large if size > FIELD else ''}Where will you mark every object?",
            ("In the whole image", whole.toolTip(), whole.click),
            ("In regions I draw", parts.toolTip(), parts.click),
        )

    def withdraw(self) -> None:
        """Ask nothing."""
        self.about = None
        self.hide()

    def _answering(self, act: Act) -> Act:
        def answer() -> None:
            self.withdraw()
            act()

        return answer
