"""New detectors: each front end from a layout or weights, kill and resume, what is refused."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
import yaml

from napari_beerlanet.core.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from napari_beerlanet.core.common.storage import FileError
from napari_beerlanet.core.detection.detector import Detector
from napari_beerlanet.core.formats.dataset import check_dataset, read_dataset
from napari_beerlanet.core.stains.palette import palette_of
from napari_beerlanet.core.training.fine_tune import fine_tune, train_detector
from napari_beerlanet.core.training.settings import TrainSettings
from napari_beerlanet.core.training.setup import build_network, load_parent, training_sample
from tinydata import MODEL, NAMES, write_smears

QUICK = {"batch": 2, "image_size": 64, "device": "cpu"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_smears(tmp_path_factory.mktemp("smears"), train=4, val=2, side=64)


@pytest.fixture(scope="module")
def layout(tmp_path_factory):
    path = tmp_path_factory.mktemp("layouts") / "tiny.yaml"
    path.write_text(yaml.safe_dump({**MODEL, "nc": 80}))
    return path


@pytest.fixture(scope="module")
def learned(data, layout, tmp_path_factory):
    """A folder and what two epochs with LStainNorm and HED jitter gave."""
    folder = tmp_path_factory.mktemp("runs") / "lstainnorm"
    settings = {**QUICK, "epochs": 2, "jitter": "hed", "attention_pool": 16}
    return folder, train_detector(data, folder, layout, "lstainnorm", **settings)


def weights(path):
    return load_checkpoint(path, device="cpu").network.state_dict()


def test_lstainnorm_learns_from_a_layout(learned, data, layout):
    _, model = learned
    assert model.info["front_end"] == "lstainnorm"
    assert (model.classes, model.network.lstainnorm.pool) == (list(NAMES), 16)
    record = model.info["training"]
    assert record["parent"] is None
    assert (record["settings"]["model"], record["settings"]["jitter"]) == ("tiny.yaml", "hed")
    assert "--front-end=lstainnorm" in record["command"]
    assert "--jitter=hed" in record["command"]
    norm = model.network.lstainnorm
    assert norm.mean.any()
    assert norm.sd.any()
    dataset = read_dataset(data)
    check_dataset(dataset)
    palettes = [palette_of(one.pixels.reshape(-1, 3)) for one in training_sample(dataset, 64)]
    fitted = type(norm)(16)
    fitted.fit(palettes)
    torch.testing.assert_close(norm.template_mean, fitted.template_mean)
    torch.testing.assert_close(norm.template_sd, fitted.template_sd)
    assert model.info["stain_seen"]


def test_killed_and_resumed_it_is_the_same(learned, data, layout, tmp_path):
    folder = tmp_path / "killed"
    folder.mkdir()
    whole = json.loads((learned[0] / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({"format": 1, "settings": whole["settings"]}))
    module = "napari_beerlanet.core.training.fine_tune"
    command = [sys.executable, "-m", module, "--config", str(folder / "run.json")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            event = json.loads(line)
            if event["event"] == "batch" and event["epoch"] == 2:
                os.kill(process.pid, signal.SIGKILL)
                break
    assert process.returncode == -signal.SIGKILL
    resumed = train_detector(None, folder, None, resume=True, device="cpu")
    assert isinstance(resumed, Detector)
    mine, right = weights(folder / "last.safetensors"), weights(learned[0] / "last.safetensors")
    assert all(torch.equal(mine[name], right[name]) for name in right)


@pytest.mark.parametrize("front_end", ["none", "grey"])
def test_a_detector_without_beerlanet_learns(front_end, data, layout, tmp_path):
    model = train_detector(
        data, tmp_path / "run", layout, front_end, jitter="none", epochs=1, **QUICK
    )
    assert model.network.front_end == front_end
    assert {name.split(".")[0] for name in model.network.state_dict()} == {"model"}
    assert model.info["training"]["metrics"]["mAP50"] is not None
    assert model.detect(torch.full((64, 64, 3), 0.9).numpy()).names == list(NAMES)


def test_weights_of_a_plain_yolo_stay_in_front_of_any_front_end(layout, data, tmp_path):
    """A model that says of itself that it is untrained, as an imported .pt does."""
    parent = load_parent(TrainSettings(model=str(layout)))
    start = tmp_path / "start.safetensors"
    save_checkpoint(parent, start)
    settings = TrainSettings(model=str(start), front_end="none")
    network = build_network(load_parent(settings), list(NAMES), 64, settings, [])
    before = parent.network.half().float().state_dict()
    for name in ("model.0.conv.weight", "model.4.bn.running_var"):
        assert torch.equal(network.state_dict()[name], before[name])


def test_a_trained_front_end_stays(learned, data, tmp_path):
    path = learned[0] / "best.safetensors"
    with pytest.raises(ValueError, match=r"front_end is 'lstainnorm' in the model .* stays so"):
        train_detector(data, tmp_path / "run", path, "grey", epochs=1, **QUICK)


def test_nothing_to_train_in_front_of_a_plain_network(layout, data, tmp_path):
    with pytest.raises(ValueError, match="has nothing to train"):
        train_detector(data, tmp_path / "a", layout, "none", scope="stain", epochs=1, **QUICK)


def test_a_wrong_layout_is_one_sentence(data, tmp_path):
    bad = tmp_path / "bad.yaml"
    bad.write_text("nc: 3\nactivation: __import__('os')\nbackbone: []\nhead: []\n")
    with pytest.raises(FileError, match=r"bad\.yaml: no layout of a network \(its activation"):
        train_detector(data, tmp_path / "a", bad, epochs=1, **QUICK)
    with pytest.raises(FileError, match=r"nothing-such\.yaml: there is no such layout"):
        train_detector(data, tmp_path / "b", "nothing-such.yaml", epochs=1, **QUICK)


def test_a_layout_has_the_scale_of_its_name():
    assert load_parent(TrainSettings(model="yolov8n.yaml")).network.yaml["scale"] == "n"


def test_fine_tuning_goes_on_with_the_front_end(learned, data, tmp_path):
    model = fine_tune(learned[1], data, tmp_path / "run", scope="stain", **{**QUICK, "epochs": 1})
    assert model.network.front_end == "lstainnorm"
    before = learned[1].network.state_dict()
    changed = {
        name.split(".")[0]
        for name, value in model.network.state_dict().items()
        if not torch.equal(value, before[name])
    }
    assert changed == {"lstainnorm"}
