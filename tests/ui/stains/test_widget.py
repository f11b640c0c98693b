"""The decomposition panel: one press, live sliders, bad input, stacks and slides."""

import threading

import dask.array as da
import numpy as np
import pytest
from napari.components import ViewerModel
from PIL import Image

from napari_beerlanet.core.common.progress import report_progress
from napari_beerlanet.core.stains.decompose import decompose
from napari_beerlanet.core.stains.files import read_spectra
from napari_beerlanet.core.stains.presets import (
    load_preset,
    read_preset,
    spectral_angle,
    stain_of_region,
)
from napari_beerlanet.samples import he_field
from napari_beerlanet.ui.common import notifications
from napari_beerlanet.ui.common.session import get_session
from napari_beerlanet.ui.common.tasks import TaskOutcome
from napari_beerlanet.ui.stains.fitting import StainFitter
from napari_beerlanet.ui.stains.form import DecomposeForm
from napari_beerlanet.ui.stains.widget import DecomposeWidget
from napari_beerlanet.ui.viewer import planes
from napari_beerlanet.ui.viewer.layers import role_of, source_image


@pytest.fixture
def viewer(qapp):
    return ViewerModel()


@pytest.fixture
def opened(qtbot, until):
    """Open a panel on a viewer; `settle` waits for all work."""
    made = []

    def make(viewer):
        panel = DecomposeWidget(viewer)
        qtbot.addWidget(panel)
        panel.settle = lambda: until(
            lambda: (
                panel.live.idle
                and not panel._derived.running
                and not panel.files.running
                and (panel.layers is None or panel.layers.complete)
            )
        )
        made.append(panel)
        return panel

    yield make
    for panel in made:
        panel.shut_down()


@pytest.fixture
def panel(viewer, opened, smear):
    """A panel after its first fit of a smear."""
    viewer.add_image(smear, rgb=True, name="smear")
    made = opened(viewer)
    made.run()
    made.settle()
    return made


@pytest.fixture
def errors(monkeypatch):
    """Sentences that the user was told as errors."""
    said = []
    monkeypatch.setattr(notifications, "show_error", said.append)
    return said


def densities(viewer):
    return [layer for layer in viewer.layers if role_of(layer) == "density"]


def test_an_empty_viewer_gets_the_sample(viewer, opened, until):
    panel = opened(viewer)
    assert not panel.empty.isHidden()
    assert panel.form.isHidden()
    assert "RGB image" in panel.empty.text.text()
    panel.empty.sample.click()
    until(lambda: len(viewer.layers) == 1)
    assert panel.empty.isHidden()
    assert not panel.form.isHidden()
    assert panel.images.layer is viewer.layers[0]


@pytest.mark.parametrize(
    "add",
    [
        lambda v: v.add_image(np.zeros((8, 9))),
        lambda v: v.add_image(np.zeros((3, 8, 9))),
        lambda v: v.add_labels(np.zeros((8, 9), int)),
    ],
    ids=["grey", "3D", "labels"],
)
def test_layers_that_do_not_fit_are_not_offered_and_it_is_said_why(viewer, opened, add):
    layer = add(viewer)
    panel = opened(viewer)
    assert panel.images.layer is None
    assert layer.name in panel.empty.text.text()
    panel.run()
    assert panel.live.idle


def test_one_press_gives_layers_and_swatches(panel, viewer, smear):
    d = decompose(smear, iterations="converge")
    active = np.flatnonzero(d.active)
    assert {layer.name for layer in densities(viewer)} == {
        f"Stain {k + 1} · {100 * d.share[i]:.0f} %" for k, i in enumerate(d.order)
    }
    for i, row in enumerate(panel.result_panel.rows):
        assert row.swatch.isHidden() != d.active[i]
        if d.active[i]:
            assert row.swatch.rgb == tuple(d.colours[i])
            assert row.bar.fraction == pytest.approx(d.share[i])
    assert panel.result_panel.inactive.text() == "6 components not needed"
    assert panel.result_panel.background.rgb == tuple(np.rint(255 * d.light).astype(int))
    np.testing.assert_array_equal(panel.result_panel.curve.values, d.objective)
    assert panel.bar.text == f"{len(active)} stains"
    assert get_session(viewer).decompositions[viewer.layers["smear"]] is panel.fitted.decomposition


def test_sliders_do_nothing_before_the_first_press(viewer, opened, smear):
    viewer.add_image(smear, rgb=True)
    panel = opened(viewer)
    panel.form.lam.slider.setValue(10)
    assert panel.live.idle
    assert not densities(viewer)


def test_a_moved_slider_updates_the_layers_in_place(panel, viewer):
    before, data = densities(viewer), [layer.data for layer in densities(viewer)]
    panel.form.lam.slider.setValue(panel.form.lam.slider.value() + 60)
    panel.settle()
    assert densities(viewer) == before
    for layer, old in zip(before, data, strict=True):
        assert not np.array_equal(layer.data, old)
    assert panel.fitted.settings.lam == panel.form.lam.value


def test_many_movements_are_few_fits_and_the_last_one_wins(panel, viewer, monkeypatch):
    fits = []
    fitter = panel.live.fitter(viewer.layers["smear"])
    fit = fitter.fit
    monkeypatch.setattr(fitter, "fit", lambda *a: fits.append(a[1]) or fit(*a))
    for position in range(100, 160):
        panel.form.lam.slider.setValue(position)
    panel.settle()
    assert len(fits) <= 3
    assert panel.fitted.settings.lam == panel.form.lam.value == fits[-1].lam


def test_a_result_that_is_long_in_coming_is_preceded_by_a_first_look(panel, qtbot):
    looks = []
    show = panel.live._show
    panel.live._show = lambda image, fitted, data: (
        looks.append(fitted.is_rough) or show(image, fitted, data)
    )
    panel.form.components.slider.setValue(5)
    panel.form.lam.slider.setValue(120)
    panel.settle()
    assert looks[-2:] == [True, False]
    assert "converging" not in panel.bar.text


def test_what_the_user_set_survives_a_moved_slider(panel, viewer):
    first, *_, last = densities(viewer)
    first.name, last.colormap, first.contrast_limits = "red cells", "viridis", (0.2, 0.7)
    last.visible = not last.visible
    was, order = last.visible, list(viewer.layers)
    panel.form.gamma.slider.setValue(panel.form.gamma.slider.value() + 30)
    panel.settle()
    assert first.name == "red cells"
    assert last.colormap.name == "viridis"
    assert tuple(first.contrast_limits) == (0.2, 0.7)
    assert last.visible == was
    assert list(viewer.layers) == order


def test_looks_at_a_click(panel, viewer):
    opaque, overlay, additive = panel.form.blending_buttons.buttons()
    additive.click()
    assert {layer.blending for layer in densities(viewer)} == {"additive"}
    overlay.click()
    assert {layer.blending for layer in densities(viewer)} == {"multiplicative"}
    opaque.click()
    assert {layer.blending for layer in densities(viewer)} == {"opaque"}


def test_click_on_a_swatch_shows_only_that_one(panel, viewer):
    one = min(panel.layers.layers)
    panel.result_panel.rows[one].swatch.click()
    assert panel.layers.visible_components == {one}
    assert [i for i, row in enumerate(panel.result_panel.rows) if row.swatch.isChecked()] == [one]
    panel.result_panel.rows[one].swatch.click()
    assert panel.layers.visible_components == set()
    assert not panel.result_panel.rows[one].swatch.isChecked()
    panel.layers.layers[one].visible = True  # in napari's own layer list
    assert panel.result_panel.rows[one].swatch.isChecked()


def test_reconstruct_from_the_ticked_ones(panel, viewer):
    keep, drop = sorted(panel.layers.layers)
    panel.result_panel.rows[drop].check_box.setChecked(False)
    panel.result_panel.reconstruct_button.click()
    panel.settle()
    (layer,) = [layer for layer in viewer.layers if role_of(layer) == "reconstruction"]
    assert layer.rgb
    assert layer.name == f"Reconstruction: {panel.fitted.decomposition.labels[keep]}"
    np.testing.assert_array_equal(layer.data, panel.fitted.decomposition.reconstruct([keep]))
    panel.form.lam.slider.setValue(panel.form.lam.slider.value() + 60)
    panel.settle()
    np.testing.assert_array_equal(layer.data, panel.fitted.decomposition.reconstruct([keep]))
    panel.result_panel.rows[drop].check_box.setChecked(True)
    panel.result_panel.reconstruct_button.click()
    panel.settle()
    assert [made for made in viewer.layers if role_of(made) == "reconstruction"] == [layer]


def test_a_renamed_reconstruction_is_the_users(panel, viewer):
    panel.result_panel.reconstruct_button.click()
    panel.settle()
    (layer,) = [layer for layer in viewer.layers if role_of(layer) == "reconstruction"]
    layer.name = "keep this"
    data = layer.data
    panel.result_panel.reconstruct_button.click()
    panel.settle()
    assert layer.data is data
    assert len([made for made in viewer.layers if role_of(made) == "reconstruction"]) == 2


def test_nothing_ticked_is_told(panel, viewer, errors):
    for row in panel.result_panel.rows:
        row.check_box.setChecked(False)
    count = len(viewer.layers)
    panel.result_panel.reconstruct_button.click()
    assert len(errors) == 1
    assert len(viewer.layers) == count


def test_what_was_asked_for_last_lies_on_top_and_is_visible(panel, viewer):
    buttons = panel.result_panel
    for button, role in (
        (buttons.reconstruct_button, "reconstruction"),
        (buttons.residual_button, "residual"),
        (buttons.reconstruct_button, "reconstruction"),
    ):
        for layer in viewer.layers:
            layer.visible = layer.visible and role_of(layer) != role  # hidden by the user before
        button.click()
        panel.settle()
        top = viewer.layers[-1]
        assert role_of(top) == role
        assert top.visible
    assert len([layer for layer in viewer.layers if role_of(layer) == "reconstruction"]) == 1


def test_residual(panel, viewer):
    panel.result_panel.residual_button.click()
    panel.settle()
    (layer,) = [layer for layer in viewer.layers if role_of(layer) == "residual"]
    expected = np.linalg.norm(panel.fitted.decomposition.residual(), axis=-1)
    np.testing.assert_allclose(layer.data, expected)


def test_spectra_are_saved_and_start_another_fit(panel, viewer, tmp_path, until):
    panel.save_spectra(str(tmp_path / "mine"))
    panel.settle()
    saved = read_spectra(tmp_path / "mine.json")
    np.testing.assert_array_equal(saved, panel.fitted.decomposition.spectra)
    assert panel.file_bar.text == "Saved mine.json."
    panel.form.start.use_file(str(tmp_path / "mine.json"))
    until(lambda: panel.form.start.spectra is not None)
    panel.settle()
    np.testing.assert_array_equal(panel.fitted.settings.spectra, saved)


def test_a_disk_that_is_full_is_told_and_nothing_is_left(panel, tmp_path, errors, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device", "mine.json")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    panel.save_spectra(str(tmp_path / "mine.json"))
    panel.settle()
    assert "no space left" in errors[0].lower()
    assert not list(tmp_path.glob("*.json*"))


# --- names and presets ---


def test_the_button_and_the_result_come_first_and_the_largest_share_on_top(panel):
    panel.resize(400, 1400)
    panel.show()
    top = {
        name: widget.mapTo(panel, widget.rect().topLeft()).y()
        for name, widget in (
            ("spectra", panel.form.start),
            ("button", panel.run_button),
            ("first", panel.result_panel.rows[panel.fitted.decomposition.order[0]].swatch),
            ("second", panel.result_panel.rows[panel.fitted.decomposition.order[1]].swatch),
            ("reconstruct", panel.result_panel.reconstruct_button),
            ("advanced", panel.form.advanced.header),
        )
    }
    assert list(top) == sorted(top, key=top.get)
    assert panel.form.advanced.content.isHidden()
    panel.hide()


def named(panel, component, name):
    """As a person types it."""
    edit = panel.result_panel.rows[component].edit
    edit.setText(name)
    edit.editingFinished.emit()
    panel.settle()


def test_a_name_is_on_the_layer_in_the_session_and_in_files(panel, viewer, tmp_path):
    first, second = panel.fitted.decomposition.order
    layer, users = panel.layers.layers[first], panel.layers.layers[second]
    users.name = "my own"
    named(panel, first, "haemoglobin")
    named(panel, second, "azure")
    assert layer.name.startswith("haemoglobin · ")
    assert users.name == "my own"
    d = get_session(viewer).decompositions[viewer.layers["smear"]]
    assert (d.labels[first], d.labels[second]) == ("haemoglobin", "azure")
    panel.result_panel.reconstruct_button.click()
    panel.settle()
    (made,) = [one for one in viewer.layers if role_of(one) == "reconstruction"]
    assert set(made.name.removeprefix("Reconstruction: ").split(" + ")) == {"haemoglobin", "azure"}
    panel.save_spectra(str(tmp_path / "mine.json"))
    panel.settle()
    assert read_preset(tmp_path / "mine.json").names == ("haemoglobin", "azure")
    panel.form.lam.slider.setValue(panel.form.lam.slider.value() + 20)
    panel.settle()
    assert panel.fitted.decomposition.labels[first] == "haemoglobin"
    assert layer.name.startswith("haemoglobin · ")
    named(panel, first, "")
    assert panel.fitted.decomposition.labels[first] == "Stain 1"
    assert layer.name.startswith("Stain 1 · ")


def test_names_of_an_image_file_are_back_the_next_time(viewer, opened, smear, tmp_path):
    Image.fromarray(smear).save(tmp_path / "smear.png")
    for visit in (1, 2):
        layer = viewer.add_image(
            smear, rgb=True, metadata={"path": str(tmp_path / "smear.png")}, name="smear"
        )
        panel = opened(viewer)
        panel.run()
        panel.settle()
        first = panel.fitted.decomposition.order[0]
        if visit == 1:
            named(panel, first, "red cells")
        assert panel.fitted.decomposition.labels[first] == "red cells"
        assert panel.result_panel.rows[first].edit.text() == "red cells"
        panel.shut_down()
        viewer.layers.clear()
        del layer


def test_a_suggestion_is_taken_with_one_click_and_shows_its_angle(viewer, opened):
    viewer.add_image(he_field((96, 96), nucleus_diameter=14, seed=3).image, rgb=True)
    panel = opened(viewer)
    panel.run()
    panel.settle()
    ((component, suggested),) = panel.fitted.decomposition.suggestions().items()
    row = panel.result_panel.rows[component]
    assert suggested.name == "haematoxylin"
    assert not row.suggestion.isHidden()
    assert row.suggestion.text() == f"haematoxylin?  {suggested.angle:.0f}°"
    assert "Ruifrok" in row.suggestion.toolTip()
    row.suggestion.click()
    assert panel.fitted.decomposition.labels[component] == "haematoxylin"
    assert panel.result_panel.rows[component].suggestion.isHidden()
    other = next(i for i in panel.fitted.decomposition.order if i != component)
    assert panel.result_panel.rows[other].suggestion.isHidden()
    combo = panel.result_panel.rows[other].name
    index = next(k for k in range(combo.count()) if combo.itemText(k).startswith("eosin"))
    combo.activated.emit(index)
    assert panel.fitted.decomposition.labels[other] == "eosin"


def test_decompose_with_the_spectra_of_a_preset(panel, viewer, smear):
    panel.form.start.use_preset("Giemsa")
    panel.settle()
    d = panel.fitted.decomposition
    right = decompose(smear, spectra=load_preset("Giemsa"), fixed_spectra=True)
    np.testing.assert_array_equal(d.densities, right.densities)
    assert d.fixed_spectra
    shown = {layer.name.partition(" · ")[0] for layer in densities(viewer) if layer.visible}
    assert shown <= {"methylene blue / azure", "eosin"}
    assert panel.study_settings()["fixed_spectra"]
    assert panel.study_settings()["stain_names"] == ("methylene blue / azure", "eosin")
    made = run_snippet(panel, viewer)
    for layer, i in zip(made, d.order, strict=True):
        np.testing.assert_array_equal(layer.data, d.densities[i])
        assert layer.name.startswith(d.labels[i])


@pytest.fixture
def editor(panel):
    panel.edit_presets()
    editor = panel.preset_editor
    yield editor
    editor.close()


def test_a_preset_from_this_images_stains_is_saved_listed_and_used(editor, panel, until):
    editor.add_stains()
    editor.name.setText("Our smears")
    editor.table.item(0, 0).setText("cells")
    editor.save()
    until(lambda: panel.form.start.currentText() == "Our smears")
    panel.settle()
    assert panel.fitted.settings.fixed_spectra
    assert panel.fitted.decomposition.names[0] == "cells"
    other = DecomposeForm(panel)
    assert other.start.findText("Our smears") > 0
    editor.delete()
    until(lambda: panel.form.start.findText("Our smears") < 0)
    assert panel.form.start.spectra is None


def test_the_dialog_says_what_is_and_was_done(editor, panel, until, errors):
    assert "Presets are saved" in editor.where.text()
    editor.set_fit(panel.images.layer, None)
    assert not editor.stains_button.isEnabled()
    assert "decompose the image first" in editor.stains_reason.text()
    panel.run()  # its result comes while the dialog is open
    until(editor.stains_button.isEnabled)
    editor.name.setText("nobody's")
    editor.delete()
    assert "nothing was deleted" in errors[-1]
    editor.add_stains()
    editor.name.setText("mine")
    editor.save()
    until(lambda: "Saved" in editor.note.text())
    assert editor.preset.source == "", "a message is no origin of spectra"


def test_a_stain_is_measured_in_a_drawn_region(editor, panel, viewer, smear, until, errors):
    editor.add_region()
    assert "Draw a rectangle" in errors[0]
    d = panel.fitted.decomposition
    dark = np.unravel_index(int(smear[20:-20, 20:-20].sum(-1).argmin()), (200, 280))
    y, x = dark[0] + 20, dark[1] + 20
    box = np.array([[y - 4, x - 4], [y - 4, x + 4], [y + 4, x + 4], [y + 4, x - 4]], float)
    shapes = viewer.add_shapes([box], shape_type="polygon")
    shapes.selected_data = {0}
    editor.add_region()
    until(lambda: editor.table.rowCount() == 1)
    editor.name.setText("measured")
    (stain,) = editor.preset.stains
    pixels = smear[y - 4 : y + 4, x - 4 : x + 4].reshape(-1, 3)
    expected = stain_of_region(pixels, d.background)
    assert spectral_angle(stain.spectrum, expected.spectrum) < 2
    assert "nearest known dye" in editor.note.text()


def test_presets_are_exported_and_imported(editor, panel, until, tmp_path, errors):
    editor.export_file(str(tmp_path / "a"))
    assert "needs a name" in errors[-1]
    editor.add_stains()
    editor.name.setText("mine")
    editor.export_file(str(tmp_path / "a"))
    until(lambda: (tmp_path / "a.json").exists() and not editor.task.running)
    names = read_preset(tmp_path / "a.json").names
    editor.table.setRowCount(0)
    editor.import_file(str(tmp_path / "a.json"))
    until(lambda: editor.table.rowCount() == len(names))
    assert editor.preset.names == names
    editor.import_file(str(tmp_path / "gone.json"))
    until(lambda: "gone.json" in errors[-1])
    editor.name.setText("H&E")
    editor.save()
    assert "built in" in errors[-1]


# --- bad input ---


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda image: np.where(image > 0.7, np.nan, image), "NaN"),
        (lambda image: image * 300, "what white is"),
        (lambda image: np.dstack([image, np.zeros(image.shape[:2])]), "transparent"),
    ],
    ids=["NaN", "out of range", "all transparent"],
)
def test_bad_pixels_are_one_sentence_and_layers_stay(viewer, opened, smear, errors, change, reason):
    image = change((smear / 255).astype(np.float32))
    viewer.add_image(image, rgb=True, name="odd", contrast_limits=(0, 1))
    panel = opened(viewer)
    panel.run()
    panel.settle()
    assert len(errors) == 1
    assert reason in errors[0]
    assert [layer.name for layer in viewer.layers] == ["odd"]
    assert panel.bar.text == errors[0]


def test_a_blank_image_says_that_there_is_no_stain(viewer, opened):
    viewer.add_image(np.full((40, 50, 3), 230, np.uint8), rgb=True)
    panel = opened(viewer)
    panel.run()
    panel.settle()
    assert panel.bar.text.startswith("No stain")
    assert not densities(viewer)


def test_the_image_is_removed_while_it_is_fitted(viewer, opened, smear, errors):
    layer = viewer.add_image(smear, rgb=True)
    panel = opened(viewer)
    panel.run()
    viewer.layers.remove(layer)
    panel.settle()
    assert len(viewer.layers) == 0
    assert not errors
    assert not panel.empty.isHidden()


def test_the_image_is_renamed_while_it_is_fitted(viewer, opened, smear):
    layer = viewer.add_image(smear, rgb=True, name="before")
    panel = opened(viewer)
    panel.run()
    layer.name = "after"
    panel.settle()
    assert densities(viewer)
    assert "after" in panel.snippet


def test_the_panel_is_closed_while_it_is_fitting(viewer, opened, smear):
    viewer.add_image(smear, rgb=True)
    panel = opened(viewer)
    panel.run()
    panel.live._start_pending()
    assert panel.live.task.running
    panel.shut_down()
    assert not panel.live.task.running
    assert len(viewer.layers) == 1
    viewer.layers[0].name = "still there"


def test_another_panel_on_the_same_viewer_works(panel, viewer, opened):
    panel.shut_down()
    other = opened(viewer)
    other.run()
    other.settle()
    assert other.fitted is not None


def test_two_images_have_layers_of_their_own(panel, viewer, smear):
    first = set(densities(viewer))
    other = viewer.add_image(smear[:, ::-1].copy(), rgb=True, name="other")
    panel.images.choose(other)
    assert panel.fitted is None
    assert panel.result_panel.isHidden()
    panel.run()
    panel.settle()
    new = set(densities(viewer)) - first
    assert len(new) == len(first)
    assert all(viewer.layers.index(layer) > viewer.layers.index(other) for layer in new)


@pytest.fixture
def gate(monkeypatch):
    """Fits wait until it is set; they can be cancelled meanwhile."""
    opened, fit = threading.Event(), StainFitter.fit

    def gated(self, target, settings, report=None, rough=False):
        while not opened.wait(0.005):
            report_progress(report, 0, 1, "fitting")
        return fit(self, target, settings, report, rough)

    monkeypatch.setattr(StainFitter, "fit", gated)
    yield opened
    opened.set()


def fitted_pixels(panel):
    return panel.fitted.decomposition.image.pixels


def test_a_fit_ends_in_its_own_layers_when_another_image_is_chosen(
    viewer, opened, smear, gate, until
):
    first = viewer.add_image(smear, rgb=True, name="first")
    panel, ends = opened(viewer), []
    panel.live.task.ended.connect(ends.append)
    panel.run()
    until(lambda: panel.live.task.running)
    second = viewer.add_image(smear[:, ::-1].copy(), rgb=True, name="second")
    assert panel.images.layer is second
    assert panel.fitted is None
    gate.set()
    panel.settle()
    until(lambda: len(densities(viewer)) == 2)
    assert ends == [TaskOutcome.DONE]
    assert all(source_image(viewer, layer) is first for layer in densities(viewer))
    assert panel.fitted is None, "the chosen image has not been decomposed"
    assert panel.result_panel.isHidden()
    assert panel.bar.text == ""
    viewer.layers.selection.active = first
    assert panel.fitted is not None
    assert not panel.result_panel.isHidden()
    assert panel.bar.text == "2 stains"
    panel.form.lam.slider.setValue(150)
    panel.settle()
    assert panel.fitted.settings.lam == panel.form.lam.value, "its layers are live again"
    assert len(densities(viewer)) == 2


def test_two_images_are_decomposed_one_after_the_other(viewer, opened, smear, gate, until):
    first = viewer.add_image(smear, rgb=True, name="first")
    panel, ends = opened(viewer), []
    panel.live.task.ended.connect(ends.append)
    panel.run()
    until(lambda: panel.live.task.running)
    second = viewer.add_image(smear[:, ::-1].copy(), rgb=True, name="second")
    panel.run()
    gate.set()
    panel.settle()
    until(lambda: len(densities(viewer)) == 4)
    assert ends == [TaskOutcome.DONE] * 2
    assert panel.images.layer is second
    np.testing.assert_array_equal(fitted_pixels(panel), second.data)
    viewer.layers.selection.active = first
    np.testing.assert_array_equal(fitted_pixels(panel), first.data)
    assert len(ends) == 2, "to look at a result is no reason to compute it again"


def test_a_fit_that_is_cancelled_from_another_image_is_named(viewer, opened, smear, gate, until):
    viewer.add_image(smear, rgb=True, name="first")
    panel = opened(viewer)
    panel.run()
    until(lambda: panel.live.task.running)
    second = viewer.add_image(smear[:, ::-1].copy(), rgb=True, name="second")
    panel.live.task.cancel()
    until(lambda: panel.live.idle)
    assert panel.bar.text == "“first”: Cancelled; nothing has changed."
    assert not densities(viewer)
    panel.run()
    gate.set()
    panel.settle()
    assert densities(viewer)
    assert all(source_image(viewer, layer) is second for layer in densities(viewer))


def test_other_pixels_in_the_layer_are_fitted_anew(panel, viewer, smear):
    source = viewer.layers["smear"]
    source.data = smear[::-1].copy()
    panel.settle()
    np.testing.assert_array_equal(panel.fitted.decomposition.image.pixels, smear[::-1])


# --- stacks and slides ---


@pytest.fixture
def stack(smear):
    """(2, 3, 120, 160, 3), every plane different."""
    planes = [np.roll(smear[:120, :160], 20 * k, 1) // (1 + k % 2) for k in range(6)]
    return np.stack(planes).reshape(2, 3, 120, 160, 3)


def test_each_plane_follows_the_slider(viewer, opened, stack):
    viewer.add_image(stack, rgb=True, scale=(1, 1, 0.5, 0.5))
    panel = opened(viewer)
    assert not panel.form.stack.native.isHidden()
    panel.form.stack.value = False
    viewer.dims.set_point((0, 1), (0, 0))
    panel.run()
    panel.settle()
    layers = densities(viewer)
    assert {layer.data.shape for layer in layers} == {stack.shape[:-1]}
    assert all(tuple(layer.scale) == (1, 1, 0.5, 0.5) for layer in layers)
    viewer.dims.set_point((0, 1), (1, 2))
    panel.settle()
    assert panel.fitted.target.plane.index == (1, 2)
    d = decompose(stack[1, 2], iterations="converge")
    for i, layer in panel.layers.layers.items():
        np.testing.assert_array_equal(layer.data[1, 2], d.densities[i])


@pytest.mark.parametrize("one_fit", [True, False])
def test_layers_follow_the_slider_with_the_panel_closed(viewer, opened, stack, one_fit):
    viewer.add_image(stack, rgb=True)
    panel = opened(viewer)
    panel.form.stack.value = one_fit
    viewer.dims.set_point((0, 1), (0, 0))
    panel.run()
    panel.settle()
    d, layers = panel.fitted.decomposition, panel.layers.layers
    panel.shut_down()
    viewer.dims.set_point((0, 1), (1, 2))
    for i, layer in layers.items():
        layer.visible = True
        shown = layer._data_view if hasattr(layer, "_data_view") else layer._slice.image.view
        np.testing.assert_array_equal(np.asarray(shown), d.densities_of(stack[1, 2])[i])


def test_a_stack_has_one_fit_for_all_planes_by_default(viewer, opened, stack):
    viewer.add_image(stack, rgb=True)
    panel = opened(viewer)
    panel.run()
    panel.settle()
    layers = densities(viewer)
    assert {layer.data.shape for layer in layers} == {stack.shape[:-1]}
    assert all(isinstance(layer.data, da.Array) for layer in layers)
    assert "one fit for 6 planes" in panel.bar.text
    viewer.dims.set_point((0, 1), (1, 1))
    panel.settle()
    assert panel.fitted.target.whole_stack


def test_a_single_image_has_no_choice_of_planes(panel):
    assert panel.form.stack.native.isHidden()


@pytest.fixture
def slide(viewer, smear, monkeypatch):
    monkeypatch.setattr(planes, "SLIDE_PIXELS_LAZY", 20_000)
    levels = [da.from_array(smear[::k, ::k], chunks=(64, 64, 3)) for k in (1, 2, 4)]
    return viewer.add_image(levels, rgb=True, multiscale=True, name="slide")


def test_a_multiscale_image_has_multiscale_layers(viewer, opened, slide):
    panel = opened(viewer)
    panel.run()
    panel.settle()
    assert "0.1 million pixels, without pen and border" in panel.bar.text
    for layer in densities(viewer):
        assert layer.multiscale
        assert [level.shape for level in layer.data] == [(240, 320), (120, 160), (60, 80)]
    before = densities(viewer)
    panel.form.lam.slider.setValue(panel.form.lam.slider.value() + 40)
    panel.settle()
    assert densities(viewer) == before
    panel.result_panel.reconstruct_button.click()
    panel.result_panel.residual_button.click()
    panel.settle()


def run_snippet(panel, viewer):
    names = {"viewer": viewer}
    exec(panel.snippet, names)
    return names["layers"]


@pytest.mark.parametrize("what", ["auto", "penalty", "steps", "spectra", "many"])
def test_the_snippet_makes_the_same_layers(panel, viewer, what, until):
    form = panel.form
    if what == "penalty":
        form.lam.slider.setValue(150)
    elif what == "steps":
        form.iterations.slider.setValue(6)
    elif what == "many":
        form.components.slider.setValue(4)
        form.gamma.slider.setValue(150)
    elif what == "spectra":
        form.start.activated.emit(form.start.findText("Model “blood-cells”"))
        until(lambda: form.start.spectra is not None)
    panel.settle()
    panel.copy_snippet()
    ours = [panel.layers.layers[i] for i in panel.fitted.decomposition.order]
    for made, layer in zip(run_snippet(panel, viewer), ours, strict=True):
        np.testing.assert_array_equal(made.data, layer.data)
        assert made.name.split(" [")[0] == layer.name.split(" [")[0]
        assert made.contrast_limits == layer.contrast_limits
        assert made.visible == layer.visible
        np.testing.assert_array_equal(made.colormap.colors, layer.colormap.colors)


@pytest.mark.parametrize("blending", [0, 1, 2], ids=["opaque", "overlay", "additive"])
def test_the_snippet_reproduces_colours_and_place(viewer, opened, smear, blending):
    viewer.add_image(smear, rgb=True, scale=(0.5, 0.5), rotate=20, translate=(3, 4))
    panel = opened(viewer)
    panel.form.blending_buttons.buttons()[blending].click()
    panel.run()
    panel.settle()
    ours = [panel.layers.layers[i] for i in panel.fitted.decomposition.order]
    ours[0].colormap, ours[0].contrast_limits, ours[0].name = "viridis", (0.1, 0.7), "mine"
    for made, layer in zip(run_snippet(panel, viewer), ours, strict=True):
        assert made.colormap.name == layer.colormap.name
        np.testing.assert_array_equal(made.colormap.colors, layer.colormap.colors)
        assert (made.blending, made.visible) == (layer.blending, layer.visible)
        assert made.contrast_limits == layer.contrast_limits
        np.testing.assert_allclose(made.affine.affine_matrix, layer.affine.affine_matrix)
        np.testing.assert_allclose(made.rotate, layer.rotate)
        assert made.name.split(" [")[0] == layer.name


@pytest.mark.parametrize("one_fit", [False, True])
def test_the_snippet_of_a_stack(viewer, opened, stack, one_fit):
    viewer.add_image(stack, rgb=True)
    panel = opened(viewer)
    panel.form.stack.value = one_fit
    panel.run()
    panel.settle()
    ours = [panel.layers.layers[i] for i in panel.fitted.decomposition.order]
    for made, layer in zip(run_snippet(panel, viewer), ours, strict=True):
        np.testing.assert_array_equal(made.data, np.asarray(layer.data))


def test_the_snippet_of_a_slide(viewer, opened, slide):
    panel = opened(viewer)
    panel.run()
    panel.settle()
    ours = [panel.layers.layers[i] for i in panel.fitted.decomposition.order]
    for made, layer in zip(run_snippet(panel, viewer), ours, strict=True):
        assert made.multiscale
        for mine, its in zip(made.data, layer.data, strict=True):
            np.testing.assert_array_equal(np.asarray(mine), np.asarray(its))


def test_it_fits_a_dock_of_400_pixels(panel):
    panel.resize(400, 900)
    assert panel.body.parentWidget().minimumSizeHint().width() <= 400


def test_every_button_has_a_tooltip(panel):
    from qtpy.QtWidgets import QAbstractButton, QAbstractSlider, QComboBox, QLineEdit

    for kind in (QAbstractButton, QComboBox, QLineEdit, QAbstractSlider):
        for control in panel.findChildren(kind):
            if control.objectName().startswith("qt_") or "ScrollBar" in type(control).__name__:
                continue
            assert control.toolTip(), f"{type(control).__name__} {control.objectName()}"
