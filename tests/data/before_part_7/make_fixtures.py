"""User data as the version before Part 7 wrote it. Run with that version's code, commit e789a7e.

    git worktree add /tmp/old e789a7e
    PYTHONPATH=/tmp/old/src:/tmp/old/tests xvfb-run -a python make_fixtures.py HERE

It is kept for the record: it imports modules that are no more, and is not part of the tests.
HERE gets the folders, and expected.json with what the old code itself reads from them.
`../../before_part_7.py` makes a copy for a test. In texts, @ROOT@ stands for the folder in which
the data were, @HOST@ for the computer; times of files are those of `TIME`.

Kills are real: a process that works with the old code is ended by SIGKILL, in the middle.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np

TIME = 1_700_000_000  # seconds: every file's time, so that records of sources hold
WORK = Path("/tmp/before_part_7_work")
ROOT = WORK / "home"
CONFIG = ROOT / "config"
NAMES = ["RBC", "WBC", "Platelets"]
MODEL = {
    "nc": 3,
    "reg_max": 1,
    "backbone": [
        [-1, 1, "Conv", [4, 3, 2]],
        [-1, 1, "Conv", [8, 3, 2]],
        [-1, 1, "Conv", [8, 3, 2]],
    ],
    "head": [[[2], 1, "Detect", ["nc"]]],
}
SHAPE = (300, 420)
SLIDE = {"object_size": 20, "tile": 160, "skip_glass": False}
ENVIRONMENT = {
    "YOLO_OFFLINE": "true",
    "YOLO_CONFIG_DIR": str(WORK / "yolo"),
    "NAPARI_BEERLANET_CONFIG": str(CONFIG),
    "OMP_NUM_THREADS": "1",
    "LIBGL_ALWAYS_SOFTWARE": "1",
}
expected: dict[str, object] = {}


def child(code: str, *words: object, killed: bool = False, wait: bool = True):
    """Run code in a process of its own, with this module's names; it may kill itself."""
    whole = "from make_fixtures import *\n" + textwrap.dedent(code)
    command = [sys.executable, "-c", whole, *map(str, words)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    if wait:
        said = process.communicate()[0]
        assert process.returncode == (-signal.SIGKILL if killed else 0), process.returncode
        return said
    return process


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def until(condition, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing has happened"
        time.sleep(0.02)


def timed(folder: Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        os.utime(path, (TIME, TIME))


def numbers(array) -> list:
    return np.asarray(array, np.float64).round(4).tolist()


def facts_of(found) -> dict:
    """What is compared of detections."""
    return {
        "count": len(found),
        "counts": found.counts(),
        "names": list(found.names),
        "first": numbers(found.xyxy[:5]),
        "scores": numbers(found.scores[:5]),
        "sum": [round(float(v), 2) for v in found.xyxy.astype(float).sum(0)],
        "columns": sorted(found.columns),
    }


# --- checkpoints ---------------------------------------------------------------------------------


def network():
    import torch
    from napari_beerlanet.core.network import StainDetectionModel

    from discs import draw, enlivened, scattered

    torch.manual_seed(0)
    made = StainDetectionModel(MODEL, nc=3, imgsz=64)
    made.fit_mix()
    made.names = dict(enumerate(NAMES))
    return enlivened(made, draw((256, 256), scattered((256, 256), 40, seed=3)), -8.0, 3.0)


def sizes() -> dict:
    medians = zip(NAMES, (20.0, 30.0, 10.0), strict=True)
    return {k: {"median": m, "low": 0.7 * m, "high": 1.3 * m, "count": 90} for k, m in medians}


def checkpoints(folder: Path) -> None:
    import torch
    from napari_beerlanet.core.checkpoint import (
        checkpoint_hash,
        learned_spectra,
        load_checkpoint,
        read_info,
        save_checkpoint,
    )
    from napari_beerlanet.core.detector import Detector
    from napari_beerlanet.core.weights import describe

    folder.mkdir()
    made = network()
    info = describe(made, "tiny", NAMES, 64, object_sizes=sizes(), pixel_size=0.1)
    save_checkpoint(Detector(made, info), folder / "tiny.safetensors")
    # As Ultralytics' trainer writes its model after an epoch: the class is named by its module.
    record = {
        **{"epoch": 3, "best_fitness": 0.5, "model": None, "ema": made.half(), "updates": 10},
        **{"optimizer": None, "scaler": {}, "date": "2026-01-02", "version": "8.4.0"},
        **{"train_args": {"imgsz": 64, "data": "data.yaml"}},
    }
    torch.save(record, folder / "last.pt")
    read = {}
    for name in ("tiny.safetensors", "last.pt"):
        model = load_checkpoint(folder / name, "cpu")
        weights = {
            k: round(float(v.double().sum()), 5) for k, v in model.network.state_dict().items()
        }
        read[name] = {
            "info": json.loads(json.dumps(model.info)),
            "weights": weights,
            "spectra": learned_spectra(folder / name).round(6).tolist(),
            "sha256": checkpoint_hash(folder / name),
        }
    assert read_info(folder / "tiny.safetensors") == read["tiny.safetensors"]["info"]
    expected["checkpoints"] = read


# --- projects ------------------------------------------------------------------------------------


def smear(seed: int, shape=(48, 64), path: str | None = None, regions=None):
    from napari_beerlanet.core.annotations import Annotations
    from napari_beerlanet.core.regions import Region
    from napari_beerlanet.core.sources import Source
    from napari_beerlanet.sample_data import blood_smear

    field = blood_smear(shape, seed=seed, cell_diameter=16, white_cells=0.2)
    source = Source.of(field.image, f"smear {seed}.png", path, (0.1, 0.1))
    whole = (Region.whole(shape),) if regions is None else tuple(regions)
    boxes = field.boxes.astype(np.float64)
    return (
        source,
        field.image,
        Annotations(boxes, field.labels, list(NAMES), regions=whole, image_shape=shape),
    )


def read_project(path: Path) -> dict:
    from napari_beerlanet.core.dataset import check_dataset, data_hash, read_dataset

    from napari_beerlanet.core.project import Project

    with Project.open(path) as project:
        content = {
            "classes": project.classes,
            "seed": project.seed,
            "training_size": project.training_size,
            "summary": {k: v for k, v in project.summary().items() if k != "sentence"},
            "rows": [
                [r.file, r.split, r.source, r.x, r.y, r.width, r.height, r.boxes, r.counts]
                for r in project.rows
            ],
            "notes": project.notes,
            "read_only": project.read_only,
            "images": {},
        }
        for name, source in project.sources().items():
            found = project.load_annotations(source)
            content["images"][name] = {
                "name": source.name,
                "digest": source.digest,
                "shape": list(source.shape),
                "boxes": numbers(found.xyxy),
                "labels": found.labels.tolist(),
                "classes": list(found.names),
                "regions": [region.kind for region in found.regions],
            }
        data = read_dataset(project.data)
        check_dataset(data)
        content["data_hash"] = data_hash(data)
    return content


def make_project(path: Path) -> None:
    """Two images, one of them annotated in two regions; classes added and renamed."""
    from napari_beerlanet.core.regions import Region

    from napari_beerlanet.core.project import Project

    regions = [
        Region.rectangle(0, 0, 30, 48),
        Region("polygon", [[34, 4], [62, 8], [58, 44], [36, 40]]),
    ]
    with Project.create(path, NAMES[:2] + ["Thrombocytes"], seed=7) as project:
        project.add_classes(["Parasite"])
        project.rename_class("Thrombocytes", NAMES[2])
        project.add_image(*smear(1, path=str(ROOT / "smear 1.png")), 64)
        project.add_image(*smear(2, regions=regions), 64, side=32)


KILLED_CHANGE = """
    from napari_beerlanet.core.project import Project
    moves, real = int(sys.argv[2]), os.replace

    def replace(old, new):
        global moves
        if os.path.basename(new) == ".journal.json" and moves >= 0:
            real(old, new)
            if moves == 0:
                kill_self()
        elif ".stage-" in str(old):
            real(old, new)
            moves -= 1
            if moves == 0:
                kill_self()
        elif os.path.basename(new) == ".journal.json":
            kill_self()  # all is prepared, and nothing holds
        else:
            real(old, new)

    project = Project.open(sys.argv[1])
    os.replace = replace
    project.add_image(*smear(3), 64)
"""


def projects(folder: Path) -> None:
    folder.mkdir()
    make_project(folder / "whole")
    read = {"whole": read_project(folder / "whole")}
    # -1: killed before the journal; 0: journal there, nothing moved; 3: three files moved
    for name, moves in (("prepared", -1), ("begun", 0), ("halfway", 3)):
        shutil.copytree(folder / "whole", folder / name)
        child(KILLED_CHANGE, folder / name, moves, killed=True)
        assert ((folder / name) / ".journal.json").exists() == (moves >= 0)
        assert list((folder / name).glob(".stage-*"))
        shutil.copytree(folder / name, WORK / "look" / name)
        read[name] = read_project(WORK / "look" / name)
    shutil.copytree(folder / "whole", folder / "locked")
    code = """
        from napari_beerlanet.core.project import Project
        project = Project.open(sys.argv[1])
        (project.path / "annotations" / ".smear.json.0123456789abcdef.partial").write_text("{")
        kill_self()
    """
    child(code, folder / "locked", killed=True)
    assert json.loads((folder / "locked" / ".lock").read_text())["process"]
    shutil.copytree(folder / "locked", WORK / "look" / "locked")
    read["locked"] = read_project(WORK / "look" / "locked")
    expected["projects"] = read


# --- runs ----------------------------------------------------------------------------------------

PANEL = """
    import napari
    from qtpy.QtCore import QTimer
    from napari_beerlanet.ui import training_process
    from napari_beerlanet.ui.finetune_widget import FinetunePanel

    training_process.lower_priority = lambda process: None
    project, epochs, then, name = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    viewer = napari.Viewer(show=True)
    panel = FinetunePanel(viewer)
    panel.closing.ask = lambda: "go on"
    viewer.window.add_dock_widget(panel)
    panel.project.choose(project)
    panel.model.choose_file(project / "models" / "tiny.safetensors")
    panel.form.batch.setValue(2)
    panel.form.epochs.setValue(epochs)
    verdict = panel.verdict.judge
    panel.verdict.judge = lambda folder: verdict(folder, fields=1)
    state = ["start"]

    def look():
        if state[0] == "start" and panel.start_button.isEnabled() and not panel.run.running:
            panel.start()
            state[0] = "train"
        elif state[0] == "train" and panel.verdict.judged is not None:
            if then == "keep":
                panel.verdict.name.setText(name)
                panel.verdict.keep()
            else:
                panel.verdict.discard()
            state[0] = "end"
        elif state[0] == "end" and not panel.verdict.keep_task.running:
            timer.stop()
            panel.close_down()
            print("done", flush=True)
            os._exit(0)

    timer = QTimer()
    timer.timeout.connect(look)
    timer.start(100)
    napari.run()
"""


def read_run_folder(path: Path) -> dict:
    from napari_beerlanet.core.checkpoint import load_checkpoint
    from napari_beerlanet.core.runfiles import RunFolder
    from napari_beerlanet.core.runs import EventTail, look_at

    run = look_at(path)
    state = RunFolder(path, locked=False).read_state()
    events = [event["event"] for event in EventTail(path).read()]
    last = load_checkpoint(path / "last.safetensors", "cpu")
    return {
        "state": str(run.state),
        "epoch": run.epoch,
        "epochs": run.epochs,
        "can_resume": run.can_resume,
        "goes_on": run.goes_on,
        "settings": {k: v for k, v in run.settings.items() if k not in ("model", "data")},
        "rows": len(state["rows"]),
        "events": {name: events.count(name) for name in sorted(set(events))},
        "mAP50": last.info["training"]["metrics"]["mAP50"],
        "files": sorted(p.name for p in path.iterdir()),
    }


def runs(folder: Path) -> None:
    import torch
    from napari_beerlanet.core.runs import list_runs, look_at

    from tinydata import write_smears

    torch.set_num_threads(1)
    project = folder
    write_smears(project, train=3, val=2, side=48)
    (project / "models").mkdir()
    shutil.copy(ROOT / "checkpoints" / "tiny.safetensors", project / "models")
    for then in ("keep", "discard"):
        print(child(PANEL, project, 2, then, "ours"))
    known = {run.path for run in list_runs(project)}
    viewer = child(PANEL, project, 12, "keep", "never", wait=False)
    found: list[Path] = []

    def new() -> bool:
        found[:] = [run.path for run in list_runs(project) if run.path not in known]
        return (
            bool(found) and look_at(found[0]).process is not None and look_at(found[0]).epoch >= 2
        )

    until(new)
    os.kill(look_at(found[0]).process, signal.SIGKILL)
    viewer.kill()
    viewer.communicate()
    time.sleep(1)
    kept = known - {found[0]}
    # Plain names, and by a run that was killed after a viewer that was killed.
    names = dict(
        zip(sorted(kept), ("2026-01-01_10-00-00_all", "2026-01-01_11-00-00_all"), strict=True)
    )
    names[found[0]] = "2026-01-01_12-00-00_all"
    read = {}
    for old, new_name in names.items():
        old.rename(old.parent / new_name)
        read[new_name] = read_run_folder(old.parent / new_name)
    # Large, and of a run that is finished nothing reads it.
    (project / "runs" / "2026-01-01_11-00-00_all" / "state.pt").unlink()
    from napari_beerlanet.core.checkpoint import load_checkpoint

    ours = load_checkpoint(project / "models" / "ours.safetensors", "cpu").info
    expected["runs"] = {
        "runs": read,
        "newest first": [run.name for run in list_runs(project)],
        "kept": {
            "name": ours["name"],
            "training": sorted(ours["training"]),
            "compared": ours["training"]["compared"],
        },
    }


# --- slides --------------------------------------------------------------------------------------


def slide_image(seed=1, shape=SHAPE):
    from discs import draw, scattered

    return draw(shape, scattered(shape, 40, seed=seed))


def save_png(path: Path, pixels) -> None:
    from PIL import Image

    Image.fromarray(pixels).save(path, optimize=True)
    os.utime(path, (TIME, TIME))


def slide_run(path: Path, results: Path):
    """A search as the Find cells panel begins it for an image with a file."""
    from napari_beerlanet.core.checkpoint import load_checkpoint
    from napari_beerlanet.core.slidedetect import SlideDetection
    from napari_beerlanet.core.stamps import stamp
    from PIL import Image

    model = load_checkpoint(ROOT / "checkpoints" / "tiny.safetensors", "cpu")
    facts = {k: v for k, v in stamp(path).items() if k != "path"}
    source = {"name": path.name, **facts, "index": []}
    pixels = np.asarray(Image.open(path).convert("RGB"))
    return SlideDetection(model, pixels, results=results, source=source, **SLIDE)


STOPPED_SLIDE = """
    path, results = Path(sys.argv[1]), Path(sys.argv[2])
    run = slide_run(path, results)
    torn = sys.argv[3] == "torn"
    for step in run.steps():
        if step.done == 3 and torn:
            whole = run._log._file

            class Half:
                def write(self, content):
                    whole.write(content[: len(content) - 17])
                    whole.flush()
                    kill_self()

            run._log._file = Half()
        elif step.done == 3:
            kill_self()
"""


def slides(folder: Path) -> None:
    from napari_beerlanet.core.tilefile import peek

    folder.mkdir()
    read = {}
    for name in ("whole", "half", "torn"):
        path = folder / f"{name}.png"
        results = folder / f"{name}.png.tiles"
        save_png(path, slide_image())
        if name == "whole":
            with slide_run(path, results) as run:
                for _ in run.steps():
                    pass
                read[name] = facts_of(run.detections(0.25, densities=True))
        else:
            child(STOPPED_SLIDE, path, results, name, killed=True)
        header, done = peek(results)
        with slide_run(path, WORK / "look" / "none.tiles") as run:
            total = len(run.tiles)
        read[name] = {
            **read.get(name, {}),
            "tiles": done,
            "wanted": header["wanted"],
            "total": total,
            "model": header["name"],
            "scale": header["choice"][0],
        }
    expected["slides"] = read


# --- studies and commands ------------------------------------------------------------------------


def command(*words: object, **more) -> subprocess.Popen:
    """Our command line; without pyarrow, whose files would hold paths."""
    shim = WORK / "shim"
    shim.mkdir(exist_ok=True)
    (shim / "pyarrow.py").write_text("raise ImportError('hidden')\n")
    path = os.pathsep.join([str(shim), os.environ["PYTHONPATH"]])
    return subprocess.Popen(
        [sys.executable, "-m", "napari_beerlanet.cli", *map(str, words)],
        env={**os.environ, "PYTHONPATH": path},
        **more,
    )


def run(*words: object) -> None:
    assert command(*words).wait() == 0, words


def order(images: Path, out: Path, **settings):
    from napari_beerlanet.core.studycommand import StudyOrder
    from napari_beerlanet.core.studysettings import StudySettings

    chosen = {
        "iterations": 3,
        "components": 3,
        "previews": False,
        "reports": False,
        "device": "cpu",
    }
    return StudyOrder((str(images),), out, StudySettings.of({**chosen, **settings}), workers=0)


def study(folder: Path) -> None:
    from napari_beerlanet.core.study import run_study
    from napari_beerlanet.core.tilefile import peek
    from napari_beerlanet.ui.batch_process import prepare

    images = folder / "images"
    images.mkdir(parents=True)
    for seed in range(3):
        save_png(
            images / f"field{seed}.png", slide_image(seed, (420, 560) if seed == 1 else (200, 280))
        )
    settings = {"model": "blood-cells", "object_size": 40.0, "tile": 256, "confidence": 0.3}
    read = {}
    # complete, with a file that is no image
    (images / "broken.png").write_bytes(b"no image")
    os.utime(images / "broken.png", (TIME, TIME))
    given = order(images, folder / "whole", **settings, formats=("csv", "geojson"))
    out = prepare(given)
    with (out / "progress.jsonl").open("wb") as events:
        assert command("batch", out / "study.json", "--json", stdout=events).wait() == 1
    read["whole"] = read_study(out)
    # killed while it looks for cells in the second image
    given = order(images, folder / "killed", **settings, measure=False, formats=("csv",))
    out = prepare(given)
    with (out / "progress.jsonl").open("wb") as events:
        process = command("batch", out / "study.json", "--json", stdout=events)

    def begun() -> bool:
        done = list((out / "records").glob("[!.]*.json"))
        found = [peek(path) for path in (out / ".work").glob("*.tiles")]
        return bool(done) and any(one is not None and one[1] >= 2 for one in found)

    until(begun)
    process.kill()
    process.wait()
    read["killed"] = read_study(out)
    read["killed"]["work"] = {p.name: peek(p)[1] for p in (out / ".work").glob("*.tiles")}
    # stains alone
    out = folder / "stains"
    given = order(images / "field0.png", out)
    prepare(given)
    sys.modules["pyarrow"] = None
    run_study(list(given.images), out, given.settings, workers=0)
    del sys.modules["pyarrow"]
    read["stains"] = read_study(out)
    expected["study"] = read


def read_study(out: Path) -> dict:
    content = json.loads((out / "manifest.json").read_text())
    records = {}
    for path in sorted((out / "records").glob("[!.]*.json")):
        record = json.loads(path.read_text())
        row = {k: v for k, v in record["row"].items() if k != "path"}
        records[path.stem] = {
            "settings": record["settings"],
            "row": row,
            "outputs": sorted(record["outputs"]),
        }
    return {
        "counts": content["counts"],
        "settings_sha256": content["settings_sha256"],
        "settings": content["settings"],
        "records": records,
        "config": sorted(json.loads((out / "study.json").read_text())),
    }


def commands(folder: Path) -> None:
    """What `decompose`, `detect` and `evaluate` leave; told again, they have nothing to do."""
    images = folder / "images"
    images.mkdir(parents=True)
    save_png(images / "smear.png", smear(5, (40, 56))[1])
    save_png(images / "discs.png", slide_image(2, (200, 280)))
    model = ROOT / "checkpoints" / "tiny.safetensors"
    tell = {
        "decompose": [
            "decompose",
            images,
            "--out",
            folder / "decompose",
            "--components",
            3,
            "--iterations",
            5,
            "--no-preview",
        ],
        "zarr": [
            "decompose",
            images / "smear.png",
            "--out",
            folder / "zarr",
            "--components",
            2,
            "--iterations",
            5,
            "--format",
            "zarr",
            "--no-preview",
        ],
        "detect": [
            "detect",
            images,
            "--out",
            folder / "detect",
            "--model",
            model,
            "--object-size",
            40,
            "--tile",
            256,
            "--confidence",
            0.5,
            "--formats",
            "csv",
            "geojson",
            "yolo",
            "coco",
            "voc",
            "overlay",
        ],
    }
    read = {}
    for name, words in tell.items():
        run(*words, "--quiet")
        again = command(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        said = "".join(again.communicate())
        assert again.returncode == 0
        assert "skipped" in said, said
        read[name] = {
            "words": [str(word) for word in words],
            "files": sorted(
                str(p.relative_to(folder / name)) for p in (folder / name).rglob("*") if p.is_file()
            ),
            "said": said.strip().splitlines()[-1],
        }
    data, out = ROOT / "training" / "data.yaml", WORK / "evaluate.json"
    run("evaluate", "--data", data, "--model", model, "--out", out, "--quiet")
    metrics = json.loads(out.read_text())
    curves = metrics.pop("curves")
    read["evaluate"] = {**metrics, "curves": sorted(curves)}
    import napari_beerlanet as nb

    metrics = nb.evaluate(nb.load_checkpoint(model, device="cpu"), data, object_size=20.0)
    read["evaluate at 20 pixels"] = {**metrics, "curves": sorted(metrics["curves"])}
    from napari_beerlanet.core.results import read_spectra

    for name in ("decompose/smear", "decompose/discs", "zarr/smear"):
        read[name] = read_spectra(folder / f"{name}.spectra.json").tolist()
    for name in ("smear", "discs"):
        content = json.loads((folder / "detect" / f"{name}.detections.json").read_text())
        read[f"detect/{name}"] = {"counts": content["counts"], "classes": content["classes"]}
    expected["commands"] = read


# --- files of boxes ------------------------------------------------------------------------------


def formats(folder: Path) -> None:
    from napari_beerlanet.core.boxes import Detections
    from napari_beerlanet.core.formats import write_detections

    folder.mkdir()
    rng = np.random.default_rng(0)
    corner = rng.uniform(0, 80, (12, 2))
    boxes = np.concatenate([corner, corner + rng.uniform(8, 30, (12, 2))], 1)
    columns = {
        "OD 1 mean": rng.random(12).astype(np.float32),
        "OD 2 mean": rng.random(12).astype(np.float32),
    }
    found = Detections(
        boxes,
        rng.integers(0, 3, 12),
        np.linspace(0.95, 0.3, 12),
        NAMES,
        columns,
        (120, 160),
        (0.1, 0.1),
    )
    read = {}
    for kind, ending in {
        "csv": "csv",
        "geojson": "geojson",
        "coco": "coco.json",
        "voc": "xml",
        "yolo": "txt",
    }.items():
        path = folder / f"image.{ending}"
        write_detections(path, found, "image.png", format=kind)
        read[path.name] = describe_boxes(path)
    expected["formats"] = read


def describe_boxes(path: Path) -> dict:
    from napari_beerlanet.core.formats import read_detections

    names = NAMES if path.suffix == ".txt" else None
    found = read_detections(path, (120, 160), names)
    return {
        "boxes": numbers(found.xyxy),
        "labels": np.asarray(found.labels).tolist(),
        "names": list(found.names),
        "scores": numbers(found.scores),
    }


# --- viewers that are killed ---------------------------------------------------------------------

ANNOTATE = """
    import napari
    from PIL import Image
    from qtpy.QtCore import QTimer
    from napari_beerlanet.ui.annotate_panel import AnnotatePanel

    image, project = Path(sys.argv[1]), sys.argv[2]
    viewer = napari.Viewer(show=True)
    viewer.add_image(np.asarray(Image.open(image).convert("RGB")), name=image.stem)
    panel = AnnotatePanel(viewer)
    viewer.window.add_dock_widget(panel, name="Annotate")
    panel.store.classes.add(["RBC", "WBC"])
    if project != "none":
        panel.project.create(project)
    rng, drawn = np.random.default_rng(0), 0

    def draw():
        global drawn
        made = panel.flow.annotated
        if made is None:
            if project == "none" or panel.store.project is not None:
                panel.flow.begin()
            return
        y, x = rng.uniform(0, 60, 2).round(1)
        box = np.array([[y, x], [y, x + 30], [y + 20, x + 30], [y + 20, x]])
        made.boxes.layer.add(box)
        if drawn % 3 == 2:
            made.boxes.layer.selected_data = {drawn}
            made.boxes.set_class("WBC")
            made.boxes.layer.selected_data = set()
        drawn += 1
        if drawn == 6:
            panel.parts.click()
            made.regions.layer.add([box * 0.9], shape_type=["rectangle"])
        print(drawn, flush=True)

    timer = QTimer()
    timer.timeout.connect(draw)
    timer.start(80)
    napari.run()
"""

REVIEW = """
    import napari
    from PIL import Image
    from qtpy.QtCore import QTimer
    from napari_beerlanet.core.boxes import Detections
    from napari_beerlanet.core.colours import class_colours
    from napari_beerlanet.ui.detection_layer import DetectionLayer
    from napari_beerlanet.ui.review_widget import ReviewWidget
    from napari_beerlanet.ui.session import session

    viewer = napari.Viewer(show=True)
    pixels = np.asarray(Image.open(sys.argv[1]).convert("RGB"))
    source = viewer.add_image(pixels, name="reviewed")
    found = reviewed(pixels.shape[:2])
    shower = DetectionLayer(viewer, source, found, class_colours(len(found.names)))
    shower.show(0.25)
    session(viewer).put_result(source, found, shower)
    panel = ReviewWidget(viewer)
    viewer.window.add_dock_widget(panel)
    step = [0]

    def decide():
        if panel.keeper.path is None or not len(panel.rows):
            return
        step[0] += 1
        if step[0] <= 6:
            panel.next()
            (panel.reject if step[0] % 3 == 0 else panel.accept)()
            print(step[0], flush=True)

    timer = QTimer()
    timer.timeout.connect(decide)
    timer.start(100)
    napari.run()
"""


def reviewed(shape):
    """Detections of the picture that is reviewed."""
    from napari_beerlanet.core.boxes import Detections

    n = 12
    x, y = 20.0 * (np.arange(n) % 4) + 3, 24.0 * (np.arange(n) // 4) + 3
    boxes = np.stack([x, y, x + 14, y + 14], 1)
    labels = (np.arange(n) % 4 == 3).astype(int)
    return Detections(boxes, labels, np.linspace(0.95, 0.4, n), ["RBC", "WBC"], {}, shape)


def files(folder: Path) -> list[dict]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("[!.]*.json"))]


def viewers(folder: Path) -> None:
    folder.mkdir()
    read = {}
    for name, seed in (("draft", 11), ("projected", 12)):
        image = folder / f"{name}.png"
        save_png(image, smear(seed, (84, 100))[1])
        project = "none" if name == "draft" else folder / "project"
        saved = CONFIG / "drafts" if name == "draft" else folder / "project" / "annotations"
        viewer = child(ANNOTATE, image, project, wait=False)
        for line in viewer.stdout:
            there = files(saved)
            if int(line) >= 9 and there and len(there[0]["objects"]) >= 6 and there[0]["regions"]:
                break
        viewer.kill()
        viewer.communicate()
        (content,) = files(saved)
        read[name] = {
            "file": next(saved.glob("[!.]*.json")).name,
            "boxes": [entry["box"] for entry in content["objects"]],
            "classes": [entry["class"] for entry in content["objects"]],
            "regions": len(content["regions"]),
            "source": content["source"],
        }
    image = folder / "reviewed.png"
    save_png(image, smear(13, (84, 100))[1])
    viewer = child(REVIEW, image, wait=False)
    until(lambda: any(len(one["decisions"]) == 6 for one in files(CONFIG / "reviews")))
    viewer.kill()
    viewer.communicate()
    (content,) = files(CONFIG / "reviews")
    read["reviewed"] = {
        "file": next((CONFIG / "reviews").glob("*.json")).name,
        "decisions": content["decisions"],
        "detections": content["detections"],
    }
    expected["viewers"] = read


def settings() -> None:
    """What the user's own folder says."""
    from napari_beerlanet.ui.batch_process import RECENT
    from napari_beerlanet.ui.finetune_recent import recent_projects
    from napari_beerlanet.ui.project_store import last_open
    from napari_beerlanet.ui.recent_models import recent_models, remember_model

    remember_model(ROOT / "checkpoints" / "tiny.safetensors")
    expected["settings"] = {
        "models": [str(p) for p in recent_models()],
        "projects": [str(p) for p in recent_projects()],
        "batches": [str(p) for p in RECENT.paths()],
        "open": str(last_open()),
    }


# --- all -----------------------------------------------------------------------------------------


def scrub(folder: Path) -> None:
    """Places and names of this computer out of texts, and out of the heads of tile files."""
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.name == "make_fixtures.py":
            continue
        content = path.read_bytes()
        if path.suffix == ".tiles":
            head, _, rest = content.partition(b"\n")
            clean = head.replace(str(ROOT).encode(), b"@ROOT@") + b"\n" + rest
        else:
            clean = content.replace(str(ROOT).encode(), b"@ROOT@")
            clean = clean.replace(b'"' + socket.gethostname().encode() + b'"', b'"@HOST@"')
        if clean != content:
            assert b"\0" not in clean or path.suffix == ".tiles", path
            path.write_bytes(clean)
        assert b"/tmp/" not in clean, path


def main(here: Path) -> None:
    shutil.rmtree(WORK, ignore_errors=True)
    ROOT.mkdir(parents=True)
    (WORK / "look").mkdir()
    steps = {
        "checkpoints": checkpoints,
        "projects": projects,
        "training": runs,
        "slides": slides,
        "study": study,
        "commands": commands,
        "formats": formats,
        "viewers": viewers,
    }
    for name, make in steps.items():
        began = time.monotonic()
        make(ROOT / name)
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    settings()
    (ROOT / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    for old in here.iterdir():
        if old.name != "make_fixtures.py":
            shutil.rmtree(old) if old.is_dir() else old.unlink()
    shutil.copytree(ROOT, here, dirs_exist_ok=True)
    scrub(here)
    total = sum(p.stat().st_size for p in here.rglob("*") if p.is_file())
    print(f"{total / 1e6:.2f} MB in {sum(p.is_file() for p in here.rglob('*'))} files")


os.environ.update(ENVIRONMENT)
sys.path.insert(0, str(Path(__file__).parent))
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]
)

if __name__ == "__main__":
    main(Path(sys.argv[1]))
