"""Runs first in every process that a test starts: garbage is looked for less often than usual.

Importing torch and napari makes millions of objects and no garbage; with Python's own thresholds a
quarter of the time of such a process goes into looking for some, and more when it exits. Windows
are taken down as ever: what goes wrong there shall be seen.
"""

import atexit
import gc
import sys

import keep_none  # noqa: F401

gc.set_threshold(20_000, 20, 100)


@atexit.register
def _leave_the_rest_to_the_system() -> None:
    # Triton complains of objects that are left.
    if not {"qtpy", "triton"} & sys.modules.keys():
        gc.freeze()
