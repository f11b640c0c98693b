"""A normalizer that is part of a model: in its file, on images, crops and slides, in training."""

import copy
from types import SimpleNamespace

import dask.array as da
import numpy as np
import pytest
import torch
from PIL import Image

from discs import SIZES
from napari_beerlanet.core.checkpoints.checkpoint import (
    CheckpointError,
    load_checkpoint,
    read_info,
    save_checkpoint,
)
from napari_beerlanet.core.checkpoints.serialize import describe_network
from napari_beerlanet.core.classification.slide_classifier import classify_slide
from napari_beerlanet.core.detection.detector import Detector
from napari_beerlanet.core.detection.network import StainDetectionModel
from napari_beerlanet.core.detection.slide_detector import SlideDetection, detect_slide
from napari_beerlanet.core.normalization.methods import fitted_normalizer, save_normalizer
from napari_beerlanet.core.stains.front_end import weights_digest
from napari_beerlanet.core.training.fine_tune import train_detector
from napari_beerlanet.core.training.train_classifier import train_classifier
from napari_beerlanet.core.training.trainer.data import read_bgr
from napari_beerlanet.samples import blood_smear
from tinyclasses import SMALL, cell, tiny_classifier, write_classes
from tinydata import MODEL, NAMES, write_smears


@pytest.fixture(scope="module")
def template():
    return blood_smear((80, 80), seed=7, cell_diameter=30.0).image


@pytest.fixture(scope="module")
def smear():
    image = blood_smear((150, 170), seed=4, cell_diameter=40.0).image
    return (image * (0.8, 0.7, 0.6)).astype(np.uint8)


@pytest.fixture(scope="module", params=["reinhard", "macenko"])
def normalizer(request, template):
    return fitted_normalizer(request.param, template)


def tiny_detector(normalizer=None, front_end="none"):
    torch.manual_seed(3)
    network = StainDetectionModel(
        copy.deepcopy(MODEL), nc=3, imgsz=128, components=3, front_end=front_end
    ).eval()
    with torch.no_grad():
        for branch in network.model[-1].cv3:
            branch[-1].bias += 5.0
    network.normalizer = normalizer
    info = describe_network(network, "tiny", list(NAMES), 128, object_sizes=SIZES)
    return Detector(network, info)


def assert_same_boxes(one, other, tolerance=0.0):
    for a, b in ((one.xyxy, other.xyxy), (one.scores, other.scores)):
        np.testing.assert_allclose(a, b, atol=tolerance)
    assert len(one) > 0


def test_a_detector_sees_the_normalised_image(normalizer, smear):
    model, plain = tiny_detector(normalizer), tiny_detector()
    by_hand = plain.detect(normalizer.apply(smear).rgb, confidence=0.01, object_size=40.0)
    assert_same_boxes(model.detect(smear, confidence=0.01, object_size=40.0), by_hand)
    other = plain.detect(smear, confidence=0.01, object_size=40.0)
    assert len(other) != len(by_hand) or not np.allclose(other.scores, by_hand.scores)


def test_a_file_keeps_it_to_the_bit(normalizer, smear, tmp_path):
    path = tmp_path / "tiny.safetensors"
    for model in (tiny_detector(normalizer), tiny_classifier(SMALL)):
        model.network.normalizer = normalizer
        save_checkpoint(model, path)
        assert read_info(path)["normalizer"]["method"] == normalizer.method
        back = load_checkpoint(path, "cpu")
        again = back.network.normalizer.apply(smear).rgb
        np.testing.assert_array_equal(again, normalizer.apply(smear).rgb)
        save_checkpoint(back, tmp_path / "again.safetensors")
        assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()
        back.network.normalizer = None  # and it can be taken away
        save_checkpoint(back, tmp_path / "without.safetensors")
        assert "normalizer" not in read_info(tmp_path / "without.safetensors")
        assert load_checkpoint(tmp_path / "without.safetensors", "cpu").network.normalizer is None


def test_a_slide_is_normalised_as_the_image(normalizer, smear, tmp_path):
    model = tiny_detector(normalizer)
    settings = {"object_size": 40.0, "tile": 128, "skip_glass": False}
    lazy = da.from_array(smear, chunks=(64, 64, 3))
    found = detect_slide(model, [lazy], 0.01, **settings)
    # Reinhard's sums over colours and over pixels differ by rounding: a grey level here and there.
    image = model.detect(smear, 0.01, object_size=40.0, tile=128)
    assert len(found) == pytest.approx(len(image), abs=2)
    best = np.argsort(-image.scores)[:5]
    near = np.abs(found.xyxy[:, None] - image.xyxy[best]).max(2).min(0)
    assert near.max() < 0.5
    results = tmp_path / "slide.tiles"
    with SlideDetection(model, [lazy], results=results, **settings) as first:
        next(iter(first.detect_tiles()))
    with SlideDetection(model, [lazy], results=results, **settings) as second:
        assert second.resumed == 1
        assert not second.changed
        for _ in second.detect_tiles():
            pass
        assert_same_boxes(second.detections(0.01), found)
    with SlideDetection(tiny_detector(), [lazy], results=results, **settings) as other:
        assert other.resumed == 0


def test_what_looks_at_more_than_colours_takes_no_slide(normalizer, smear):
    model = tiny_detector(normalizer)
    model.network.normalizer = SimpleNamespace(
        method="of neighbours", colour_only=False, state=normalizer.state
    )
    with pytest.raises(ValueError, match=r"looks at more than a pixel's colour.*as an image\.$"):
        detect_slide(model, [smear])


def test_a_classifier_sees_normalised_crops_and_images(normalizer, smear):
    plain, model = tiny_classifier(), tiny_classifier()
    model.network.normalizer = normalizer
    crops = [cell("dark" if k % 2 else "pale", k, side=40) for k in range(4)]
    by_hand = plain.classify([normalizer.apply(crop).rgb for crop in crops])
    np.testing.assert_array_equal(model.classify(crops).scores, by_hand.scores)
    boxes = np.array([[10, 20, 60, 70], [80, 60, 120, 110.0]])
    by_hand = plain.classify(normalizer.apply(smear).rgb, boxes)
    np.testing.assert_array_equal(model.classify(smear, boxes).scores, by_hand.scores)
    lazy = model.classify(da.from_array(smear, chunks=(64, 64, 3)), boxes)
    np.testing.assert_allclose(lazy.scores, by_hand.scores, atol=2e-3)


def test_patches_of_a_slide_are_normalised_once(normalizer, smear):
    plain, model = tiny_classifier(), tiny_classifier()
    model.network.normalizer = normalizer
    shown = normalizer.apply(smear).rgb
    found = classify_slide(model, [smear], patch=50, min_tissue=0)
    by_hand = classify_slide(plain, [shown], patch=50, min_tissue=0)
    np.testing.assert_allclose(found.scores, by_hand.scores, atol=2e-3)


def test_an_image_without_stain_is_told_of(normalizer):
    found = tiny_detector(normalizer).detect(np.full((90, 90, 3), 250, np.uint8), object_size=40.0)
    assert any("unchanged" in note for note in found.report["notes"])


def test_a_slide_without_stain_is_told_of(normalizer, tmp_path):
    """Also where the run resumes."""
    model, blank = tiny_classifier(), np.full((90, 90, 3), 250, np.uint8)
    model.network.normalizer = normalizer
    for _ in range(2):
        found = classify_slide(model, [blank], patch=30, min_tissue=0, results=tmp_path / "run")
        assert any("unchanged" in note for note in found.report["notes"])


@pytest.mark.parametrize("task", ["detect", "classify"])
def test_training_images_without_stain_are_told_of_once(template, tmp_path, task):
    normalizer = fitted_normalizer("macenko", template)
    if task == "detect":
        data = write_smears(tmp_path / "data", train=3, val=1, side=64)
        files = sorted((tmp_path / "data/images/train").iterdir())[:2]
    else:
        data = write_classes(tmp_path / "data", 4)
        files = [tmp_path / "data" / name for name in ("dark/dark-0.png", "pale/pale-1.png")]
    for k, file in enumerate(files):  # not the same image twice, which two splits may not have
        Image.fromarray(np.full((64, 64, 3), 250 - k, np.uint8)).save(file)
    said = []
    settings = {"epochs": 2, "batch": 2, "device": "cpu", "progress": said.append}
    if task == "detect":
        train_detector(
            data, tmp_path / "run", tiny_detector(), "none", normalizer, image_size=64, **settings
        )
    else:
        settings |= {"input_size": 32, "normalizer": normalizer}
        train_classifier(data, tmp_path / "run", SMALL, "grey", **settings)
    told = [event["message"] for event in said if "unchanged" in event.get("message", "")]
    assert len(told) == 1
    assert told[0].endswith(f"({files[0].name} and 1 more image).")


def test_digests_tell_normalizers_apart(normalizer, smear):
    other = fitted_normalizer(normalizer.method, smear)
    digests = {weights_digest(tiny_detector(n).network) for n in (None, normalizer, other)}
    assert len(digests) == 3


def test_a_damaged_normalizer_is_one_sentence(normalizer, tmp_path):
    model = tiny_detector(normalizer)
    path = tmp_path / "tiny.safetensors"
    arrays, settings = normalizer.state()
    for changed in (
        {name: array[:1].ravel() for name, array in arrays.items()},
        {},
    ):
        broken = SimpleNamespace(
            method=normalizer.method, state=lambda changed=changed: (changed, settings)
        )
        model.network.normalizer = broken
        save_checkpoint(model, path)
        with pytest.raises(CheckpointError, match=r"its normalizer cannot be used: .*\.$"):
            load_checkpoint(path)
    broken.method = "no such method"
    save_checkpoint(model, path)
    with pytest.raises(CheckpointError, match="No normalization method"):
        load_checkpoint(path)


# --- training ------------------------------------------------------------------------------------


def test_a_detector_is_trained_on_normalised_images(template, tmp_path):
    normalizer = fitted_normalizer("macenko", template)
    data = write_smears(tmp_path / "data", train=3, val=2, side=64)
    start = tiny_detector()
    start.info["notes"] = ["The stain front end is untrained"]
    events = []
    model = train_detector(
        data,
        tmp_path / "run",
        start,
        "grey",
        normalizer,
        "none",
        epochs=1,
        image_size=64,
        batch=2,
        device="cpu",
        progress=events.append,
    )
    assert model.network.normalizer.method == "macenko"
    assert model.info["training"]["settings"]["normalizer"] == "normalizer.safetensors"
    file = next((tmp_path / "data" / "images" / "train").iterdir())
    shown = normalizer.apply(np.asarray(Image.open(file))).rgb
    np.testing.assert_array_equal(read_bgr(file, model.network.normalizer)[..., ::-1], shown)
    resumed = train_detector(None, tmp_path / "run", None, resume=True, device="cpu")
    assert resumed.network.normalizer.method == "macenko"


def test_a_classifier_is_trained_on_normalised_crops(template, tmp_path):
    normalizer = fitted_normalizer("reinhard", template)
    saved = tmp_path / "reinhard.safetensors"
    save_normalizer(normalizer, saved)
    data = write_classes(tmp_path / "data", 4)
    settings = {"epochs": 1, "batch": 4, "input_size": 32, "device": "cpu", "jitter": "hed"}
    model = train_classifier(
        data, tmp_path / "run", SMALL, "lstainnorm", normalizer=saved, **settings
    )
    assert model.network.normalizer.method == "reinhard"
    assert model.network.front_end == "lstainnorm"
    record = model.info["training"]
    assert record["settings"]["normalizer"] == "reinhard.safetensors"
    assert "--normalizer=reinhard.safetensors --jitter=hed" in record["command"]
    assert model.info["stain_seen"]
    further = train_classifier(data, tmp_path / "further", model=model, **settings)
    assert further.network.normalizer.method == "reinhard"
