"""Benchmarks on two laboratories of a few tiny images: every method, kills, a cluster, mistakes."""

import csv
import errno
import glob
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
import yaml
from PIL import Image

import napari_beerlanet as nb
from napari_beerlanet.core.benchmark import job as job_module
from napari_beerlanet.core.benchmark.benchmark import (
    BenchmarkProgress,
    estimate_benchmark,
    run_benchmark,
)
from napari_beerlanet.core.benchmark.data import read_pixels
from napari_beerlanet.core.benchmark.settings import METHODS
from napari_beerlanet.core.common import storage
from napari_beerlanet.core.common.progress import Cancelled
from napari_beerlanet.core.common.storage import FileError
from napari_beerlanet.core.training.trainer.data import read_bgr
from tinyclasses import SMALL, write_classes
from tinydata import MODEL, write_smear

# Workers get functions of this module as they are: another package may be called `tests`, too.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SIDE = 64


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two laboratories: smears with boxes, and crops of two types."""
    folder = tmp_path_factory.mktemp("data")
    for laboratory, splits in {"a": ("train", "val"), "b": ("val",)}.items():
        for split in splits:
            for seed in range(3 if split == "train" else 2):
                number = seed + 10 * len(split) + 100 * (laboratory == "b")
                write_smear(folder / laboratory, split, number, SIDE)
        named = {split: f"images/{split}" for split in splits}
        text = yaml.safe_dump({**named, "names": ["RBC", "WBC", "Platelets"]})
        (folder / laboratory / "data.yaml").write_text(text)
    for number, laboratory in enumerate("abc"):
        write_classes(folder / f"types-{laboratory}", 3, first=50 * number)
    (folder / "tiny.yaml").write_text(yaml.safe_dump(MODEL))
    return folder


def settings(data, *, methods=("none", "reinhard"), kinds=("classify",), **changes):
    shared = {"weights": str(data / "tiny.yaml"), "image_size": SIDE, "batch": 2, "epochs": 1}
    tasks = {
        "detect": {
            "name": "cells",
            "kind": "detect",
            "train": str(data / "a" / "data.yaml"),
            "tests": {"lab b": str(data / "b" / "data.yaml")},
            **shared,
        },
        "classify": {
            "name": "types",
            "kind": "classify",
            "train": str(data / "types-a"),
            "tests": {"lab b": str(data / "types-b")},
            "backbone": SMALL,
            **{**shared, "weights": None, "image_size": 32},
        },
    }
    gan = {"filters": 4, "blocks": 1, "crop": 32, "steps": 2, "distill_steps": 2}
    return {
        "tasks": [tasks[kind] for kind in kinds],
        "methods": list(methods),
        "seeds": [0],
        "staingan": gan,
        "threads": 1,
        "device": "cpu",
        **changes,
    }


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """A benchmark of all methods that nothing happens to."""
    out = tmp_path_factory.mktemp("whole")
    chosen = settings(data, methods=METHODS)
    return run_benchmark(chosen, out, workers=0, paper=True)


# --- all methods ----------------------------------------------------------------------------------


def test_every_method_fills_every_column(whole):
    assert whole.failures == {}
    assert whole.count("done") == len(METHODS)
    assert [row.method for row in whole.table.rows] == list(METHODS)
    for row in whole.table.rows:
        assert all(len(cell.values) == 1 for cell in row.cells), row.method
        assert row.apu["classify"].mean is not None
    assert whole.table.notes() == []
    assert not (whole.out / "work").exists(), "normalizers are gone"
    assert not list(whole.out.glob("**/state.pt"))


def test_the_files_say_the_same_as_the_result(whole):
    assert (whole.out / "table.md").read_text() == whole.table.markdown()
    assert (whole.out / "table.tex").read_text().count(r"\\") == 3 + len(METHODS)
    with (whole.out / "table.csv").open(newline="") as file:
        assert [row["method"] for row in csv.DictReader(file)] == list(METHODS)
    assert not (whole.out / "failures.csv").exists()
    again = yaml.safe_load((whole.out / "benchmark.yaml").read_text())
    assert again["methods"] == list(METHODS)


def test_networks_that_are_the_same_are_trained_once(whole):
    runs = sorted(path.name for path in (whole.out / "runs").iterdir())
    recipes = {method.recipe for method in METHODS.values()}
    assert len(runs) == len(recipes) < len(METHODS)
    records = {r["method"]: r for r in whole.records}
    assert "train" in records["none"]["seconds"]
    assert "train" not in records["batch-statistics"]["seconds"]
    assert "train" not in records["staingan"]["seconds"]
    assert records["staingan"]["staingan"]["steps"] == 2


def test_the_network_sees_what_the_method_makes_of_an_image(whole):
    def seen(method, number):
        return read_pixels(whole.out / "pictures" / f"types-{method}-seed0-{number}.png").astype(
            int
        )

    plain = seen("none", 1)
    assert np.array_equal(plain, seen("stain-jitter", 1)), "jitter is for training alone"
    assert np.array_equal(plain, seen("batch-statistics", 1))
    assert not np.array_equal(seen("beerlanet", 1), seen("beerlanet-jitter", 1)), "trained apart"
    for method in ("reinhard", "macenko", "vahadane", "staingan", "beerlanet", "grey"):
        assert np.abs(plain - seen(method, 1)).max() > 2, method
    grey = seen("grey", 1)
    assert np.ptp(grey, axis=2).max() == 0
    assert np.array_equal(seen("none", 0), seen("staingan", 0)), "not the training laboratory"


def test_the_page_shows_all_and_loads_nothing(whole):
    page = whole.page.read_text(encoding="utf-8")
    for method in METHODS.values():
        assert method.title in page
    assert page.count("<img ") == 2 * len(METHODS), "each method on each laboratory"
    assert page.count("<polyline") == len(METHODS)
    for text in (
        "The paper's table",
        "Recall on lab b",
        "48.66",
        "16.27",
        "torch",
        "4 filters, 1 blocks",
    ):
        assert text in page, text
    record = whole.records[0]
    assert record["data"]["training"] in page
    templates = {r["method"]: r["template"] for r in whole.records if r["template"]}
    assert set(templates) == {"reinhard", "macenko", "vahadane"}
    assert templates["reinhard"]["sha256"] in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "<script" not in page


def test_a_second_run_trains_nothing(whole, data):
    chosen = settings(data, methods=METHODS)
    before = {path: path.stat().st_mtime_ns for path in whole.out.glob("records/*.json")}
    again = run_benchmark(chosen, whole.out, workers=0)
    assert again.count("skipped") == len(before) == len(METHODS)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert again.table.csv() == whole.table.csv()
    left = estimate_benchmark(chosen, whole.out)
    assert left.seconds == 0
    assert left.sentence() == f"All {len(METHODS)} jobs are done."


def test_another_laboratory_is_measured_with_the_networks_that_are_there(whole, data, tmp_path):
    out = tmp_path / "more"
    shutil.copytree(whole.out, out)
    chosen = settings(data, methods=("none",))
    chosen["tasks"][0]["tests"] |= {"lab c": str(data / "types-c")}
    done = run_benchmark(chosen, out, workers=0)
    assert done.count("done") == 1
    assert "train" not in done.records[0]["seconds"]
    before = next(r for r in whole.records if r["method"] == "none")
    assert done.records[0]["results"]["lab b"] == before["results"]["lab b"]
    assert set(done.records[0]["results"]) == {"lab b", "lab c"}


# --- killed, stopped, on a cluster ----------------------------------------------------------------

FEW = ("none", "macenko", "batch-statistics")


@pytest.fixture(scope="module")
def few(data, tmp_path_factory):
    """Three methods of detection that nothing happens to."""
    out = tmp_path_factory.mktemp("few")
    return run_benchmark(few_settings(data), out, workers=0)


def few_settings(data):
    chosen = settings(data, methods=FEW, kinds=("detect",))
    chosen["tasks"][0]["epochs"] = 2
    return chosen


def test_detectors_are_measured_by_their_boxes(few):
    assert few.failures == {}
    assert [c.metric for c in few.table.columns] == ["mAP50", "mAP50-95"]
    record = few.records[0]
    assert record["images"] == {"training": 3, "lab b": 2}
    assert [epoch for epoch, _ in record["curve"]] == [1, 2]
    assert set(record["results"]["lab b"]["per_class"]) == {"RBC", "WBC", "Platelets"}
    assert "AP50 on lab b" in few.page.read_text(encoding="utf-8")


def test_what_a_killed_run_was_writing_goes_with_the_next(data, few, tmp_path):
    out = Path(shutil.copytree(few.out, tmp_path / "out"))
    left = [
        out / ".0.partial.csv",
        out / "records/.1.partial.json",
        out / "pictures/.2.partial.png",
    ]
    for file in left:
        file.write_bytes(b"half")
    done = run_benchmark(few_settings(data), out, workers=0)
    assert done.table.csv() == few.table.csv()
    assert [file.name for file in left if file.exists()] == []


def settings_file(data, folder):
    file = folder / "benchmark.yaml"
    file.write_text(yaml.safe_dump(few_settings(data)))
    return file


# Runs the benchmark of its arguments in a child for every line that it reads: a fork has imported
# all that takes long.
FORKS = """
import os, sys
from napari_beerlanet.core.benchmark.benchmark import run_benchmark
from napari_beerlanet.core.evaluation import batch_statistics, dataset
from napari_beerlanet.core.normalization import classical
from napari_beerlanet.core.training.trainer import trainer

for line in sys.stdin:
    child = os.fork()
    if not child:
        run_benchmark(*sys.argv[1:], workers=0)
        os._exit(0)
    print(child, flush=True)
    sys.stdin.readline()  # not before it was killed, or its number may be another's
    os.waitpid(child, 0)
    print("ended", flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
def test_killed_at_five_random_moments_and_resumed_the_table_is_the_same(data, few, tmp_path):
    file, out, moments = settings_file(data, tmp_path), tmp_path / "out", random.Random(0)
    words = [sys.executable, "-m", "napari_beerlanet", "benchmark", str(file), "--out", str(out)]
    run = subprocess.Popen(
        [*words, "--no-estimate", "--quiet"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    _wait_for_progress(out, {})
    time.sleep(moments.uniform(0, 1))
    assert run.poll() is None, run.communicate()
    run.kill()
    run.communicate()
    with subprocess.Popen(
        [sys.executable, "-c", FORKS, str(file), str(out)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as forks:  # fmt: skip
        for _ in range(4):
            before = _traces(out)
            forks.stdin.write("again\n")
            forks.stdin.flush()
            child = int(forks.stdout.readline())
            _wait_for_progress(out, before)
            time.sleep(moments.uniform(0, 0.3))
            os.kill(child, signal.SIGKILL)
            forks.stdin.write("killed\n")
            forks.stdin.flush()
            assert forks.stdout.readline() == "ended\n"
            done = sorted(out.glob("records/[!.]*.json"), key=lambda path: path.stat().st_mtime_ns)
            if len(done) == len(FEW):  # so that the next kill meets work
                done[-1].unlink()
    done = run_benchmark(file, out, workers=0)
    assert done.failures == {}
    assert done.table.csv() == few.table.csv()
    assert not list(out.glob("**/*.partial*"))


def _wait_for_progress(out, before):
    limit = time.monotonic() + 120
    while _traces(out) == before:
        assert time.monotonic() < limit, "nothing happens"
        time.sleep(0.01)


def _traces(out):
    """What a benchmark has begun or done so far: when each of its files was written."""
    kinds = ("work/*/*", "runs/*/state.pt", "records/[!.]*.json")
    found = {}
    # `Path.glob` would fail where a folder is removed meanwhile.
    for name in (name for kind in kinds for name in glob.glob(kind, root_dir=out)):
        with suppress(FileNotFoundError):
            found[name] = (out / name).stat().st_mtime_ns
    return found


@pytest.mark.slow
def test_on_a_cluster_of_two_with_one_killed_the_table_is_the_same(data, few, tmp_path):
    distributed = pytest.importorskip("distributed")
    file = settings_file(data, tmp_path)
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=":0", silence_logs=50
    ) as cluster:
        killed = []

        def kill_one(entry):
            if not killed:
                killed.append(next(iter(cluster.workers.values())).pid)
                os.kill(killed[0], signal.SIGTERM if sys.platform == "win32" else signal.SIGKILL)

        done = run_benchmark(file, tmp_path / "out", scheduler=cluster, ended=kill_one)
    assert killed
    assert done.failures == {}
    assert done.table.csv() == few.table.csv()


def test_stopped_within_a_training_it_resumes_there(data, tmp_path):
    heard = []

    def stop_in_training(progress):
        heard.append(progress)
        if "epoch" in progress.message:
            raise Cancelled("enough")

    chosen = settings(data, methods=("none",))
    with pytest.raises(Cancelled):
        run_benchmark(chosen, tmp_path, workers=0, report=stop_in_training)
    assert isinstance(heard[-1], BenchmarkProgress)
    assert 0 < heard[-1].fraction < 1
    (run,) = (tmp_path / "runs").iterdir()
    assert json.loads((run / "run.json").read_text())["state"] == "cancelled"
    assert "–" in (tmp_path / "table.md").read_text(), "the table as it stands"
    done = run_benchmark(chosen, tmp_path, workers=0)
    assert done.count("done") == 1
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [run.name]


@pytest.mark.parametrize("kind", ["detect", "classify"])
def test_a_results_folder_that_was_moved_in_mid_training_resumes(data, tmp_path, kind):
    """The normalizer is in it, too."""

    def stop_in_training(progress):
        if "epoch 2" in progress.message:
            raise Cancelled("enough")

    chosen = settings(data, methods=("reinhard",), kinds=(kind,))
    chosen["tasks"][0]["epochs"] = 2
    with pytest.raises(Cancelled):
        run_benchmark(chosen, tmp_path / "here", workers=0, report=stop_in_training)
    (tmp_path / "here").rename(tmp_path / "there")
    done = run_benchmark(chosen, tmp_path / "there", workers=0)
    assert done.failures == {}
    assert done.count("done") == 1
    assert [epoch for epoch, _ in done.records[0]["curve"]] == [1, 2]
    assert not (tmp_path / "here").exists()


def test_a_full_disk_ends_it_in_one_sentence_and_keeps_what_is_finished(
    data, tmp_path, monkeypatch
):
    real, records = storage._flush_to_disk, []

    def full_after_one_record(path):
        if records and "partial" in path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        real(path)

    def count(entry):
        records.append(entry.job.name)

    monkeypatch.setattr(storage, "_flush_to_disk", full_after_one_record)
    chosen = settings(data, methods=("none", "grey", "reinhard"))
    done = run_benchmark(chosen, tmp_path, workers=0, ended=count)
    assert done.stopped == f"no space left on device in {tmp_path}; stopped with 1 more to do."
    assert (done.count("done"), done.count("waiting")) == (1, 1)
    assert len(list((tmp_path / "records").glob("[!.]*.json"))) == 1
    monkeypatch.undo()
    again = run_benchmark(chosen, tmp_path, workers=0)
    assert (again.count("skipped"), again.count("done")) == (1, 2)
    assert again.failures == {}


# --- mistakes -------------------------------------------------------------------------------------


def test_test_classes_that_differ_are_refused_before_anything_is_trained(data, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(data / "b", other)
    text = (other / "data.yaml").read_text().replace("WBC", "leukocyte")
    (other / "data.yaml").write_text(text)
    chosen = settings(data, kinds=("detect",))
    chosen["tasks"][0]["tests"]["lab d"] = str(other / "data.yaml")
    with pytest.raises(FileError, match="leukocyte") as told:
        run_benchmark(chosen, tmp_path / "out", workers=0)
    assert str(told.value) == (
        "Task 'cells', test set 'lab d': the training data does not have the class leukocyte; it "
        "knows RBC, WBC, Platelets: name them alike in the data."
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"template": "gone.png"}, "gone.png: the template is no file that is there."),
        ({"seeds": []}, "seeds is empty: give at least one, for instance [0, 1, 2]."),
        ({"staingan": {"layers": 3}}, "There is no setting 'layers'"),
        ({"train": "gone/data.yaml"}, "Task 'cells': "),
        ({"weights": "gone.pt"}, "gone.pt: there is no such file of weights."),
        ({"tests": {"x": "gone/data.yaml"}}, "Task 'cells', test set 'x': "),
    ],
)
def test_mistakes_are_one_sentence_before_anything_is_trained(data, tmp_path, change, sentence):
    chosen = settings(data, methods=("none", "staingan"), kinds=("detect",))
    for key, value in change.items():
        (chosen["tasks"][0] if key in ("train", "weights", "tests") else chosen)[key] = value
    with pytest.raises(ValueError, match=r"\w") as told:
        run_benchmark(chosen, tmp_path / "out", workers=0)
    assert sentence in str(told.value)
    assert "\n" not in str(told.value)
    assert not (tmp_path / "out").exists()


def test_a_template_of_background_fails_its_jobs_and_no_others(data, tmp_path):
    blank = tmp_path / "blank.png"
    Image.fromarray(np.full((64, 64, 3), 240, np.uint8)).save(blank)
    done = run_benchmark(settings(data, template=str(blank)), tmp_path / "out", workers=0)
    assert (done.count("done"), done.count("failed")) == (1, 1)
    (error,) = done.failures.values()
    assert error.startswith("blank.png cannot be a template: ")
    assert error.endswith("; choose another template.")
    with (done.out / "failures.csv").open(newline="") as file:
        assert [row["job"] for row in csv.DictReader(file)] == ["types, Reinhard, seed 0"]
    assert error.split(":")[0] in done.page.read_text(encoding="utf-8")


def test_a_random_template_of_background_is_passed_over_and_noted(data, tmp_path):
    place = tmp_path / "a"
    shutil.copytree(data / "types-a", place)
    images = sorted(place.glob("*/*.png"))
    for number, image in enumerate(images[:-1]):
        Image.fromarray(np.full((30, 30, 3), 240 - number, np.uint8)).save(image)
    chosen = settings(data, methods=("reinhard",))
    chosen["tasks"][0]["train"] = str(place)
    done = run_benchmark(chosen, tmp_path / "out", workers=0)
    assert done.failures == {}
    assert done.records[0]["template"]["file"] == images[-1].name
    notes = " ".join(done.notes)
    assert "Reinhard, training: The image is unchanged: it has one colour only (" in notes
    assert "cannot be a template" in notes


# --- how long -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_estimate_times_a_step_of_each_training(data, tmp_path):
    heard = []
    chosen = settings(data, methods=("none", "reinhard", "batch-statistics"), seeds=[0, 1])
    found = estimate_benchmark(chosen, tmp_path, workers=2, report=heard.append)
    assert len(found.jobs) == 6
    assert found.jobs["types-batch-statistics-seed0"] == 0, "its network is that of another"
    assert found.jobs["types-none-seed0"] == found.jobs["types-none-seed1"] > 0
    assert found.wall_seconds == pytest.approx(found.seconds / 2)
    assert "6 jobs to do: about" in found.sentence()
    chosen = settings(data, kinds=("detect",))
    chosen["tasks"][0]["options"] = {"mosaic": 0.0}
    assert estimate_benchmark(chosen, tmp_path).seconds > 0
    assert not list(tmp_path.iterdir()), "nothing is left"


def test_the_remaining_time_goes_by_what_jobs_take():
    far = BenchmarkProgress(2, 4, "", 0.5, 1, finished_work=0.6, skipped_work=0.2)
    assert far.fraction == 0.6
    assert far.eta(30.0) == pytest.approx(30.0), "half of what was to do is done"
    assert far.eta(0.1) is None


def test_it_is_public():
    assert nb.run_benchmark is run_benchmark
    assert Path(job_module.__file__).name == "job.py"


def test_what_alpha_hides_is_padding_as_in_training(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 4), np.uint8)
    pixels[:, :12, 3] = 0
    Image.fromarray(pixels).save(tmp_path / "image.png")
    assert np.array_equal(
        read_pixels(tmp_path / "image.png"), read_bgr(tmp_path / "image.png")[..., ::-1]
    )
