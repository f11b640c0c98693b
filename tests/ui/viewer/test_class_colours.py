"""A class has one colour in all layers of a viewer, and the same one after a restart."""

import numpy as np
import pytest
from napari.utils.colormaps.standardize_color import transform_color

import napari_beerlanet as nb
from napari_beerlanet.core.boxes.classes import class_colours
from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.detection.detector import Detector
from napari_beerlanet.core.formats import write_detections
from napari_beerlanet.core.project.project import Project
from napari_beerlanet.ui.annotate.store import AnnotationStore
from napari_beerlanet.ui.common.session import ClassPalette, get_project_store, get_session
from napari_beerlanet.ui.detections.detection_layer import DetectionLayer
from napari_beerlanet.ui.viewer.layers import role_of

pytestmark = pytest.mark.window
SHAPE = (60, 80)


def boxes(names: list[str]) -> Detections:
    """One box of each class."""
    corner = np.arange(len(names))[:, None] * 12.0
    xyxy = np.hstack([corner, corner, corner + 10, corner + 10])
    return Detections(xyxy, np.arange(len(names)), np.full(len(names), 0.9), names)


def edge_colours(layer) -> dict[str, str]:
    """By class, as they are drawn."""
    eight = np.rint(255 * np.asarray(layer.edge_color)[:, :3]).astype(int)
    classes = layer.features["class"]
    return {name: f"#{r:02x}{g:02x}{b:02x}" for name, (r, g, b) in zip(classes, eight, strict=True)}


@pytest.fixture(scope="module")
def packaged():
    return nb.load_checkpoint("blood-cells", device="cpu")


@pytest.fixture
def window(shared_viewer):
    """A viewer with an image; every call is another day."""

    def make():
        viewer = shared_viewer()
        return viewer, viewer.add_image(np.full((*SHAPE, 3), 200, np.uint8), name="smear")

    return make


@pytest.fixture
def truth(tmp_path):
    """Annotations in a file, whose classes have another order than the model's."""
    path = tmp_path / "smear.detections.csv"
    write_detections(path, boxes(["WBC", "thing", "RBC"]), "smear", format="csv")
    return path


def test_truth_detections_and_annotations_have_the_same_colours(window, truth, packaged):
    viewer, image = window()
    (from_file,) = viewer.open(truth, plugin="napari-beerlanet")
    assert role_of(from_file) == "boxes"
    get_session(viewer).set_model(packaged, "blood-cells")
    shown = DetectionLayer(viewer, image, boxes(packaged.classes), packaged.info["colours"])
    store = AnnotationStore(viewer)
    store.classes.add(["Platelets", "RBC", "thing", "WBC"])
    expected = dict(zip(packaged.classes, class_colours(3), strict=True))
    assert edge_colours(shown.layer) == expected
    assert {name: store.classes.colour(name) for name in expected} == expected
    there = edge_colours(from_file)
    assert {name: there[name] for name in ("RBC", "WBC")} == {
        n: expected[n] for n in ("RBC", "WBC")
    }
    assert there["thing"] == store.classes.colour("thing") not in expected.values()

    store.classes.recolour("RBC", "#123456")
    assert edge_colours(shown.layer)["RBC"] == edge_colours(from_file)["RBC"] == "#123456"
    other = Detector(
        packaged.network, packaged.info | {"colours": ["#aa0000", "#00aa00", "#0000aa"]}
    )
    get_session(viewer).set_model(other, "other")
    assert edge_colours(shown.layer) == {"RBC": "#123456", "WBC": "#00aa00", "Platelets": "#0000aa"}
    assert edge_colours(from_file)["WBC"] == "#00aa00"


def test_colours_are_the_same_after_a_restart(window, packaged, tmp_path, until):
    viewer, _ = window()
    project = Project.create(tmp_path / "project", ["ring", "RBC"])
    store = AnnotationStore(viewer)
    get_project_store(viewer).put(project)
    store.classes.recolour("ring", "#abcdef")
    until(lambda: project.colours.get("ring") == "#abcdef")
    until(lambda: project.colours.get("RBC") == store.classes.colour("RBC"))
    palette = get_session(viewer).palette
    free = palette.colour("no project has it")
    get_project_store(viewer).release()

    viewer, image = window()
    assert get_session(viewer).palette.colour("no project has it") == free
    (tmp_path / "settings" / "class-colours.json").unlink()  # another machine, the same project
    viewer, image = window()
    with Project.open(tmp_path / "project") as again:
        get_project_store(viewer).put(again)
        shown = DetectionLayer(viewer, image, boxes(["RBC", "ring"]), ["#111111", "#222222"])
        assert edge_colours(shown.layer) == again.colours
        get_project_store(viewer).release()


def test_classes_beside_each_other_never_share_a_colour():
    palette = ClassPalette({"a": "#111111", "b": "#111111"})
    first, second = palette.colours(["a", "b"])
    assert first == "#111111" != second
    assert palette.colours(["b"]) == [second], "and it keeps the new one"
    palette.use_model({"c": "not a colour", "b": second})
    assert palette.colour("b") == second
    with pytest.raises(ValueError, match="A colour is written as"):
        palette.choose("a", "red")
    assert np.allclose(transform_color(palette.colour("c"))[0, 3], 1)
