"""What the panels of one viewer share: the loaded model, and results by image layer."""

from __future__ import annotations

import weakref
from typing import Any

from psygnal import Signal

from napari_beerlanet.ui.panel import unwrapped


class Session:
    """One per viewer; it ends with the viewer.

    `model` is the loaded `Detector` or None, `model_key` what it was loaded from. For each image
    layer, as long as it lives: `results` holds the last `Detections`, `previous` those before,
    `shown` the `DetectionLayer` that shows them, `decompositions` the last decomposition.
    """

    model_changed = Signal(object)
    detected = Signal(object)

    def __init__(self) -> None:
        self.model: Any = None
        self.model_key: Any = None
        self.results: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self.previous: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self.shown: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self.decompositions: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def put_model(self, model: Any, key: Any = None) -> None:
        """Make this the model of all panels."""
        self.model, self.model_key = model, key
        self.model_changed.emit(model)

    def put_result(self, layer: Any, result: Any, shower: Any = None) -> None:
        """Remember what was found in an image layer and what shows it; tell the other panels."""
        if layer in self.results and self.results[layer] is not result:
            self.previous[layer] = self.results[layer]
        self.results[layer] = result
        if shower is not None:
            self.shown[layer] = shower
        self.detected.emit(layer)


_sessions: weakref.WeakKeyDictionary[Any, Session] = weakref.WeakKeyDictionary()


def session(viewer: Any) -> Session:
    """The session of this viewer."""
    return _sessions.setdefault(unwrapped(viewer), Session())
