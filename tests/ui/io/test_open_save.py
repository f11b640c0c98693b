"""Boxes through napari's own Open and Save, in a real window and by the plugin's manifest."""

import numpy as np
import pytest
from PIL import Image

from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.common.storage import FileError
from napari_beerlanet.core.formats import FORMATS, read_detections, write_detections
from napari_beerlanet.ui.common.file_opening import open_if_ours
from napari_beerlanet.ui.io import boxes_reader

pytestmark = pytest.mark.window

PLUGIN = "napari-beerlanet"
NAMES = ["RBC", "WBC"]


def some(n, shape=(240, 320)):
    random = np.random.default_rng(0)
    corner = random.uniform(0, 0.9, (n, 2)) * (shape[1], shape[0])
    columns = {"status": random.choice(["accepted", "rejected"], n)}
    labels, scores = random.integers(0, 2, n), random.uniform(0.1, 1, n)
    boxes = np.hstack([corner, corner + 12])
    return Detections(boxes, labels, scores, NAMES, columns, image_shape=shape)


@pytest.fixture
def viewer(shared_viewer, smear, tmp_path):
    made = shared_viewer()
    Image.fromarray(smear).save(tmp_path / "smear.png")
    made.open(str(tmp_path / "smear.png"), plugin="napari")
    return made


@pytest.mark.parametrize("kind", sorted(FORMATS))
def test_saved_and_opened_again(viewer, tmp_path, kind):
    write_detections(tmp_path / "smear.csv", some(9), "smear.png")
    assert open_if_ours(viewer, tmp_path / "smear.csv")
    layer = viewer.layers[-1]
    path = tmp_path / f"again{FORMATS[kind].suffix}"
    assert layer.save(str(path), plugin=PLUGIN)[0] == str(path)
    if kind == "csv":
        assert open_if_ours(viewer, path)  # napari reads .csv itself, so the manifest does not
    else:
        viewer.open(str(path), plugin=PLUGIN)
    again = viewer.layers[-1]
    assert again is not layer
    np.testing.assert_allclose(np.array(again.data), np.array(layer.data), atol=0.01)
    assert again.features["class"].tolist() == layer.features["class"].tolist()
    if kind != "yolo":
        assert again.features["status"].tolist() == layer.features["status"].tolist()


def test_many_boxes_open_at_once_and_are_saved_whole(viewer, tmp_path, monkeypatch):
    n = boxes_reader.MAX_PLAIN_BOXES + 500
    write_detections(tmp_path / "smear.csv", some(n), "smear.png")
    assert open_if_ours(viewer, tmp_path / "smear.csv")
    shown = viewer.layers[-1]
    assert 0 < len(shown.data) < n
    shown.save(str(tmp_path / "all.geojson"), plugin=PLUGIN)
    assert len(read_detections(tmp_path / "all.geojson")) == n


def test_a_folder_is_a_stack_with_boxes(viewer, smear, tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    for name in "abc":
        Image.fromarray(smear).save(folder / f"{name}.png")
        write_detections(folder / f"{name}.xml", some(4), f"{name}.png")
    viewer.layers.clear()
    assert open_if_ours(viewer, folder)
    stack, boxes = viewer.layers
    assert stack.data.shape == (3, 240, 320, 3)
    assert len(boxes.data) == 12


def test_a_bad_file_is_one_sentence(viewer, tmp_path):
    (tmp_path / "bad.json").write_text("[" * 100_000)
    with pytest.raises(FileError, match=r"bad\.json: .*nested too deep\.$"):
        viewer.open(str(tmp_path / "bad.json"), plugin=PLUGIN)
    assert [layer.name for layer in viewer.layers] == ["smear"]
