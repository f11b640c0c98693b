"""Layouts of networks: those of Ultralytics pass, and nothing that runs code or eats memory."""

import copy
import json
from pathlib import Path

import pytest
import torch

from napari_beerlanet.core.checkpoints.layout import (
    check_layout,
    check_shapes,
    head_width,
    layer_shapes,
)
from napari_beerlanet.core.detection.network import StainDetectionModel
from napari_beerlanet.core.detection.ultralytics_api import DetectionModel, parse_model, ultralytics

TINY = {
    "nc": 2,
    "reg_max": 1,
    "backbone": [[-1, 1, "Conv", [8, 3, 4]], [-1, 1, "Conv", [8, 3, 2]]],
    "head": [[-1, 1, "C2f", [8]], [[1, 2], 1, "Detect", ["nc"]]],
}
MODELS = Path(ultralytics.__file__).parent / "cfg" / "models"


def detection_layouts():
    """Every detection model that comes with Ultralytics, in all of its sizes."""
    import yaml

    for path in sorted(MODELS.glob("*/*.yaml")):
        layout = yaml.safe_load(path.read_text(encoding="utf-8"))
        if layout["head"] and layout["head"][-1][2] in ("Detect", "v10Detect"):
            for scale in layout.get("scales") or [""]:
                yield pytest.param({**layout, "scale": scale}, id=f"{path.stem}{scale}")


@pytest.mark.parametrize("layout", detection_layouts())
def test_every_detection_model_of_ultralytics_passes(layout):
    checked = check_layout(json.loads(json.dumps(layout)))
    assert [row[2] for row in checked["backbone"]] == [row[2] for row in layout["backbone"]]
    assert check_layout(checked) == checked


def test_shapes_are_those_of_the_network():
    layout = check_layout({**TINY, "activation": "nn.ReLU()", "yaml_file": "/home/me/a.yaml"})
    assert layout["yaml_file"] == "a.yaml"
    network = DetectionModel(copy.deepcopy(layout), nc=2, verbose=False)
    own = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    assert layer_shapes(layout, parse_model) == own
    assert isinstance(network.model[0].act, torch.nn.ReLU)
    check_shapes(own, own)


@pytest.mark.parametrize("name", ["yolov8n.yaml", "yolo11n.yaml", "yolo26n.yaml", "yolov10n.yaml"])
def test_shapes_of_a_head_that_kept_its_width(name):
    """Ultralytics keeps the class branch of pretrained weights: 80 wide, for three classes."""
    network = DetectionModel(name, nc=3, verbose=False)
    before = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    network.load(DetectionModel(name, nc=80, verbose=False), verbose=False)
    own = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    layout = check_layout(network.yaml)
    assert own != before
    assert head_width(layout, own) == 80
    assert layer_shapes(layout, parse_model, 80) == own
    assert layer_shapes(layout, parse_model, head_width(layout, before)) == before


def test_scale_is_named():
    layout = {**TINY, "scales": {"n": [0.5, 0.5, 1024], "a": [1.0, 2.0, 1024]}}
    assert check_layout(layout)["scales"] == {"n": [0.5, 0.5, 1024]}


def changed(**entries):
    return {**copy.deepcopy(TINY), **entries}


def row(*values):
    """TINY with another first layer."""
    return changed(backbone=[list(values), TINY["backbone"][1]])


CODE = "__import__('os').mkdir('ran')"
EVIL = {
    "activation runs code": changed(activation=CODE),
    "activation hides code": changed(activation=f"nn.SiLU({CODE})"),
    "activation is no text": changed(activation=["nn.SiLU()"]),
    "argument is code": row(-1, 1, "Conv", [CODE, 3, 2]),
    "argument names a variable": row(-1, 1, "Conv", ["d", 3, 2]),
    "layer downloads": row(-1, 1, "TorchVision", [64, "resnet18", "DEFAULT"]),
    "layer of torchvision": row(-1, 1, "torchvision.ops.Conv2dNormActivation", [3, 8]),
    "layer is no layer": row(-1, 1, "nn.init", []),
    "layer is a function": row(-1, 1, "torch_safe_load", ["second.pt"]),
    "layer has no name": row(-1, 1, None, []),
    "another head": changed(head=[[[1], 1, "RTDETRDecoder", ["nc"]]]),
    "no head": changed(head=TINY["head"][:1]),
    "head of another count": changed(head=[TINY["head"][0], [[1, 2], 1, "Detect", [80]]]),
    "two heads": changed(head=[[[1], 1, "Detect", ["nc"]], [[1, 2], 1, "Detect", ["nc"]]]),
    "channels": row(-1, 1, "Conv", [10**9, 3, 2]),
    "channels by width": changed(width_multiple=1e9),
    "channels of a scale": changed(scales={"n": [1, 1e9, 1e9]}, scale="n"),
    "repeats": row(-1, 10**9, "C2f", [8]),
    "repeats by depth": changed(depth_multiple=1e9),
    "repeats that add up": changed(backbone=[[-1, 64, "C2f", [8]]] * 200),
    "layers": changed(backbone=TINY["backbone"] * 1000),
    "enlarged much": row(-1, 1, "nn.Upsample", [None, 10**6, "nearest"]),
    "enlarged to a size": row(-1, 1, "nn.Upsample", [10**6, None, "nearest"]),
    "zero padding": row(-1, 1, "nn.ZeroPad2d", [10**6]),
    "from nowhere": row(-2, 1, "Conv", [8, 3, 2]),
    "from later": row(3, 1, "Conv", [8, 3, 2]),
    "from a text": row("x", 1, "Conv", [8, 3, 2]),
    "from a list": row([-1], 1, "Conv", [8, 3, 2]),
    "classes": changed(nc=10**9),
    "no classes": changed(nc=0),
    "classes are no number": changed(nc=CODE),
    "bins": changed(reg_max=10**6),
    "channels of the image": changed(channels=4),
    "row": changed(backbone=["Conv", "Conv"]),
    "short row": changed(backbone=[[-1, 1, "Conv"]]),
    "nested": row(-1, 1, "SPP", [8, [[[5]]]]),
    "not a number": row(-1, 1, "Conv", [8, float("nan"), 2]),
}


@pytest.mark.parametrize("layout", EVIL.values(), ids=EVIL)
def test_layout_is_refused_before_it_is_built(layout, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.nn.Module, "__init__", lambda *_, **__: pytest.fail("built"))
    with pytest.raises(ValueError, match=r"model layout|layer|activation|network"):
        check_layout(layout)
    assert not list(tmp_path.iterdir())


COSTLY = {
    "enlarged by repeats": changed(
        backbone=[
            [-1, 1, "Conv", [8, 3, 2]],
            [-1, 1, "Conv", [8, 3, 2]],
            [-1, 64, "nn.Upsample", [None, 2, "nearest"]],
            [-1, 1, "Conv", [8, 3, 2]],
        ],
        head=[[[1, 3], 1, "Detect", ["nc"]]],
    ),
    "enlarged by repeats of weights": changed(
        backbone=[
            [-1, 1, "Conv", [8, 3, 2]],
            [-1, 1, "Conv", [8, 3, 2]],
            [-1, 8, "nn.ConvTranspose2d", [8, 2, 2]],
            [-1, 1, "Conv", [8, 3, 2]],
        ],
        head=[[[1, 3], 1, "Detect", ["nc"]]],
    ),
    "wide at full size": row(-1, 1, "Conv", [8192, 1, 1]),
    "attention at full size": changed(
        backbone=[[-1, 1, "Conv", [128, 1, 1]], [-1, 1, "PSA", [128]]]
    ),
    "stride zero": row(-1, 1, "Conv", [8, 3, 0]),
    "kernels at full size": row(-1, 1, "Conv", [400, 16, 1]),
}


@pytest.mark.parametrize("layout", COSTLY.values(), ids=COSTLY)
def test_a_network_that_would_take_much_is_not_built(layout):
    """Ultralytics sends an image through it while it builds it."""
    with pytest.raises((ValueError, RuntimeError), match=r"more than any detection|stride"):
        StainDetectionModel(check_layout(layout))


def test_weights_are_counted_before_there_are_any():
    """225 bytes of layout were 64 GB."""
    wide = [[-1, 1, "Conv", [8192, 3, 8]], *[[-1, 1, "Conv", [8192, 16, 2]]] * 4]
    head = [[-1, 1, "Conv", [64, 3, 1]], [[5], 1, "Detect", ["nc"]]]
    layout = check_layout(changed(backbone=wide, head=head))
    with pytest.raises(ValueError, match="more weights than any detection model"):
        layer_shapes(layout, parse_model)


def test_layers_that_do_not_fit_are_told_and_leave_no_trace():
    from ultralytics.nn.modules import Conv

    usual = Conv.default_act
    layout = check_layout({**row(-1, 1, "SPP", [8, 5]), "activation": "nn.ReLU()"})
    with pytest.raises(ValueError, match="do not fit together"):
        layer_shapes(layout, parse_model)
    assert Conv.default_act is usual


@pytest.mark.parametrize(
    ("found", "sentence"),
    [({}, "lacks 1"), ({"a": (2,), "b": (1,)}, "no place"), ({"a": (3,)}, "has shape")],
)
def test_shapes_that_differ(found, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_shapes(found, {"a": (2,)})
