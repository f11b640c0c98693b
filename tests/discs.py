"""Dark discs on a bright field, and a network whose last part finds them by looking for dark spots.

All that lies before and after (stains, tiles, resolutions, merging, densities) is real, so what
comes out can be compared with what was drawn.
"""

import numpy as np
import torch
from scipy import ndimage

from napari_beerlanet.core.detection.detector import Detector
from napari_beerlanet.core.detection.network import PADDING, StainDetectionModel
from tinydata import MODEL, NAMES

SIZES = {
    "RBC": {"median": 40.0, "low": 30.0, "high": 48.0, "count": 2000},
    "WBC": {"median": 75.0, "low": 60.0, "high": 90.0, "count": 200},
    "Platelets": {"median": 16.0, "low": 10.0, "high": 22.0, "count": 200},
}
_ROOM = 64  # boxes at least; six would be taken for another kind of output


def always(size):
    """Class and score of a dark spot of a size, whatever its size."""
    return 0, 0.9


def trained(size):
    """As a network that was trained on SIZES: small red cells look like platelets, large like white
    cells, and what is far from all it knows is doubtful."""
    known = np.array([SIZES[name]["median"] for name in NAMES])
    off = np.log(size / known)
    label = int(np.argmin(np.abs(off)))
    return label, float(0.9 * np.exp(-0.5 * (off[label] / 0.3) ** 2))


class DiscNetwork(StainDetectionModel):
    """Finds dark spots of at least 3 working pixels; `judge` says what they are."""

    judge = staticmethod(always)
    looks = 0

    def predict_mixed(self, mixed):
        self.looks += 1
        found = [self._spots(image) for image in mixed.float().cpu().numpy()]
        out = torch.zeros(len(found), 4 + len(NAMES), max(_ROOM, *(len(f) for f in found), 0))
        for row, spots in enumerate(found):
            for k, (x1, y1, x2, y2) in enumerate(spots):
                label, score = self.judge(np.sqrt((x2 - x1) * (y2 - y1)))
                box = [(x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1]
                out[row, :4, k] = torch.tensor(box)
                out[row, 4 + label, k] = score
        return out

    def _spots(self, image):
        dark = (image[1] < 0.62) & (np.abs(image - PADDING) > 1e-4).any(0)
        numbered, _ = ndimage.label(dark)
        boxes = [
            (s[1].start, s[0].start, s[1].stop, s[0].stop) for s in ndimage.find_objects(numbered)
        ]
        return [b for b in boxes if min(b[2] - b[0], b[3] - b[1]) >= 3]


def disc_detector(judge=always, image_size=320, sizes=SIZES, kind=DiscNetwork, **info):
    """A detector whose network finds discs."""
    torch.manual_seed(0)
    network = kind(dict(MODEL), nc=3, imgsz=image_size)
    network.fit_mix()
    network.judge = judge
    facts = {"name": "discs", "classes": list(NAMES), "image_size": image_size, "pixel_size": None}
    return Detector(network, {**facts, "object_sizes": sizes, **info})


def draw(shape, discs):
    """(H, W, 3) uint8 with discs (cx, cy, diameter) in continuous pixel coordinates."""
    image = np.full((*shape, 3), (232, 226, 236), np.uint8)
    image += (np.indices(shape).sum(0) % 7)[..., None].astype(np.uint8)
    for cx, cy, diameter in discs:
        x1, x2 = max(int(cx - diameter), 0), int(cx + diameter) + 2
        y1, y2 = max(int(cy - diameter), 0), int(cy + diameter) + 2
        part = image[y1:y2, x1:x2]
        y, x = np.indices(part.shape[:2]) + 0.5
        part[np.hypot(x + x1 - cx, y + y1 - cy) <= diameter / 2] = (150, 60, 130)
    return image


def boxes_of(discs):
    """(n, 4) xyxy of discs."""
    cx, cy, diameter = np.array(discs, dtype=float).reshape(-1, 3).T
    half = diameter / 2
    return np.stack([cx - half, cy - half, cx + half, cy + half], 1)


def scattered(shape, diameter, seed=0, share=0.25, spread=0.0):
    """Discs (n, 3) that do not touch, at random places, of about a diameter."""
    random = np.random.default_rng(seed)
    pitch = 1.5 * diameter
    rows, columns = (max(int(n // pitch), 1) for n in shape)
    discs = []
    for i in range(rows):
        for j in range(columns):
            size = diameter * np.exp(spread * random.normal())
            free = max(pitch - 1.1 * size, 0)
            dy, dx = random.uniform(0, free, 2) + size / 2
            if random.random() < 4 * share and i * pitch + dy + size / 2 < shape[0]:
                discs.append((j * pitch + dx, i * pitch + dy, size))
    return [d for d in discs if d[0] + d[2] / 2 < shape[1]]


@torch.no_grad()
def enlivened(network, image, mean=-7.0, spread=4.0):
    """The untrained network with scores from 0 to 1 in an image like this one (H, W, 3)."""
    head = network.eval().model[-1]
    x = torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))[None].float() / 255
    kept = []
    lasts = [branch[-1] for branch in (*head.cv3, *(getattr(head, "one2one_cv3", None) or ()))]
    hooks = [last.register_forward_hook(lambda *a: kept.append((a[0], a[2]))) for last in lasts]
    network(x)
    for hook in hooks:
        hook.remove()
    for last, logits in kept:
        gain = spread / logits.std((0, 2, 3)).clamp(min=1e-9)
        last.bias.copy_(mean - (logits.mean((0, 2, 3)) - last.bias) * gain)
        last.weight.mul_(gain[:, None, None, None])
    return network
