"""Arrays that grow at their end without being copied each time."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_ROOM = 1.5  # times what is needed, when more room is made
_LEAST = 64


class GrowingArray:
    """Values (n, …) of one dtype; `extend` costs what it adds, on average."""

    def __init__(self, values: npt.NDArray[Any]) -> None:
        """`values` are taken as they are, not copied; the first `extend` makes room elsewhere."""
        self._buffer, self._length = values, len(values)

    def __len__(self) -> int:
        return self._length

    @property
    def values(self) -> npt.NDArray[Any]:
        """All of them; what is written there is kept. An `extend` may move them elsewhere."""
        return self._buffer[: self._length]

    def extend(self, values: Any) -> None:
        """Add values (m, …) at the end."""
        added = np.asarray(values, self._buffer.dtype)
        end = self._length + len(added)
        if end > len(self._buffer):
            larger = max(int(_ROOM * end), _LEAST)
            buffer = np.empty((larger, *self._buffer.shape[1:]), self._buffer.dtype)
            buffer[: self._length] = self.values
            self._buffer = buffer
        self._buffer[self._length : end] = added
        self._length = end
