"""Geometry of boxes: overlaps, conversions, clipping."""

import numpy as np
import torch
import torchvision
from hypothesis import given
from hypothesis import strategies as st

from napari_beerlanet.core.boxes import geometry
from napari_beerlanet.core.boxes.geometry import iou
from random_boxes import box_sets


def test_overlaps_by_hand():
    a = np.array([[0, 0, 4, 4], [2, 2, 2, 5]], np.float32)
    b = np.array([[2, 0, 6, 4], [1, 1, 2, 2], [9, 9, 10, 10], [2, 2, 2, 5]], np.float32)
    np.testing.assert_array_equal(geometry.intersection(a, b)[0], [8, 1, 0, 0])
    np.testing.assert_allclose(iou(a, b), [[1 / 3, 1 / 16, 0, 0], [0, 0, 0, 0]])
    assert iou(a, b[:0]).shape == (2, 0)


def test_overlap_of_far_boxes_is_not_lost_to_rounding():
    """In float32, areas of a slide's larger boxes differ by more than the overlap of small ones."""
    box = np.array([[60_000, 60_000, 64_097, 64_097]], np.float32)
    assert iou(box, box)[0, 0] == 1
    assert geometry.area(box)[0] == 4097**2


@given(box_sets())
def test_iou_is_torchvisions(made):
    xyxy = made[0].astype(np.float64)
    theirs = torchvision.ops.box_iou(torch.tensor(xyxy), torch.tensor(xyxy)).numpy()
    np.testing.assert_allclose(iou(xyxy, xyxy), np.nan_to_num(theirs), atol=1e-12)


@given(box_sets(), st.sampled_from([None, (480, 640), (4000, 7)]))
def test_centres_and_back(made, shape):
    xyxy = made[0]
    np.testing.assert_allclose(
        geometry.cxcywh_to_xyxy(geometry.xyxy_to_cxcywh(xyxy, shape), shape), xyxy, atol=1e-6
    )


def test_centres_by_hand():
    box = np.array([[3, 10, 6, 30]], np.float32)
    assert geometry.xyxy_to_cxcywh(box).tolist() == [[4.5, 20, 3, 20]]
    assert geometry.xyxy_to_cxcywh(box, (100, 10)).tolist() == [[0.45, 0.2, 0.3, 0.2]]


def test_scaling_moving_and_clipping():
    box = np.array([[3, 10, 6, 30]], np.float32)
    assert geometry.scale(box, 2).tolist() == [[6, 20, 12, 60]]
    assert geometry.scale(box, 2, 0.5).tolist() == [[6, 5, 12, 15]]
    assert geometry.translate(box, -4, 5).tolist() == [[-1, 15, 2, 35]]
    assert geometry.clip(geometry.translate(box, -4, 5), (20, 100)).tolist() == [[0, 15, 2, 20]]
    outside = geometry.clip(geometry.translate(box, 500, 0), (100, 100))
    assert geometry.area(outside).tolist() == [0]
    for moved in (geometry.scale(box, 0.3), geometry.translate(box, 0.1, 0), outside):
        assert moved.dtype == np.float32
