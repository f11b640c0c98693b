"""Gives None, True and False more references than a process can lose.

PySide6 6.12 takes one from None with every call that returns nothing. Since Python 3.12 that does
not matter; before, the process aborts when none are left: "deallocating None".
"""

import ctypes
import sys

if sys.version_info < (3, 12):
    for _constant in (None, True, False):
        ctypes.c_ssize_t.from_address(id(_constant)).value += 1 << 40
