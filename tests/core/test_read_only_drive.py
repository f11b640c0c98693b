"""A drive that is mounted read-only: all on it can be read, and writing to it is one sentence.

The mount is a real one, in a name space of a child process, and so holds for root and for SQLite.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from discs import disc_detector
from napari_beerlanet.core.batch.study import run_study
from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.checkpoints.checkpoint import save_checkpoint
from napari_beerlanet.core.checkpoints.serialize import describe_network
from napari_beerlanet.core.detection.detector import Detector
from napari_beerlanet.core.detection.network import StainDetectionModel
from napari_beerlanet.core.detection.slide_detector import detect_slide
from napari_beerlanet.core.formats import write_detections
from napari_beerlanet.core.project.project import Project
from napari_beerlanet.core.review.review import Review, save_review
from napari_beerlanet.samples import blood_smear
from projects import NAMES, fill, tree
from tinydata import MODEL

UNSHARE = shutil.which("unshare")
MOUNTED = 'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" && shift && exec "$@"'

# What a child does: each action's result, or the kind and the text of its error.
CHILD = """
import json, sys
from pathlib import Path
import test_read_only_drive as here

drive, said = Path(sys.argv[1]), {}
for name, action in here.ACTIONS.items():
    try:
        said[name] = ["", str(action(drive))]
    except Exception as error:
        said[name] = [[one.__name__ for one in type(error).__mro__], str(error)]
print(json.dumps(said))
"""


def smear_image(seed: int = 0):
    """A synthetic smear, (160, 160, 3) uint8."""
    return blood_smear((160, 160), seed=seed, cell_diameter=30).image


def boxes() -> Detections:
    """Two boxes of one class."""
    return Detections([[1, 1, 20, 20], [30, 30, 50, 50]], [0, 0], [0.9, 0.8], ["RBC"])


def detector(seed: int = 0) -> Detector:
    """A network that has learned nothing."""
    torch.manual_seed(seed)
    network = StainDetectionModel(MODEL, nc=3, imgsz=64)
    return Detector(network, describe_network(network, "tiny", list(NAMES), 64))


SLIDE = {"object_size": 40, "tile": 128, "skip_glass": False}


def search_slide(drive: Path, results: str) -> str:
    """Search an image as a slide, with results in a file."""
    found = detect_slide(disc_detector(), smear_image(), results=drive / results, **SLIDE)
    return f"{len(found.candidates)} candidates; {' '.join(found.report['notes'])}"


def open_project(drive: Path) -> str:
    """Why it cannot be changed, and how many images it has."""
    with Project.open(drive / "project") as project:
        return f"{project.read_only} {project.summary()['images']} images"


def change_project(drive: Path) -> None:
    """Add a class."""
    with Project.open(drive / "project") as project:
        project.add_classes(["new"])


def load_model(drive: Path) -> str:
    """The name of a saved model."""
    from napari_beerlanet.core.checkpoints.checkpoint import load_checkpoint

    return str(load_checkpoint(drive / "model.safetensors").info["name"])


def create_run(drive: Path) -> None:
    """Begin a training in a project."""
    from napari_beerlanet.ui.finetune.start import create_run

    create_run(drive / "project", detector(), {})


def fine_tune(drive: Path) -> None:
    """Train into a folder."""
    from napari_beerlanet.core.training.fine_tune import fine_tune

    fine_tune(drive / "model.safetensors", drive / "project", drive / "trained", epochs=1)


def study(drive: Path, out: str) -> str:
    """Decompose and find cells of a folder's images."""
    settings = {"components": 2, "iterations": 2, "previews": False, "reports": False}
    settings |= {"model": str(drive / "model.safetensors"), "object_size": 30}
    result = run_study([drive / "images"], drive / out, settings, workers=0)
    return f"{result.count('done')} done, {result.count('skipped')} skipped"


def counts(drive: Path) -> str:
    """Images of a study's results."""
    from napari_beerlanet.core.batch.counts import StudyCounts

    return f"{len(StudyCounts.read(drive / 'results').images)} images"


def write_report(drive: Path) -> None:
    """A report on an image."""
    from napari_beerlanet.cli.main import main

    given = ["report", str(drive / "images/0.png"), f"--out={drive / 'report.html'}", "--no-stains"]
    if status := main([*given, f"--model={drive / 'model.safetensors'}", "--device=cpu"]):
        raise OSError(f"exit {status}")


def load_review(drive: Path) -> str:
    """Decisions of a review."""
    from napari_beerlanet.core.review.review import load_review

    review, matched = load_review(drive / "review.json", boxes())
    return f"{matched} of {len(review.detections)}"


def save_preset(drive: Path) -> None:
    """Spectra under a name."""
    from napari_beerlanet.core.stains.presets import StainLibrary, load_preset

    StainLibrary(drive / "stains").save(load_preset("H&E"))


def save_normalizer(drive: Path) -> None:
    """A fitted normalizer."""
    from napari_beerlanet.core.normalization.methods import fitted_normalizer, save_normalizer

    save_normalizer(fitted_normalizer("reinhard", smear_image()), drive / "reference.safetensors")


def remember(drive: Path) -> str:
    """Preferences, which are a comfort: nothing may come of it."""
    os.environ["NAPARI_BEERLANET_CONFIG"] = str(drive / "settings")
    from napari_beerlanet.ui.common.recent import RecentPaths

    RecentPaths("batches", "batches.json").add(drive / "results")
    return "fine"


ACTIONS = {
    "open a project": open_project,
    "change a project": change_project,
    "create a project": lambda drive: Project.create(drive / "new", ["RBC"]),
    "load a model": load_model,
    "save a model": lambda drive: save_checkpoint(detector(), drive / "new.safetensors"),
    "begin a run": create_run,
    "train": fine_tune,
    "study": lambda drive: study(drive, "new"),
    "study again": lambda drive: study(drive, "results"),
    "counts of a study": counts,
    "report": write_report,
    "new results of a slide": lambda drive: search_slide(drive, "new.tiles"),
    "known results of a slide": lambda drive: search_slide(drive, "old.tiles"),
    "load a review": load_review,
    "save a review": lambda drive: save_review(drive / "review.json", Review(boxes())),
    "save boxes": lambda drive: write_detections(drive / "boxes.csv", boxes()),
    "save a preset": save_preset,
    "save a normalizer": save_normalizer,
    "remember a file": remember,
}


@pytest.fixture(scope="module")
def drive(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drive")
    (folder / "images").mkdir()
    for number in range(2):
        Image.fromarray(smear_image(number)).save(folder / "images" / f"{number}.png")
    with Project.create(folder / "project", NAMES) as project:
        fill(project, [1, 2], 64)
    save_checkpoint(detector(), folder / "model.safetensors")
    save_review(folder / "review.json", Review(boxes()))
    study(folder, "results")
    search_slide(folder, "old.tiles")
    return folder


@pytest.fixture(scope="module")
def said(drive, root):
    """What each action answers on the read-only drive."""
    alone = [UNSHARE or "false", "--map-root-user", "--mount", "sh", "-c", MOUNTED, "sh", drive]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no name spaces of mounts here")
    before = tree(drive)
    done = subprocess.run(
        [*alone, sys.executable, "-c", CHILD, drive],
        cwd=Path(__file__).parent,
        env=child_environment(root),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert tree(drive) == before
    return json.loads(done.stdout.splitlines()[-1])


def child_environment(root):
    paths = [str(root / "tests"), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


@pytest.mark.parametrize(
    ("action", "answer"),
    [
        ("open a project", "cannot be written to"),
        ("load a model", "tiny"),
        ("counts of a study", "2 images"),
        ("load a review", "of 2"),
        ("new results of a slide", "what is found is not saved there"),
        ("known results of a slide", "what is found is not saved there"),
        ("remember a file", "fine"),
    ],
)
def test_what_is_there_is_read(said, action, answer):
    kinds, text = said[action]
    assert not kinds, (kinds, text)
    assert answer in text


@pytest.mark.parametrize(
    "action",
    [
        "change a project",
        "create a project",
        "save a model",
        "begin a run",
        "train",
        "study",
        "study again",
        "report",
        "save a review",
        "save boxes",
        "save a preset",
        "save a normalizer",
    ],
)
def test_writing_is_one_sentence(said, action, drive):
    kinds, text = said[action]
    assert {"FileError", "ValueError", "OSError"} & set(kinds), (kinds, text)
    assert "\n" not in text
    if action != "report":  # whose sentence is printed
        assert str(drive) in text
        reasons = ("read-only", "cannot be written to", "no permission")
        assert any(words in text.lower() for words in reasons)
