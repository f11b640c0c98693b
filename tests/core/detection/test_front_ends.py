"""Detectors without BeerLaNet, in grey, or behind LStainNorm: their files, images and slides."""

import copy
import hashlib

import numpy as np
import pytest
import torch

from discs import SIZES
from napari_beerlanet.core.boxes.detections import DOMAIN_SHIFT_COLUMN
from napari_beerlanet.core.checkpoints.checkpoint import (
    CheckpointError,
    checkpoint_hash,
    has_spectra,
    learned_spectra,
    load_checkpoint,
    read_info,
    save_checkpoint,
)
from napari_beerlanet.core.checkpoints.serialize import describe_network
from napari_beerlanet.core.detection.detector import Detector
from napari_beerlanet.core.detection.network import StainDetectionModel
from napari_beerlanet.core.detection.slide_detector import detect_slide
from napari_beerlanet.core.detection.stain_statistics import AnnotatedSample, detection_warnings
from napari_beerlanet.core.stains.front_end import fit_stain, weights_digest
from napari_beerlanet.core.stains.settings import FRONT_ENDS
from napari_beerlanet.core.training.monitor import describe_training_domain
from napari_beerlanet.samples import blood_smear
from tinydata import MODEL, NAMES

OTHERS = [name for name in FRONT_ENDS if name != "beerlanet"]


def tiny_detector(front_end, **settings):
    torch.manual_seed(3)
    network = StainDetectionModel(
        copy.deepcopy(MODEL), nc=3, imgsz=128, components=3, front_end=front_end, **settings
    ).eval()
    with torch.no_grad():  # that it is sure of something
        for branch in network.model[-1].cv3:
            branch[-1].bias += 5.0
    return Detector(
        network, describe_network(network, "tiny", list(NAMES), 128, object_sizes=SIZES)
    )


@pytest.fixture(scope="module", params=OTHERS)
def detector(request):
    return tiny_detector(request.param)


@pytest.fixture(scope="module")
def smear():
    return blood_smear((150, 170), seed=4, cell_diameter=40.0).image


def boxes(found):
    everything = found.candidates if found.candidates is not None else found
    order = np.lexsort(everything.xyxy.T)
    return everything.xyxy[order], everything.scores[order]


def test_a_file_brings_it_back(detector, smear, tmp_path):
    path = tmp_path / "tiny.safetensors"
    save_checkpoint(detector, path)
    back = load_checkpoint(path, "cpu")
    front_end = detector.network.front_end
    assert back.network.front_end == back.info["front_end"] == front_end
    assert not has_spectra(read_info(path))
    own = {name for name in detector.network.state_dict() if not name.startswith("model.")}
    assert bool(own) == (front_end == "lstainnorm")
    for name in own:
        assert torch.equal(back.network.state_dict()[name], detector.network.state_dict()[name])
    again = tmp_path / "again.safetensors"
    save_checkpoint(back, again)
    assert again.read_bytes() == path.read_bytes()
    halves = detector.network.state_dict()
    detector.network.load_state_dict(
        {
            k: v.half().float() if v.is_floating_point() and k not in own else v
            for k, v in halves.items()
        }
    )
    detector._runner = None
    a, b = (
        boxes(detector.detect(smear, object_size=40.0)),
        boxes(back.detect(smear, object_size=40)),
    )
    np.testing.assert_array_equal(a[0], b[0])
    np.testing.assert_array_equal(a[1], b[1])
    assert len(a[0]) > 3


def test_layer_0_gets_what_is_said(smear):
    image = torch.from_numpy(smear.transpose(2, 0, 1).copy())[None].float() / 255
    seen = {
        name: tiny_detector(name).network.apply_front_end(image).detach() for name in FRONT_ENDS
    }
    assert torch.equal(seen["none"], image)
    grey = (image * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1, keepdim=True)
    torch.testing.assert_close(seen["grey"], grey.expand_as(image))
    assert (seen["lstainnorm"] - image).abs().max() > 0.02
    assert (seen["lstainnorm"] - seen["beerlanet"]).abs().max() > 0.02


def test_tiles_and_slides_get_what_images_get(detector, smear):
    fit = fit_stain(detector.network, smear)
    whole = fit.mix_tiles(detector.network, smear[None])
    image = torch.from_numpy(smear.transpose(2, 0, 1).copy())[None].float() / 255
    direct = detector.network.apply_front_end(image).detach()
    torch.testing.assert_close(whole, direct, atol=1e-5, rtol=0)
    if detector.network.front_end != "lstainnorm":  # whose attention sees a tile
        part = fit.mix_tiles(detector.network, np.ascontiguousarray(smear[None, 20:90, 30:100]))
        torch.testing.assert_close(part, whole[..., 20:90, 30:100], atol=1e-6, rtol=0)
    by_slide = detect_slide(detector, [smear], object_size=40.0, skip_glass=False)
    by_image = detector.detect(smear, object_size=40.0)
    for mine, other in zip(boxes(by_slide), boxes(by_image), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-3)


def test_lstainnorm_standardises_a_tile_as_its_image(smear):
    """A tile of nothing but a dark cell is not taken for a dark slide."""
    network = tiny_detector("lstainnorm").network
    fit = fit_stain(network, smear)
    statistics = network.lstainnorm.statistics(
        torch.from_numpy(smear.transpose(2, 0, 1).copy())[None].float() / 255
    )
    np.testing.assert_allclose(fit.statistics, statistics[0], atol=1e-5)


def test_no_stain_channels_is_one_sentence(detector, smear, tmp_path):
    with pytest.raises(ValueError, match=r"^This detector has no stain front end .*by itself\.$"):
        detector.decompose(smear)
    found = detector.detect(smear, object_size=40.0)
    assert not [name for name in found.columns if name.startswith("Model channel")]
    path = tmp_path / "tiny.safetensors"
    save_checkpoint(detector, path)
    with pytest.raises(CheckpointError, match="it has no spectra of a stain front end"):
        learned_spectra(path)


def test_warnings_of_another_domain_stay(detector, smear):
    corners = 12 * np.arange(8, dtype=np.float32)[:, None]
    boxes = np.hstack([corners, corners, corners + 30, corners + 30])
    sample = [AnnotatedSample(smear, boxes, np.zeros(8, np.int64))]
    seen = describe_training_domain(detector.network, sample, detector.info)
    model = Detector(detector.network, {**detector.info, **seen})
    usual = model.detect(smear, object_size=40.0)
    assert not [w for w in detection_warnings(model.info, usual) if "colour" in w or "light" in w]
    assert DOMAIN_SHIFT_COLUMN in usual.columns
    odd = model.detect(255 - smear, object_size=40.0)
    assert any("background" in warning for warning in detection_warnings(model.info, odd))


def test_digests_tell_front_ends_apart(smear):
    """A search that was begun with another front end is not resumed."""
    none, grey = (tiny_detector(name).network for name in ("none", "grey"))
    assert weights_digest(none) != weights_digest(grey)


def test_files_with_beerlanet_stay_the_same(tmp_path):
    """To the byte: their hashes name the models that trainings began with."""
    model = load_checkpoint("blood-cells", "cpu")
    assert "front_end" not in model.info
    path = tmp_path / "again.safetensors"
    save_checkpoint(model, path)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == checkpoint_hash("blood-cells")


@pytest.mark.parametrize("wrong", ["macenko", 3])
def test_an_unknown_front_end_is_refused(wrong, tmp_path):
    detector = tiny_detector("none")
    detector.network.front_end = wrong
    with pytest.raises(CheckpointError, match="front_end must be one of"):
        save_checkpoint(detector, tmp_path / "wrong.safetensors")
