"""Reviews for tests: detections on a grid, and the review panel in a window."""

import numpy as np

from napari_beerlanet.core.boxes.classes import class_colours
from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.review.review import Review

NAMES = ["RBC", "WBC"]
PICTURE = np.random.default_rng(0).integers(0, 255, (400, 600, 3), np.uint8)


def some(n=40):
    """n boxes of 20 × 20 on a grid, the surest first."""
    x, y = 50.0 * (np.arange(n) % 10) + 10, 60.0 * (np.arange(n) // 10) + 10
    boxes = np.stack([x, y, x + 20, y + 20], 1)
    columns = {"Model channel 1 mean": np.linspace(0, 1, n).astype(np.float32)}
    labels = np.arange(n) % 4 == 3
    scores = np.linspace(0.95, 0.05, n)
    return Detections(boxes, labels.astype(int), scores, NAMES, columns, (400, 600))


def random_review(n, seed=0):
    """n boxes of three classes anywhere, with two columns of densities."""
    rng = np.random.default_rng(seed)
    low = rng.uniform(0, 4000, (n, 2))
    boxes = np.concatenate([low, low + rng.uniform(10, 60, (n, 2))], 1)
    columns = {f"Model channel {k} mean": rng.gamma(2, 0.2, n).astype(np.float32) for k in (1, 2)}
    labels, scores = rng.integers(0, 3, n), rng.uniform(0.01, 1, n)
    return Review(Detections(boxes, labels, scores, ["RBC", "WBC", "Platelets"], columns))


def detected_image(viewer, name="smear", found=None, picture=PICTURE):
    """An image layer in the viewer, and the layer of its detections."""
    from napari_beerlanet.ui.common.session import get_session
    from napari_beerlanet.ui.detections.detection_layer import DetectionLayer

    index = (0,) * (picture.ndim - 3)
    source = viewer.add_image(picture, name=name, scale=(1,) * len(index) + (0.5, 0.5))
    viewer.dims.point = (0,) * viewer.dims.ndim
    found = (some() if found is None else found).above(0.25)
    colours = class_colours(len(found.names))
    detection_layer = DetectionLayer(viewer, source, found, colours, index)
    detection_layer.set_filter(0.25)
    get_session(viewer).set_detections(source, found, detection_layer)
    return source, detection_layer


def open_panel(viewer, until, found=None, picture=PICTURE):
    """The review panel on detections of one picture, with their layer."""
    from napari_beerlanet.ui.review.widget import ReviewWidget

    _, detection_layer = detected_image(viewer, "smear", found, picture)
    panel = ReviewWidget(viewer)
    viewer.window.add_dock_widget(panel)
    until(lambda: panel.autosave.path is not None and len(panel.rows) > 0)
    return viewer, panel, detection_layer


def annotate(viewer, found, drop=(), move=()):
    """The detected boxes as drawn annotations, some left out, some of another class."""
    from napari_beerlanet.ui.viewer.box_shapes import corners_from_boxes

    keep = [k for k in range(len(found)) if k not in drop]
    names = ["WBC" if k in move else NAMES[found.labels[k]] for k in keep]
    return viewer.add_shapes(
        list(corners_from_boxes(found.xyxy[keep])),
        shape_type="rectangle",
        name="truth",
        scale=(0.5, 0.5),
        features={"class": np.array(names, dtype=object)},
    )
