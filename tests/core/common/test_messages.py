"""Sentences for people."""

import pytest

from napari_beerlanet.core.common.messages import error_message
from napari_beerlanet.core.common.progress import Cancelled


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (FileNotFoundError(2, "No such file or directory", "a.png"), "a.png: no such file or"),
        (OSError(28, "No space left on device"), "No space left on device."),
        (ValueError("a.csv: two\n  lines."), "a.csv: two lines."),
        (Cancelled("stopped"), "stopped"),
        (MemoryError(), "Not enough memory: use smaller images."),
        (RuntimeError("CUDA out of memory. Tried to …"), "Not enough memory: use smaller images."),
        (KeyError("x"), "Unexpected KeyError: 'x' (see the log)."),
        (ValueError(), "Unexpected ValueError (see the log)."),
    ],
)
def test_an_error_is_one_sentence(error, message):
    said = error_message(error, " (see the log)", "use smaller images")
    assert said.startswith(message)
    assert "\n" not in said
