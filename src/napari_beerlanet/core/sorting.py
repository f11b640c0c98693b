"""The order of a million values within a few frames: stable, exact, by their bits.

NumPy sorts 16-bit integers by counting, ten times faster than anything else. A number's bits, after
a small change, are in the order of the numbers; so it is sorted by its lowest 16 bits, then by the
next, each time stably.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_FEW = 5000  # values that NumPy's own way sorts as fast


def stable_order(values: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """(n,) as `np.argsort(values, kind="stable")` of numbers; NaN comes last, −0 equals 0."""
    if len(values) < _FEW or values.dtype.kind not in "iufb":
        return np.argsort(values, kind="stable")
    bits = _sortable(values)
    order: npt.NDArray[np.int64] | None = None
    for shift in range(0, 8 * bits.dtype.itemsize, 16):
        part = (bits >> bits.dtype.type(shift)).astype(np.uint16)
        if part[0] == part[-1] and (part == part[0]).all():
            continue
        if order is None:
            order = np.argsort(part, kind="stable")
        else:
            order = order[np.argsort(part[order], kind="stable")]
    return np.arange(len(values)) if order is None else order


def _sortable(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Unsigned integers in the same order."""
    if values.dtype.kind == "b":
        return values.astype(np.uint16)
    size = max(values.dtype.itemsize, 2)
    unsigned = np.dtype(f"u{size}")
    if values.dtype.kind == "u":
        return np.asarray(values, unsigned)
    top = unsigned.type(1 << (8 * size - 1))
    if values.dtype.kind == "i":
        return np.asarray(values.astype(f"i{size}").view(unsigned) ^ top)
    number = values + values.dtype.type(0)  # −0 becomes 0
    number[np.isnan(number)] = np.nan  # of whichever sign and bits
    bits = number.view(unsigned)
    return np.asarray(np.where(bits & top, ~bits, bits | top))
