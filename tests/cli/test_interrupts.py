"""Ctrl-C in the middle of every command: exit status 130, one line, and no unfinished files.

The signal is a real one, and comes at a given call of a function of ours, not at a time, so that it
comes at the same place on every machine.

And a folder for results that cannot be written to: one line before anything is computed.
"""

import builtins
import errno
import io
import os
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
import torch

from napari_beerlanet.cli import main
from napari_beerlanet.core.batch.image import WORK_FOLDER
from napari_beerlanet.core.benchmark import example
from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.checkpoints.checkpoint import save_checkpoint
from napari_beerlanet.core.checkpoints.serialize import describe_network
from napari_beerlanet.core.detection.detector import Detector
from napari_beerlanet.core.detection.network import StainDetectionModel
from napari_beerlanet.core.formats import write_detections
from tinyclasses import tiny_classifier, write_classes
from tinydata import MODEL, NAMES, write_smears

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for one process")

OURS = str(Path(main.__file__).parents[1])
QUICK = ["--components=2", "--iterations=2"]
FINDING = ["--model=model.safetensors", "--no-previews"]
DETECTOR = ["--model=model.safetensors", "--device=cpu"]

COMMANDS = {
    "decompose": ["fields", "--out=OUT", *QUICK],
    "detect": ["fields", "--out=OUT", *DETECTOR],
    "classify": ["crops", "--recursive", "--out=OUT", "--model=types.safetensors"],
    "classify boxes": [
        "fields/1.png",
        "--out=OUT",
        "--model=types.safetensors",
        "--boxes=boxes.csv",
    ],
    "classify slides": ["fields/1.png", "--out=OUT", "--model=types.safetensors", "--patches=30"],
    "malaria": ["fields", "--out=OUT", *DETECTOR, "--classify=stages.safetensors", "--no-reports"],
    "normalize": ["fields", "--out=OUT", "--method=reinhard", "--reference=fields/1.png"],
    "evaluate": ["--data=smears/data.yaml", *DETECTOR, "--out=OUT/metrics.json", "--quiet"],
    "batch": ["fields", "--out=OUT", "--workers=0", *FINDING, *QUICK, "--no-reports"],
    "report": ["fields/1.png", "--out=OUT/report.html", *DETECTOR, "--no-stains"],
    "convert": ["many.csv", "OUT", "--to=geojson"],
}
"""Of which the moment is a share of all calls, so that they are carried out as a whole first."""

LONG_COMMANDS = {
    "train a classifier": "--task=classify --data=crops --out=OUT --epochs=2 --batch=2 "
    "--backbone=shufflenet_v2_x0_5 --device=cpu --json",
    "normalize by a GAN": "fields --out=OUT --method=staingan --train-from=fields "
    "--reference=fields --steps=3 --filters=4 --blocks=1 --crop=64 --device=cpu",
    "benchmark": "--example --out=OUT --workers=0",
    "demo": "--no-window --out=OUT",
}
"""Of which it is the n-th look at whether a signal has come."""

ELSEWHERE = {"train", "export"}
"""Tested in test_train.py and in test_export.py."""


def test_every_command_is_interrupted():
    here = {name.split()[0] for name in (*COMMANDS, *LONG_COMMANDS)}
    assert here | ELSEWHERE == main._COMMANDS.keys() - {"info"}, "which only reads one file"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A folder with fields, crops, boxes, annotations and models."""
    folder = tmp_path_factory.mktemp("work")
    data = write_smears(folder / "smears", train=4, val=2, side=64)
    fields = folder / "fields"
    fields.mkdir()
    for number, path in enumerate(sorted((data.parent / "images" / "train").iterdir())[:3]):
        shutil.copy(path, fields / f"{number}.png")
    write_classes(folder / "crops", 3)
    torch.manual_seed(0)
    network = StainDetectionModel(MODEL, nc=3, imgsz=64)
    detector = Detector(network, describe_network(network, "tiny", list(NAMES), 64))
    save_checkpoint(detector, folder / "model.safetensors")
    save_checkpoint(tiny_classifier("shufflenet_v2_x0_5"), folder / "types.safetensors")
    stages = ["ring", "uninfected"]
    meant = {"applies_to": ["RBC"]}
    save_checkpoint(
        tiny_classifier("shufflenet_v2_x0_5", stages, info=meant), folder / "stages.safetensors"
    )
    corner = np.random.default_rng(0).uniform(0, 40, (8, 2))
    boxes = Detections(
        np.hstack([corner, corner + 20]), np.zeros(8, int), np.linspace(0.9, 0.2, 8), ["RBC"]
    )
    write_detections(folder / "boxes.csv", boxes, "1.png")
    lines = (folder / "boxes.csv").read_text().splitlines()
    more = [line.replace("1.png", f"{n}.png") for n in range(40) for line in lines[1:]]
    (folder / "many.csv").write_text("\n".join([lines[0], *more]) + "\n")
    return folder


def arguments(command, given, out):
    return [command.split()[0], *(word.replace("OUT", str(out)) for word in given)]


@contextmanager
def calls_of(wanted: Callable[[FrameType], bool], interrupted: int = 0):
    """Count the calls of our functions in this thread, while a command is carried out.

    At the one of that number Ctrl-C is pressed.
    """
    counted = [0]

    def on_call(frame, event, _):
        code = frame.f_code.co_filename
        if event != "call" or not code.startswith(OURS) or not wanted(frame):
            return
        if signal.getsignal(signal.SIGINT) is main._on_signal:
            counted[0] += 1
            if counted[0] == interrupted:
                signal.raise_signal(signal.SIGINT)

    before = sys.getprofile()
    sys.setprofile(on_call)
    try:
        yield counted
    finally:
        sys.setprofile(before)


def names_in(folder):
    """All files but those from which a run is resumed."""
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(file) for file in files if file.parts[0] != WORK_FOLDER}


def check_interrupted(status, said, out):
    assert status == 130, said
    assert said.splitlines()[-1] == "napari-beerlanet: interrupted; finished results are saved."
    assert "Traceback" not in said
    assert not [name for name in names_in(out) if ".partial" in name]


@pytest.fixture(scope="module")
def whole(workspace, tmp_path_factory):
    """How many calls a command has, and the names of its files."""
    done = {}

    def carried_out(command):
        if command not in done:
            first, out = (tmp_path_factory.mktemp("whole") for _ in range(2))
            assert main.main(arguments(command, COMMANDS[command], first)) == 0  # loads and caches
            with calls_of(lambda frame: True) as counted:
                assert main.main(arguments(command, COMMANDS[command], out)) == 0
            done[command] = counted[0], names_in(out)
        return done[command]

    return carried_out


@pytest.mark.parametrize("share", [0.4, 0.8])
@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c(command, share, whole, workspace, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(workspace)
    calls, names = whole(command)
    out = tmp_path / "out"
    given = arguments(command, COMMANDS[command], out)
    capfd.readouterr()
    with calls_of(lambda frame: True, interrupted=round(share * calls)):
        status = main.main(given)
    check_interrupted(status, capfd.readouterr().err, out)
    assert names_in(out) <= names
    if share == 0.4 and command in ("decompose", "classify slides", "batch", "convert"):
        assert main.main(given) == 0
        assert names_in(out) == names


def is_look(frame):
    return frame.f_code.co_name == "raise_if_interrupted"


@pytest.mark.parametrize("command", LONG_COMMANDS)
def test_ctrl_c_in_what_takes_long(command, workspace, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(workspace)
    monkeypatch.setattr(example, "_COUNTS", {"train": 4, "val": 2, "test": 2})
    out = tmp_path / "out"
    with calls_of(is_look, interrupted=4) as counted:
        status = main.main(arguments(command, LONG_COMMANDS[command].split(), out))
    check_interrupted(status, capfd.readouterr().err, out)
    assert counted[0] < 8, "it went on"


def test_a_signal_that_comes_at_the_very_end_counts(workspace, tmp_path, monkeypatch, capfd):
    """Whoever presses Ctrl-C does not want the next command of a script to start."""
    monkeypatch.chdir(workspace)
    out = tmp_path / "out"
    given = arguments("convert", COMMANDS["convert"], out)
    with calls_of(lambda frame: frame.f_code.co_name == "echo", interrupted=1):
        status = main.main(given)
    check_interrupted(status, capfd.readouterr().err, out)
    assert len(names_in(out)) == 40


def test_pressed_twice_ends_at_once(workspace, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(workspace)
    out = tmp_path / "out"
    given = arguments("detect", COMMANDS["detect"], out)

    def impatient(frame):
        wanted = frame.f_code.co_name == "read_image"
        if wanted:
            signal.raise_signal(signal.SIGINT)
        return wanted

    with calls_of(impatient, interrupted=1):
        status = main.main(given)
    check_interrupted(status, capfd.readouterr().err, out)
    assert not names_in(out)


# --- folders that cannot be written to -----------------------------------------------------------


@pytest.fixture
def make_read_only(monkeypatch):
    """Makes a folder as on a drive that is mounted read-only, also for root."""

    def make(folder):
        inside = f"{folder}{os.sep}"

        def guard(module, name, writes):
            real = getattr(module, name)

            def guarded(path, *args, **named):
                text = path if isinstance(path, int) else os.fsdecode(path)
                if str(text).startswith(inside) and writes(*args, **named):
                    raise OSError(errno.EROFS, "Read-only file system", text)
                return real(path, *args, **named)

            monkeypatch.setattr(module, name, guarded)

        def opens(mode="r", *args, **named):
            return any(letter in mode for letter in "wax+")

        for module in (builtins, io):
            guard(module, "open", opens)
        guard(os, "open", lambda flags, *args, **named: flags & (os.O_WRONLY | os.O_RDWR))
        for name in ("mkdir", "rename", "replace", "unlink", "remove", "rmdir"):
            guard(os, name, lambda *args, **named: True)

    return make


WRITING = [*COMMANDS, *LONG_COMMANDS, *sorted(ELSEWHERE)]


@pytest.mark.parametrize("command", WRITING)
@pytest.mark.parametrize("there", [True, False], ids=["folder", "new folder"])
def test_a_folder_that_cannot_be_written_to(
    command, there, workspace, tmp_path, monkeypatch, capfd, make_read_only
):
    monkeypatch.chdir(workspace)
    drive = tmp_path / "drive"
    out = drive / "out"
    (out if there else drive).mkdir(parents=True)
    make_read_only(drive)
    given = COMMANDS.get(command) or LONG_COMMANDS.get(command, "").split()
    if command == "train":
        given = ["--data=smears/data.yaml", "--out=OUT", *DETECTOR, "--epochs=1"]
    if command == "export":
        given = ["model.safetensors", "--out=OUT"]
    with calls_of(lambda frame: frame.f_code.co_name in ("detect", "_infer", "train")) as counted:
        status = main.main(arguments(command, given, out))
    said = [line for line in capfd.readouterr().err.splitlines() if "%|" not in line]
    assert status in (1, 2)
    assert counted[0] == 0, "it computed first"
    (line,) = [one for one in said if str(drive) in one]
    assert line.startswith("napari-beerlanet: ")
    assert "read-only file system" in line.lower()
    assert len(said) == 1, said
    assert not names_in(drive)
