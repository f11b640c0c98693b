"""Parts of the fine-tune panel that need no viewer: curves, look-in, outlook, judging."""

import copy
import json

import numpy as np
import pytest
import torch

from napari_beerlanet.core.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from napari_beerlanet.core.checkpoints.serialize import describe_network
from napari_beerlanet.core.common.storage import DataError, FileError
from napari_beerlanet.core.detection.detector import Detector
from napari_beerlanet.core.detection.network import StainDetectionModel
from napari_beerlanet.core.evaluation.diff import ImageChange, ModelChange
from napari_beerlanet.core.formats.dataset import read_dataset
from napari_beerlanet.core.training.comparison import (
    ComparisonRow,
    ModelComparison,
    compare_models,
    save_best_model,
)
from napari_beerlanet.core.training.estimate import (
    TrainingEstimate,
    estimate_duration,
    summarise_dataset,
)
from napari_beerlanet.core.training.runs import RunFolder, list_runs, new_run
from napari_beerlanet.core.training.settings import TrainSettings
from napari_beerlanet.core.training.setup import comparison_key, resolve_defaults
from napari_beerlanet.ui.common.tasks import Task
from napari_beerlanet.ui.finetune.curves import TrainingCurves
from napari_beerlanet.ui.finetune.model_comparison import MetricsTable, keep_and_load_model
from napari_beerlanet.ui.finetune.run_view import (
    PredictionPreview,
    predict_validation_images,
)
from napari_beerlanet.ui.finetune.start import create_run, describe_estimate, set_run_device
from tinydata import MODEL, NAMES, write_smear, write_smears


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    network = StainDetectionModel(MODEL, nc=3, imgsz=64)
    network.fit_mix()
    info = describe_network(network, "tiny", list(NAMES), 64, training={"epochs": 3})
    return Detector(network, info)


@pytest.fixture
def project(tmp_path):
    write_smears(tmp_path, train=3, val=2, side=64)
    return tmp_path


def batch(epoch, number, loss):
    done = 2 * (epoch - 1) + number
    return {"epochs": 2, "step": done, "steps": 4, "losses": {"a": loss, "b": loss}}


def test_curves_draw_batches_and_epochs(qtbot, tmp_path):
    curves = TrainingCurves()
    qtbot.addWidget(curves)
    for epoch in (1, 2):
        for number in (1, 2):
            curves.add_batch(batch(epoch, number, 1 / epoch))
    (tmp_path / "results.csv").write_text(
        "epoch,train/box_loss,val/box_loss,val/cls_loss,metrics/mAP50(B),metrics/mAP50-95(B)\n"
        "1,2,1,1,0.25,0.1\n2,1,0.5,0.25,0.5,nan\n"
    )
    curves.read_epochs(tmp_path)
    x, y = curves.lines["train"].getData()
    np.testing.assert_allclose(x, [0.5, 1, 1.5, 2])
    np.testing.assert_allclose(y, [2, 2, 1, 1])
    np.testing.assert_allclose(curves.lines["val"].getData()[1], [2, 0.75])
    np.testing.assert_allclose(curves.lines["mAP50"].getData()[1], [25, 50])
    assert len(curves.lines["mAP50-95"].getData()[1]) == 1
    curves.add_batch(batch(2, 1, 7))  # the second epoch is done again
    curves.read_epochs(tmp_path / "gone")
    np.testing.assert_allclose(curves.lines["train"].getData()[1], [2, 2, 14])


@pytest.mark.parametrize(
    ("before", "after", "texts"),
    [
        (0.9914, 0.9896, ["99.1", "99.0", "▼ 0.1"]),  # 0.18 points, but not of what is seen
        (0.99051, 0.99049, ["99.1", "99.0", "▼ 0.1"]),
        (0.99049, 0.98951, ["99.0", "99.0", "="]),
        (0.5, 0.7306, ["50.0", "73.1", "▲ 23.1"]),
        (None, 0.7, ["–", "70.0", ""]),
    ],
)
def test_the_change_is_that_of_the_numbers_beside_it(qtbot, before, after, texts):
    table = MetricsTable()
    qtbot.addWidget(table)
    table.set_rows([ComparisonRow("mAP50", before, after)])
    assert table.texts()[1][1:] == texts


def test_preview_names_the_epoch_and_draws(qtbot, project, tiny):
    save_checkpoint(tiny, project / "last.safetensors")
    epoch, pictures = predict_validation_images(project, str(project / "data.yaml"))
    assert epoch == 3
    assert [name for name, _ in pictures] == ["smear-100.png", "smear-101.png"]
    shown = PredictionPreview(Task())
    qtbot.addWidget(shown)
    shown.show_pictures(epoch, pictures)
    assert "after epoch 3" in shown.caption.text()
    assert not shown.pictures[1].isHidden()
    assert shown.pictures[2].isHidden()


def test_the_estimate_is_one_line_of_the_panel_so_that_the_button_below_stays():
    told = describe_estimate(TrainingEstimate(144, 600, 4800.0, "cuda:0", 640))
    assert told == "About 1 h 20 min on cuda:0 · 144 epochs, 600 steps"
    assert len(told) <= 52, "characters, in a dock at 1280 × 720"


def test_outlook_measures_a_step_or_takes_an_earlier_run(project, tiny):
    save_checkpoint(tiny, project / "tiny.safetensors")
    data = summarise_dataset(project / "data.yaml")
    assert "3 images for training" in data.sentence()
    recipe = TrainSettings(
        model=str(project / "tiny.safetensors"), data=str(project / "data.yaml"), device="cpu"
    )
    seen = estimate_duration(recipe, data.dataset)
    assert not seen.from_earlier_run
    assert seen.seconds > 8
    assert seen.device == "CPU"
    resolved = resolve_defaults(recipe)
    assert seen.epochs == resolved.epochs > resolved.rounds
    run = new_run(project, resolved.model_dump())
    batches = seen.steps // resolved.rounds
    event = {"event": "epoch", "seconds": 100.0, "batches": batches, "device": "CPU"}
    (run / "progress.jsonl").write_text(f"{json.dumps(event)}\n" * 3)
    told = estimate_duration(recipe, data.dataset, list_runs(project))
    assert told.from_earlier_run
    assert told.seconds == pytest.approx(8 + 100 * resolved.rounds)


def test_what_is_trained_is_preselected_by_the_amount_of_data(tmp_path):
    def scope(train, classes=NAMES, name="data"):
        data = tmp_path / f"{name}-{train}"
        return summarise_dataset(write_smears(data, train=train, val=1, side=96)).scope(classes)

    assert scope(2) == "stain"
    assert scope(2, ["RBC", "WBC"], "new") == "head"  # a class is new
    assert scope(8) == "all"
    assert scope(8, ["cell"], "other") == "all"


def test_too_few_boxes_of_a_class_are_warned_of_before_training(project):
    data = summarise_dataset(project / "data.yaml")
    few = {name: count for name, count in data.counts.items() if 0 < count < 10}
    assert few
    first, count = next(iter(few.items()))
    assert data.notes[0].startswith("Only ")
    assert f"{count} boxes of {first}" in data.notes[0] or f"{count} of {first}" in data.notes[0]
    assert "about 10 boxes of a class are needed" in data.notes[0]
    for file in (project / "labels" / "train").iterdir():
        rows = [f"{k} 0.{n:02d} 0.5 0.2 0.2" for k in range(3) for n in range(10, 20)]
        file.write_text("\n".join(rows))
    assert not any("are needed" in note for note in summarise_dataset(project / "data.yaml").notes)


def test_stain_only_needs_the_same_classes(project, tiny):
    text = (project / "data.yaml").read_text().replace("WBC", "yeast")
    (project / "data.yaml").write_text(text)
    recipe = TrainSettings(data=str(project / "data.yaml"), scope="stain", device="cpu")
    with pytest.raises(DataError, match="yeast"):
        estimate_duration(recipe, summarise_dataset(project / "data.yaml").dataset, parent=tiny)


def test_model_that_is_no_file_is_written_into_its_run(project, tiny):
    path = create_run(project, tiny, {"scope": "head", "epochs": None, "image_size": None})
    settings = json.loads((path / "run.json").read_text())["settings"]
    assert settings["model"] == str(path / "start.safetensors")
    assert load_checkpoint(settings["model"], device="cpu").classes == list(NAMES)
    set_run_device(path, "mps")
    assert json.loads((path / "run.json").read_text())["settings"]["device"] == "mps"


def test_a_class_that_was_added_is_compared_by_the_others(project, tiny):
    torch.manual_seed(1)
    network = StainDetectionModel(copy.deepcopy(MODEL), nc=4, imgsz=64)
    network.fit_mix()
    more = [*NAMES, "parasite"]
    save_checkpoint(
        Detector(network, describe_network(network, "more", more, 64)), project / "m.safetensors"
    )
    text = (project / "data.yaml").read_text().replace("Platelets]", "Platelets, parasite]")
    (project / "data.yaml").write_text(text)
    labels = project / "labels" / "val" / "smear-100.txt"
    labels.write_text(labels.read_text() + "3 0.5 0.5 0.3 0.3\n")
    path = create_run(project, tiny, {"scope": "head"})
    (project / "m.safetensors").rename(path / "best.safetensors")
    judged = compare_models(path, fields=1)
    assert judged.new[0] is not None
    assert judged.notes[0].startswith("The model before does not know parasite")
    rows = {row.what: row for row in judged.class_rows()}
    assert rows["New data, parasite"].before is None
    assert (rows["New data, parasite"].after, rows["New data, parasite"].count) == (0.0, 1)
    assert rows["New data, RBC"].before is not None
    assert rows["Reference, RBC"].count > 5
    again = compare_models(path, fields=1)
    assert again.rows() == judged.rows()


@pytest.mark.parametrize(
    ("before", "after", "count", "forgotten"),
    [
        (0.986, 0.45, 16, True),
        (0.9, 0.79, 29, False),  # three boxes: may be chance
        (0.9, 0.79, 200, True),
        (0.99, 0.95, 5000, False),  # some points are no forgetting
        (None, 0.1, 50, False),
        (0.2, 0.9, 50, False),
    ],
)
def test_a_class_is_forgotten_where_it_fell_by_more_than_chance(before, after, count, forgotten):
    assert ComparisonRow("Reference, WBC", before, after, count).forgotten == forgotten


def test_forgotten_classes_are_marked_in_the_record(tiny):
    scores = {"WBC": (0.986, 0.452, 20), "RBC": (0.99, 0.98, 100)}
    pair = ({"mAP50": 0.957, "mAP50-95": 0.7}, {"mAP50": 0.818, "mAP50-95": 0.6})
    judged = ModelComparison(tiny, tiny, (None, pair[1]), pair, classes={"reference": scores})
    assert judged.to_dict()["forgotten"] == ["WBC: 98.6 → 45.2 % (reference)"]


def test_comparison_is_cached_and_saved_with_the_model(project, tiny):
    path = create_run(project, tiny, {})
    with pytest.raises(FileError, match="no model to compare"):
        compare_models(path)
    save_checkpoint(tiny, path / "best.safetensors")
    judged = compare_models(path, fields=1)
    assert [row.before for row in judged.rows()] == [row.after for row in judged.rows()]
    assert len(judged.rows()) == 4
    stored = json.loads((path / "compared.json").read_text())
    stored["result"]["new data"][1]["mAP50"] = 0.75
    (path / "compared.json").write_text(json.dumps(stored))
    assert compare_models(path, fields=1).rows()[0].after == 0.75  # not measured again
    kept = save_best_model(path, "Ünser Labor", judged)
    assert kept == project / "models" / "Unser-Labor.safetensors"
    info = load_checkpoint(kept, device="cpu").info
    assert info["name"] == "Unser-Labor"
    assert info["training"]["compared"]["new data"]
    assert save_best_model(path, "Ünser Labor").name == "Unser-Labor-2.safetensors"


def test_scores_are_measured_again_when_the_data_have_changed(project, tiny):
    path = create_run(project, tiny, {})
    save_checkpoint(tiny, path / "best.safetensors")

    def boxes_of_new_data():
        rows = compare_models(path, fields=1).class_rows()
        return sum(row.count for row in rows if row.what.startswith("New data"))

    before = boxes_of_new_data()
    write_smear(project, "val", 150, side=64)
    boxes = len((project / "labels" / "val" / "smear-150.txt").read_text().splitlines())
    assert boxes_of_new_data() == before + boxes


def test_what_the_training_has_compared_is_not_measured_again(project, tiny):
    path = create_run(project, tiny, {})
    save_checkpoint(tiny, path / "best.safetensors")
    settings = json.loads((path / "run.json").read_text())["settings"]
    dataset = read_dataset(settings["data"])
    key = comparison_key(settings["model"], path / "best.safetensors", dataset)
    change = ModelChange("tiny", (ImageChange("far away", (66.0, 27.0), {"RBC": (9, 9)}),), 1)
    RunFolder(path, locked=False).write_run(change={"key": key, **change.to_dict()})
    assert compare_models(path, fields=1).change == change
    assert compare_models(path, fields=1).change == change
    write_smear(project, "train", 50, side=64)
    measured = compare_models(path, fields=1).change
    assert (measured.total, len(measured.images), measured.code) == (6, 6, "alike")


def test_a_kept_model_is_ready_before_panels_ask_what_it_runs_on(monkeypatch, tmp_path):
    """Or the GUI thread would fuse its network."""
    saved = "napari_beerlanet.core.training.comparison.save_best_model"
    monkeypatch.setattr(saved, lambda *_: "blood-cells")
    _, model = keep_and_load_model(tmp_path, "kept", None)
    assert model._runner is not None
