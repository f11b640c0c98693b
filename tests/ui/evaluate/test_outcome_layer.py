from __future__ import annotations

import numpy as np
from napari.components import ViewerModel

from napari_beerlanet.ui.annotate.annotated_image import AnnotatedImage
from napari_beerlanet.ui.annotate.classes import ClassList
from napari_beerlanet.ui.evaluate.outcome_layer import annotation_layers, region_layers


def test_annotated_regions_are_offered_as_regions_and_not_as_annotations(qtbot):
    viewer = ViewerModel()
    image = viewer.add_image(np.zeros((40, 50, 3), np.uint8), name="smear")
    annotated = AnnotatedImage(image, viewer, ClassList())
    boxes, regions = annotated.boxes.layer, annotated.regions.layer
    assert regions not in region_layers(viewer, image)
    annotated.show_regions()
    drawn = viewer.add_shapes(name="drawn by hand")
    assert annotation_layers(viewer, image) == [boxes, drawn]
    assert regions in region_layers(viewer, image)
