"""The table of `benchmarks/device.py`."""

import sys

import numpy as np
import pytest
import torch

from napari_beerlanet.core.boxes.detections import RawDetections

STAGES = ("colours", "pixels", "forward", "backward", "load", "detect", "training step")


@pytest.fixture
def script(root, monkeypatch):
    monkeypatch.syspath_prepend(root / "benchmarks")
    import device

    monkeypatch.setattr(device, "TIMED_S", 0.0)
    yield device
    sys.modules.pop("device")


def test_without_a_gpu_the_cpu_alone_is_measured_and_that_is_said(script, capsys):
    script.main(["--device", "cpu", "--side", "128"])
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + len(STAGES)
    for row, stage in zip(rows[1:], STAGES, strict=True):
        assert stage in row
        assert row.rstrip(" |").endswith(" ms")
    assert "Only the CPU was measured" in printed
    assert f"torch {torch.__version__}" in printed


def test_a_stage_that_fails_does_not_hide_the_others(script, monkeypatch):
    def scarce(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def broken(*_):
        raise RuntimeError("not implemented for this device")

    monkeypatch.setattr(script, "_layer", scarce)
    monkeypatch.setattr(script, "_load", broken)
    cells = list(script.measure_device(torch.device("cpu"), "blood-cells", 128).values())
    assert cells[2:4] == ["memory", "memory"]
    assert cells[4] == "failed: not implemented for this device"
    assert cells[5:] == ["no detector", "no detector"]


def test_the_table_compares_two_devices(script):
    def boxes(*corners):
        n = len(corners)
        return RawDetections(
            np.array(corners, np.float32), np.zeros(n, int), np.ones(n, np.float32)
        )

    both = boxes((0, 0, 10, 10), (20, 20, 30, 30))
    cpu = {"a": (0.2, np.zeros(3)), "b": (0.1, both), "c": "memory", "d": (0.1, None)}
    gpu = {"a": (0.1, np.full(3, 1e-6)), "b": (0.2, both[:1]), "c": (0.1, None), "d": "memory"}
    lines = script.speed_table({"CPU": cpu, "cuda:0": gpu})
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["", "CPU", "cuda:0", "ratio", "difference"]
    assert cells[2:] == [
        ["a", "200.0 ms", "100.0 ms", "2.00×", "1.0e-06"],
        ["b", "100.0 ms", "200.0 ms", "0.50×", "50.0 % of 2 boxes"],
        ["c", "memory", "100.0 ms", "", ""],
        ["d", "100.0 ms", "memory", "", ""],
    ]
    assert len({len(line) for line in lines}) == 1
