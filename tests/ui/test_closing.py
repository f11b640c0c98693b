"""napari is closed in the middle of a task; `benchmarks/closing.py` does so with every one."""

import argparse
import os
import sys

import pytest
from PIL import Image

from napari_beerlanet.samples import blood_smear

pytestmark = pytest.mark.window


@pytest.fixture
def closing(root, monkeypatch):
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    import closing

    monkeypatch.setenv(closing.MARK, f"test {os.getpid()}")
    monkeypatch.setattr(closing, "SIDE", 320)
    yield closing
    sys.modules.pop("closing")


@pytest.mark.parametrize(
    "task", ["decompose an image", "find cells", "classify cells", "write a report"]
)
def test_the_window_is_closed_in_the_middle(closing, make_napari_viewer, tmp_path, task):
    seen = closing.close_once(task, tmp_path, 0.0, lambda: make_napari_viewer(show=True))
    assert seen["middle"]
    assert seen["left"] == []


def test_the_program_ends_with_the_window_and_nothing_is_left(closing, tmp_path):
    """With a run in a process of its own, which is to be stopped."""
    (tmp_path / "images").mkdir()
    for seed in range(4):
        image = blood_smear((100, 100), seed=seed, cell_diameter=30).image
        Image.fromarray(image).save(tmp_path / "images" / f"{seed}.png")
    options = argparse.Namespace(times=0, exits=1, seed=0)
    line, well = closing.run_task("run on folder", "pyqt6", tmp_path, options)
    assert well, line
    assert "| 1 of 1 |" in line
