"""Save the boxes of a Shapes layer in any of the formats, with all features."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from napari.utils.notifications import show_info

from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.common.messages import count_of
from napari_beerlanet.core.common.storage import FileError
from napari_beerlanet.core.formats import (
    CLASSES_FILE,
    write_detections,
    write_yolo_with_classes,
)
from napari_beerlanet.ui.viewer.layer_data import (
    detections_from_shapes,
    detections_from_table,
    with_image_facts,
)
from napari_beerlanet.ui.viewer.layers import find_source, own_metadata, user_images
from napari_beerlanet.ui.viewer.planes import PlaneIndex, all_planes, pixel_size

if TYPE_CHECKING:
    from napari.layers import Image, Layer

_NUMBERED = re.compile(r"\d{4,9}(-\d{4,9})*")  # as `_plane_path` does


def write_csv(path: str, data: Any, attributes: dict[str, Any]) -> list[str]:
    """Save as a table with all features, in pixels and micrometres."""
    return _write(path, data, attributes, "csv")


def write_geojson(path: str, data: Any, attributes: dict[str, Any]) -> list[str]:
    """Save as QuPath reads it."""
    return _write(path, data, attributes, "geojson")


def write_coco(path: str, data: Any, attributes: dict[str, Any]) -> list[str]:
    """Save as COCO JSON."""
    return _write(path, data, attributes, "coco")


def write_voc(path: str, data: Any, attributes: dict[str, Any]) -> list[str]:
    """Save as Pascal VOC XML."""
    return _write(path, data, attributes, "voc")


def write_yolo(path: str, data: Any, attributes: dict[str, Any]) -> list[str]:
    """Save as YOLO's text, with a classes.txt beside it."""
    return _write(path, data, attributes, "yolo")


def _write(path: str, data: Any, attributes: Mapping[str, Any], kind: str) -> list[str]:
    """One file for one image; of a stack one for each plane, which its name says.

    Those are the planes with boxes, or of a `DetectionLayer` those on which something was run.
    """
    own = own_metadata(attributes.get("metadata"))
    layer, source = _saved_layer_and_image(attributes, own)
    parts = _from_detection_layer(layer) or detections_from_shapes(data, attributes)
    shape, size = _image_facts(source, own)
    names = own.get("images") or plane_names(source)
    title = str(own.get("image") or _file_name(source) or "")
    parts = parts or {(): Detections.empty([str(n) for n in own.get("classes", [])])}
    written: list[str] = []
    for index, detections in parts.items():
        one = _plane_path(Path(path), index, names) if index else Path(path)
        name = names[index[0]] if len(index) == 1 and index[0] < len(names) else title
        written += _write_one(one, with_image_facts(detections, shape, size), str(name), kind)
    if any(parts):
        files = [Path(one).name for one in written if Path(one).name != CLASSES_FILE]
        span = " … ".join(dict.fromkeys([files[0], files[-1]]))
        show_info(f"Saved in {count_of(len(files), 'file')}, one for each plane: {span}.")
    return written


def _write_one(path: Path, detections: Detections, name: str, kind: str) -> list[str]:
    if kind != "yolo":
        write_detections(path, detections, name, format=kind)
        return [str(path)]
    if detections.image_shape is None:
        raise FileError(
            f"{path}: YOLO text needs the size of the image; open the image that the boxes belong "
            "to, or save as CSV or GeoJSON."
        )
    return [str(one) for one in write_yolo_with_classes(path, detections)]


def _plane_path(path: Path, index: PlaneIndex, names: list[str]) -> Path:
    """Named by the plane's image where no other has its name, or else numbered."""
    stems = [Path(name.replace("\\", "/")).stem for name in names]
    word = stems[index[0]] if len(index) == 1 and index[0] < len(stems) else ""
    if stems.count(word) != 1:
        word = "-".join(f"{place:04d}" for place in index)
    return path.with_name(f"{path.stem}.{word}{path.suffix}")


def plane_names(image: Image | None) -> list[str]:
    """The files of the planes of a stack that was opened from a folder, [] of any other."""
    metadata = image.metadata if image is not None else None
    names = metadata.get("images") if isinstance(metadata, dict) else None
    return [str(name) for name in names] if isinstance(names, (list, tuple)) else []


def plane_of_file(path: Path, image: Image) -> PlaneIndex | None:
    """The plane of a stack that a file is named after, as saving does; None where it is not."""
    word, shape = path.stem.rpartition(".")[2], all_planes(image)[-1].index
    stems = [Path(name.replace("\\", "/")).stem for name in plane_names(image)]
    if stems.count(word) == 1:
        return (stems.index(word),)
    index = tuple(map(int, word.split("-"))) if _NUMBERED.fullmatch(word) else ()
    fits = len(index) == len(shape) and all(k <= last for k, last in zip(index, shape, strict=True))
    return index if fits else None


def _saved_layer_and_image(
    attributes: Mapping[str, Any], own: Mapping[str, Any]
) -> tuple[Layer | None, Image | None]:
    """The layer that is saved and the image that it is on, as far as there is a viewer."""
    import napari

    viewer = napari.current_viewer()
    if viewer is None:
        return None, None
    name = attributes.get("name")
    layer = next((one for one in viewer.layers if one.name == name), None)
    images, source = user_images(viewer), find_source(viewer, own)
    for image in images:
        if image is source or len(images) == 1:
            return layer, image
    return layer, None


def _from_detection_layer(layer: Layer | None) -> dict[PlaneIndex, Detections]:
    """The boxes of a `DetectionLayer`, whose Shapes layer holds those in view only, by plane."""
    import napari

    from napari_beerlanet.ui.detections.image_detections import detection_layers

    viewer = napari.current_viewer()
    if layer is None or viewer is None:
        return {}
    for detection_layer in detection_layers(viewer).values():
        if detection_layer.layer is layer:
            return {
                index: replace(
                    detections_from_table(boxes.xyxy, boxes.features, boxes.names),
                    report={"colours": colours},
                )
                for index, (boxes, colours) in detection_layer.read_all().items()
            }
    return {}


def _image_facts(source: Image | None, own: Mapping[str, Any]) -> tuple[Any, Any]:
    """(H, W) of the image and its pixel size in micrometres, None where unknown."""
    if source is None:
        return own.get("image_shape"), None
    return all_planes(source)[0].shape, pixel_size(source)


def _file_name(source: Image | None) -> str:
    path = getattr(getattr(source, "source", None), "path", None)
    return Path(path).name if path else getattr(source, "name", "")
