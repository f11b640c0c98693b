"""COCO JSON: images, categories, annotations with a box x, y, width, height in pixels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.common.storage import FileError
from napari_beerlanet.core.formats.common import (
    MAX_LISTED_CLASSES,
    AnyPath,
    BoxRows,
    DetectionRecord,
    ImageShape,
    agreed_shape,
    detection_records,
    load_json,
    parsing,
    save_json,
    to_detections,
    to_plain,
)


def write_coco(path: AnyPath, detections: Detections, image_name: str = "") -> None:
    """Write one image with its annotations: `score` as COCO's results have it, further columns
    as `attributes`. Categories count from 1.
    """
    image: dict[str, Any] = {"id": 1, "file_name": image_name}
    if detections.image_shape is not None:
        image["height"], image["width"] = map(int, detections.image_shape)
    categories = [{"id": i + 1, "name": name} for i, name in enumerate(detections.names)]
    annotations = [
        _annotation(i, entry) for i, entry in enumerate(detection_records(detections), 1)
    ]
    save_json(path, {"images": [image], "categories": categories, "annotations": annotations})


def _annotation(number: int, entry: DetectionRecord) -> dict[str, Any]:
    x1, y1, x2, y2 = entry.box
    width, height = round(x2 - x1, 3), round(y2 - y1, 3)
    return {
        **{"id": number, "image_id": 1, "category_id": entry.label + 1},
        **{"bbox": [x1, y1, width, height], "area": round(width * height, 3), "iscrowd": 0},
        **{"segmentation": [], "score": entry.score, "attributes": entry.extra},
    }


def read_coco(
    path: AnyPath,
    image_shape: ImageShape | None = None,
    names: Sequence[str] | None = None,
    image_name: str = "",
) -> Detections:
    """Read the annotations of one image: the only one, or the one whose file is `image_name`."""
    content = _load_coco(path)
    with parsing(path, "COCO JSON"):
        images = content["images"]
        wanted = images
        if len(images) != 1:
            wanted = [image for image in images if image_name in _file_names(image)]
        if len(wanted) != 1:
            raise FileError(
                f"{path}: about {len(images)} images, {len(wanted)} of them with the name "
                f"{image_name!r:.80}; say which is meant by its file name."
            )
        mine = [a for a in content["annotations"] if a["image_id"] == wanted[0]["id"]]
        return _read_annotations(path, wanted[0], mine, _categories(content), names, image_shape)


def read_coco_images(
    path: AnyPath, names: Sequence[str] | None = None
) -> Iterator[tuple[str, Detections]]:
    """File name and annotations of each image of a file."""
    content = _load_coco(path)
    with parsing(path, "COCO JSON"):
        categories = _categories(content)
        by_image: dict[Any, list[Any]] = defaultdict(list)
        for entry in content["annotations"]:
            by_image[entry["image_id"]].append(entry)
        for image in content["images"]:
            mine = by_image[image["id"]]
            yield (
                str(image["file_name"]),
                _read_annotations(path, image, mine, categories, names, None),
            )


def coco_image_names(path: AnyPath) -> list[str]:
    """The file names of the images that a file is about."""
    content = _load_coco(path)
    with parsing(path, "COCO JSON"):
        return [str(image["file_name"]) for image in content["images"]]


def _load_coco(path: AnyPath) -> dict[str, Any]:
    content = load_json(path, "COCO JSON")
    if isinstance(content, list):
        raise FileError(f"{path}: a list without images and classes; whole COCO files are read.")
    if not isinstance(content, dict):
        raise FileError(f"{path}: not COCO JSON as expected: no images, no annotations.")
    return content


def _file_names(image: dict[str, Any]) -> tuple[str, str]:
    return image["file_name"], PurePosixPath(image["file_name"].replace("\\", "/")).name


def _categories(content: dict[str, Any]) -> dict[Any, str]:
    return {entry["id"]: str(entry["name"]) for entry in content["categories"]}


def _read_annotations(
    path: AnyPath,
    image: dict[str, Any],
    annotations: list[dict[str, Any]],
    categories: dict[Any, str],
    names: Sequence[str] | None,
    given: ImageShape | None,
) -> Detections:
    shape = agreed_shape(path, image.get("width"), image.get("height"), given)
    rows = BoxRows()
    for entry in annotations:
        if entry["category_id"] not in categories:
            raise FileError(f"{path}: there is no category {entry['category_id']!r:.80}.")
        x, y, width, height = map(float, entry["bbox"])
        extra = {name: to_plain(value) for name, value in (entry.get("attributes") or {}).items()}
        box = [x, y, x + width, y + height]
        rows.add(categories[entry["category_id"]], box, entry.get("score"), extra)
    known = list(categories.values()) if len(categories) <= MAX_LISTED_CLASSES else []
    return to_detections(path, rows, names, shape, known)
