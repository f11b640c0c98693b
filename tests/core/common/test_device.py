"""Devices: what there is is picked, what there is not is refused in a sentence."""

import subprocess
import sys

import pytest
import torch

from napari_beerlanet.core.common import device
from napari_beerlanet.core.common.device import available_devices, describe_device, pick_device


def test_the_cpu_is_always_there_and_last():
    assert available_devices()[-1] == "cpu"
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device(torch.device("cpu")) == torch.device("cpu")
    assert describe_device(torch.device("cpu")) == "CPU"


def test_auto_takes_the_first(monkeypatch):
    assert str(pick_device("auto")) == available_devices()[0]
    monkeypatch.setattr(device, "available_devices", lambda: ["cuda:0", "cpu"])
    assert pick_device() == torch.device("cuda:0")


@pytest.mark.parametrize("name", ["warp", "", "gpu", "cuda:x"])
def test_no_device_name(name):
    with pytest.raises(ValueError, match=r'is no device name; use "auto" or one of .*cpu\.$'):
        pick_device(name)


@pytest.mark.parametrize("name", ["cuda", "cuda:3", "mps", "xpu"])
def test_a_device_that_is_not_here(monkeypatch, name):
    monkeypatch.setattr(device, "available_devices", lambda: ["cpu"])
    with pytest.raises(ValueError, match=rf'^This machine has no "{name}"; it has cpu\.$'):
        pick_device(name)


def test_a_second_gpu_that_is_not_here(monkeypatch):
    monkeypatch.setattr(device, "available_devices", lambda: ["cuda:0", "cpu"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert pick_device("cuda") == torch.device("cuda")
    with pytest.raises(ValueError, match='no "cuda:1"; it has cuda:0, cpu'):
        pick_device("cuda:1")


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is loaded elsewhere")
def test_torchs_library_is_loaded_before_torch_is_imported():
    code = """if True:
        import sys
        from napari_beerlanet.core.common.device import preload_torch
        preload_torch()
        assert "torch" not in sys.modules
        assert "libtorch_cpu" in open("/proc/self/maps").read()
        import torch
        preload_torch()
        print(float(torch.ones(3).sum()))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "3.0", done.stderr
