"""Parts of the panel "Find cells" by themselves: model card, choice of models, counts, files."""

import json
import subprocess
import sys

import numpy as np
import pytest

import napari_beerlanet as nb
from napari_beerlanet.core.boxes.classes import ClassCounts
from napari_beerlanet.core.checkpoints.checkpoint import read_info
from napari_beerlanet.core.checkpoints.model_card import model_facts
from napari_beerlanet.ui.common import recent
from napari_beerlanet.ui.common.controls import FractionSlider
from napari_beerlanet.ui.common.model_picker import ModelPicker, get_reader
from napari_beerlanet.ui.common.model_section import (
    ModelCard,
    class_chips,
    summary_line,
)
from napari_beerlanet.ui.common.session import get_session
from napari_beerlanet.ui.detect.form import DetectForm
from napari_beerlanet.ui.detect.results import CountsPanel
from napari_beerlanet.ui.detect.widget import DetectWidget


@pytest.fixture
def shown(qtbot):
    def add(widget):
        qtbot.addWidget(widget)
        return widget

    return add


# --- model card ----------------------------------------------------------------------------------


def test_card_tells_the_starter_at_a_glance(shown):
    card = shown(ModelCard())
    card.show()
    assert card.summary.isVisible(), "its space is kept until there is a model"
    assert "No model" in card.summary.text()
    assert not card.fold.isEnabled()
    card.show_info(read_info("blood-cells"), "CPU")
    assert card.summary.text() == "trained 2026-11-16 · mAP50 96.7 % on 500 images · runs on CPU"
    told = dict(model_facts(read_info("blood-cells"), "CPU"))
    assert told["Stains"] == "8 components, 10 iterations"
    assert told["Trained on"].startswith("292 images of bccd/data.yaml, 20 epochs")
    assert told["On BCCD test"] == "mAP50 87.8 %, mAP50-95 54.4 % (72 images)"
    assert told["Size of RBC"] == "53 pixels (31 to 65), 3341 annotated"


def test_card_of_a_model_that_says_little(shown):
    bare = {"classes": ["<b>x</b>"], "components": 2, "iterations": 3, "image_size": 64}
    card = shown(ModelCard())
    card.show_info(bare)
    assert card.summary.text() == "No information on its training."
    assert "<b>x" not in card.classes.text(), "a class name is text and not HTML"
    noted = bare | {"notes": ["fresh front end"], "training": {"metrics": {"mAP50": 0.5}}}
    assert ("Note", "fresh front end") in model_facts(noted)
    assert summary_line(noted) == "mAP50 50.0 %, on unknown images"


def test_many_classes_are_not_all_named():
    text = class_chips([f"class {i}" for i in range(80)], None)
    assert text.count("■") == 12
    assert text.endswith("… and 68 more")


# --- choice and memory of models -----------------------------------------------------------------


def test_recent_models_are_kept_newest_first(tmp_path):
    files = [tmp_path / f"{i}.safetensors" for i in range(10)]
    for file in [*files, files[3]]:
        recent.add_recent_model(file)
    kept = recent.recent_models()
    assert kept[:3] == [files[3], files[9], files[8]]
    assert len(kept) == 8


@pytest.mark.parametrize("content", ["", "[1, 2]", '{"models": 3}', '{"models": [4, null]}', "\0"])
def test_spoilt_memory_is_forgotten(tmp_path, content):
    file = recent.RECENT_MODELS.file
    file.parent.mkdir(parents=True)
    file.write_text(content)
    assert recent.recent_models() == []
    recent.add_recent_model(tmp_path / "a.safetensors")
    assert json.loads(file.read_text())["models"] == [str(tmp_path / "a.safetensors")]


def test_a_home_that_cannot_be_written_just_forgets(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("NAPARI_BEERLANET_CONFIG", str(blocked / "below"))
    recent.add_recent_model(tmp_path / "a.safetensors")
    assert recent.recent_models() == []


def test_choice_offers_packaged_models_first(shown, tmp_path, qtbot):
    recent.add_recent_model(tmp_path / "old.safetensors")
    choice = shown(ModelPicker())
    assert choice.list.itemText(0) == "blood-cells (packaged)"
    assert choice.list.itemText(1) == "old.safetensors (not found)"
    with qtbot.waitSignal(choice.chosen) as told:
        choice.choose("blood-cells")
    assert told.args == ["blood-cells"]
    assert choice.list.currentIndex() == 0


# --- small controls ------------------------------------------------------------------------------


def test_slider_and_field_agree(shown, qtbot):
    made = shown(FractionSlider(0.25, "tip"))
    heard = []
    made.changed.connect(heard.append)
    made.slider.setValue(40)
    made.box.setValue(0.6)
    assert heard == [0.4, 0.6]
    assert made.slider.value() == 60


def test_form_remembers_a_device_that_is_offered_again(shown, qtbot):
    from qtpy.QtWidgets import QLabel

    made = shown(DetectForm(QLabel()))
    assert made.chosen_device == "auto"
    made.device.offer(["cuda:0", "cpu"])
    made.device.value = "cpu"
    made.device.offer(["cuda:0", "mps", "cpu"])
    assert made.chosen_device == "cpu"
    made.device.offer(["cuda:0"])
    assert made.chosen_device == "auto"


def test_counts_show_parasitaemia_and_warnings(shown):
    panel = shown(CountsPanel())
    panel.show_counts(ClassCounts({"red blood cell": 190, "ring <1>": 10}), ["#ff0000"])
    assert "5.0 % (2.7 % to 9.0 %)" in panel.parasitaemia.text()
    assert "ring &lt;1&gt;" in panel.table.text()
    panel.show_warnings(["Strange."])
    assert panel.warnings.isVisibleTo(panel)
    panel.show_warnings([])
    assert not panel.warnings.isVisibleTo(panel)
    panel.show_counts(ClassCounts({"WBC": 3}), [])
    assert not panel.parasitaemia.isVisibleTo(panel)


# --- opened or dropped in the viewer -------------------------------------------------------------


def test_only_models_are_read():
    assert get_reader("a.safetensors") is not None
    assert get_reader(["a.SAFETENSORS"]) is not None
    assert get_reader("a.tif") is None
    assert get_reader(["a.safetensors", "b.safetensors"]) is None


@pytest.mark.window
def test_a_model_opened_in_the_viewer_goes_to_the_panel(shared_viewer, tmp_path, until, smear):
    model = nb.load_checkpoint("blood-cells", device="cpu")
    path = tmp_path / "dropped.safetensors"
    nb.save_checkpoint(model, path)
    viewer = shared_viewer()
    viewer.add_image(smear, name="smear")
    assert viewer.open(str(path), plugin="napari-beerlanet") == []
    until(lambda: get_session(viewer).model_key == str(path))
    panels = viewer.window._qt_window.findChildren(DetectWidget)
    assert len(panels) == 1
    assert panels[0].model.picker.key == str(path)
    viewer.open(str(path), plugin="napari-beerlanet")
    assert len(viewer.window._qt_window.findChildren(DetectWidget)) == 1
    assert [layer.name for layer in viewer.layers] == ["smear"]
    np.testing.assert_array_equal(viewer.layers[0].data, smear)


def test_the_panel_opens_without_loading_torch():
    """It takes seconds, and the window would stand still meanwhile."""
    code = "import sys, napari_beerlanet.ui.detect.widget as w; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
