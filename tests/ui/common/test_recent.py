"""What is remembered in the user's own folder."""

import json
from pathlib import Path

import pytest

from napari_beerlanet.ui.common.recent import FoundSizes

FACTS = [[0.1, 0.1]]


def test_a_size_is_found_by_image_or_else_by_folder(tmp_path):
    sizes, image = FoundSizes(), tmp_path / "a.png"
    assert sizes.find("model", image, FACTS) is None
    sizes.add("model", image, FACTS, 50.123)
    assert sizes.find("model", image, FACTS) == 50.12
    assert sizes.find("model", tmp_path / "b.png", FACTS) == 50.12
    sizes.add("model", tmp_path / "b.png", FACTS, 60)
    assert sizes.find("model", image, FACTS) == 50.12, "its own, not the newest"
    assert sizes.find("model", tmp_path / "c.png", FACTS) == 60
    sizes.add("model", image, FACTS, 55)
    assert sizes.find("model", image, FACTS) == 55
    for model, path, facts in (
        ("other", image, FACTS),
        ("model", tmp_path / "elsewhere" / "a.png", FACTS),
        ("model", image, [[0.2, 0.2]]),
    ):
        assert sizes.find(model, path, facts) is None


def test_sizes_are_few_and_a_damaged_file_is_none(tmp_path):
    sizes = FoundSizes()
    for k in range(310):
        sizes.add("model", tmp_path / f"{k}" / "a.png", FACTS, 50)
    assert len(json.loads(sizes.file.read_text())["sizes"]) == 300
    for content in ("", "[]", '{"sizes": 3}', '{"sizes": [3, ["a"], ["m", "i", "f", [], "x"]]}'):
        sizes.file.write_text(content)
        assert sizes.find("m", Path("i"), []) is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NAPARI_BEERLANET_CONFIG", str(tmp_path / "file"))
    FoundSizes().add("model", tmp_path / "a.png", FACTS, 50)
    assert FoundSizes().find("model", tmp_path / "a.png", FACTS) is None


@pytest.mark.parametrize("size", [float("nan"), 0, -1, 1e9])
def test_nonsense_is_not_tried(tmp_path, size):
    FoundSizes().add("model", tmp_path / "a.png", FACTS, size)
    assert FoundSizes().find("model", tmp_path / "a.png", FACTS) is None
