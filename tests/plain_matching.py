"""Greedy matching of boxes in plain Python, to test the fast one against."""

from napari_beerlanet.core.boxes.geometry import iou


def plain_matches(found, true, limit, scores, found_labels=None, true_labels=None):
    """The highest score first, each takes the free box of its class with the largest IoU."""
    shared = iou(found, true)
    taken = [-1] * len(found)
    for i in sorted(range(len(found)), key=lambda i: (-scores[i], i)):
        free = [
            j
            for j in range(len(true))
            if j not in taken and (found_labels is None or found_labels[i] == true_labels[j])
        ]
        best = max(free, key=lambda j: (shared[i, j], -j), default=None)
        if best is not None and shared[i, best] >= limit:
            taken[i] = best
    return taken
