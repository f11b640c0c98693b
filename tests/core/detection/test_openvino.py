"""Detection in OpenVINO: boxes as torch's, the cache, the setting, and all that it must not do."""

import copy
import hashlib
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from discs import SIZES, disc_detector, draw, enlivened, scattered
from napari_beerlanet import load_checkpoint
from napari_beerlanet.core.boxes.geometry import iou
from napari_beerlanet.core.detection import inference
from napari_beerlanet.core.detection import openvino_network as ov
from napari_beerlanet.core.detection.detector import Detector
from napari_beerlanet.core.detection.inference import InferenceRunner
from napari_beerlanet.core.detection.network import StainDetectionModel
from napari_beerlanet.core.detection.slide_detector import detect_slide
from napari_beerlanet.samples import blood_smear
from tinydata import MODEL, NAMES

pytest.importorskip("openvino")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """A cache of this file's own, empty at first."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NAPARI_BEERLANET_CACHE", str(folder))
        yield folder / "openvino"


@pytest.fixture(scope="module")
def packaged(cache):
    return load_checkpoint("blood-cells", "cpu")


@pytest.fixture(scope="module")
def smear():
    return blood_smear((192, 256), seed=3, cell_diameter=40.0).image


def lively(config=MODEL, seed=1):
    """An untrained network whose scores are anywhere from 0 to 1."""
    torch.manual_seed(seed)
    network = StainDetectionModel(
        config if isinstance(config, str) else dict(config), nc=3, imgsz=128
    )
    network.fit_mix()
    enlivened(network, blood_smear((128, 128), seed=9, cell_diameter=40.0).image)
    info = {"classes": list(NAMES), "image_size": 128, "object_sizes": SIZES}
    return Detector(network, info)


@pytest.fixture(scope="module")
def tiny(cache):
    """A small network, which OpenVINO has converted."""
    detector = lively()
    assert detector.runner.openvino("float32", []) is not None
    return detector


def twin(detector):
    """Another detector of the same weights, as another process would load it."""
    return Detector(copy.deepcopy(detector.network), detector.info)


@pytest.fixture
def automatic(monkeypatch):
    """As outside of the tests, where nothing is said in the environment."""
    monkeypatch.delenv(ov.VARIABLE, raising=False)


def assert_same_boxes(one, other, pixels=0.1, score=1e-3):
    """All candidates, within a tenth of a pixel and a thousandth of confidence."""
    one, other = (d if d.candidates is None else d.candidates for d in (one, other))
    assert len(one) == len(other)
    close = np.abs(one.xyxy[:, None] - other.xyxy).max(2) < pixels
    close &= np.abs(one.scores[:, None] - other.scores) < score
    close &= one.labels[:, None] == other.labels
    assert close.any(0).all()
    assert close.any(1).all()


@pytest.mark.usefixtures("automatic")
def test_boxes_of_a_real_image_are_those_of_torch(packaged, shared):
    from napari_beerlanet.core.images.files import read_image

    path = sorted((shared / "data" / "bccd" / "JPEGImages").glob("*.jpg"))[5]
    image = read_image(path).pixels
    torchs, ours = (packaged.detect(image, openvino=mode) for mode in ("off", "auto"))
    assert len(torchs) > 5
    assert torchs.report["device"] == "CPU"
    assert ours.report["device"] == packaged.runs_on() == "CPU, OpenVINO"
    assert_same_boxes(torchs, ours)


def test_tiles_and_slides_are_those_of_torch(tiny, smear):
    settings = {"object_size": 20.0, "tile": 128}
    torchs, ours = (tiny.detect(smear, **settings, openvino=m) for m in ("off", "float32"))
    assert torchs.report["tiles"] > 4
    assert len(ours.candidates) > 20
    assert_same_boxes(torchs, ours)
    slide = detect_slide(tiny, smear, **settings, skip_glass=False, openvino="float32")
    assert slide.report["device"] == "CPU, OpenVINO"
    np.testing.assert_array_equal(slide.xyxy, ours.xyxy)


def test_bfloat16_finds_the_same_cells_nearly_where_they_are(packaged, smear):
    if not ov.has_bfloat16():
        pytest.skip("this CPU has no bfloat16")
    size = {"object_size": 40.0}
    torchs, ours = (packaged.detect(smear, **size, openvino=m) for m in ("off", "bfloat16"))
    assert ours.report["device"] == "CPU, OpenVINO (bfloat16)"
    overlap = iou(torchs.xyxy, ours.candidates.xyxy).max(1)
    assert (overlap > 0.9).mean() > 0.95
    assert not np.array_equal(torchs.scores, ours.scores)  # it was bfloat16 indeed


def test_bfloat16_leaves_what_moves_boxes_in_float32(packaged):
    if not ov.has_bfloat16():
        pytest.skip("this CPU has no bfloat16")
    network = packaged.runner.openvino("bfloat16", [])
    network(torch.rand(1, 3, 64, 64))
    found = {}
    for layer in network._compiled.get_runtime_model().get_ordered_ops():
        facts = layer.get_rt_info()
        if facts["layerType"].value == "Convolution":
            block = int(layer.get_friendly_name().split(".")[3])
            of_boxes = ".dfl." in layer.get_friendly_name()
            found.setdefault((block < 5 or of_boxes), set()).add(facts["runtimePrecision"].value)
    assert found == {True: {"f32"}, False: {"bf16"}}


@pytest.fixture
def many(monkeypatch):
    """Four tiles are many, on any CPU."""
    monkeypatch.setattr(inference, "_MIN_ROUNDED_TILES", 4)
    monkeypatch.setattr(inference, "_TILES_PER_COMPARISON", 2)
    monkeypatch.setattr(ov, "has_bfloat16", lambda: True)


MANY = {"object_size": 40.0, "tile": 128}


@pytest.mark.usefixtures("automatic", "many")
def test_many_tiles_are_rounded_where_that_finds_the_same(packaged, smear):
    exact, found = (packaged.detect(smear, **MANY, openvino=m) for m in ("float32", "auto"))
    assert exact.report["device"] == "CPU, OpenVINO"
    assert found.report["device"] == "CPU, OpenVINO (bfloat16)"
    assert len(exact) > 5
    assert (iou(exact.xyxy, found.candidates.xyxy).max(1) > 0.9).all()
    slide = detect_slide(packaged, smear, **MANY, skip_glass=False)
    assert slide.report["device"] == "CPU, OpenVINO (bfloat16)"
    np.testing.assert_array_equal(slide.xyxy, found.xyxy)
    first, again = (packaged.detect(smear, tile=128).report for _ in range(2))
    assert first["device"] == "CPU, OpenVINO (bfloat16)"
    assert again == first, "the second time from the cache"
    few = packaged.detect(smear, object_size=40.0)
    assert few.report["device"] == "CPU, OpenVINO"


@pytest.mark.usefixtures("automatic", "many")
@pytest.mark.parametrize("harm", ["moved", "lost", "more"])
def test_many_tiles_are_not_rounded_where_that_finds_other_boxes(
    packaged, smear, monkeypatch, harm
):
    whole = ov.OpenVinoNetwork.__call__

    def harmed(self, mixed):
        output = whole(self, mixed)
        if self.precision == "bfloat16":
            output[:, :4] += 10.0 if harm == "moved" else 0.0
            output[:, 4:] = {"moved": output[:, 4:], "lost": 0.0, "more": 0.9}[harm]
        return output

    exact = packaged.detect(smear, **MANY, openvino="float32")
    monkeypatch.setattr(ov.OpenVinoNetwork, "__call__", harmed)
    found = packaged.detect(smear, **MANY)
    assert found.report["device"] == "CPU, OpenVINO"
    np.testing.assert_array_equal(found.xyxy, exact.xyxy)
    slide = detect_slide(packaged, smear, **MANY, skip_glass=False)
    np.testing.assert_array_equal(slide.xyxy, exact.xyxy)


def test_where_a_gpu_s_memory_does_not_suffice_the_cpu_runs_it(tiny, smear, monkeypatch):
    detector, infer = twin(tiny), InferenceRunner.infer_tiles

    def scarce(self, *given, **more):
        if self.device.type == "cuda":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return infer(self, *given, **more)

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tiny card")
    monkeypatch.setattr(InferenceRunner, "infer_tiles", scarce)
    settings = {"object_size": 20.0, "tile": 128, "openvino": "float32", "skip_glass": False}
    right = detect_slide(detector, smear, **settings)
    monkeypatch.setattr(detector.runner, "device", torch.device("cuda:0"))
    found = detect_slide(detector, smear, **settings)
    assert found.report["device"] == right.report["device"] == "CPU, OpenVINO"
    np.testing.assert_array_equal(found.xyxy, right.xyxy)


@pytest.mark.usefixtures("automatic", "many")
def test_tiles_without_boxes_do_not_show_that_rounding_is_harmless(packaged):
    grey = np.full((192, 256, 3), 200, np.uint8)
    grey[::16, ::16] = 90
    assert packaged.detect(grey, **MANY).report["device"] == "CPU, OpenVINO"


def test_switched_off_it_is_not_even_loaded(tiny, smear, monkeypatch):
    def refuse(*args):
        raise AssertionError("OpenVINO was asked for")

    monkeypatch.setattr("napari_beerlanet.core.detection.inference.openvino_network", refuse)
    monkeypatch.setattr(ov, "_core", refuse)
    tiny.runner._converted = {}
    assert tiny.detect(smear, openvino="off").report["device"] == "CPU"
    monkeypatch.setenv(ov.VARIABLE, "off")  # what "auto" then means
    assert tiny.detect(smear).report["device"] == tiny.runs_on() == "CPU"


def test_the_environment_says_what_automatic_is(monkeypatch):
    for value, expected in (("float32", "float32"), ("OFF", None), ("", "float32")):
        monkeypatch.setenv(ov.VARIABLE, value)
        assert ov.choose_precision("auto", notes := []) == expected
        assert notes == []
    monkeypatch.setenv(ov.VARIABLE, "often")
    assert ov.choose_precision("auto", notes := []) == "float32"
    assert notes == [
        "NAPARI_BEERLANET_OPENVINO is 'often', not float32, bfloat16 or off: left aside."
    ]
    assert ov.choose_precision("off", []) is None  # a setting goes before it


@pytest.mark.usefixtures("automatic")
def test_where_it_is_not_installed_torch_runs_and_nobody_is_told(tiny, smear, monkeypatch):
    monkeypatch.setattr(ov, "find_spec", lambda name: None)
    found = tiny.detect(smear)
    assert found.report["device"] == "CPU"
    assert found.report["notes"] == []
    # Who asks for it by name is told how to get it.
    (note,) = tiny.detect(smear, openvino="float32").report["notes"]
    assert 'pip install "napari-beerlanet[openvino]"' in note


def test_other_weights_are_never_taken_from_the_cache(tiny, smear, cache):
    before = tiny.detect(smear, openvino="float32")
    files = set(cache.glob("*.bin"))
    assert files
    tuned = twin(tiny)
    with torch.no_grad():  # the least that a training changes: one number
        tuned.network.model[-1].cv3[0][-1].bias[0] += 0.5
    torchs, ours = (tuned.detect(smear, openvino=mode) for mode in ("off", "float32"))
    assert_same_boxes(torchs, ours)
    assert not np.array_equal(before.scores, ours.scores[: len(before.scores)])
    assert len(set(cache.glob("*.bin")) - files) == 1


def test_equal_weights_are_converted_once(tiny, smear, cache, monkeypatch):
    first = tiny.detect(smear, openvino="float32")
    monkeypatch.setattr(ov, "convert", lambda network: pytest.fail("converted again"))
    again = twin(tiny)
    assert again.runner.openvino("float32", []) is tiny.runner.openvino("float32", [])
    monkeypatch.setattr(ov, "_networks", {})  # as in another process: from the file
    another = twin(tiny)
    np.testing.assert_array_equal(another.detect(smear, openvino="float32").xyxy, first.xyxy)


@pytest.mark.parametrize("damage", ["cut", "flipped", "other"])
def test_a_damaged_file_is_made_again(tiny, smear, cache, monkeypatch, damage):
    first = tiny.detect(smear, openvino="float32")
    path = cache / f"{ov._network_key(tiny.runner.network)}.bin"
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    content = b"no network"
    other = hashlib.sha256(content).digest() + content
    path.write_bytes({"cut": whole[:5000], "flipped": bytes(flipped), "other": other}[damage])
    monkeypatch.setattr(ov, "_networks", {})
    again = twin(tiny).detect(smear, openvino="float32")
    np.testing.assert_array_equal(again.xyxy, first.xyxy)
    stored = path.read_bytes()
    assert stored[:32] == hashlib.sha256(stored[32:]).digest()
    assert len(stored) > 0.9 * len(whole)


def test_the_cache_keeps_the_networks_that_were_used_last(tmp_path):
    for k in range(ov._KEPT_FILES + 3):
        ov._save(tmp_path / f"{k}.bin", b"%d" % k)
        os.utime(tmp_path / f"{k}.bin", (k, k))
    ov._save(tmp_path / "last.bin", b"x")
    left = {file.stem for file in tmp_path.iterdir()}
    assert len(left) == ov._KEPT_FILES
    assert {"last", str(ov._KEPT_FILES + 2)} <= left
    assert "0" not in left


def test_a_network_that_cannot_be_converted_is_run_by_torch_and_that_is_told_once():
    discs = scattered((300, 400), 40, seed=1, spread=0.1)
    image, detector = draw((300, 400), discs), disc_detector()
    first, second = (detector.detect(image, object_size=40, openvino="float32") for _ in range(2))
    (note,) = first.report["notes"]
    assert note.startswith("OpenVINO cannot run this network (")
    assert second.report["notes"] == []
    assert first.report["device"] == second.report["device"] == "CPU"
    torchs = disc_detector().detect(image, object_size=40, openvino="off")
    np.testing.assert_array_equal(first.xyxy, torchs.xyxy)
    assert len(first) == len(discs)
    np.testing.assert_array_equal(first.xyxy, second.xyxy)


def test_a_failure_while_it_runs_leaves_the_rest_to_torch(tiny, smear, monkeypatch):
    detector = twin(tiny)
    torchs = detector.detect(smear, openvino="off")

    def fail(self, mixed):
        raise RuntimeError("Exception from somewhere:\nno kernel")

    monkeypatch.setattr(ov.OpenVinoNetwork, "__call__", fail)
    found = detector.detect(smear, openvino="float32")
    assert_same_boxes(torchs, found)
    assert found.report["device"] == "CPU"
    assert "no kernel" in found.report["notes"][0]


def test_threads_are_those_of_torch_within_our_limit(tiny, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    torch.set_num_threads(2)
    two = tiny.runner.openvino("float32", [])
    torch.set_num_threads(1)
    one = tiny.runner.openvino("float32", [])
    assert (one.threads, two.threads) == (1, 2)
    assert two._compiled.get_property("INFERENCE_NUM_THREADS") == 2
    assert one._compiled.get_property("ENABLE_CPU_PINNING") is False
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(4)
    assert ov.inference_threads() == 1


@pytest.mark.usefixtures("automatic")
def test_while_it_is_prepared_a_run_does_not_wait_unless_it_is_long(tiny, smear, monkeypatch):
    detector = twin(tiny)
    go_on, convert = threading.Event(), detector.runner._convert

    def slow(precision):
        go_on.wait(600)
        return convert(precision)

    monkeypatch.setattr(detector.runner, "_convert", slow)
    detector.runner.prepare()
    assert detector.detect(smear).report["device"] == "CPU"
    assert detector.runs_on() == "CPU, OpenVINO"  # what it will be
    go_on.set()
    detector.runner._preparation.join()
    assert detector.detect(smear).report["device"] == "CPU, OpenVINO"


FORK = """
import os, sys, time
from napari_beerlanet import load_checkpoint
from napari_beerlanet.samples import blood_smear
model, image = load_checkpoint("blood-cells", "cpu"), blood_smear((240, 320), seed=3).image
before = model.detect(image, object_size=60.0)
assert before.report["device"] == "CPU, OpenVINO", before.report
child = os.fork()
if child == 0:
    found = model.detect(image, object_size=60.0)
    os._exit(0 if len(found) == len(before) and found.report["device"] == "CPU" else 7)
for _ in range(600):
    pid, status = os.waitpid(child, os.WNOHANG)
    if pid:
        sys.exit(os.waitstatus_to_exitcode(status))
    time.sleep(0.1)
os.kill(child, 9)
sys.exit("the child hangs")
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_detects_with_torch():
    environment = {**os.environ, "OMP_NUM_THREADS": "2", ov.VARIABLE: ""}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr


CONVERSION = """
import socket, sys
socket.getaddrinfo = lambda *_, **__: sys.exit("asked for " + str(_[0]))
from napari_beerlanet.core.detection import openvino_network as ov
ov._core()
import openvino.tools.ovc.telemetry_utils as utils
assert "openvino_telemetry" not in sys.modules, "telemetry was loaded"
assert utils.init_ovc_telemetry().__class__.__module__.endswith("telemetry_stub")
"""


def test_nothing_is_reported_to_anyone(tmp_path):
    """OpenVINO would tell Google Analytics, and write an identifier to the home folder."""
    environment = {**os.environ, "HOME": str(tmp_path), "USERPROFILE": str(tmp_path)}
    environment.pop("CI", None)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CONVERSION],
        env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "intel").exists()


@pytest.mark.slow
@pytest.mark.parametrize("config", ["yolo26n.yaml", "yolo11n.yaml"])
def test_other_architectures_run_in_it_or_in_torch_with_equal_boxes(config, smear):
    """One that thins boxes out by itself, and one with attention."""
    detector = lively(config)
    torchs, ours = (
        detector.detect(smear, object_size=60.0, openvino=mode) for mode in ("off", "float32")
    )
    assert len(torchs.candidates) > 5
    assert_same_boxes(torchs, ours)


def test_it_is_prepared_after_kernels_are_compiled(monkeypatch):
    """Both at once would keep a first detection from the cores."""
    compiling, asked = threading.Event(), threading.Event()
    compiling.set()

    def being_compiled():
        asked.set()
        return compiling.is_set()

    converted = []
    monkeypatch.setattr(inference, "kernels_being_compiled", being_compiled)
    monkeypatch.setattr(inference, "choose_precision", lambda mode, notes: "float32")
    monkeypatch.setattr(InferenceRunner, "_convert", lambda self, *how: converted.append(how))
    runner = InferenceRunner(disc_detector().network, torch.device("cpu"))
    runner.prepare()
    assert asked.wait(600)
    assert not converted
    assert runner.openvino("auto", []) is None, "a run is torch's meanwhile"
    compiling.clear()
    runner._preparation.join(600)
    assert converted == [("float32",)]
