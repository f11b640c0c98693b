"""A sentence on the canvas, where nobody else has written."""

from __future__ import annotations

from typing import Any


class CanvasWords:
    """Writes into the viewer's text overlay, unless the user or another plugin uses it."""

    def __init__(self, viewer: Any) -> None:
        self._overlay = viewer.canvas.overlays.text
        self._said = ""

    def say(self, words: str) -> None:
        """Show these words; nothing for ""."""
        overlay = self._overlay
        free = not overlay.visible or not overlay.text or overlay.text == self._said
        if not free or (words == self._said and overlay.visible == bool(words)):
            return
        if not words and not self._said:
            return
        overlay.visible = bool(words)
        self._said = overlay.text = words
        if words:  # napari puts it in its place only one drawing later
            overlay.events.position.emit(overlay.position)
