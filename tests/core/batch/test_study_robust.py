"""A study whose machinery dies: workers, the scheduler, the run itself; full disks, lost slides."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import cloudpickle
import pandas as pd
import psutil
import pytest
from PIL import Image

from napari_beerlanet.cli.study import ConsoleOutput
from napari_beerlanet.core.batch import study
from napari_beerlanet.core.batch.study import StudyProgress, run_study
from napari_beerlanet.core.common import workers as common_workers
from napari_beerlanet.core.common.device import device_for_worker
from napari_beerlanet.core.common.jobs import LOCK_FILE, STOP_FILE
from napari_beerlanet.core.common.progress import Cancelled
from napari_beerlanet.core.common.storage import FileError
from napari_beerlanet.samples import he_field

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL"),
]

# Workers get functions of this module as they are: another package may be called `tests`, too.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

QUICK = {"iterations": 3, "previews": False, "leave_out": ()}
COUNT = 8


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for seed in range(COUNT):
        Image.fromarray(he_field((150, 200), seed=seed).image).save(folder / f"field{seed}.png")
    return folder


@pytest.fixture(scope="module")
def right(images, tmp_path_factory):
    """The table of a run that nothing happens to."""
    return run_study(images, tmp_path_factory.mktemp("right"), QUICK, workers=0).rows


def written(out):
    """The table that a run has left, as the rows of one that returned."""
    rows = [json.loads(path.read_text())["row"] for path in (out / "records").glob("[!.]*.json")]
    return sorted(rows, key=lambda row: row["image"])


def counts(out):
    return json.loads((out / "manifest.json").read_text())["counts"]


# --- a cluster of processes that are started as an institute starts them --------------------------


def ended(process):
    process.kill()
    process.wait(600)


@contextmanager
def scheduler_process(folder):
    """A `dask scheduler` on a port of its own; gives its address and its process."""
    pytest.importorskip("distributed")
    where = folder / "scheduler.json"
    where.unlink(missing_ok=True)
    words = ["scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard"]
    with open(folder / "scheduler.log", "wb") as log:
        process = dask(*words, "--scheduler-file", str(where), log=log)
    try:
        limit = time.monotonic() + 60
        while not where.exists() or not where.read_text().strip():
            assert process.poll() is None, (folder / "scheduler.log").read_text()
            assert time.monotonic() < limit
            time.sleep(0.05)
        yield json.loads(where.read_text())["address"], process
    finally:
        ended(process)


@contextmanager
def worker_processes(address, count=2, *more):
    words = ["worker", address, "--nthreads", "1", "--no-nanny", "--no-dashboard", *more]
    workers = [dask(*words) for _ in range(count)]
    try:
        yield workers
    finally:
        for worker in workers:
            ended(worker)


def dask(*words, log=subprocess.DEVNULL):
    return subprocess.Popen(
        [sys.executable, "-m", "dask", *words], stdout=log, stderr=log, cwd=os.getcwd()
    )


def test_a_worker_is_killed_and_its_image_goes_on(images, right, tmp_path):
    with (
        scheduler_process(tmp_path) as (address, _),
        worker_processes(address) as workers,
    ):
        killed = []

        def kill_one(entry):
            if not killed:
                os.kill(workers[0].pid, signal.SIGKILL)
                killed.append(entry)

        done = run_study(images, tmp_path / "out", QUICK, scheduler=address, ended=kill_one)
    assert killed
    assert workers[0].returncode == -signal.SIGKILL
    assert done.count("done") + done.count("skipped") == COUNT
    assert done.rows == right


def test_a_scheduler_is_killed_and_another_goes_on(images, right, tmp_path):
    out = tmp_path / "out"
    with (
        scheduler_process(tmp_path) as (address, scheduler),
        worker_processes(address, 1),
    ):

        def kill_it(entry):
            os.kill(scheduler.pid, signal.SIGKILL)

        first = run_study(images, out, QUICK, scheduler=address, ended=kill_it)
    assert f"scheduler at {address} is gone" in first.stopped
    assert 0 < first.count("done") < COUNT
    assert first.count("failed") == 0, "no image is to blame"
    left = counts(out)
    assert left["done"] == first.count("done")
    assert left["waiting"] == COUNT - left["done"]
    assert len(pd.read_csv(out / "summary.csv")) == left["done"]
    with (
        scheduler_process(tmp_path) as (address, _),
        worker_processes(address, 1),
    ):
        second = run_study(images, out, QUICK, scheduler=address)
    assert second.count("skipped") >= first.count("done")
    assert second.count("done") + second.count("skipped") == COUNT
    assert second.rows == right


def test_a_cluster_without_workers_is_waited_for_and_told(images, right, tmp_path, monkeypatch):
    distributed = pytest.importorskip("distributed")
    monkeypatch.setattr(common_workers, "_NO_WORKERS_S", 0.6)
    monkeypatch.setattr(common_workers, "_WORKERS_INTERVAL_S", 0.2)
    heard = []
    with distributed.LocalCluster(
        n_workers=0, processes=False, dashboard_address=":0", silence_logs=50
    ) as cluster:

        def stop_when_told(progress):
            if progress.notice:
                raise Cancelled("enough")

        with pytest.raises(Cancelled):
            run_study(images, tmp_path / "out", QUICK, scheduler=cluster, report=stop_when_told)

        def start_one_when_told(progress):
            if progress.notice and progress.notice not in heard:
                assert progress.message == progress.notice
                heard.append(progress.notice)
                cluster.scale(1)

        done = run_study(
            images, tmp_path / "out", QUICK, scheduler=cluster, report=start_one_when_told
        )
        address = cluster.scheduler_address
    assert f"no worker has been connected to the dask scheduler at {address} for " in heard[0]
    assert f"Start one (dask worker {address}), or stop the run" in heard[0]
    assert done.rows == right


def test_a_result_that_is_lost_with_its_worker_is_waited_for(images, tmp_path):
    """The scheduler takes a while to notice; meanwhile the run can be stopped."""

    class Client(_FakeClient):
        def submit(self, *given, **more):
            future = super().submit(*given, **more)
            answers = [TimeoutError(), TimeoutError(), {"status": "failed", "error": "y."}]

            def result(timeout):
                answer = answers.pop(0)
                if isinstance(answer, Exception):
                    raise answer
                return answer

            future.result = result
            return future

    done = run_study(images, tmp_path, QUICK, scheduler=Client([{}]))
    assert set(done.failures.values()) == {"y."}
    assert len(done.failures) == COUNT


@pytest.mark.parametrize("quiet", [True, False])
def test_what_a_run_waits_for_is_printed_once(capsys, quiet):
    output = ConsoleOutput(quiet)
    for notice in ("", "no worker.", "no worker.", "", "none again."):
        output.report(StudyProgress(0, 2, notice, notice=notice))
    printed = capsys.readouterr().err
    assert printed.count("napari-beerlanet: no worker.\n") == 1
    assert printed.count("napari-beerlanet: none again.\n") == 1


def test_a_cluster_and_what_goes_wrong_with_slides(images, tmp_path, monkeypatch):
    """Unreadable, vanished, and a full disk, by workers of a cluster object."""
    distributed = pytest.importorskip("distributed")
    folder = tmp_path / "images"
    shutil.copytree(images, folder)
    (folder / "broken.svs").write_bytes(b"II*\0 no slide")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=":0", silence_logs=50
    ) as cluster:
        last = min(folder.glob("*.png"), key=lambda path: path.stat().st_size)

        def vanish_then_go(*given):  # it was listed, and no worker has it yet
            last.unlink()
            go_through(*given)

        go_through = study._collect_outcomes
        with monkeypatch.context() as patched:
            patched.setattr(study, "_collect_outcomes", vanish_then_go)
            done = run_study(folder, tmp_path / "out", QUICK, scheduler=cluster)
        assert (done.count("done"), done.count("failed")) == (COUNT - 1, 2)
        assert {os.path.basename(path) for path in done.failures} == {"broken.svs", last.name}
        assert set(pd.read_csv(tmp_path / "out" / "failures.csv")["error"].str[-1]) == {"."}
        with distributed.Client(cluster) as client:
            client.run(_tell_often)
            far, slow = [], {"iterations": 300}
            Image.fromarray(he_field((800, 800)).image).save(tmp_path / "large.png")
            large = tmp_path / "large.png"
            run_study(large, tmp_path / "one", slow, scheduler=client, report=far.append)
            assert any(p.done == 0 and p.images_in_progress > 0 for p in far), (
                "within an image, too"
            )
            client.run(_fill_the_disk)
            full = run_study(images, tmp_path / "full", QUICK, scheduler=client)
            assert client.status == "running", "a client that was given stays open"
    assert "no space left" in full.stopped
    assert full.count("waiting") > 0
    again = run_study(images, tmp_path / "full", QUICK, workers=0)
    assert again.count("failed") == 0
    assert len(again.rows) == COUNT


def _tell_often():
    from napari_beerlanet.core.common import workers

    workers._REPORT_INTERVAL_S = 0.05


def _fill_the_disk():
    """Runs in a worker: whatever is flushed to the disk from now on does not fit."""
    import errno

    from napari_beerlanet.core.common import storage

    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    storage._flush_to_disk = full


class _FakeClient:
    """Says what workers it has, and notes what is submitted."""

    status = "running"
    scheduler = type("Scheduler", (), {"address": "tcp://here:1"})

    def __init__(self, resources):
        self.resources, self.asked, self.begun = resources, [], []

    def scheduler_info(self, n_workers=-1):
        return {"workers": {str(k): {"resources": r} for k, r in enumerate(self.resources)}}

    def submit(self, function, task, number, topic, **more):
        self.asked.append(more["resources"])
        self.begun.append(task["name"])
        result = {"status": "failed", "error": "x."}
        return type(
            "F",
            (),
            {"status": "finished", "result": lambda s, timeout: result, "release": lambda s: None},
        )()

    def cancel(self, futures):
        pass

    subscribe_topic = unsubscribe_topic = lambda self, *given: None


@pytest.mark.parametrize(
    ("resources", "model", "asked"),
    [
        ([{}, {"GPU": 1}], "blood-cells", {"GPU": 1}),
        ([{}, {"GPU": 1}], "", None),
        ([{}, {}], "blood-cells", None),
    ],
)
def test_workers_with_a_gpu_find_the_objects(images, tmp_path, resources, model, asked):
    client = _FakeClient(resources)
    run_study(images, tmp_path / "out", {**QUICK, "model": model}, scheduler=client)
    assert client.asked == [asked] * COUNT


def test_the_largest_are_begun_first(tmp_path):
    """Where several work side by side, the last to end is then a small one."""
    sizes = {"a": 40, "b": 160, "c": 80}
    for name, side in sizes.items():
        Image.fromarray(he_field((side, side)).image).save(tmp_path / f"{name}.png")
    client = _FakeClient([{}])
    done = run_study(tmp_path, tmp_path / "out", QUICK, scheduler=client)
    assert client.begun == ["b", "c", "a"]
    assert [e.job.name for e in done.entries] == ["a", "b", "c"]


def test_local_workers_share_the_gpus(monkeypatch):
    monkeypatch.setattr(
        "napari_beerlanet.core.common.device.available_devices", lambda: ["cuda:0", "cuda:1", "cpu"]
    )
    assert [device_for_worker("auto", k) for k in range(4)] == [
        "auto",
        "cuda:1",
        "cuda:0",
        "cuda:1",
    ]
    assert device_for_worker("cpu", 3) == "cpu"
    monkeypatch.setattr("napari_beerlanet.core.common.device.available_devices", lambda: ["cpu"])
    assert device_for_worker("auto", 3) == "auto"


def test_without_distributed_it_says_what_to_install(images, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(FileError, match=r"napari-beerlanet\[cluster\]"):
        run_study(images, tmp_path / "out", QUICK, scheduler="tcp://here:1")


# --- this machine ---------------------------------------------------------------------------------


def command(images, out, *more):
    words = [
        sys.executable,
        "-m",
        "napari_beerlanet.cli.main",
        "batch",
        str(images),
        "--out",
        str(out),
    ]
    words += ["--iterations", "3", "--no-previews", "--leave-out", "--workers", "2", *more]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(condition, process=None, seconds=120):
    limit = time.monotonic() + seconds
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_a_run_is_killed_with_its_workers_at_work_and_goes_on(images, right, tmp_path):
    out = tmp_path / "out"
    run = command(images, out)
    wait_for(lambda: list(out.glob("records/[!.]*.json")), run)
    crew = psutil.Process(run.pid).children()
    assert crew
    run.kill()
    run.communicate()
    (out / "records" / ".0123.partial.json").write_text("{")  # by a process that was killed
    _, alive = psutil.wait_procs(crew, timeout=600)
    assert not alive, "nobody is left to work for"
    again = run_study(images, out, QUICK, workers=0)
    assert again.count("skipped") > 0
    assert again.rows == right
    assert not list(out.glob("**/*.partial*"))


def test_a_file_ends_a_run_and_two_runs_do_not_mix(images, tmp_path):
    out = tmp_path / "out"
    run = command(images, out, "--json")
    wait_for(lambda: list(out.glob("records/[!.]*.json")), run)
    with pytest.raises(FileError, match=f"another run writes .* \\(process {run.pid},"):
        run_study(images, out, QUICK, workers=0)
    (out / STOP_FILE).touch()
    told, _ = run.communicate(timeout=600)
    events = [json.loads(line) for line in told.splitlines()]
    assert events[-1]["event"] in ("cancelled", "end")
    assert not (out / STOP_FILE).exists()
    assert not (out / LOCK_FILE).read_text()
    (out / STOP_FILE).touch()
    done = run_study(images, out, QUICK, workers=0)
    assert len(done.rows) == COUNT, "a file that was meant for the last run does not end this one"


def test_a_disk_that_is_really_full(images, right, tmp_path):
    out = tmp_path / "small"
    out.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(out)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small disk cannot be mounted here")
    try:
        done = run_study(images, out, QUICK, workers=1)
        assert "no space left" in done.stopped
        assert done.count("waiting") + done.count("failed") > 0
        assert written(out) == [row for row in right if row["image"] in names_in(out)]
        subprocess.run(["mount", "-o", "remount,size=16m", str(out)], check=True)
        again = run_study(images, out, QUICK, workers=1)
        assert again.count("failed") == 0
        assert again.rows == right
    finally:
        subprocess.run(["umount", str(out)], check=True)


def names_in(out):
    return {path.stem for path in (out / "records").glob("[!.]*.json")}


def test_how_far_it_is_counts_parts_of_images(images, tmp_path):
    told = []

    def hear(progress):
        told.append(progress)
        if progress.done >= 2 and progress.images_in_progress:
            raise Cancelled

    with pytest.raises(Cancelled):
        run_study(images, tmp_path / "out", QUICK, workers=0, report=hear)
    fractions = [p.fraction for p in told]
    assert fractions == sorted(fractions)
    assert any(0 < p.fraction < 1 / COUNT for p in told)
    again = StudyProgress(6, 10, "", 0.5, skipped=5)
    assert again.fraction == pytest.approx(0.65)
    assert again.eta(30.0) == pytest.approx(70.0), "what was skipped took no time"
    assert again.eta(0.1) is None
