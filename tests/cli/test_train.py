"""The command `train` on a tiny dataset: what it prints, what it writes, how it ends."""

import errno
import json
import os
import re
import shlex
import signal
import subprocess
import sys

import pytest
import torch
import yaml

from napari_beerlanet.cli import main, train
from napari_beerlanet.core.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from napari_beerlanet.core.checkpoints.serialize import describe_network
from napari_beerlanet.core.common import storage
from napari_beerlanet.core.common.events import RunState
from napari_beerlanet.core.common.progress import Cancelled
from napari_beerlanet.core.detection.detector import Detector
from napari_beerlanet.core.detection.network import StainDetectionModel
from napari_beerlanet.core.normalization.methods import fitted_normalizer, save_normalizer
from napari_beerlanet.core.training.fine_tune import TrainingRun, _DetectorRun
from napari_beerlanet.core.training.runs import inspect_run
from napari_beerlanet.core.training.settings import TrainSettings
from napari_beerlanet.core.training.train_classifier import ClassifierTrainSettings
from tinydata import MODEL, NAMES, write_smears


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_smears(tmp_path_factory.mktemp("smears"), train=4, val=2, side=64)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(0)
    network = StainDetectionModel(MODEL, nc=3, imgsz=64)
    path = tmp_path_factory.mktemp("models") / "tiny.safetensors"
    save_checkpoint(Detector(network, describe_network(network, "tiny", list(NAMES), 64)), path)
    return path


@pytest.fixture
def quick(data, model, tmp_path):
    """The arguments of a short training."""
    settings = {"data": data, "model": model, "out": tmp_path / "run", "epochs": 2, "batch": 2}
    return [f"--{key}={value}" for key, value in settings.items()] + ["--device=cpu"]


def run(*arguments):
    try:
        return main.main(["train", *map(str, arguments)])
    except SystemExit as end:
        return int(end.code or 0)


def lines(text):
    return [json.loads(line) for line in text.splitlines()]


def test_lines_of_json(quick, tmp_path, capfd):
    assert run(*quick, "--json") == 0
    out, err = capfd.readouterr()
    told = lines(out)
    kinds = [event["event"] for event in told if event["event"] != "warning"]
    epoch = ["batch", "batch", "epoch"]
    assert kinds == ["start", *epoch, *epoch, "compare", "end"]
    assert told == lines((tmp_path / "run" / "progress.jsonl").read_text())
    assert err == ""
    assert told[-1]["best"] == str(tmp_path / "run" / "best.safetensors")


def test_words_for_people(quick, tmp_path, capfd):
    assert run(*quick, "--scope=stain", "--lr=0.001", "--set=mosaic=0.5", "--no-jitter") == 0
    out, err = capfd.readouterr()
    best = tmp_path / "run" / "best.safetensors"
    assert out.strip() == f"{best}: trained on 4 images, validated on 2"  # no score of so few
    assert re.search(r"Only \d+ (box|boxes) of .*: about 10 boxes of a class are needed", err)
    assert err.index("are needed to learn it") < err.index("epoch 1 of 2")
    assert out.count("\n") == 1
    assert "training of 2 epochs: 4 train and 2 val images, on cpu." in err
    assert re.search(r"epoch 1 of 2: mAP50 \d+\.\d %, mAP50-95 \d+\.\d %", err)
    record = load_checkpoint(tmp_path / "run" / "best.safetensors", "cpu").info["training"]
    assert record["settings"]["advanced"]["mosaic"] == 0.5
    assert (record["scope"], record["settings"]["jitter"]) == ("stain", False)
    assert "--set=mosaic=0.5" in record["command"]


def test_front_end_normalizer_and_jitter(data, model, tmp_path, capfd):
    layout, normalizer = tmp_path / "tiny.yaml", tmp_path / "reinhard.safetensors"
    layout.write_text(yaml.safe_dump(MODEL))
    template = next((data.parent / "images" / "train").iterdir())
    save_normalizer(fitted_normalizer("reinhard", template), normalizer)
    shared = [f"--data={data}", "--epochs=1", "--batch=2", "--imgsz=64", "--device=cpu", "--quiet"]
    chosen = [f"--model={layout}", f"--normalizer={normalizer}", "--front-end=grey", "--jitter=hed"]
    assert run(*shared, *chosen, f"--out={tmp_path / 'run'}") == 0
    made = load_checkpoint(tmp_path / "run" / "best.safetensors", "cpu")
    assert (made.network.front_end, made.network.normalizer.method) == ("grey", "reinhard")
    command = made.info["training"]["command"]
    assert "--front-end=grey --normalizer=reinhard.safetensors --jitter=hed" in command
    capfd.readouterr()
    trained = [f"--model={model}", "--front-end=none", f"--out={tmp_path / 'other'}"]
    assert run(*shared, *trained) == 1
    said = capfd.readouterr().err
    assert "front_end is 'beerlanet' in the model that training starts from" in said
    assert said.count("\n") == 1


SHARED = {"seed": 7, "device": "cpu", "normalizer": "reinhard.safetensors", "epochs": 30}
SHARED |= {"learning_rate": 1e-05, "attention_pool": 4, "keep_statistics": False, "share": 0.3}
SHARED |= {"jitter": [False, "hed", {"dyes": 0.1, "kind": "stain"}]}
DETECTOR = SHARED | {"model": "my model.safetensors", "data": "a set/data.yaml", "scope": "head"}
DETECTOR |= {"image_size": 320, "batch": [4, "auto"], "front_end": "none", "pixel_size": 0.1}
DETECTOR |= {"advanced": {"mosaic": 0.5, "cos_lr": True, "optimizer": "AdamW"}, "length": "quick"}
DETECTOR |= {"validate_every": 3, "repeats": 2, "average": 20}
CLASSIFIER = SHARED | {"data": "a set/crops", "model": "my model.safetensors"}
CLASSIFIER |= {"front_end": "grey", "input_size": 96, "fill": 0.5, "fit": "image", "views": 4}
CLASSIFIER |= {"normalize": True, "denoise": True, "beside_rgb": True, "standardize": False}
CLASSIFIER |= {"components": 3, "iterations": 5, "domain": "intensity", "unit_spectra": False}
CLASSIFIER |= {"backbone": "resnet34", "weights": "w.pt", "detector": "blood-cells"}
CLASSIFIER |= {"object_class": "1", "reference": "known", "batch": 16, "balanced": False}
CLASSIFIER |= {"prior": {"a b": 2.0}, "validation": 0.3, "scale_jitter": 0.1, "shift_jitter": 0.1}
CLASSIFIER |= {"blur_jitter": 0.1, "border_jitter": 0.5, "turn_jitter": False, "light": False}
CLASSIFIER |= {"label_smoothing": 0.2, "weight_decay": 0.1, "head_factor": 2.0, "averaging": 0.9}
CLASSIFIER |= {"warm_up": 3, "cosine": True}


def one_by_one(kind, values):
    """All at once, each field of the settings alone, and the default."""
    assert kind.model_fields.keys() - {"task"} == values.keys()
    lists = {name: v if isinstance(v, list) else [v] for name, v in values.items()}
    yield kind, {name: each[0] for name, each in lists.items()}
    yield from ((kind, {name: value}) for name, each in lists.items() for value in each)


@pytest.mark.parametrize(
    ("kind", "values"),
    [*one_by_one(TrainSettings, DETECTOR), *one_by_one(ClassifierTrainSettings, CLASSIFIER)],
)
def test_a_recorded_command_asks_for_the_same_settings(kind, values, tmp_path, monkeypatch):
    values = {"data": "a set/data.yaml", "model": "my model.safetensors"} | values
    for name in {"data", "model", "normalizer", "weights", "reference"} & values.keys():
        values[name] = str(tmp_path / values[name])  # of paths the last names are recorded
    for name in ("my model.safetensors", "known"):
        (tmp_path / name).touch()
    settings = kind(**values)
    asked = []

    def remember(_, requested, *more):
        asked.append(requested)
        raise Cancelled

    monkeypatch.setattr(TrainingRun, "run", remember)
    monkeypatch.chdir(tmp_path)
    program, *words = shlex.split(settings.command())
    assert program == "napari-beerlanet"
    assert str(tmp_path) not in shlex.join(words)
    assert run(*words[1:]) == 130
    assert asked == [settings]


def test_quiet(quick, capfd):
    assert run(*quick, "--quiet", "--epochs=1") == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert "trained on 4 images" in out


def test_a_model_that_takes_cells_for_other_sizes_is_told_at_the_end(quick, capfd, monkeypatch):
    told = "On 3 of 6 images the new model assumes cells of another size."
    change = {"code": "sizes", "text": told, "images": 6}
    monkeypatch.setattr(_DetectorRun, "compare", lambda *_: {"change": change})
    assert run(*quick, "--epochs=1", "--quiet") == 0
    assert capfd.readouterr().err == f"napari-beerlanet: {told}\n"


def test_a_file_stops_it_and_resume_goes_on(quick, tmp_path, capfd, monkeypatch):
    folder = tmp_path / "run"
    show = train._JsonOutput.__call__
    asked = []

    def stopping(self, event):
        show(self, event)
        if event["event"] == "batch" and event["epoch"] == 2 and not asked:
            asked.append(event)
            (folder / "stop").touch()

    monkeypatch.setattr(train._JsonOutput, "__call__", stopping)
    assert run(*quick, "--json") == 130
    out, err = capfd.readouterr()
    assert lines(out)[-1]["event"] == "cancelled"
    assert f"the best so far is {folder / 'best.safetensors'}" in err
    assert run("--resume", f"--out={folder}", "--device=cpu", "--json") == 0
    told = lines(capfd.readouterr().out)
    assert [event["epoch"] for event in told if event["event"] == "epoch"] == [2]


def test_second_run_in_the_folder_is_refused(quick, capfd):
    assert run(*quick, "--epochs=1", "--quiet") == 0
    capfd.readouterr()
    assert run(*quick) == 1
    assert "resume it" in capfd.readouterr().err
    assert run("--resume", *[a for a in quick if a.startswith("--out")], "--device=cpu") == 0


@pytest.mark.parametrize(
    ("arguments", "status", "word"),
    [
        (["--out=run"], 2, "--data"),
        (["--data=gone.yaml", "--model=gone.pt", "--out=run"], 1, "gone.yaml"),
        (["--data=gone.yaml", "--out=run", "--scope=neck"], 2, "neck"),
        (["--data=gone.yaml", "--out=run", "--set=mosaic"], 2, "KEY=VALUE"),
        (["--data=gone.yaml", "--out=run", "--epochs=0"], 2, "epochs"),
        (["--out=run", "--resume"], 1, "no run to resume"),
    ],
)
def test_mistakes_are_one_line(arguments, status, word, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == status
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert word in err


@pytest.mark.parametrize("full", ["best.safetensors", "state.pt"])
def test_a_full_disk_in_the_first_epoch(quick, tmp_path, capfd, monkeypatch, full):
    """A whole model or none, one sentence, and with some space it is resumed."""
    folder = tmp_path / "run"
    replace = storage._replace_path

    def replaced(new, path):
        if path == folder / full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        replace(new, path)

    monkeypatch.setattr(storage, "_replace_path", replaced)
    assert run(*quick, "--epochs=1", "--quiet") == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert f"{folder / full}" in err
    assert "no space left on device" in err.lower()
    for name in ("best.safetensors", "last.safetensors"):
        if (folder / name).exists():
            load_checkpoint(folder / name, "cpu")
    assert not list(folder.glob(".*.partial*"))
    monkeypatch.undo()
    assert run("--resume", f"--out={folder}", "--device=cpu", "--quiet") == 0
    load_checkpoint(folder / "best.safetensors", "cpu")
    assert inspect_run(folder).state is RunState.FINISHED


def test_help_answers_without_torch():
    code = "from napari_beerlanet.cli.main import main; main(['train', '--help'])"
    listing = os.environ | {"PYTHONPROFILEIMPORTTIME": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=listing)
    assert done.returncode == 0
    assert "--scope" in done.stdout
    assert "torch" not in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")
def test_interrupted_by_the_keyboard(quick, tmp_path):
    command = [sys.executable, "-m", "napari_beerlanet.cli.main", "train", *quick]
    with subprocess.Popen(
        [*command, "--json", "--epochs=500"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    ) as process:
        try:
            for line in process.stdout:
                if json.loads(line)["event"] == "epoch":
                    process.send_signal(signal.SIGINT)
                    break
            out, err = process.communicate(timeout=600)
        finally:
            process.kill()
    assert process.returncode == 130
    assert lines(out)[-1]["event"] == "cancelled"
    assert err.strip().endswith("finished results are saved.")
    load_checkpoint(tmp_path / "run" / "best.safetensors", "cpu")
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
