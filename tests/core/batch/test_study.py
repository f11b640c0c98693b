"""Studies of many images: complete, equal, resumable, whatever dies or is unreadable."""

import errno
import json
import os
import signal
import sys

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from discs import disc_detector, draw, scattered, trained
from napari_beerlanet.core.batch import image, manifest
from napari_beerlanet.core.batch.manifest import Records
from napari_beerlanet.core.batch.settings import DETECT_PRESET, StudySettings
from napari_beerlanet.core.batch.study import run_study
from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.checkpoints.checkpoint import checkpoint_hash
from napari_beerlanet.core.common.progress import Cancelled
from napari_beerlanet.core.common.storage import FileError, file_hash
from napari_beerlanet.core.common.workers import process_pool_runner
from napari_beerlanet.core.detection.slide_detector import SlideDetection
from napari_beerlanet.core.images.files import read_image
from napari_beerlanet.core.stains.decompose import decompose
from napari_beerlanet.samples import blood_smear, he_field

QUICK = {"iterations": 3, "previews": False, "leave_out": ()}


@pytest.fixture(scope="module")
def fields():
    return [he_field((150, 200), seed=seed).image for seed in range(5)]


@pytest.fixture
def images(fields, tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    for k, field in enumerate(fields):
        Image.fromarray(field).save(folder / f"field{k}.png")
    return folder


def results(out):
    """Everything in a folder that must be the same, by name."""
    spectra = {}
    for path in sorted(out.glob("*.spectra.json")):
        content = json.loads(path.read_text())
        spectra[path.name] = (content["components"], content["background"])
    return spectra, sorted(p.name for p in out.iterdir() if p.is_file())


def test_all_images_are_done_and_in_one_table(images, tmp_path):
    done = run_study(images, tmp_path / "out", QUICK, workers=0)
    assert (done.count("done"), done.count("failed")) == (5, 0)
    table = pd.read_csv(tmp_path / "out" / "summary.csv")
    assert table["image"].tolist() == [f"field{k}" for k in range(5)]
    assert (table["stains"] > 0).all()
    content = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert content["counts"] == {"done": 5, "skipped": 0, "failed": 0, "waiting": 0}
    for entry in content["images"]:
        for name, facts in entry["outputs"].items():
            assert file_hash(tmp_path / "out" / name) == facts["sha256"]
        assert entry["source_sha256"] == file_hash(images / f"{entry['name']}.png")
    assert not (tmp_path / "out" / ".work").exists()
    assert not (tmp_path / "out" / "failures.csv").exists()


def test_parquet_where_it_can_be_written(images, tmp_path):
    pytest.importorskip("pyarrow")
    run_study(images, tmp_path / "out", QUICK, workers=0)
    a, b = (tmp_path / "out" / f"summary.{kind}" for kind in ("csv", "parquet"))
    np.testing.assert_allclose(pd.read_csv(a)["light_r"], pd.read_parquet(b)["light_r"])


def test_what_is_done_is_skipped(images, tmp_path):
    out = tmp_path / "out"
    run_study(images, out, QUICK, workers=0)
    again = run_study(images, out, QUICK, workers=0)
    assert again.count("skipped") == 5
    assert len(again.rows) == 5, "the table is of all images"
    (out / "field1.spectra.json").unlink()
    Image.fromarray(read_image(images / "field2.png").pixels[::-1]).save(images / "field2.png")
    third = run_study(images, out, QUICK, workers=0)
    assert [e.job.name for e in third.entries if e.status == "done"] == ["field1", "field2"]
    assert run_study(images, out, {**QUICK, "iterations": 4}, workers=0).count("done") == 5
    again = run_study(images, out, {**QUICK, "iterations": 4}, workers=0, overwrite=True)
    assert again.count("done") == 5


def test_objects_are_found_and_measured(tmp_path):
    smear = blood_smear((300, 400), seed=1)
    Image.fromarray(smear.image).save(tmp_path / "smear.png")
    settings = {"model": "blood-cells", "iterations": 3, "pixel_size": smear.pixel_size}
    done = run_study(tmp_path / "smear.png", tmp_path / "out", settings, workers=0)
    (row,) = done.rows
    assert row["objects"] == sum(row[f"count {n}"] for n in ("RBC", "WBC", "Platelets"))
    assert row["objects"] > 5
    assert row["mm2"] == pytest.approx(300 * 400 * smear.pixel_size**2 / 1e6)
    table = pd.read_csv(tmp_path / "out" / "smear.detections.csv")
    assert len(table) == row["objects"]
    assert "Model channel 1 mean" in table
    for ending in ("detections.geojson", "overlay.png", "preview.png", "spectra.json"):
        assert (tmp_path / "out" / f"smear.{ending}").is_file()
    report = (tmp_path / "out" / "smear.report.html").read_text()
    assert f"{row['objects']:,}" in report
    assert file_hash(tmp_path / "smear.png") in report
    assert row["warnings"] == ""
    assert row["per mm2 RBC"] == pytest.approx(row["count RBC"] / row["tissue_mm2"])


def test_an_image_out_of_domain_is_reported(tmp_path):
    Image.fromarray(255 - blood_smear((200, 260), seed=1).image).save(tmp_path / "inverted.png")
    settings = {"model": "blood-cells", "iterations": 3, "previews": False, "decompose": False}
    done = run_study(tmp_path / "inverted.png", tmp_path / "out", settings, workers=0)
    (row,) = done.rows
    assert "background" in row["warnings"]
    report = (tmp_path / "out" / "inverted.report.html").read_text()
    assert row["warnings"].split(".")[0] in report.replace("&#39;", "'")


def test_only_what_is_asked_for(tmp_path):
    smear = blood_smear((200, 260), seed=1)
    Image.fromarray(smear.image).save(tmp_path / "smear.png")
    settings = {"model": "blood-cells", "decompose": False, "densities": False, "reports": False}
    done = run_study(tmp_path / "smear.png", tmp_path / "out", settings, workers=0)
    (row,) = done.rows
    assert row["objects"] > 3
    assert "stains" not in row
    assert "Model channel 1 mean" not in pd.read_csv(tmp_path / "out" / "smear.detections.csv")
    assert sorted(p.name for p in (tmp_path / "out").glob("smear*")) == [
        "smear.detections.csv",
        "smear.detections.geojson",
        "smear.overlay.png",
    ]
    with pytest.raises(ValueError, match="nothing to do"):
        run_study(tmp_path / "smear.png", tmp_path / "out", {"decompose": False}, workers=0)


def test_a_report_on_a_slide_is_as_on_an_image(tmp_path):
    """Boxes in the picture and in the crops are in their places, whatever the slide's size."""
    from napari_beerlanet.core.report import report
    from napari_beerlanet.core.stains.slide_pixels import SlidePixels

    image = np.full((1200, 5000, 3), 230, np.uint8)
    image[600:640, 4000:4050] = (90, 20, 120)
    found = Detections(
        np.array([[4000, 600, 4050, 640]], np.float32),
        np.array([0]),
        np.array([0.9], np.float32),
        ["cell"],
        image_shape=image.shape[:2],
    )
    small = image[::4, ::4]
    lazy = report.ReportSubject("a", SlidePixels([image]), found, picture=small, hashes={"x": "y"})
    plain = report.ReportSubject("a", image, found, hashes={"x": "y"}, date=lazy.date)
    one, other = report.render_report(lazy), report.render_report(plain)
    assert one.split("gallery")[-1] == other.split("gallery")[-1], "the same crops"
    assert "5,000 × 1,200 pixels" in one


def test_stains_that_are_counted_first(tmp_path, fields):
    """As many components as the image needs, on which typed penalties act, as in the viewer."""
    Image.fromarray(fields[0]).save(tmp_path / "a.png")
    settings = {**QUICK, "iterations": "converge", "components": "auto", "lam": 0.5, "gamma": 0.01}
    run_study(tmp_path / "a.png", tmp_path / "out", settings, workers=0)
    got = json.loads((tmp_path / "out" / "a.spectra.json").read_text())
    counted = decompose(fields[0], iterations="converge")
    more = {"spectra": counted.spectra, "components": counted.spectra.shape[1]}
    wanted = decompose(fields[0], iterations="converge", lam=0.5, gamma=0.01, **more)
    absorbs = np.array([c["spectrum"] for c in got["components"]]).T
    np.testing.assert_allclose(absorbs, wanted.spectra, atol=1e-6)


# --- what goes wrong -----------------------------------------------------------------------------


def test_failures_are_listed_and_not_fatal(images, tmp_path):
    (images / "broken.svs").write_bytes(b"II*\0 no slide")
    (images / "empty.png").touch()
    given = [images, tmp_path / "nowhere.tif"]
    done = run_study(given, tmp_path / "out", QUICK, workers=0)
    assert (done.count("done"), done.count("failed")) == (5, 3)
    table = pd.read_csv(tmp_path / "out" / "failures.csv")
    assert [os.path.basename(p) for p in table["path"]] == [
        "broken.svs",
        "empty.png",
        "nowhere.tif",
    ]
    assert table["error"].str.endswith(".").all()
    assert "no such file" in done.failures[str(tmp_path / "nowhere.tif")]
    (images / "empty.png").unlink()
    (images / "broken.svs").unlink()
    assert run_study(images, tmp_path / "out", QUICK, workers=0).count("failed") == 0
    assert not (tmp_path / "out" / "failures.csv").exists()


def test_a_slide_that_vanishes(images, tmp_path, monkeypatch):
    from napari_beerlanet.core.stains import slide

    solve = slide.fit_slide

    def slow(*given, **settings):
        found = solve(*given, **settings)
        (images / "field3.png").unlink(missing_ok=True)
        return found

    monkeypatch.setattr(slide, "fit_slide", slow)
    done = run_study(sorted(images.iterdir())[3:], tmp_path / "out", QUICK, workers=0)
    assert [e.status for e in done.entries] == ["failed", "done"]
    assert "vanished" in done.entries[0].error
    assert not (tmp_path / "out" / "field3.spectra.json").exists()


def test_a_full_disk_stops_the_study(images, tmp_path, monkeypatch):
    write = manifest.Records.write

    def full(self, name, *rest):
        if name == "field2":
            raise OSError(errno.ENOSPC, "No space left on device", str(self.out))
        return write(self, name, *rest)

    monkeypatch.setattr(manifest.Records, "write", full)
    done = run_study(images, tmp_path / "out", QUICK, workers=0)
    assert [e.status for e in done.entries] == ["done", "done", "failed", "waiting", "waiting"]
    assert "no space left" in done.stopped
    assert "2 more to do" in done.stopped
    monkeypatch.undo()
    again = run_study(images, tmp_path / "out", QUICK, workers=0)
    assert (again.count("skipped"), again.count("done")) == (2, 3)


def test_cancelling_keeps_what_is_done(images, tmp_path):
    def stop(progress):
        if progress.done == 2:
            raise Cancelled

    with pytest.raises(Cancelled):
        run_study(images, tmp_path / "out", QUICK, workers=0, report=stop)
    content = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert content["counts"]["done"] == 2
    assert run_study(images, tmp_path / "out", QUICK, workers=0).count("skipped") == 2


def test_results_of_other_settings_are_not_skipped_in_a_folder_of_files(tmp_path):
    Image.fromarray(blood_smear((150, 200), seed=1).image).save(tmp_path / "smear.png")
    settings = {"model": "blood-cells", "components": 3, "reports": False, **QUICK}
    done = run_study(tmp_path / "smear.png", tmp_path / "out", settings, workers=0, layout="files")
    (job,) = (entry.job for entry in done.entries)
    chosen = StudySettings(**settings, model_sha256=checkpoint_hash("blood-cells"))

    def is_done(**other):
        _, record = Records("files", tmp_path / "out", chosen.replace(**other)).find(job)
        return record is not None

    assert is_done()
    assert is_done(device="cpu", batch=4, openvino="off"), "no result depends on these"
    assert is_done(formats=("csv",)), "the other file may stay"
    for other in (
        *({"components": 5}, {"gamma": 0.1}, {"unit_spectra": False}, {"decompose": False}),
        *({"densities": False}, {"skip_glass": False}, {"confidence": 0.5}, {"tile": 640}),
        {"formats": ("csv", "coco")},
    ):
        assert not is_done(**other), other


@pytest.mark.parametrize("batch", [1, 2])
def test_the_tiles_of_an_image_that_was_stopped_are_not_searched_again(
    tmp_path, monkeypatch, batch
):
    Image.fromarray(blood_smear((300, 400), seed=1).image).save(tmp_path / "smear.png")
    settings = {"model": "blood-cells", "decompose": False, "previews": False, "tile": 128}
    settings |= {"object_size": 40, "batch": batch}
    given = (tmp_path / "smear.png", tmp_path / "out", settings)
    told, resumed, steps = [], [], SlideDetection.detect_tiles

    def stop(progress):
        told.append("finding cells" in progress.message)
        if sum(told) == 5:
            raise Cancelled

    def noted(self, *words, **more):
        resumed.append(self.resumed)
        return steps(self, *words, **more)

    monkeypatch.setattr(SlideDetection, "detect_tiles", noted)
    with pytest.raises(Cancelled):
        run_study(*given, workers=0, report=stop)
    assert run_study(*given, workers=0).count("done") == 1
    assert resumed == [0, 4 * batch]


def test_what_a_killed_worker_was_writing_is_gone_when_the_study_ends(images, tmp_path):
    out = tmp_path / "out"

    def leave(entry):
        """What a kill within `atomic_path` leaves, of a file and of a folder."""
        (out / ".0123456789abcdef.partial.csv").write_text("half of a ta")
        (out / ".0123456789abcdef.partial.zarr").mkdir(exist_ok=True)
        (out / "records" / ".0123456789abcdef.partial.json").write_text("{")

    done = run_study(images, out, QUICK, workers=0, ended=leave)
    assert done.count("done") == 5
    assert not [path for path in out.rglob("*") if ".partial" in path.name]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"iteration": 3}, "There is no setting 'iteration'"),
        ({"formats": ["xls"]}, "formats must be one of"),
    ],
)
def test_wrong_settings(images, tmp_path, given, said):
    with pytest.raises(ValueError, match=said):
        run_study(images, tmp_path / "out", given, workers=0)


def test_a_model_that_is_not_there_or_has_changed(images, tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        run_study(images, tmp_path / "out", {"model": str(tmp_path / "m.safetensors")})
    settings = StudySettings(model="blood-cells", model_sha256="other", iterations=2)
    task = {"source": str(images / "field0.png"), "name": "a", "out": str(tmp_path / "out")}
    task["layout"] = "study"
    task["settings"] = settings.as_dict()
    assert "not the model" in image.process_image(task)["error"]


# --- processes -----------------------------------------------------------------------------------


def test_a_task_that_goes_wrong_here_does_not_end_the_others(images, tmp_path):
    """One worker alone: the rest would wait without a reason."""
    shared = {"work": "napari_beerlanet.core.batch.image:process_image", "out": str(tmp_path)}
    shared |= {"layout": "files", "settings": StudySettings(**QUICK).as_dict()}
    tasks = [
        (k, {"source": str(path), "title": path.name, "name": path.stem, **shared})
        for k, path in enumerate(sorted(images.iterdir())[:2])
    ]
    tasks[0][1]["settings"] = object()  # which cannot be sent
    outcomes = {k: done for k, done in process_pool_runner(1)(tasks) if k >= 0}
    assert outcomes[0]["status"] == "failed"
    assert "field0.png" in outcomes[0]["error"]
    assert outcomes[1]["status"] == "done"


KILLER = """
import os, signal, sys, threading, time
def watch():
    while "napari_beerlanet.core.stains.slide" not in sys.modules:
        time.sleep(0.001)
    for k in range({times}):
        try:
            os.close(os.open({mark!r} + str(k), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[:1] == ["-m"]:
    threading.Thread(target=watch, daemon=True).start()
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
@pytest.mark.parametrize("times", [1, 3])
def test_a_process_that_is_killed_is_replaced(images, tmp_path, monkeypatch, times):
    """Killed once, its image goes on; killed with every try, that image is a failure."""
    right = run_study(images, tmp_path / "right", QUICK, workers=0)
    code = KILLER.format(mark=str(tmp_path / "killed"), times=times)
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    chosen = sorted(images.iterdir())[: 3 if times == 1 else 1]
    done = run_study(chosen, tmp_path / "out", QUICK, workers=1)
    assert len(list(tmp_path.glob("killed*"))) == times
    if times == 1:
        assert done.count("done") == 3
        assert done.rows == right.rows[:3]
    else:
        assert "died 3 times" in done.entries[0].error


@pytest.mark.slow
def test_processes_give_the_same_and_can_be_stopped(images, tmp_path):
    run_study(images, tmp_path / "right", QUICK, workers=0)
    run_study(images, tmp_path / "out", QUICK, workers=2)
    assert results(tmp_path / "out") == results(tmp_path / "right")

    def stop(progress):
        raise Cancelled

    with pytest.raises(Cancelled):
        run_study(images, tmp_path / "third", QUICK, workers=2, report=stop)
    again = run_study(images, tmp_path / "third", QUICK, workers=0)
    assert again.count("done") + again.count("skipped") == 5


# --- a cluster -----------------------------------------------------------------------------------


def test_a_scheduler_that_does_not_answer(images, tmp_path, monkeypatch):
    distributed = pytest.importorskip("distributed")

    def silent(address, timeout):
        raise OSError(f"Timed out trying to connect to {address}")

    monkeypatch.setattr(distributed, "Client", silent)
    with pytest.raises(FileError, match="No dask scheduler answers at tcp://nowhere"):
        run_study(images, tmp_path / "out", QUICK, scheduler="tcp://nowhere:1")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_cluster_whose_worker_is_killed(images, tmp_path):
    distributed = pytest.importorskip("distributed")
    run_study(images, tmp_path / "right", QUICK, workers=0)
    killed = []
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0", silence_logs=50
    ) as cluster:
        with distributed.Client(cluster) as client:
            pids = list(client.run(os.getpid).values())

        def kill_one(entry):
            if not killed:
                os.kill(pids[0], signal.SIGKILL)
                killed.append(entry)

        done = run_study(
            images, tmp_path / "out", QUICK, scheduler=cluster.scheduler_address, ended=kill_one
        )
    assert killed
    assert done.count("done") + done.count("skipped") == 5
    assert results(tmp_path / "out") == results(tmp_path / "right")


def test_one_model_per_process(monkeypatch):
    from napari_beerlanet.core.checkpoints import checkpoint

    loaded = []
    for kind in ("detector", "classifier"):

        def load(*given, kind=kind):
            loaded.append((kind, *given))

        monkeypatch.setattr(checkpoint, f"load_{kind}", load)
    monkeypatch.setattr(image, "_loaded_models", {})
    for _ in range(3):
        image._load_model("detector", "a", "", "cpu")
        image._load_model("classifier", "b", "", "cpu")
    assert loaded == [("detector", "a", "cpu"), ("classifier", "b", "cpu")]
    image._load_model("detector", "c", "", "cpu")
    image._load_model("detector", "a", "", "cpu")
    assert len(loaded) == 4, "one of each kind is kept"


def test_images_are_shown_as_others_of_their_study_whenever_they_are_done(tmp_path, monkeypatch):
    """The last one shows white cells alone, which may as well be red ones at half the size."""
    fields = [scattered((480, 640), 40.0, seed=k) for k in range(6)]
    fields[5] = [(200.0, 150.0, 75.0), (420.0, 300.0, 75.0), (150.0, 350.0, 75.0)]
    (tmp_path / "images").mkdir()
    for number, discs in enumerate(fields):
        Image.fromarray(draw((480, 640), discs)).save(tmp_path / "images" / f"{number}.png")
    monkeypatch.setattr(image, "_load_model", lambda *_: disc_detector(trained))
    settings = {**DETECT_PRESET, "model": "blood-cells", "previews": False}
    out = tmp_path / "out"
    whole = run_study(tmp_path / "images", out, settings, workers=0)
    assert not whole.failures
    sizes = [row["object_size"] for row in whole.rows]
    np.testing.assert_allclose(sizes, 40, rtol=0.15)
    assert [row["count WBC"] for row in whole.rows] == [0] * 5 + [3]
    for record in ("0", "5"):
        (out / "records" / f"{record}.json").unlink()
    monkeypatch.setattr(image, "_found_sizes", {})
    again = run_study(tmp_path / "images", out, settings, workers=0)
    assert (again.count("done"), again.count("skipped")) == (2, 4)
    assert again.rows == whole.rows
    alone = run_study(tmp_path / "images" / "5.png", out, settings, workers=0, overwrite=True)
    assert alone.rows[0]["count WBC"] == 0, "with nothing beside it, they are what is usual"
