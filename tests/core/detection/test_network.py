"""The front end before a YOLO network: exact, and alive after all that is done to models."""

import copy
import os
import pickle
import random
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from napari_beerlanet.core.detection.network import PADDING, StainDetectionModel
from napari_beerlanet.core.training.trainer.data import StainJitter
from napari_beerlanet.samples import blood_smear


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = StainDetectionModel("yolov8n.yaml", nc=3, imgsz=96)
    model.fit_mix()
    model.args = SimpleNamespace(box=7.5, cls=0.5, dfl=1.5)
    return model.eval()


@pytest.fixture
def images():
    """(2, 3, 96, 96) in [0, 1]: a smear, and one with grey below."""
    fields = [blood_smear((96, 96), seed=k, cell_diameter=30.0).image for k in range(2)]
    fields[1][64:] = 114
    return torch.from_numpy(np.stack(fields).transpose(0, 3, 1, 2).copy()).float() / 255


def test_keys_of_the_network_are_ultralytics_own(model):
    learned = {"stain.raw_spectra", "stain.log_lam", "stain.log_gamma", "mix.weight", "mix.bias"}
    assert {k for k, _ in model.named_parameters() if not k.startswith("model.")} == learned
    assert {k.split(".")[0] for k in model.state_dict()} == {"model", "stain", "mix"}


def test_reading_colours_equals_reading_pixels(model, images):
    with torch.no_grad():
        seen = model.apply_front_end(images)
        every_pixel = model.mix(model.stain(images)).clamp(max=1).exp()
    grey = (images == torch.tensor(114 / 255)).all(1, keepdim=True).expand_as(images)
    torch.testing.assert_close(seen[~grey], every_pixel[~grey], atol=1e-5, rtol=0)


def test_start_resembles_the_picture(model, images):
    with torch.no_grad():
        seen = model.apply_front_end(images[:1])[0].flatten(1).numpy()
    shown = images[0].flatten(1).numpy()
    for k in range(3):
        assert np.corrcoef(seen[k], shown[k])[0, 1] > 0.75
    assert np.abs(seen.mean(1) - shown.mean(1)).max() < 0.15


def test_start_fitted_to_images_is_close_to_them(model, images):
    fitted = copy.deepcopy(model)
    pictures = [np.ascontiguousarray(255 * images[0].permute(1, 2, 0).numpy()).round()]
    error = fitted.fit_mix([picture.astype(np.uint8) for picture in pictures])
    with torch.no_grad():
        found = (fitted.apply_front_end(images[:1]) - images[:1]).square().mean().sqrt()
    assert found == pytest.approx(error, abs=1e-3)
    assert error < 0.03


def test_padding_stays_grey_and_changes_nothing_else(model, images):
    with torch.no_grad():
        seen, cut = model.apply_front_end(images), model.apply_front_end(images[1:, :, :64])
    assert torch.equal(seen[1, :, 64:], torch.full_like(seen[1, :, 64:], PADDING))
    torch.testing.assert_close(seen[1, :, :64], cut[0], atol=1e-5, rtol=0)


def test_result_does_not_depend_on_the_batch(model, images):
    with torch.no_grad():
        torch.testing.assert_close(
            model.apply_front_end(images)[:1], model.apply_front_end(images[:1])
        )


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_see_the_same(model, images, how):
    other = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        assert torch.equal(other.apply_front_end(images), model.apply_front_end(images))


def test_half_leaves_the_stain_in_float32(model, images):
    half = copy.deepcopy(model).half()
    assert half.model[0].conv.weight.dtype == torch.float16
    assert {p.dtype for m in (half.stain, half.mix) for p in m.parameters()} == {torch.float32}
    for ours, before in zip(half.stain.parameters(), model.stain.parameters(), strict=True):
        assert torch.equal(ours, before)
    with torch.no_grad():
        seen = half.apply_front_end(images.half())
    assert seen.dtype == torch.float16
    torch.testing.assert_close(
        seen.float(), model.apply_front_end(images).detach(), atol=2e-3, rtol=0
    )


def test_fused_network_finds_the_same(model, images):
    with torch.no_grad():
        before = model(images)[0]
        after = copy.deepcopy(model).fuse(verbose=False)(images)[0]
    torch.testing.assert_close(before, after, atol=1e-2, rtol=1e-3)


@pytest.mark.filterwarnings("ignore")  # tracing warns of every Python number
def test_exported_network_sees_other_images_as_this_one_does(model, images):
    """A trace must hold the solver, not its results for the image that it was traced with."""
    still = copy.deepcopy(model)
    for parameter in still.parameters():
        parameter.requires_grad_(False)
    with torch.no_grad():
        traced = torch.jit.trace_module(still, {"apply_front_end": images[:1]}, check_trace=False)
        other = images[:1].flip(2) * 0.9
        torch.testing.assert_close(
            traced.apply_front_end(other), still.apply_front_end(other), atol=1e-5, rtol=1e-4
        )


def test_ultralytics_strips_the_optimizer_of_its_own_files(model, images, tmp_path):
    from ultralytics.utils.torch_utils import strip_optimizer

    file = tmp_path / "last.pt"
    trained = copy.deepcopy(model)
    trained.args = vars(trained.args)
    record = {"model": trained, "ema": None, "optimizer": {}, "epoch": 3}
    torch.save({**record, "train_args": {}}, file)
    strip_optimizer(file)
    kept = torch.load(file, weights_only=False)["model"].float()
    with torch.no_grad():
        torch.testing.assert_close(
            kept.apply_front_end(images), model.apply_front_end(images), atol=1e-6, rtol=0
        )


def test_loss_reaches_every_stain_parameter(model, images):
    learner = copy.deepcopy(model).train()
    boxes = torch.tensor([[0.5, 0.5, 0.3, 0.3], [0.3, 0.3, 0.2, 0.2]])
    batch = {"img": images, "cls": torch.zeros(2, 1), "bboxes": boxes}
    loss, _ = learner({**batch, "batch_idx": torch.tensor([0.0, 1.0])})
    loss.sum().backward()
    for parameter in (*learner.stain.parameters(), *learner.mix.parameters()):
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
        assert parameter.grad.abs().sum() > 0


def test_other_than_three_channels_are_refused():
    with pytest.raises(ValueError, match="RGB"):
        StainDetectionModel("yolov8n.yaml", ch=4)


def test_jitter_keeps_padding_and_shape():
    random.seed(0)
    image = blood_smear((64, 64), seed=1, cell_diameter=30.0).image
    image[:16] = 114
    changed = StainJitter(share=1.0, focus=1.0)({"img": image.copy()})["img"]
    assert changed.shape == image.shape
    assert changed.dtype == np.uint8
    assert (changed[:16] == 114).all()
    assert (changed[16:] != image[16:]).any()


def test_jitter_of_nothing_changes_only_the_light():
    image = blood_smear((64, 64), seed=1, noise=0.0, jpeg_quality=None).image
    still = StainJitter(dyes=0.0, strength=0.0, light=(1.0, 1.0), cast=0.0, share=1.0)
    changed = still({"img": image.copy()})["img"].astype(float)
    ratio = changed / image
    assert ratio.std(axis=(0, 1)).max() < 0.02


def test_importing_ultralytics_leaves_the_environment_alone(tmp_path):
    code = (
        "import os, warnings, numpy, torch, torchvision, PIL.Image; before = dict(os.environ)\n"
        "import cv2; os.environ.clear(); os.environ.update(before)\n"
        "cv2.setNumThreads(2)\n"
        "def traces():\n"
        "    return (PIL.Image.open, torch.save, cv2.getNumThreads(), list(warnings.filters),\n"
        "        repr(numpy.linspace(0, 1, 40)), repr(torch.linspace(0, 1, 40)))\n"
        "patched = traces()\n"
        "import napari_beerlanet.core.detection.ultralytics_api\n"
        "assert patched == traces(), (patched, traces())\n"
        "print(sorted(dict(os.environ.items() ^ before.items())))"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("YOLO", "QT_", "OMP"))}
    environment["NAPARI_BEERLANET_CACHE"] = str(tmp_path / "cache")
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == "['YOLO_AUTOINSTALL', 'YOLO_CONFIG_DIR', 'YOLO_OFFLINE']"
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
