"""How smoothly cells are classified in a window, and how a million typed cells follow the slider.

    xvfb-run -a -s "-screen 0 1400x900x24" python benchmarks/classify_window.py

For each step: the GUI thread's work, and the longest stall, in which the window did not answer (the
largest gap between ticks of a 5 ms timer), as processor time of the GUI thread and by the clock.
On a virtual machine, the processor time of all cores that its host gave to others meanwhile: a
stall with much of it is the machine's, not the window's. Last, the longest collection of garbage,
if above 5 ms: Python's full ones go through all objects that napari and torch consist of. The image
is made up; the classifier is a MobileNetV2 of random weights, as fast as any.
"""

import argparse
import os
import tempfile
import time

os.environ.setdefault("LIBGL_ALWAYS_SOFTWARE", "1")

import napari
import numpy as np
from qtpy.QtWidgets import QTabWidget
from review import Watch, made, spin

from napari_beerlanet.core.boxes.classes import class_colours
from napari_beerlanet.core.checkpoints.serialize import describe_classifier
from napari_beerlanet.core.classification.classifier import Classifier
from napari_beerlanet.core.classification.network import ClassificationNetwork
from napari_beerlanet.core.classification.settings import ClassifierSettings
from napari_beerlanet.ui.classify.widget import ClassifyWidget
from napari_beerlanet.ui.common.session import get_session
from napari_beerlanet.ui.detect.widget import DetectWidget
from napari_beerlanet.ui.detections.detection_layer import DetectionLayer
from napari_beerlanet.ui.review.widget import ReviewWidget

TYPES = ["neutrophil", "eosinophil", "basophil", "lymphocyte", "monocyte"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--boxes", type=int, default=10_000, help="boxes to classify")
    parser.add_argument("--typed", type=int, default=1_000_000, help="boxes that have types")
    parser.add_argument("--input-size", type=int, default=128, help="side of a crop in pixels")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as own:
        os.environ["NAPARI_BEERLANET_CONFIG"] = own
        if options.boxes:
            classify(options.boxes, options.input_size)
        if options.typed:
            follow_slider(options.typed)


def random_classifier(input_size):
    """A MobileNetV2 behind BeerLaNet, untrained."""
    settings = ClassifierSettings(input_size=input_size)
    network = ClassificationNetwork("mobilenet_v2", len(TYPES), settings)
    network.fit_mix()
    return Classifier(network, describe_classifier(network, "random", TYPES))


def show(name, measured, watch=None):
    values = [f"{1e3 * value:.0f} ms" for value in measured]
    if watch is not None:
        values += [f"{1e3 * watch.stolen:.0f} ms stolen"] if watch.stolen else []
        values += [f"{1e3 * watch.collected:.0f} ms garbage"] if watch.collected > 0.005 else []
    print(name, *values, sep="  ", flush=True)


def opened(count, panels, classifier=None):
    """A viewer with that many detections, and panels in tabs of one dock."""
    image, found = made(count)
    viewer = napari.Viewer()
    source = viewer.add_image(image, name="smear")
    if classifier is not None:  # before the panel loads the first packaged one
        get_session(viewer).set_classifier(classifier, "random")
    tabs = QTabWidget()
    shown = [panel(viewer) for panel in panels]
    for panel in shown:
        tabs.addTab(panel, panel.title)
    viewer.window.add_dock_widget(tabs, name="panels", area="right")
    return viewer, source, found, shown


def classify(count, input_size):
    viewer, source, found, (panel, review) = opened(
        count, (ClassifyWidget, ReviewWidget), random_classifier(input_size)
    )
    session = get_session(viewer)
    layer = DetectionLayer(viewer, source, found.above(0.25), class_colours(3))
    session.set_detections(source, layer.detections, layer)
    spin(3)
    watch, started = Watch(), time.perf_counter()
    measured = watch.run(panel.run, lambda: not panel.classify_task.running, 2.0, limit=3600)
    seconds = time.perf_counter() - started
    print(panel.progress_bar.text, f"{len(layer.detections) / seconds:.0f} boxes a second")
    show(f"classify {count:,} boxes", measured, watch)
    for name, action in (
        ("undo", panel.undo),
        ("redo", panel.undo),
        ("colour by class", lambda: layer.set_colour_by("class")),
        ("correct the type of all", lambda: (review.table.selectAll(), review.relabel(1))),
    ):
        show(name, watch.run(action), watch)
    viewer.close()


def follow_slider(count):
    viewer, source, found, (cells, _) = opened(count, (DetectWidget, ClassifyWidget))
    found = found.above(0.25)
    p = np.random.default_rng(0).dirichlet(np.ones(len(TYPES)), count).astype(np.float32)
    for name, detections in (("without types", found), ("with types", found.with_types(TYPES, p))):
        assert len(detections.type_labels) == len(detections)
        layer = DetectionLayer(viewer, source, detections, class_colours(3))
        get_session(viewer).set_detections(source, detections, layer)
        layer.set_colour_by("type")
        spin(5)
        watch = Watch()
        moves = [
            watch.run(lambda k=k, layer=layer: layer.set_filter(0.5 + k / 50), settle=1.0)
            for k in range(5)
        ]
        counted = [watch.run(cells.result.count) for _ in range(5)]
        show(f"{count:,} boxes {name}: slider", np.median(moves, axis=0))
        show(f"{count:,} boxes {name}: counts", np.median(counted, axis=0))
        layer.remove()
        spin(1)
    viewer.close()


if __name__ == "__main__":
    main()
