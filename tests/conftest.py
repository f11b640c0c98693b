"""What every test shares: a Qt that needs no display, the shared data, patient hypothesis."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]

if sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
    os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")

# The first example may compile a kernel, and the machine may be busy: time proves nothing here.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


@pytest.fixture(scope="session")
def root() -> Path:
    """The project's top folder."""
    return ROOT


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real images beside the project; tests that need it skip where it is absent."""
    folder = ROOT.parent / "shared"
    if not (folder / "data").is_dir():
        pytest.skip(
            "real images not found: these tests look for them in ../shared beside the project"
        )
    return folder
