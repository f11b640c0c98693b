"""Boxes, and folders of images with their boxes, that the tests of readers and writers share."""

import numpy as np
from PIL import Image as Picture

from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.formats.yolo import write_yolo

NAMES = ["RBC", "WBC", 'a "b", <c>\né']
SHAPE = (100, 120)


def some(n=6, shape=SHAPE, names=NAMES, seed=0):
    random = np.random.default_rng(seed)
    corner = random.uniform(0, 0.7, (n, 2)) * (shape[1], shape[0])
    columns = {
        "id": np.arange(n),
        "status": random.choice(["accepted", "rejected"], n),
        "Model channel 1 mean": random.random(n).astype(np.float32),
    }
    boxes = np.hstack([corner, corner + random.uniform(3, 20, (n, 2))])
    labels, scores = random.integers(0, len(names), n), random.uniform(0.1, 1, n)
    return Detections(boxes, labels, scores, names, columns, image_shape=shape)


def yolo_folder(folder, sizes):
    for part in ("images", "labels"):
        (folder / part).mkdir(parents=True)
    for k, shape in enumerate(sizes):
        Picture.fromarray(np.full((*shape, 3), k, np.uint8)).save(folder / f"images/{k}.png")
        d = some(3 + k, shape, ["a", "b"], seed=k)
        write_yolo(folder / f"labels/{k}.txt", d, confidence=False)
    (folder / "data.yaml").write_text("train: images\nval: images\nnames: [RBC, WBC]\n")
