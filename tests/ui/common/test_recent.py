"""What is remembered in the user's own folder."""

import json
import os

import pytest

from napari_beerlanet.ui.annotate.actions import save_unreviewed_answer
from napari_beerlanet.ui.common import recent
from napari_beerlanet.ui.common.recent import FoundSizes
from napari_beerlanet.ui.common.session import save_open_project
from napari_beerlanet.ui.evaluate.class_mapping import remember_classes

SCALE = "0.1 × 0.1 µm per pixel"


def test_a_size_is_found_by_image_or_else_by_folder(tmp_path):
    sizes, image = FoundSizes(), tmp_path / "a.png"
    assert sizes.find("model", image, SCALE) is None
    sizes.add("model", image, SCALE, 50.123)
    assert sizes.find("model", image, SCALE) == 50.12
    assert sizes.find("model", tmp_path / "b.png", SCALE) == 50.12
    sizes.add("model", tmp_path / "b.png", SCALE, 60)
    assert sizes.find("model", image, SCALE) == 50.12, "its own, not the newest"
    sizes.add("model", tmp_path / "c.png", SCALE, 150)
    assert sizes.find("model", tmp_path / "d.png", SCALE) == 60, "the last one may be wrong"
    sizes.add("model", image, SCALE, 55)
    assert sizes.find("model", image, SCALE) == 55
    for model, path, scale in (
        ("other", image, SCALE),
        ("model", tmp_path / "elsewhere" / "a.png", SCALE),
        ("model", image, "0.2 × 0.2 µm per pixel"),
    ):
        assert sizes.find(model, path, scale) is None


def test_only_the_last_sizes_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(recent, "_MAX_SIZES", 3)
    for k in range(5):
        FoundSizes().add("model", tmp_path / f"{k}" / "a.png", SCALE, 50)
    kept = [FoundSizes().find("model", tmp_path / f"{k}" / "a.png", SCALE) for k in range(5)]
    assert kept == [None, None, 50, 50, 50]


def test_a_damaged_file_has_no_sizes(tmp_path):
    sizes = FoundSizes()
    sizes.add("model", tmp_path / "a.png", SCALE, 50)
    damaged = {"model": "model", "image": str(tmp_path / "a.png"), "magnification": SCALE}
    for entry in (3, ["model"], damaged, {**damaged, "size": "50"}, {"size": 50}):
        sizes.file.write_text(json.dumps({"sizes": [entry]}))
        assert sizes.find("model", tmp_path / "a.png", SCALE) is None
    for content in ("", "[]", '{"sizes": 3}', "{"):
        sizes.file.write_text(content)
        assert sizes.find("model", tmp_path / "a.png", SCALE) is None
    sizes.file.write_text(json.dumps({"sizes": [3, {**damaged, "size": 50}]}))
    assert sizes.find("model", tmp_path / "a.png", SCALE) == 50


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NAPARI_BEERLANET_CONFIG", str(tmp_path / "file"))
    FoundSizes().add("model", tmp_path / "a.png", SCALE, 50)
    assert FoundSizes().find("model", tmp_path / "a.png", SCALE) is None


@pytest.mark.parametrize("size", [float("nan"), 0, -1, 1e9])
def test_nonsense_is_not_tried(tmp_path, size):
    FoundSizes().add("model", tmp_path / "a.png", SCALE, size)
    assert FoundSizes().find("model", tmp_path / "a.png", SCALE) is None


@pytest.mark.parametrize(
    "save",
    [
        lambda folder: recent.RecentPaths("models", "models.json").add(folder / "a.safetensors"),
        lambda folder: FoundSizes().add("model", folder / "a.png", SCALE, 50),
        lambda folder: save_open_project(folder),
        lambda folder: remember_classes("here", {"0": "RBC"}),
        lambda folder: save_unreviewed_answer("use"),
    ],
)
def test_the_window_does_not_wait_for_a_busy_disk(tmp_path, monkeypatch, save):
    """A disk that writes gigabytes lets `fsync` wait for minutes, of the smallest file, too."""

    def wait(handle):
        pytest.fail("waits for the disk")

    monkeypatch.setattr(os, "fsync", wait)
    monkeypatch.setattr(os, "sync", wait, raising=False)
    save(tmp_path)
