"""Sliders, boxes, and the choice of what to start from."""

import numpy as np
import pytest
from napari.components import ViewerModel
from qtpy.QtCore import Qt

from napari_beerlanet.core.checkpoints.checkpoint import learned_spectra
from napari_beerlanet.core.stains.decompose import decompose
from napari_beerlanet.core.stains.files import write_spectra
from napari_beerlanet.core.stains.presets import load_preset
from napari_beerlanet.ui.common.panel import Panel
from napari_beerlanet.ui.common.sliders import AutoSlider, IntegerScale, LogScale
from napari_beerlanet.ui.stains import form as form_module
from napari_beerlanet.ui.stains.form import DecomposeForm


@pytest.fixture
def form(qtbot):
    panel = Panel(ViewerModel())
    qtbot.addWidget(panel)
    made = DecomposeForm(panel)
    for part in (made.start_row, made, made.advanced):
        panel.body.addWidget(part)
    yield made
    panel.shut_down()


@pytest.fixture
def told(form):
    """How often the form said that something changed."""
    heard = []
    form.changed.connect(lambda: heard.append(1))
    return heard


@pytest.mark.parametrize("value", [1e-3, 0.0123, 1.0, 999])
def test_a_log_scale_there_and_back(value):
    scale = LogScale(1e-3, 1e3)
    assert scale.value(scale.position(value)) == pytest.approx(value, rel=0.05)


def test_scales_do_not_leave_their_ends():
    assert LogScale(0.1, 10).position(0) == 0
    assert LogScale(0.1, 10, 50).position(1e9) == 50
    assert IntegerScale(1, 12).position(99) == 11


@pytest.mark.parametrize(
    ("text", "number"), [("0.5", 0.5), ("1e-3", 1e-3), ("0,5", 0.5), ("-1", None), ("nan", None)]
)
def test_what_may_be_typed(text, number):
    assert LogScale(0.1, 10).parse(text) == number


def test_moving_a_slider_unticks_auto_and_tells(qtbot):
    slider = AutoSlider(LogScale(0.01, 100), 1.0, "strength", "auto")
    qtbot.addWidget(slider)
    slider.set_value(None)
    assert slider.value is None
    with qtbot.waitSignal(slider.changed):
        slider.slider.setValue(0)
    assert slider.value == pytest.approx(0.01)
    assert slider.field.text() == "0.01"
    with qtbot.waitSignal(slider.changed):
        slider.box.click()
    assert slider.value is None


def test_typing_moves_the_slider_and_nonsense_does_not(qtbot):
    slider = AutoSlider(LogScale(0.01, 100), 1.0, "strength", "auto")
    qtbot.addWidget(slider)
    slider.field.selectAll()
    qtbot.keyClicks(slider.field, "25")
    qtbot.keyClick(slider.field, Qt.Key.Key_Return)
    assert slider.value == 25
    assert slider.slider.value() > slider.slider.maximum() / 2
    slider.field.selectAll()
    qtbot.keyClicks(slider.field, "much")
    qtbot.keyClick(slider.field, Qt.Key.Key_Return)
    assert slider.value == 25
    assert slider.field.text() == "25"


def test_arrow_keys_move_it(qtbot):
    slider = AutoSlider(IntegerScale(1, 12), 8, "stains")
    qtbot.addWidget(slider)
    qtbot.keyClick(slider.slider, Qt.Key.Key_Right)
    assert slider.value == 9


def test_what_is_shown_is_not_told(qtbot):
    slider = AutoSlider(IntegerScale(1, 100, 1000), 10, "steps", "converge")
    qtbot.addWidget(slider)
    slider.set_value(None)
    with qtbot.assertNotEmitted(slider.changed):
        slider.display_value(345)
    assert slider.value is None
    assert slider.field.text() == "345"


def test_everything_is_left_to_the_image_at_first(form):
    settings = form.settings()
    assert (settings.iterations, settings.lam, settings.gamma) == ("converge", "auto", "auto")
    assert settings.components == "auto"
    assert settings.spectra is None


def test_what_is_set_is_said(form, told):
    form.components.slider.setValue(3)
    form.iterations.slider.setValue(19)
    form.lam.slider.setValue(160)
    settings = form.settings()
    assert (settings.components, settings.iterations) == (4, 20)
    assert settings.lam == pytest.approx(1.58, rel=0.1)
    assert settings.gamma == "auto"
    assert len(told) == 3


def test_sliders_on_auto_show_what_was_chosen(form, told, smear):
    d = decompose(smear, iterations="converge")
    form.show_result(d)
    assert float(form.lam.field.text()) == pytest.approx(d.lam, rel=0.01)
    assert form.components.field.text() == str(d.active.sum())
    assert form.settings().components == "auto"
    assert not told


def test_the_packaged_model_is_offered(form, told, until):
    index = form.start.findText("Model “blood-cells”")
    assert form.start.findText("Model “white-cells”") < 0, "it has no spectra"
    form.start.setCurrentIndex(index)
    form.start.activated.emit(index)
    until(lambda: form.start.spectra is not None)
    np.testing.assert_array_equal(form.settings().spectra, learned_spectra("blood-cells"))
    assert not form.components.isEnabled()
    assert told
    form.start.setCurrentIndex(0)
    form.start.activated.emit(0)
    assert form.settings().spectra is None
    assert form.components.isEnabled()


def test_spectra_of_a_file(form, told, until, smear, tmp_path):
    d = decompose(smear, 4)
    write_spectra(tmp_path / "mine.json", d)
    form.start.use_file(str(tmp_path / "mine.json"))
    until(lambda: form.start.spectra is not None)
    np.testing.assert_array_equal(form.start.spectra, d.spectra)
    assert form.start.currentText() == "mine.json"


def test_a_preset_is_kept_fixed_and_has_names_until_the_tick_is_taken_away(form, told):
    index = form.start.findText("H-DAB")
    form.start.activated.emit(index)
    assert form.start.currentText() == "H-DAB"
    settings = form.settings()
    np.testing.assert_array_equal(settings.spectra, load_preset("H-DAB").spectra)
    assert settings.fixed_spectra
    assert settings.stain_names == ("haematoxylin", "DAB")
    assert form.start.keep.isEnabled()
    assert len(told) == 1
    form.start.keep.click()
    assert not form.settings().fixed_spectra
    assert len(told) == 2
    form.start.activated.emit(0)
    assert form.settings().spectra is None
    assert not form.settings().fixed_spectra
    assert not form.start.keep.isEnabled()


def test_penalties_iterations_and_components_are_advanced(form):
    assert form.advanced.content.isHidden()
    for slider in form.sliders:
        assert form.advanced.content.isAncestorOf(slider)
    form.advanced.header.click()
    assert not form.advanced.content.isHidden()


@pytest.mark.parametrize("name", ["gone.json", "broken.json", "gone.safetensors", "broken.pt"])
def test_a_file_that_cannot_be_used_is_told_and_nothing_changes(
    form, told, until, tmp_path, name, monkeypatch
):
    said = []
    monkeypatch.setattr(form_module, "notify_error", lambda error: said.append(str(error)))
    if "broken" in name:
        (tmp_path / name).write_bytes(b"{nonsense" * 20)
    form.start.use_file(str(tmp_path / name))
    until(lambda: bool(said))
    assert name in said[0]
    assert form.start.spectra is None
    assert form.start.currentText() == "Found in this image"
    assert not told


def test_a_dialog_that_is_cancelled_changes_nothing(form, told, monkeypatch):
    monkeypatch.setattr(form_module.QFileDialog, "getOpenFileName", lambda *_: ("", ""))
    for text in ("Checkpoint …", "Spectra or preset file …"):
        index = form.start.findText(text)
        form.start.setCurrentIndex(index)
        form.start.activated.emit(index)
        assert form.start.currentText() == "Found in this image"
    assert not told


def test_every_control_has_a_tooltip(form):
    blendings = form.blending_buttons.buttons()
    controls = [form.start, form.stack.native, *blendings]
    for slider in (form.components, form.iterations, form.lam, form.gamma):
        controls += [slider.slider, slider.field, slider.box]
    assert all(control.toolTip() for control in controls)


def test_the_levels_of_a_slide_are_offered_finest_first_and_a_preview_last(form, told):
    for shapes in ([], [(9000, 8000), (4500, 4000)], [(7000, 7000)], [(9000, 8000), (4500, 4000)]):
        form.slide.set_levels(shapes)
    texts = [form.slide.level.native.itemText(i) for i in range(3)]
    assert texts == [
        "Whole slide: 9,000 × 8,000",
        "Level 1: 4,500 × 4,000",
        "Preview only: 12 tiles",
    ]
    assert form.slide.options.level == 0
    assert not told
    form.slide.level.native.setCurrentIndex(2)
    assert form.slide.options.preview_only
    assert len(told) == 1
