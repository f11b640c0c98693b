"""A classifier trained in the panel, from the project that a detector is trained from."""

import numpy as np
import pytest
import torch
from qtpy.QtTest import QTest

from napari_beerlanet.core.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from napari_beerlanet.core.checkpoints.info import CLASSIFIER
from napari_beerlanet.core.classification.network import build_backbone
from napari_beerlanet.core.common.events import RunState
from napari_beerlanet.core.project.project import Project
from napari_beerlanet.core.training.runs import list_runs, read_run
from napari_beerlanet.ui.common.recent import recent_models
from napari_beerlanet.ui.common.session import get_session
from napari_beerlanet.ui.finetune.start import NEW_CLASSIFIER
from tinyclasses import SMALL, tiny_classifier, typed_field

pytestmark = pytest.mark.window


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "our types"
    with Project.create(folder, ["WBC"]) as made:
        for seed in range(3):
            made.add_image(*typed_field(seed, ("dark", "pale", "band"), count=4), 128)
    parent = tiny_classifier(SMALL, ["basophil", "dark", "pale"], seed=4)
    save_checkpoint(parent, folder / "models" / "types.safetensors")
    return folder


def choose(choice, words: str) -> None:
    """Select the first model whose description has these words."""
    texts = [choice.list.itemText(k) for k in range(choice.list.count())]
    choice.list.setCurrentIndex(next(k for k, text in enumerate(texts) if words in text))


def test_the_form_follows_what_is_trained(panel, project, until, tmp_path):
    panel.project_choice.choose(project)
    detectors = [
        panel.model_choice.list.itemText(k) for k in range(panel.model_choice.list.count())
    ]
    assert not any("types" in text for text in detectors)
    panel.train_classifier.click()
    assert panel.form.isHidden()
    choose(panel.classifier_choice, "New, from a backbone")
    assert panel.classifier_choice.selected == NEW_CLASSIFIER
    until(lambda: panel.start_button.isEnabled())
    assert "crops of 2 images for training (8 band, 8 dark, 8 pale)" in panel.data_line.text()
    assert "about 10 crops of a type are needed" in panel.data_line.text()
    assert not panel.classifier_form.network.isHidden()
    panel.classifier_form.backbone.value = SMALL
    panel.classifier_form.input_size.value = 32
    panel.classifier_form.weights.set_path(tmp_path / "weights.pth")
    until(lambda: panel.estimate.text().startswith("About"))
    _, settings = panel._chosen()
    assert (settings["backbone"], settings["input_size"]) == (SMALL, 32)
    assert settings["weights"] == str(tmp_path / "weights.pth")
    assert settings["epochs"] is None

    choose(panel.classifier_choice, "types (project")
    assert panel.classifier_form.network.isHidden()
    assert "weights" not in panel._chosen()[1]
    until(lambda: "No training crops of basophil" in panel.data_line.text())
    panel.train_detector.click()
    assert not panel.form.isHidden()
    until(lambda: "images for training" in panel.data_line.text())


def test_what_no_network_can_start_from_is_refused_before_there_is_a_run(
    panel, project, until, tmp_path
):
    panel.project_choice.choose(project)
    panel.train_classifier.click()
    choose(panel.classifier_choice, "New, from a backbone")
    until(lambda: panel.start_button.isEnabled())
    form = panel.classifier_form
    other = tmp_path / "squeezenet.pth"
    torch.save(build_backbone("squeezenet1_1", 2).state_dict(), other)
    form.backbone.lineEdit().selectAll()
    QTest.keyClicks(form.backbone, "resnet81")
    for backbone, weights, said in (
        (None, "", "torchvision has no classification network 'resnet81'; it has, for instance, "),
        (SMALL, other, f"{other}: the weights are not those of {SMALL}: "),
        (SMALL, tmp_path / "gone.pth", f"{tmp_path / 'gone.pth'}: "),
    ):
        if backbone is not None:
            form.backbone.value = backbone
        form.weights.set_path(weights)
        panel.start_button.click()
        until(lambda said=said: panel.start_bar.text.startswith(said))
        until(lambda: panel.start_button.isEnabled())
        assert panel.start_bar.text.count(". ") == 0  # one sentence
        assert list_runs(project, "classify") == []
        assert not panel.run_view.running


@pytest.mark.slow
def test_train_compare_and_keep_a_classifier(panel, project, until):
    panel.project_choice.choose(project)
    panel.train_classifier.click()
    choose(panel.classifier_choice, "types (project")
    until(lambda: panel.start_button.isEnabled())
    panel.classifier_form.epochs.value = 2
    panel.classifier_form.learning_rate.value = 0.01
    panel.start()
    until(lambda: panel.run_view.running)
    until(lambda: not panel.run_view.running)
    assert panel.run_view.process.end.state is RunState.FINISHED
    curves = panel.run_view.curves
    assert (curves.task, len(curves.lines["mAP50"].getData()[0])) == ("classify", 2)
    assert np.isfinite(curves.lines["val"].getData()[1]).all()
    (run,) = list_runs(project, "classify")
    assert list_runs(project) == []
    assert "classifier · finished" in panel.run_list.list.item(0).text()
    assert read_run(run.path / "run.json")["settings"]["data"] == str(project)

    until(lambda: panel.comparison.comparison is not None)
    rows = panel.comparison.rows()
    assert rows[0][0] == "Accuracy in percent"
    assert rows[1][0] == "New data, balanced accuracy"
    band = next(row for row in rows if row[0].startswith("New data, band (4 crops)"))
    assert band[1] == "–"
    assert "gained" in panel.comparison.changes_line.text()
    assert panel.comparison.changes.isHidden() is (not panel.comparison.comparison.changes)
    assert "no crops to measure basophil with" in panel.comparison.notes.text()
    assert panel.comparison.image_row.isHidden()
    panel.comparison.name.setText("our types")
    panel.comparison.keep()
    session = get_session(panel.viewer)
    until(lambda: session.classifier is not None)
    kept = project / "models" / "our-types.safetensors"
    assert session.classifier_key == str(kept)
    assert session.model is None
    assert session.classifier.classes == ["basophil", "dark", "pale", "band"]
    assert recent_models(CLASSIFIER)[0] == kept.resolve()
    assert "compared" in load_checkpoint(kept, device="cpu").info["training"]
    assert "loaded for classification" in panel.start_bar.text
    assert panel.classifier_choice.list.itemText(0) == "our-types (loaded)"
