"""The fine-tune panel in a real window: train, watch, compare, keep; what goes wrong is told."""

import os
import re
import threading

import numpy as np
import pytest
from qtpy.QtGui import QCloseEvent, QHideEvent

from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.checkpoints.checkpoint import (
    checkpoint_hash,
    load_checkpoint,
    save_checkpoint,
)
from napari_beerlanet.core.common.events import RunState
from napari_beerlanet.core.common.progress import report_progress
from napari_beerlanet.core.detection.detector import Detector
from napari_beerlanet.core.training import comparison
from napari_beerlanet.core.training.runs import RunFolder, inspect_run, new_run, read_run
from napari_beerlanet.core.training.settings import TrainSettings
from napari_beerlanet.ui.common.recent import add_recent_project, recent_projects
from napari_beerlanet.ui.common.session import get_session
from napari_beerlanet.ui.detections.comparison_layer import comparison_layer
from napari_beerlanet.ui.finetune import model_comparison
from napari_beerlanet.ui.finetune.form import SCOPES
from napari_beerlanet.ui.finetune.start import create_run, rounded_duration
from napari_beerlanet.ui.finetune.widget import FineTuneWidget
from tinydata import NAMES, write_smears

pytestmark = pytest.mark.window


@pytest.fixture
def project(tmp_path, tiny):
    folder = tmp_path / "my project é"
    write_smears(folder, train=3, val=2, side=64)
    (folder / "models").mkdir()
    save_checkpoint(tiny, folder / "models" / "tiny.safetensors")
    return folder


@pytest.fixture
def panel(panel, smear):
    """As for all, with an image to compare models on."""
    panel.viewer.add_image(smear[:96, :96], name="field")
    return panel


def choose_tiny(panel, project):
    panel.project_choice.choose(project)
    panel.model_choice.choose_file(project / "models" / "tiny.safetensors")
    panel.form.batch.value = 2


def ready(panel):
    return lambda: panel.start_button.isEnabled()


# --- the whole way -------------------------------------------------------------------------------


@pytest.mark.slow
def test_train_compare_and_keep(panel, project, until, stalls):
    choose_tiny(panel, project)
    until(ready(panel))
    assert "3 images for training" in panel.data_line.text()
    until(lambda: panel.estimate.text().startswith("About"))
    panel.form.epochs.value = 3
    evaluate_run = panel.comparison.evaluate_run
    panel.comparison.evaluate_run = lambda folder: evaluate_run(folder, reference_images=1)
    with stalls.watched():
        panel.start()
        until(lambda: panel.run_view.running)
        assert panel.settings.isHidden()
        until(lambda: not panel.run_view.running)
    print(f"longest stall of the GUI while training: {1000 * stalls.longest:.0f} ms")
    assert stalls.answers > 1
    assert panel.run_view.process.end.state is RunState.FINISHED
    assert len(panel.run_view.curves.lines["mAP50"].getData()[0]) == 3
    assert len(panel.run_view.curves.lines["train"].getData()[0]) == 6
    assert "CPU" in panel.run_view.resources_line.text()
    until(lambda: panel.comparison.comparison is not None)
    rows = panel.comparison.rows()
    assert [row[0] for row in rows[1:3]] == ["New data, mAP50", "New data, mAP50-95"]
    assert [row[0] for row in rows[3:5]] == ["Reference, mAP50", "Reference, mAP50-95"]
    assert all(re.fullmatch(r"(New data|Reference), \w+ \(\d+ box(es)?\)", r[0]) for r in rows[5:])
    assert len(rows) > 6
    until(lambda: bool(panel.comparison.compare_bar.text))
    panel.comparison.name.setText("my lab")
    folder = panel.comparison.folder
    panel.comparison.keep()
    until(lambda: get_session(panel.viewer).model is not None)
    kept = project / "models" / "my-lab.safetensors"
    assert get_session(panel.viewer).model_key == str(kept)
    record = load_checkpoint(kept, device="cpu").info["training"]
    assert record["parent"] == checkpoint_hash(project / "models" / "tiny.safetensors")
    assert {"data_hash", "settings", "seed", "versions", "metrics", "compared"} <= set(record)
    assert record["run"] == folder.name
    assert folder.is_dir()
    assert not panel.settings.isHidden()
    assert comparison_layer(panel.viewer) is None
    # a second name that is taken gets a number, and nothing is overwritten
    before = kept.read_bytes()
    panel._show_result(inspect_run(folder))
    until(lambda: panel.comparison.comparison is not None)
    panel.comparison.name.setText("my lab")
    panel.comparison.keep()
    until(lambda: (project / "models" / "my-lab-2.safetensors").exists())
    assert kept.read_bytes() == before


@pytest.mark.slow
def test_closing_the_viewer_and_finding_the_run_again(panel, project, until, qtbot, tmp_path):
    choose_tiny(panel, project)
    until(ready(panel))
    panel.form.epochs.value = 2000
    panel.start()
    until(lambda: panel.run_view.running and "Epoch" in panel.run_view.bar.format())
    window, asked = panel.viewer.window._qt_window, []

    def stay():
        asked.append("stay")
        return "stay"

    panel.close_confirmation.ask = stay
    assert not window.close()
    assert asked == ["stay"]
    folder = panel.run_view.folder
    panel.viewer.window.remove_dock_widget(panel)  # closing the panel alone asks nothing
    assert asked == ["stay"]
    assert inspect_run(folder).state is RunState.RUNNING
    again = FineTuneWidget(panel.viewer)
    again.close_confirmation.ask = lambda: "continue"
    panel.viewer.window.add_dock_widget(again, name="again")
    until(lambda: again.run_view.running)  # the last project is opened, and its run found
    assert again.run_view.folder == folder
    until(lambda: "Epoch" in again.run_view.bar.format())
    running = re.compile(r" · running, epoch \d+ of 2000$")
    until(lambda: bool(running.search(again.run_list.list.item(0).text())))
    again.run_view.pause_button.click()
    until(lambda: inspect_run(folder).state is RunState.PAUSED)  # a process that writes stops later
    assert again.run_view.pause_button.text() == "Resume"
    again.run_view.pause_button.click()
    until(lambda: inspect_run(folder).state is RunState.RUNNING)
    until(lambda: inspect_run(folder).epoch > 0)
    again.close_confirmation.ask = lambda: "stop"
    again.close_confirmation.eventFilter(window, QCloseEvent())
    assert again.run_view.running
    again.close_confirmation.eventFilter(window, QHideEvent())
    until(lambda: not again.run_view.running)
    assert inspect_run(folder).state is RunState.STOPPED
    stopped = re.compile(r"stopped after epoch \d+ of 2000", re.IGNORECASE)
    assert stopped.search(again.run_list.list.item(0).text())
    assert stopped.fullmatch(again.run_view.bar.format())
    button = again.run_view.resume_button
    assert button.isVisibleTo(again)
    assert not again.run_view.stop_button.isVisibleTo(again)
    button.click()
    assert "starting" in again.run_list.list.item(0).text()
    assert not button.isVisibleTo(again)
    until(lambda: inspect_run(folder).state is RunState.RUNNING)
    again.run_view.process.kill()
    until(lambda: not again.run_view.running)
    assert button.isVisibleTo(again)  # after a kill, too
    again.shut_down()


def test_keep_does_not_wait_for_the_comparison(panel, project, tiny, until, monkeypatch):
    path = create_run(project, tiny, {})
    save_checkpoint(tiny, path / "best.safetensors")
    RunFolder(path, locked=False).write_run(state="finished", epoch=1)
    gate, compare_models = threading.Event(), comparison.compare_models

    def later(*args):
        gate.wait(600)
        return compare_models(*args)

    monkeypatch.setattr(comparison, "compare_models", later)
    shown = panel.comparison
    shown.evaluate_run(path, reference_images=1)
    panel._update_controls()
    assert panel.settings.isHidden()
    shown.name.setText("at once")
    assert shown.keep_button.isEnabled()
    shown.keep_button.click()
    kept = project / "models" / "at-once.safetensors"
    session = get_session(panel.viewer)
    until(lambda: session.model_key == str(kept))
    assert shown.evaluate_task.running
    assert not panel.settings.isHidden()  # the next run can be set up
    assert "The comparison continues" in panel.start_bar.text
    assert not shown.keep_button.isVisibleTo(panel)
    assert "compared" not in load_checkpoint(kept, device="cpu").info["training"]
    gate.set()
    until(lambda: "compared" in session.model.info["training"])
    assert load_checkpoint(kept, device="cpu").info == session.model.info
    assert len(shown.rows()) > 2
    assert shown.isVisibleTo(panel)
    shown.close_button.click()
    assert not shown.isVisibleTo(panel)


def test_the_result_of_another_run_stays_open_when_keep_ends(
    panel, project, tiny, until, monkeypatch
):
    paths = [create_run(project, tiny, {}) for _ in range(2)]
    for path in paths:
        save_checkpoint(tiny, path / "best.safetensors")
        RunFolder(path, locked=False).write_run(state="finished", epoch=1)
    gate, keep = threading.Event(), model_comparison.keep_and_load_model

    def later(*args):
        gate.wait(600)
        return keep(*args)

    monkeypatch.setattr(model_comparison, "keep_and_load_model", later)
    shown = panel.comparison
    shown.evaluate_run(paths[0], reference_images=1)
    until(lambda: shown.comparison is not None)
    shown.name.setText("first")
    shown.keep_button.click()
    shown.evaluate_run(paths[1], reference_images=1)
    gate.set()
    session = get_session(panel.viewer)
    until(lambda: session.model_key == str(project / "models" / "first.safetensors"))
    assert shown.folder == paths[1]
    assert shown.isVisibleTo(panel)
    assert panel.settings.isHidden()
    assert panel.start_bar.text == "Saved as first and loaded for detection."
    assert shown.keep_button.isEnabled()
    until(lambda: shown.comparison is not None)


def test_a_model_that_takes_cells_for_other_sizes_is_told_before_it_is_kept(
    panel, project, tiny, until, monkeypatch
):
    """At once what the training has found, then also of the open image."""

    def detect(self, rgb, *args, **settings):
        size = 20.0 if self.info["training"] and (rgb.shape[0] == 96 or "far" in told) else 66.0
        boxes, labels = np.tile(np.array([[1, 1, 9, 9]], np.float32), (5, 1)), np.zeros(5, int)
        return Detections(boxes, labels, np.ones(5), list(NAMES), report={"object_size": size})

    told = []
    monkeypatch.setattr(Detector, "detect", detect)
    paths = [create_run(project, tiny, {}) for _ in range(2)]
    for path in paths:
        best = Detector(tiny.network, {**tiny.info, "training": {"epochs": 1}})
        save_checkpoint(best, path / "best.safetensors")
        RunFolder(path, locked=False).write_run(state="finished", epoch=1)
    RunFolder(paths[1], locked=False).write_run(change={"text": "It does."})
    shown = panel.comparison
    shown.evaluate_run(paths[0], reference_images=1)
    assert not shown.warning.isVisibleTo(panel)
    until(lambda: bool(shown.compare_bar.text))
    assert shown.warning.text().startswith("On the open image the new model assumes cells of")
    told.append("far")
    shown.evaluate_run(paths[1], reference_images=1)
    assert shown.warning.text() == "It does."  # before anything is measured again
    assert shown.warning.isVisibleTo(panel)
    until(lambda: bool(shown.compare_bar.text))
    both, field = "On 5 of 5 images and on the open one the new model", shown.image_choice.layer
    assert shown.warning.text().startswith(both)
    shown.image_choice.choose(panel.viewer.add_image(np.array(field.data), name="another"))
    assert shown.warning.text().startswith("On 5 of 5 images the new model")
    shown.image_choice.choose(field)
    assert shown.warning.text().startswith(both)
    shown.name.setText("checked")
    shown.keep()
    until(lambda: get_session(panel.viewer).model is not None)
    compared = get_session(panel.viewer).model.info["training"]["compared"]
    assert compared["change"] == {"code": "sizes", "images": 5}
    assert not shown.warning.isVisibleTo(panel)


def test_discarding_ends_the_comparison(panel, project, tiny, until, monkeypatch):
    path = create_run(project, tiny, {})
    save_checkpoint(tiny, path / "best.safetensors")
    reached, gate = threading.Event(), threading.Event()

    def later(folder, report, fields):
        reached.set()
        gate.wait(600)
        report_progress(report, 0, 1)

    monkeypatch.setattr(comparison, "compare_models", later)
    panel.comparison.evaluate_run(path)
    until(reached.is_set)
    panel.comparison.discard_button.click()
    assert not panel.settings.isHidden()
    gate.set()
    until(lambda: not panel.comparison.evaluate_task.running)
    assert not panel.comparison.isVisibleTo(panel)
    assert not list((project / "models").glob("my*"))


@pytest.mark.slow
def test_a_run_that_diverges_says_so_and_its_best_model_is_offered(panel, project, until):
    choose_tiny(panel, project)
    until(ready(panel))
    panel.form.scopes["all"].click()
    panel.form.epochs.value = 20
    panel.form.learning_rate.value = 0.3
    panel.start()
    until(lambda: panel.run_view.running)
    until(lambda: not panel.run_view.running)
    assert panel.run_view.process.end.state is RunState.DIVERGED
    assert panel.start_bar.text.startswith("Training diverged in epoch ")
    assert re.search(r"diverged in epoch \d+ of 20$", panel.run_list.list.item(0).text())
    assert not panel.run_view.resume_button.isVisibleTo(panel)
    assert panel.comparison.pending
    assert panel.comparison.keep_button.isEnabled()


@pytest.mark.slow
def test_interrupted_run_is_offered_and_resumed(panel, project, until):
    recipe = TrainSettings(
        model=str(project / "models" / "tiny.safetensors"), data=str(project / "data.yaml")
    )
    settings = {**recipe.model_dump(), "epochs": 2, "batch": 2, "device": "cuda:5"}
    path = new_run(project, settings)
    RunFolder(path, locked=False).write_run(state="running", process=2**22 + 1, epoch=1)
    choose_tiny(panel, project)
    assert "interrupted after epoch 1" in panel.resume_line.text()
    assert panel.run_list.selected.path == path
    until(ready(panel))
    panel.run_list.resume_button.click()  # on the device that is chosen now, as that one is gone
    until(lambda: not panel.run_view.running)
    assert inspect_run(path).state is RunState.FINISHED
    assert read_run(path / "run.json")["settings"]["device"] == "auto"


# --- bad input -----------------------------------------------------------------------------------


def told(panel, until) -> str:
    until(lambda: bool(panel.data_bar.text))
    assert not panel.start_button.isEnabled()
    return panel.data_bar.text


def test_no_annotations(panel, project, until):
    for file in (project / "labels").rglob("*.txt"):
        file.write_text("")
    choose_tiny(panel, project)
    assert "has no boxes" in told(panel, until)


def test_all_images_in_one_split(panel, project, until):
    for image in (project / "images" / "val").iterdir():
        image.unlink()
    choose_tiny(panel, project)
    assert "`val` has no images" in told(panel, until)


def test_project_on_a_drive_that_is_gone(panel, tmp_path, until):
    panel.project_choice.choose(tmp_path / "removed")
    assert "connect the drive" in told(panel, until)


def test_drive_that_goes_before_the_start(panel, project, until):
    choose_tiny(panel, project)
    until(ready(panel))
    project.rename(project.with_name("elsewhere"))
    panel.start()
    until(lambda: bool(panel.start_bar.text))
    assert "connect the drive" in panel.start_bar.text
    assert not panel.run_view.running


def test_one_class_is_enough_and_other_classes_need_another_scope(panel, project, until):
    data = project / "data.yaml"
    data.write_text(data.read_text().replace("[RBC, WBC, Platelets]", "[yeast]"))
    for file in (project / "labels").rglob("*.txt"):
        rows = [line.split() for line in file.read_text().splitlines()]
        file.write_text("\n".join(" ".join(["0", *row[1:]]) for row in rows))
    choose_tiny(panel, project)
    until(ready(panel))
    until(lambda: panel.estimate.text().startswith("About"))
    panel.form.scopes["stain"].setChecked(True)
    until(lambda: "yeast" in panel.estimate.text())
    assert "train the head or everything" in panel.estimate.text()


def test_labels_of_classes_that_the_data_does_not_name(panel, project, until):
    file = next((project / "labels" / "train").iterdir())
    file.write_text("7 0.5 0.5 0.2 0.2\n")
    choose_tiny(panel, project)
    assert file.name in told(panel, until)


@pytest.mark.slow
def test_failure_in_the_process_is_told_in_the_panel(panel, project, until):
    choose_tiny(panel, project)
    until(ready(panel))
    panel.form.set_devices(["cuda:7"])
    panel.form.device.value = "cuda:7"
    panel.start()
    until(lambda: "cuda:7" in panel.start_bar.text)
    assert "it has" in panel.start_bar.text
    assert not panel.settings.isHidden()
    assert panel.start_button.isEnabled()


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write anywhere")
def test_folder_that_cannot_be_written_to(panel, project, until):
    choose_tiny(panel, project)
    until(ready(panel))
    project.chmod(0o500)
    panel.start()
    until(lambda: bool(panel.start_bar.text))
    project.chmod(0o700)
    assert "cannot be written" in panel.start_bar.text


# --- small things --------------------------------------------------------------------------------


def test_every_control_has_a_tooltip_and_fits_a_narrow_dock(panel):
    from qtpy.QtWidgets import QAbstractButton, QAbstractSpinBox, QComboBox, QLineEdit

    kinds = (QAbstractButton, QAbstractSpinBox, QComboBox)
    inside = panel.body.parentWidget()
    controls = [w for kind in kinds for w in inside.findChildren(kind)]
    controls += [w for w in inside.findChildren(QLineEdit) if w.objectName() == ""]
    bare = [w for w in controls if not w.toolTip() and not _is_part(w)]
    assert not bare, bare
    assert inside.minimumSizeHint().width() < 400


def _is_part(widget) -> bool:
    """Qt's own parts of a spin box, scroll bar or list."""
    return type(widget.parent()).__name__ in ("QSpinBox", "QDoubleSpinBox", "QComboBox")


def test_settings_of_the_form(panel):
    form = panel.form
    for name in ("epochs", "image_size", "learning_rate"):
        assert form.settings()[name] is None
        assert getattr(form, name).native.text() == "auto"
    assert set(SCOPES) == set(form.scopes)
    form.scopes["stain"].setChecked(True)
    form.length.value = "quick"
    form.epochs.value = 7
    form.learning_rate.value = 0.001
    asked = form.settings()
    assert (asked["scope"], asked["length"], asked["epochs"]) == ("stain", "quick", 7)
    assert asked["learning_rate"] == pytest.approx(0.001)
    assert TrainSettings(model="m", data="d", **asked).jitter_kind == "stain"
    for kind in ("hed", "none"):
        form.jitter.value = kind
        assert TrainSettings(model="m", data="d", **form.settings()).jitter_kind == kind
    assert form.image_size.native.text() == "auto"
    form.image_size.value = 640
    assert form.settings()["image_size"] == 640
    TrainSettings(model="m", data="d", **asked)


def test_the_scope_is_preselected_by_the_data_until_the_user_has_chosen(panel, project, until):
    choose_tiny(panel, project)
    until(ready(panel))
    assert panel.form.scope == "stain"
    assert panel.form.scope_line.text() == "“Stain only” is preselected for 3 training images."
    assert "are needed to learn it" in panel.data_line.text()
    for message in (panel.summary.notes[0], "The loss jumped."):  # what a run warns of
        panel.run_view._on_event({"event": "warning", "message": message})
    assert panel.run_view.warnings_line.text() == "The loss jumped.", "the other is shown above"
    panel.form.scopes["head"].click()
    assert panel.form.scope_line.text() == ""
    panel.open_project(project)
    until(lambda: panel.summary is not None)
    assert panel.form.scope == "head"


def test_loaded_model_is_offered(panel, tiny):
    get_session(panel.viewer).set_model(tiny, None)
    assert panel.model_choice.list.itemText(0) == "tiny (loaded)"
    assert "blood-cells (packaged)" in [
        panel.model_choice.list.itemText(k) for k in range(panel.model_choice.list.count())
    ]


def test_deleting_a_run_asks_first(panel, project):
    path = new_run(project, TrainSettings(model="m", data="d").model_dump())
    panel.project_choice.choose(project)
    panel.run_list.confirm_delete = lambda run: False
    panel.run_list.delete_button.click()
    assert path.is_dir()
    panel.run_list.confirm_delete = lambda run: True
    panel.run_list.delete_button.click()
    assert not path.exists()


def test_recent_projects_are_remembered(tmp_path):
    for k in range(10):
        add_recent_project(tmp_path / str(k))
    assert recent_projects()[:2] == [tmp_path / "9", tmp_path / "8"]
    assert len(recent_projects()) == 8


def test_times_are_no_more_exact_than_they_are():
    assert [rounded_duration(s) for s in (3, 31, 100, 340, 4000)] == [
        "5 s",
        "30 s",
        "2 min",
        "6 min",
        "1 h 10 min",
    ]


def test_the_comparison_fits_a_narrow_dock(panel, tiny):
    scores = dict.fromkeys(("RBC", "WBC", "a class with a long name"), (0.986, 0.452, 1200))
    pair = ({"mAP50": 0.957, "mAP50-95": 0.7}, {"mAP50": 0.818, "mAP50-95": 0.6})
    classes = {"new data": scores, "reference": scores}
    shown = panel.comparison
    shown.table.set_rows(
        comparison.ModelComparison(tiny, tiny, pair, pair, (), classes).class_rows()
    )
    shown.show()
    name, *_, change = shown.rows()[1]
    assert (name, change) == ("New data, RBC (1,200 boxes): forgotten", "▼ 53.4")
    assert shown.minimumSizeHint().width() < 340


def test_changes_are_counted_against_the_annotations_of_the_image(panel):
    from napari_beerlanet.core.boxes.detections import Detections
    from napari_beerlanet.core.evaluation.diff import diff_detections
    from napari_beerlanet.ui.viewer.layers import Role, role_metadata
    from napari_beerlanet.ui.viewer.planes import current_plane

    def found(*boxes):
        count = len(boxes)
        scores = np.ones(count, np.float32)
        return Detections(np.array(boxes, np.float32), np.zeros(count, int), scores, list(NAMES))

    layer = panel.viewer.layers["field"]
    plane = current_plane(layer, panel.viewer)
    diff = diff_detections(found([0, 0, 10, 10]), found([20, 20, 40, 40], [60, 60, 80, 90]))
    panel.comparison._show_diff(layer, plane, diff)
    assert "Against" not in panel.comparison.compare_bar.text
    panel.viewer.add_shapes(
        [np.array([[19.5, 19.5], [19.5, 39.5], [39.5, 39.5], [39.5, 19.5]])],
        features={"class": ["RBC"]},
        metadata=role_metadata(Role.ANNOTATIONS, layer),
    )
    panel.comparison._show_diff(layer, plane, diff)
    told = panel.comparison.compare_bar.text
    assert "1 of 2 gained is right, 0 of 1 lost were right." in told


def test_comparison_is_shown_as_layers(panel, tiny, smear, until):
    from napari_beerlanet.core.boxes.detections import Detections
    from napari_beerlanet.core.evaluation.diff import diff_detections
    from napari_beerlanet.ui.detections.comparison_layer import show_comparison

    def found(boxes, scores):
        return Detections(
            np.array(boxes, np.float32),
            np.zeros(len(boxes), np.int64),
            np.array(scores, np.float32),
            list(NAMES),
            image_shape=(96, 96),
        )

    before = found([[0, 0, 10, 10], [20, 20, 40, 40]], [0.9, 0.5])
    after = found([[20, 20, 40, 40], [60, 60, 80, 90]], [0.9, 0.8])
    layer = panel.viewer.layers["field"]
    for _ in range(2):  # again in the place of the first
        show_comparison(panel.viewer, layer, diff_detections(before, after))
        shown = comparison_layer(panel.viewer)
        assert list(shown.features["kind"]) == ["gained", "lost", "changed"]
        assert len(panel.viewer.layers) == 2
    np.testing.assert_allclose(shown.data[0].min(0), (59.5, 59.5))
    assert panel.viewer.layers.selection.active is layer
    panel.comparison.toggles.boxes["gained"].setChecked(False)
    assert list(shown.features["kind"]) == ["lost", "changed"]
    for box in panel.comparison.toggles.boxes.values():
        box.setChecked(False)
    assert len(shown.data) == 0
