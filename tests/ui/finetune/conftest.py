"""What the tests of the panel "Fine-tune" share: the panel, a small detector, and patience."""

import pytest
import torch

from napari_beerlanet.core.checkpoints.serialize import describe_network
from napari_beerlanet.core.detection.detector import Detector
from napari_beerlanet.core.detection.network import StainDetectionModel
from napari_beerlanet.ui.finetune import run_view
from napari_beerlanet.ui.finetune.widget import FineTuneWidget
from tinydata import MODEL, NAMES


@pytest.fixture
def until(qtbot):
    """As for all panels, with the patience that processes need on a busy machine."""
    return lambda condition, timeout=300_000: qtbot.waitUntil(condition, timeout=timeout)


@pytest.fixture(scope="session")
def tiny():
    """A detector that has learned nothing."""
    torch.manual_seed(0)
    network = StainDetectionModel(MODEL, nc=3, imgsz=64)
    network.fit_mix()
    return Detector(network, describe_network(network, "tiny", list(NAMES), 64))


@pytest.fixture
def panel(shared_viewer, monkeypatch):
    """The panel in a dock; a training that still runs at the end is killed."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(run_view, "lower_priority", lambda process: None)
    viewer = shared_viewer()
    made = FineTuneWidget(viewer)
    made.close_confirmation.ask = lambda: "continue"
    viewer.window.add_dock_widget(made, name="Fine-tune")
    yield made
    if made.run_view.process is not None:
        made.run_view.process.kill()
    made.shut_down()
