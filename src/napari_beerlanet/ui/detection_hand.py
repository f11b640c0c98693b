"""The user's hand in a layer of boxes: noticed when it moves, and taken over before it is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from napari.layers.base import ActionType

from napari_beerlanet.ui.detection_shown import Shown


class UserHand:
    """Listens to a layer; `edited` stays true once the user moved, added or renamed anything.

    `changed` is called when the user did something, `picked(row)` when one box was selected.
    """

    def __init__(
        self, shown: Shown, changed: Callable[[], None], picked: Callable[[int], None]
    ) -> None:
        self.edited = False
        self._shown, self._changed, self._picked = shown, changed, picked
        self._stirred = False

    def listen(self, on: bool) -> None:
        """Begin or end to listen."""
        layer = self._shown.layer
        heard = [
            (layer.events.data, self._data_changed),
            (layer.events.features, self._features_changed),
            (layer.selected_data.events.items_changed, self._selection_changed),
        ]
        for emitter, method in heard:
            (emitter.connect if on else emitter.disconnect)(method)

    def take_over(self, anyway: bool = False) -> None:
        """Keep what the user changed in the layer since it was last filled.

        `anyway`: look even if the layer told of nothing, as a table may be changed in place.
        """
        if (self._stirred or anyway) and not self._shown.ours:
            self._stirred = False
            self.edited |= self._shown.take_over()

    def _data_changed(self, event: Any) -> None:
        over = event.action in (ActionType.ADDED, ActionType.REMOVED, ActionType.CHANGED)
        if over and not self._shown.ours:
            self.edited = self._stirred = True
            self._changed()

    def _features_changed(self, event: Any = None) -> None:
        if not self._shown.ours:
            self._stirred = True
            self._changed()

    def _selection_changed(self, added: Any, removed: Any) -> None:
        row = self._shown.selected_row
        if not self._shown.ours and row is not None:
            self._picked(row)
