"""The network over tiles: batches, too little memory, two callers at once, other architectures."""

import threading
import time

import numpy as np
import pytest
import torch

from discs import SIZES, DiscNetwork, boxes_of, disc_detector, draw, enlivened, scattered
from napari_beerlanet.core.boxes.geometry import iou
from napari_beerlanet.core.common.device import is_out_of_memory
from napari_beerlanet.core.detection import inference
from napari_beerlanet.core.detection.detector import Detector
from napari_beerlanet.core.detection.inference import InferenceRunner, select_boxes
from napari_beerlanet.core.detection.network import StainDetectionModel
from napari_beerlanet.core.detection.tiling import plan_tiles, read_tile
from napari_beerlanet.core.stains.front_end import StainFit, fit_stain
from napari_beerlanet.samples import blood_smear
from tinydata import MODEL, NAMES

SHAPE = (700, 900)
DISCS = scattered(SHAPE, 40, seed=1, spread=0.1)


@pytest.fixture(scope="module")
def image():
    return draw(SHAPE, DISCS)


class Scarce(DiscNetwork):
    """Fails as a device does whose memory holds so many tiles of so many pixels."""

    tiles, pixels = 10**9, 10**9
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    def predict_mixed(self, mixed):
        if len(mixed) > self.tiles or mixed.shape[2] * mixed.shape[3] > self.pixels:
            raise self.error
        return super().predict_mixed(mixed)


def found_all(result, discs, tolerance=2.5):
    """Whether every disc was found once and nothing else."""
    expected = boxes_of(discs)
    near = np.abs(result.xyxy[:, None] - expected[None]).max(2) < tolerance
    assert (near.sum(0) == 1).all()
    assert (near.sum(1) == 1).all()


@pytest.mark.parametrize("batch", [1, 2, 5, 64])
def test_the_batch_does_not_matter(image, batch):
    detector = disc_detector()
    result = detector.detect(image, object_size=40, tile=256, batch=batch)
    assert result.report["tiles"] > 9
    found_all(result, DISCS)
    assert result.report["notes"] == []


def test_tiles_that_are_small_for_the_objects_are_told(image):
    result = disc_detector().detect(image, object_size=40, tile=128)
    assert [note for note in result.report["notes"] if "in pieces" in note]


def test_a_real_network_finds_the_same_in_any_batch():
    detector = lively()
    image = blood_smear((300, 500), seed=2, cell_diameter=40.0).image
    one, many = (detector.detect(image, object_size=40, tile=128, batch=b) for b in (1, 7))
    assert len(one.candidates) > 20
    assert len(one.candidates) == len(many.candidates)
    np.testing.assert_allclose(one.candidates.xyxy, many.candidates.xyxy, atol=0.05)
    np.testing.assert_allclose(one.candidates.scores, many.candidates.scores, atol=1e-4)


def test_too_little_memory_halves_the_batch_and_says_so(image):
    detector = disc_detector(kind=Scarce)
    detector.network.tiles = 2
    result = detector.detect(image, object_size=40, tile=256, batch=8)
    found_all(result, DISCS)
    (note,) = result.report["notes"]
    assert note == "Memory did not suffice for 8 tiles at a time; 2 did."


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("MPS backend out of memory (MPS allocated: 9.0 GB)"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"
        ),
        MemoryError(),
    ],
)
def test_too_little_memory_halves_the_tile_and_says_so(image, error):
    detector = disc_detector(kind=Scarce)
    detector.network.pixels, detector.network.error = 300 * 300, error
    result = detector.detect(image, object_size=40)
    found_all(result, DISCS)
    assert max(result.report["tile_size"]) <= 320
    assert result.report["notes"] == ["Memory did not suffice for larger tiles than 256 pixels."]


def test_too_little_memory_while_looking_for_the_size(image):
    detector = disc_detector(kind=Scarce)
    detector.network.pixels = 200 * 200
    found_all(detector.detect(image), DISCS, tolerance=6)


def test_no_memory_at_all_is_a_sentence_and_leaves_no_trace(image):
    detector = disc_detector(kind=Scarce)
    runner = detector.runner
    runner.network.pixels = 0
    with pytest.raises(MemoryError, match="does not suffice even for tiles of 128 pixels"):
        detector.detect(image, object_size=40, batch=4)
    runner.network.pixels = 10**9
    result = detector.detect(image, object_size=40)
    assert result.report["notes"] == []
    found_all(result, DISCS)


def test_other_errors_are_not_taken_for_too_little_memory(image):
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("out of memory"))
    detector = disc_detector(kind=Scarce)
    detector.network.tiles, detector.network.error = 0, RuntimeError("sizes do not match")
    with pytest.raises(RuntimeError, match="sizes do not match"):
        detector.detect(image)


class Busy(DiscNetwork):
    """Notices when it is entered twice at once: Ultralytics' head keeps state between calls."""

    inside = 0

    def predict_mixed(self, mixed):
        self.inside += 1
        time.sleep(0.005)
        assert self.inside == 1
        result = super().predict_mixed(mixed)
        self.inside -= 1
        return result


def in_two_threads(work):
    """Results of work(0) and work(1), done at once."""
    results, begin = [None, None], threading.Barrier(2)

    def run(k):
        begin.wait()
        try:
            results[k] = work(k)
        except BaseException as error:
            results[k] = error

    threads = [threading.Thread(target=run, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_two_threads_do_not_enter_the_network_at_once(image):
    detector = disc_detector(kind=Busy)
    detector.detect(image, object_size=40)
    for result in in_two_threads(lambda k: detector.detect(image, object_size=40, tile=256)):
        found_all(result, DISCS)


def test_two_threads_find_what_each_would_alone():
    detector = lively()
    images = [blood_smear(s, seed=4, cell_diameter=40.0).image for s in ((96, 128), (128, 96))]
    alone = [detector.detect(im) for im in images]
    fresh = Detector(detector.network, detector.info)
    for _ in range(5):
        together = in_two_threads(lambda k: fresh.detect(images[k]))
        for one, other in zip(alone, together, strict=True):
            np.testing.assert_allclose(other.candidates.xyxy, one.candidates.xyxy, atol=0.01)


def lively(config=MODEL, image_size=128, nc=3):
    """An untrained network whose scores are anywhere from 0 to 1."""
    torch.manual_seed(1)
    network = StainDetectionModel(
        config if isinstance(config, str) else dict(config), nc=nc, imgsz=image_size
    )
    network.fit_mix()
    enlivened(network, blood_smear((image_size, image_size), seed=9, cell_diameter=40.0).image)
    info = {"classes": list(NAMES), "image_size": image_size, "object_sizes": SIZES}
    return Detector(network, info)


@pytest.mark.parametrize("config", ["yolo26n.yaml", "yolov8n-p6.yaml"])
def test_other_architectures_run(config):
    """Networks that thin boxes out by themselves, and those with a deeper level."""
    detector = lively(config)
    image = blood_smear((100, 150), seed=2, cell_diameter=40.0).image
    result = detector.detect(image, confidence=0.0, object_size=40)
    assert np.isfinite(result.xyxy).all()
    tiled = detector.detect(image, confidence=0.0, object_size=10, tile=256)
    assert tiled.report["tiles"] > 1


def test_a_network_that_thins_boxes_itself_may_find_more_than_300():
    detector = lively("yolo26n.yaml")
    assert detector.runner.network.model[-1].max_det > 5000
    assert detector.network.model[-1].max_det == 300


def test_boxes_of_neighbouring_discs_do_not_overlap():
    boxes = boxes_of(DISCS)
    assert np.triu(iou(boxes, boxes), 1).max() == 0


# --- from the network's output to boxes ----------------------------------------------------------


def predictions(anchors: int = 3000, classes: int = 3, seed: int = 0) -> torch.Tensor:
    """(2, 4 + classes, anchors): crowded boxes, as of a network that sees objects everywhere."""
    random = torch.Generator().manual_seed(seed)
    centre = 640 * torch.rand(2, 2, anchors, generator=random)
    size = 10 + 60 * torch.rand(2, 2, anchors, generator=random)
    return torch.cat([centre, size, torch.rand(2, classes, anchors, generator=random)], dim=1)


@pytest.mark.parametrize("min_score", [0.001, 0.7])
def test_boxes_are_selected_as_ultralytics_does(min_score):
    from ultralytics.utils.nms import non_max_suppression

    raw = predictions()
    theirs = non_max_suppression(raw.clone(), min_score, 0.45, max_det=10_000, max_time_img=60)
    for ours, rows in zip(select_boxes((raw, None), 3, min_score, 0.45), theirs, strict=True):
        assert len(ours) == len(rows) > 300
        np.testing.assert_allclose(ours.xyxy, rows[:, :4].numpy(), atol=1e-3)
        np.testing.assert_array_equal(ours.scores, rows[:, 4].numpy())
        np.testing.assert_array_equal(ours.labels, rows[:, 5].numpy())
        assert (ours.xyxy.dtype, ours.labels.dtype) == (np.float32, np.int64)


def test_a_network_that_suppresses_duplicates_by_itself_is_believed():
    rows = torch.tensor([[[0, 0, 9, 9, 0.9, 1], [0, 0, 9, 9, 0.8, 1], [5, 5, 9, 9, 0.1, 0]]])
    (found,) = select_boxes(rows, 3, 0.25, 0.45, end2end=True)
    np.testing.assert_array_equal(found.xyxy, [[0, 0, 9, 9]] * 2)
    np.testing.assert_array_equal(found.labels, [1, 1])


def test_nothing_is_found_in_nothing():
    (none, empty) = select_boxes(
        predictions() * torch.tensor([1.0] * 4 + [0] * 3)[:, None], 3, 0.1, 0.5
    )
    assert len(none) == len(empty) == 0


# --- many tiles ----------------------------------------------------------------------------------


def test_tiles_side_by_side_find_what_they_do_in_turn(monkeypatch):
    detector = lively()
    image = blood_smear((300, 500), seed=2, cell_diameter=40.0).image
    settings = {"object_size": 40, "tile": 128}
    for mode in ("auto", "off"):
        with monkeypatch.context() as patch:
            patch.setattr(
                InferenceRunner, "for_many_tiles", lambda self, openvino, _: (openvino, 1)
            )
            in_turn = detector.detect(image, openvino=mode, **settings).candidates
        threads = set()
        infer = InferenceRunner._infer_batch
        with monkeypatch.context() as patch:

            def noted(self, *given, infer=infer, threads=threads):
                threads.add(threading.get_ident())
                return infer(self, *given)

            patch.setattr(InferenceRunner, "_infer_batch", noted)
            patch.setattr(inference, "thread_count", lambda: 2)
            found = detector.detect(image, openvino=mode, **settings).candidates
        assert len(threads) == 2
        assert len(found) == len(in_turn) > 20
        np.testing.assert_allclose(found.xyxy, in_turn.xyxy, atol=0.01)
        np.testing.assert_allclose(found.scores, in_turn.scores, atol=1e-4)


def test_an_error_in_one_of_many_tiles_ends_the_run(image, monkeypatch):
    calls, infer = [], InferenceRunner._infer_batch

    def fail_at_third(self, *given):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("sizes do not match")
        return infer(self, *given)

    monkeypatch.setattr(InferenceRunner, "_infer_batch", fail_at_third)
    monkeypatch.setattr(inference, "thread_count", lambda: 2)
    with pytest.raises(RuntimeError, match="sizes do not match"):
        disc_detector().detect(image, object_size=40, tile=128)
    assert len(calls) < 15, "tiles were run after the error"


def test_tiles_of_background_are_not_run():
    half = (700, 450)
    discs = scattered(half, 20, seed=1, spread=0.1)
    image = np.full((700, 1800, 3), draw(half, discs)[0, 0], np.uint8)
    image[:, :450] = draw(half, discs)
    shown = []

    class Counting(DiscNetwork):
        def predict_mixed(self, mixed):
            shown.append(len(mixed))
            return super().predict_mixed(mixed)

    result = disc_detector(kind=Counting).detect(image, object_size=40, tile=256)
    found_all(result, discs)
    assert 0 < sum(shown) < 0.6 * result.report["tiles"]


def test_a_batch_of_tiles_waits_for_the_device_twice(monkeypatch):
    """For the number of its boxes and for the boxes, whatever the number of tiles."""
    detector = lively()
    image = blood_smear((300, 500), seed=2, cell_diameter=40.0).image
    runner, fit = detector.runner, fit_stain(detector.runner.network, image)
    grid = plan_tiles(image.shape[:2], 1.0, 128, 40)
    cut = [read_tile(image, tile, grid.size) for tile in grid.tiles]
    # As on a device that is no CPU.
    mix = StainFit._mix_pixels
    monkeypatch.setattr(
        StainFit, "mix_tiles", lambda self, net, tiles: mix(self, net, torch.from_numpy(tiles))
    )
    waits = dict.fromkeys(("cpu", "item", "tolist", "numpy", "nonzero", "__bool__", "__float__"), 0)
    for name in waits:
        whole = getattr(torch.Tensor, name)

        def counted(self, *given, name=name, whole=whole, **more):
            waits[name] += 1
            return whole(self, *given, **more)

        monkeypatch.setattr(torch.Tensor, name, counted)
    runner._infer_batch(cut[:2], grid.tiles[:2], grid, fit, 0.01, 0.7, None)  # anchors
    for count in (2, 6):
        waits.update(dict.fromkeys(waits, 0))
        parts = runner._infer_batch(cut[:count], grid.tiles[:count], grid, fit, 0.01, 0.7, None)
        assert sum(len(part) for part in parts) > 20
        assert waits == {**dict.fromkeys(waits, 0), "nonzero": 1, "cpu": 1, "numpy": 1}
