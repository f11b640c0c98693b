"""Files of boxes into napari: on which image, at what place, with which features; bad ones."""

import numpy as np
import pytest
from PIL import Image as Picture

from box_files import NAMES, SHAPE, some, yolo_folder
from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.common.storage import FileError
from napari_beerlanet.core.formats import FORMATS, write_detections
from napari_beerlanet.core.formats.discover import discover_annotations
from napari_beerlanet.core.formats.yolo import write_classes
from napari_beerlanet.ui.io import boxes_reader
from napari_beerlanet.ui.io.boxes_reader import NO_LAYERS, get_reader, read_paths
from napari_beerlanet.ui.viewer.layer_data import detections_from_shapes
from napari_beerlanet.ui.viewer.layers import METADATA_KEY


def file_of(folder, kind, d=None, image="", name="smear"):
    path = folder / f"{name}{FORMATS[kind].suffix}"
    write_detections(path, some() if d is None else d, image, format=kind)
    if kind == "yolo":
        write_classes(folder / "classes.txt", [" ".join(n.split()) for n in NAMES])
    return path


@pytest.fixture
def viewer(monkeypatch):
    """A viewer without a window."""
    import napari
    from napari.components import ViewerModel

    model = ViewerModel()
    monkeypatch.setattr(napari, "current_viewer", lambda: model)
    return model


@pytest.fixture
def no_viewer(monkeypatch):
    import napari

    monkeypatch.setattr(napari, "current_viewer", lambda: None)


def image(shape=SHAPE, leading=()):
    return np.full((*leading, *shape, 3), 200, np.uint8)


def same(read_back, d):
    np.testing.assert_allclose(read_back.xyxy, d.xyxy, atol=0.01)
    np.testing.assert_allclose(read_back.scores, d.scores, atol=1e-6)
    assert [" ".join(read_back.names[k].split()) for k in read_back.labels] == [
        " ".join(d.names[k].split()) for k in d.labels
    ]


# --- onto the image ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(FORMATS))
def test_boxes_come_onto_the_open_image(tmp_path, viewer, kind):
    source = viewer.add_image(
        image(), name="smear", scale=(0.5, 0.25), translate=(10, 20), units=("um", "um")
    )
    reader = get_reader(str(file_of(tmp_path, kind)))
    (data,) = reader(str(file_of(tmp_path, kind)))
    layer = viewer._add_layer_from_data(*data)[0]
    assert layer.scale.tolist() == source.scale.tolist()
    assert layer.translate.tolist() == source.translate.tolist()
    assert layer.units == source.units
    assert len(layer.data) == 6
    (back,) = detections_from_shapes(layer.data, layer._get_state()).values()
    same(back, some())
    # The first box covers the pixels that it says: its corner is half a pixel off the centre.
    x, y = some().xyxy[0, :2] - 0.5
    np.testing.assert_allclose(layer.data[0][0], [y, x], atol=0.01)
    if kind != "yolo":
        assert set(layer.features) == {
            "class",
            "confidence",
            "id",
            "status",
            "Model channel 1 mean",
        }
        assert layer.features["status"].tolist() == some().columns["status"].tolist()
    assert layer.metadata[METADATA_KEY]["source"] == "smear"


def test_boxes_come_onto_the_image_that_the_file_names(tmp_path, viewer):
    viewer.add_image(image(), name="one")
    viewer.add_image(image(), name="two")
    viewer.add_image(image(), name="three")
    path = file_of(tmp_path, "coco", image="sub/two.png", name="annotations")
    assert read_paths(str(path))[0][1]["metadata"][METADATA_KEY]["source"] == "two"
    path = file_of(tmp_path, "geojson", name="one.detections")
    assert read_paths(str(path))[0][1]["metadata"][METADATA_KEY]["source"] == "one"
    viewer.layers.selection.active = viewer.layers["two"]
    path = file_of(tmp_path, "geojson", name="whatever")
    assert read_paths(str(path))[0][1]["metadata"][METADATA_KEY]["source"] == "two"


def test_boxes_come_onto_an_image_of_their_size(tmp_path, viewer):
    viewer.add_image(image(), name="fits")
    viewer.add_image(image((50, 60)), name="other")
    path = file_of(tmp_path, "voc", name="whatever")
    assert read_paths(str(path))[0][1]["metadata"][METADATA_KEY]["source"] == "fits"
    viewer.layers.remove("fits")
    with pytest.raises(FileError, match="an image of 120 x 100 pixels, but this one has 60 x 50"):
        read_paths(str(path))


def test_boxes_come_onto_the_plane_that_is_shown(tmp_path, viewer):
    source = viewer.add_image(image(leading=(4,)), name="stack", scale=(2, 1, 1))
    viewer.dims.set_point(0, 4)
    (data,) = read_paths(str(file_of(tmp_path, "csv")))
    layer = viewer._add_layer_from_data(*data)[0]
    assert layer.ndim == source.ndim
    assert {corner for box in layer.data for corner in box[:, 0]} == {2}
    assert layer.scale.tolist() == [2, 1, 1]


def test_a_coco_file_of_many_images(tmp_path, viewer):
    import json

    path = tmp_path / "annotations.json"
    boxes = [[1, 2, 3, 4], [5, 6, 7, 8]]
    path.write_text(
        json.dumps(
            {
                "images": [{"id": k, "file_name": f"{name}.png"} for k, name in enumerate("ab")],
                "categories": [{"id": 1, "name": "cell"}],
                "annotations": [
                    {"id": k, "image_id": k, "category_id": 1, "bbox": box}
                    for k, box in enumerate(boxes)
                ],
            }
        )
    )
    viewer.add_image(image(), name="c")
    with pytest.raises(FileError, match="has boxes of 2 images, none of which is open"):
        read_paths(str(path))
    viewer.add_image(image(), name="b")
    ((corners, _, _),) = read_paths(str(path))
    assert corners[0].tolist() == [[5.5, 4.5], [5.5, 11.5], [13.5, 11.5], [13.5, 4.5]]


def test_no_boxes_are_a_layer_without_shapes(tmp_path, viewer):
    viewer.add_image(image(), name="smear")
    path = file_of(tmp_path, "yolo", Detections.empty(NAMES, image_shape=SHAPE))
    (data,) = read_paths(str(path))
    assert len(viewer._add_layer_from_data(*data)[0].data) == 0


def test_several_files_at_once(tmp_path, viewer):
    viewer.add_image(image(), name="smear")
    paths = [str(file_of(tmp_path, "csv", name=name)) for name in ("a", "b")]
    assert [data[1]["name"] for data in get_reader(paths)(paths)] == ["a.csv", "b.csv"]


# --- without an image ----------------------------------------------------------------------------


def test_without_an_image_boxes_stand_alone(tmp_path, no_viewer):
    from napari.layers import Layer

    (data,) = read_paths(str(file_of(tmp_path, "geojson")))
    layer = Layer.create(*data)
    assert len(layer.data) == 6
    assert layer.scale.tolist() == [1, 1]


def test_yolo_brings_its_image(tmp_path, no_viewer):
    path = file_of(tmp_path, "yolo")
    with pytest.raises(FileError, match="needs the size of its image; open the image first"):
        read_paths(str(path))
    Picture.fromarray(image()).save(tmp_path / "smear.png")
    (pixels, _, kind), (corners, look, _) = read_paths(str(path))
    assert (pixels.shape, kind) == ((*SHAPE, 3), "image")
    assert len(corners) == 6
    assert look["metadata"][METADATA_KEY]["image"] == "smear.png"


def test_an_image_of_the_same_name_somewhere_else_is_not_taken(tmp_path, no_viewer):
    for name in ("mine", "other"):
        (tmp_path / name).mkdir()
    path = file_of(tmp_path / "mine", "yolo")
    Picture.fromarray(image()).save(tmp_path / "other" / "smear.png")
    with pytest.raises(FileError, match="needs the size of its image"):
        read_paths(str(path))


# --- folders -------------------------------------------------------------------------------------


def test_a_folder_of_yolo_offers_its_images(tmp_path, viewer):
    yolo_folder(tmp_path / "set", [SHAPE, (50, 60), SHAPE])
    assert get_reader(str(tmp_path / "set"))
    layers = [viewer._add_layer_from_data(*data)[0] for data in read_paths(str(tmp_path / "set"))]
    stack, boxes, single, others = layers
    assert stack.data.shape == (2, *SHAPE, 3)
    assert np.asarray(stack.data[1]).max() == 2
    assert boxes.ndim == 3
    planes = [int(box[0, 0]) for box in boxes.data]
    assert (planes.count(0), planes.count(1)) == (3, 5)
    assert set(boxes.features["class"]) <= {"RBC", "WBC"}
    assert single.data.shape == (50, 60, 3)
    assert len(others.data) == 4


def test_a_folder_of_coco_offers_its_images(tmp_path, viewer):
    Picture.fromarray(image()).save(tmp_path / "smear.png")
    file_of(tmp_path, "coco", image="smear.png", name="annotations")
    picture, boxes = read_paths(str(tmp_path))
    assert picture[2] == "image"
    assert len(boxes[0]) == 6


def test_images_of_a_coco_file_are_looked_for_where_coco_has_them(tmp_path):
    for folder in ("set/annotations", "set/val2017", "set/private/deep"):
        (tmp_path / folder).mkdir(parents=True)
    coco = file_of(
        tmp_path / "set/annotations", "coco", image="smear.png", name="instances_val2017"
    )
    Picture.fromarray(image()).save(tmp_path / "set/private/deep/smear.png")
    assert discover_annotations(coco, ()).images == []
    Picture.fromarray(image()).save(tmp_path / "set/val2017/smear.png")
    assert [p.image for p in discover_annotations(coco, ()).images] == [
        tmp_path / "set/val2017/smear.png"
    ]


def test_images_outside_of_the_folder_are_not_opened(tmp_path, viewer, monkeypatch):
    told = []
    monkeypatch.setattr(boxes_reader, "_notify", told.extend)
    yolo_folder(tmp_path / "secret", [SHAPE])
    yolo_folder(tmp_path / "set", [SHAPE])
    text = f"train: [images, {tmp_path / 'secret/images'}]\nnames: [RBC, WBC]\n"
    (tmp_path / "set/data.yaml").write_text(text)
    layers = read_paths(str(tmp_path / "set"))
    assert [data[1]["name"] for data in layers] == ["0.png", "0.png · boxes"]
    assert any("1 of its images lie outside of it" in note for note in told)
    (tmp_path / "set/data.yaml").write_text("train: ../secret/images\nnames: [RBC, WBC]\n")
    with pytest.raises(FileError, match="lie outside of it"):
        read_paths(str(tmp_path / "set"))
    # A COCO file may name what it likes: images are looked for in the folder, by their names.
    (tmp_path / "coco").mkdir()
    file_of(tmp_path / "coco", "coco", image="../secret/images/0.png", name="annotations")
    with pytest.raises(FileError):
        read_paths(str(tmp_path / "coco"))


def test_links_that_lead_out_are_not_followed(tmp_path, viewer, monkeypatch):
    monkeypatch.setattr(boxes_reader, "_notify", lambda notes: None)
    yolo_folder(tmp_path / "set", [SHAPE, SHAPE])
    Picture.fromarray(image()).save(tmp_path / "outside.png")
    (tmp_path / "set/images/1.png").unlink()
    try:
        (tmp_path / "set/images/1.png").symlink_to(tmp_path / "outside.png")
    except OSError:
        pytest.skip("this system makes no links")
    assert len(read_paths(str(tmp_path / "set"))) == 2


def test_one_bad_file_of_a_folder_is_told(tmp_path, viewer, monkeypatch):
    told = []
    monkeypatch.setattr(boxes_reader, "_notify", told.extend)
    yolo_folder(tmp_path / "set", [SHAPE, SHAPE])
    (tmp_path / "set/images/0.png").write_bytes(b"no picture")
    assert len(read_paths(str(tmp_path / "set"))) == 2
    assert any("0.png" in note for note in told)


# --- what is not ours, what is no good -----------------------------------------------------------


def test_other_files_are_left_to_others(tmp_path):
    (tmp_path / "napari.csv").write_text("index,shape-type,vertex-index,axis-0,axis-1\n")
    (tmp_path / "classes.txt").write_text("a\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "pictures").mkdir()
    Picture.fromarray(image()).save(tmp_path / "pictures/a.png")
    for name in ("napari.csv", "a.tif", "classes.txt", "empty", "pictures"):
        assert get_reader(str(tmp_path / name)) is None


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.json", "{", "not COCO or GeoJSON that can be read"),
        ("a.geojson", "[" * 100_000, "nested too deep"),
        ("a.xml", "<!DOCTYPE a [<!ENTITY b 'c'>]><annotation/>", "declares a document type"),
        ("a.txt", "0 50 50 10 10", "out of range"),
        ("a.csv", "class,x1,y1,x2,y2\na,1,2", "has 3 cells"),
    ],
)
@pytest.mark.parametrize("with_image", [False, True])
def test_a_bad_file_gets_its_sentence(tmp_path, viewer, name, text, sentence, with_image):
    if with_image:
        viewer.add_image(image(), name="smear")
    else:
        Picture.fromarray(image()).save(tmp_path / "a.png")  # for YOLO
    (tmp_path / name).write_text(text)
    with pytest.raises(FileError, match=sentence):
        get_reader(str(tmp_path / name))(str(tmp_path / name))


def test_reading_needs_neither_torch_nor_numba():
    import subprocess
    import sys

    code = (
        "import sys, napari_beerlanet.ui.io.boxes_reader; "
        "print({'torch', 'numba'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


def test_many_boxes_are_shown_in_parts(tmp_path, viewer, monkeypatch):
    viewer.add_image(image(), name="smear")
    shown = []
    monkeypatch.setattr(boxes_reader, "MAX_PLAIN_BOXES", 5)
    monkeypatch.setattr(boxes_reader, "_show_in_detection_layer", lambda *args: shown.append(args))
    assert read_paths(str(file_of(tmp_path, "csv"))) == NO_LAYERS
    assert len(shown[0][2]) == 6
