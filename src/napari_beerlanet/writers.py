"""Boxes of a Shapes layer saved from napari, in any of the formats and with all features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from napari_beerlanet.core.boxes import Detections
from napari_beerlanet.core.files import FileError
from napari_beerlanet.core.formats import write_detections, write_yolo_beside_classes
from napari_beerlanet.layer_files import OWNER, Index, detections_of, from_table, with_image


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
    """One file for one image; of a stack one for each of its planes that has boxes."""
    told = (attributes.get("metadata") or {}).get(OWNER) or {}
    layer, source = _layers_of(attributes, told)
    parts = _shown_in_parts(layer) or detections_of(data, attributes)
    shape, size = _facts(source, told)
    names = told.get("images") or []
    title = str(told.get("image") or _file_name(source) or "")
    parts = parts or {(): Detections.empty([str(n) for n in told.get("classes", [])])}
    written: list[str] = []
    for index, found in parts.items():
        one = Path(path) if len(parts) == 1 else _of_plane(Path(path), index, names)
        name = names[index[0]] if len(index) == 1 and index[0] < len(names) else title
        written += _write_one(one, with_image(found, shape, size), str(name), kind)
    return written


def _write_one(path: Path, found: Detections, name: str, kind: str) -> list[str]:
    if kind != "yolo":
        write_detections(path, found, name, format=kind)
        return [str(path)]
    if found.image_shape is None:
        raise FileError(
            f"{path}: YOLO's text needs the size of the image; open the image that the boxes "
            "are of, or save as CSV or GeoJSON."
        )
    return [str(one) for one in write_yolo_beside_classes(path, found)]


def _of_plane(path: Path, index: Index, names: list[str]) -> Path:
    """Named by the plane's image, or else numbered."""
    if len(index) == 1 and index[0] < len(names):
        word = Path(names[index[0]].replace("\\", "/")).stem
    else:
        word = "-".join(f"{place:04d}" for place in index)
    return path.with_name(f"{path.stem}.{word}{path.suffix}")


def _layers_of(attributes: Mapping[str, Any], told: Mapping[str, Any]) -> tuple[Any, Any]:
    """The layer that is saved and the image that it is on, as far as there is a viewer."""
    import napari

    viewer = napari.current_viewer()
    if viewer is None:
        return None, None
    from napari_beerlanet.ui.layers import role
    from napari_beerlanet.ui.planes import fitting_layers

    name = attributes.get("name")
    layer = next((one for one in viewer.layers if one.name == name), None)
    images = [image for image in fitting_layers(viewer) if role(image) is None]
    named = [image for image in images if image.name == told.get("source")]
    if named:
        return layer, named[0]
    return layer, images[0] if len(images) == 1 else None


def _shown_in_parts(layer: Any) -> dict[Index, Detections]:
    """All boxes of a layer of detections, which itself holds those in view only."""
    if layer is None:
        return {}
    import napari

    from napari_beerlanet.ui.session import session

    for shower in session(napari.current_viewer()).shown.values():
        if shower.alive and shower.layer is layer:
            back = shower.read_back()
            found = from_table(back.xyxy, back.features, back.names)
            colours = dict(zip(back.names, shower.colours, strict=False))
            return {(): replace(found, report={"colours": colours})}
    return {}


def _facts(source: Any, told: Mapping[str, Any]) -> tuple[Any, Any]:
    """(H, W) of the image and its pixel size in micrometres, None where unknown."""
    if source is None:
        return told.get("image_shape"), None
    from napari_beerlanet.ui.planes import all_planes, pixel_size

    return all_planes(source)[0].shape, pixel_size(source)


def _file_name(source: Any) -> str:
    path = getattr(getattr(source, "source", None), "path", None)
    return Path(path).name if path else getattr(source, "name", "")
