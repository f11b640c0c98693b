"""Open files of boxes onto the open image, or folders of annotated images as stacks.

napari imports this module whenever a file is opened, so what is slow to import is imported late.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.common.storage import FileError, regular_file
from napari_beerlanet.core.formats import CLASSES_FILE, image_names, read_detections
from napari_beerlanet.core.formats.discover import AnnotatedImageFile, discover_annotations
from napari_beerlanet.core.images.files import IMAGE_SUFFIXES, read_image

if TYPE_CHECKING:
    from napari.layers import Image
    from napari.viewer import Viewer

    from napari_beerlanet.ui.viewer.layer_data import LayerData
    from napari_beerlanet.ui.viewer.planes import PlaneIndex

MAX_PLAIN_BOXES = 3000
"""Boxes above which a layer shows those in view only, as napari is slow with more."""
NO_LAYERS: list[Any] = [(None,)]
"""What a reader returns that has put its layers into the viewer itself."""

_ANNOTATION_SUFFIXES = (".geojson", ".json", ".xml", ".txt")
_BOX_FILE_SUFFIXES = (*_ANNOTATION_SUFFIXES, ".csv")
_MAX_IMAGES = 500
_MAX_STACKS = 12  # images of different sizes
_MAX_SCANNED_FILES = 3000  # of a folder, to see whether there are annotations in it


def get_reader(path: str | Sequence[str]) -> Callable[..., list[Any]] | None:
    """What opens a file of boxes, or a folder of annotated images; None if it is something else."""
    paths = [path] if isinstance(path, str) else list(path)
    if not all(_is_readable(Path(one)) for one in paths):
        return None
    return read_paths


def read_paths(path: str | Sequence[str]) -> list[Any]:
    """Layers of one or several files or folders; what is wrong is a `FileError`."""
    paths = [path] if isinstance(path, str) else list(path)
    layers = []
    for one in map(Path, paths):
        layers += read_folder(one) if one.is_dir() else read_box_file(one)
    with_data = [layer for layer in layers if len(layer) > 1]
    return with_data or NO_LAYERS


def _is_readable(path: Path) -> bool:
    if path.is_dir():
        return looks_annotated(path)
    suffix = path.suffix.lower()
    if suffix not in _BOX_FILE_SUFFIXES or path.name == CLASSES_FILE:
        return False
    return suffix != ".csv" or _has_our_header(path)


def _has_our_header(path: Path) -> bool:
    """napari has tables of its own, which end in .csv as well."""
    try:
        with regular_file(path).open(encoding="utf-8-sig", errors="replace") as file:
            header = file.readline(10_000)
    except OSError:
        return True  # reading it tells why not
    columns = header.replace(";", ",").replace("\t", ",").split(",")
    return {"class", "x1", "y1", "x2", "y2"} <= {name.strip().strip('"') for name in columns}


def open_boxes_dialog() -> None:
    """File › IO Utilities: choose files of boxes, which go onto the open image."""
    from napari_beerlanet.ui.common.file_opening import open_chosen_files

    known = " ".join(f"*{suffix}" for suffix in _BOX_FILE_SUFFIXES)
    open_chosen_files("Open boxes", f"Boxes ({known});;All files (*)", read_paths)


def open_folder_dialog() -> None:
    """File › IO Utilities: choose a folder of annotated images, which open as stacks with boxes."""
    from napari_beerlanet.ui.common.file_opening import open_chosen_files

    open_chosen_files("Open annotated images", "", read_paths, folder=True)


# --- a file of boxes ------------------------------------------------------------------------------


def read_box_file(path: Path) -> list[Any]:
    """A layer of boxes on the open image that they belong to; YOLO text brings its image along."""
    viewer = _current_viewer()
    problems = []
    images = _open_images(viewer)
    names = image_names(path) if images else []
    for image in _by_likelihood(viewer, images, path, names):
        try:
            return _boxes_on_image(viewer, image, path, names)
        except FileError as error:
            problems.append(error)
    if problems:
        raise problems[0]
    if path.suffix.lower() != ".txt":
        detections = read_detections(path)
        metadata = {"image_shape": detections.image_shape, "image": ""}
        return [_boxes_layer({(): detections}, path.name, {}, metadata)]
    try:
        (pair,) = discover_annotations(path, ()).images
    except FileError as error:
        raise FileError(
            f"{path}: YOLO text needs the size of its image; open the image first."
        ) from error
    return image_with_boxes(pair)


def _current_viewer() -> Any:
    import napari

    return napari.current_viewer()


def _open_images(viewer: Viewer | None) -> list[Image]:
    """The user's RGB images, the topmost first."""
    if viewer is None:
        return []
    from napari_beerlanet.ui.viewer.layers import user_images

    return user_images(viewer)[::-1]


def _by_likelihood(
    viewer: Viewer, images: list[Image], path: Path, names: Sequence[str]
) -> list[Image]:
    """Those first that are named as the file says, or as the file, then the active one."""
    wanted = {_stem(name) for name in names} or {_stem(path.name)}
    active = viewer.layers.selection.active if images else None
    return sorted(images, key=lambda image: (not wanted & _layer_stems(image), image is not active))


def _layer_stems(layer: Image) -> set[str]:
    """What a file may call an image layer: by its name, or by its file's."""
    path = getattr(layer.source, "path", None)
    return {_stem(name) for name in (layer.name, path) if name}


def _stem(name: str) -> str:
    stem = PurePosixPath(str(name).replace("\\", "/")).name
    for suffix in sorted({*IMAGE_SUFFIXES, *_BOX_FILE_SUFFIXES}, key=len, reverse=True):
        stem = stem[: -len(suffix)] if stem.lower().endswith(suffix) else stem
    return stem.removesuffix(".coco").removesuffix(".detections")


def _boxes_on_image(viewer: Viewer, image: Image, path: Path, names: Sequence[str]) -> list[Any]:
    """The boxes of a file on the plane of an image layer that it is named after, or the current."""
    from napari_beerlanet.ui.io.writers import plane_of_file
    from napari_beerlanet.ui.viewer.layers import source_link, transform_kwargs
    from napari_beerlanet.ui.viewer.planes import current_plane

    plane = current_plane(image, viewer)
    index = plane_of_file(path, image) or plane.index
    name = next((name for name in names if _stem(name) in _layer_stems(image)), "")
    if len(names) > 1 and not name:
        raise FileError(
            f"{path}: has boxes of {len(names)} images, none of which is open; "
            "open the image first, or the folder with all of them."
        )
    detections = read_detections(path, plane.shape, image_name=name)
    if len(detections) > MAX_PLAIN_BOXES:
        _show_in_detection_layer(viewer, image, detections, index)
        return NO_LAYERS
    metadata = {**source_link(image), "image_shape": plane.shape, "image": name}
    parts, transform = {index: detections}, transform_kwargs(image)
    return [_boxes_layer(parts, path.name, transform, metadata, viewer)]


def _viewer_colours(viewer: Viewer | None, parts: Iterable[Detections]) -> dict[str, str]:
    """The colours that the classes of these boxes have in the viewer; {} without one.

    A file's own colours are for classes that the viewer does not know yet.
    """
    if viewer is None:
        return {}
    from napari_beerlanet.ui.common.session import get_session
    from napari_beerlanet.ui.viewer.layer_data import follow_palette

    follow_palette(viewer)
    boxes = list(parts)
    palette = get_session(viewer).palette
    for part in boxes:
        palette.suggest(part.report.get("colours", {}))
    names = list(dict.fromkeys(name for part in boxes for name in part.names))
    return dict(zip(names, palette.colours(names), strict=True))


def _show_in_detection_layer(
    viewer: Viewer, image: Image, detections: Detections, index: PlaneIndex
) -> None:
    from napari_beerlanet.ui.common.session import get_session
    from napari_beerlanet.ui.detections.detection_layer import DetectionLayer

    detection_layer = DetectionLayer(viewer, image, detections, index=index)
    detection_layer.set_filter(0.0)
    get_session(viewer).set_detections(image, detections, detection_layer)


def _boxes_layer(
    parts: Mapping[PlaneIndex, Detections],
    name: str,
    transform: Mapping[str, Any],
    metadata: Mapping[str, Any],
    viewer: Viewer | None = None,
) -> LayerData:
    from napari import current_viewer

    from napari_beerlanet.ui.viewer.layer_data import shapes_layer_data

    colours = _viewer_colours(viewer or current_viewer(), parts.values())
    return shapes_layer_data(parts, name, transform, metadata, colours)


# --- a folder of annotated images -----------------------------------------------------------------


def looks_annotated(folder: Path) -> bool:
    """Whether there are images and files that may be annotations; without opening any."""
    images = annotations = False
    for number, path in enumerate(_visible_files(folder)):
        suffix = path.suffix.lower()
        images |= suffix in IMAGE_SUFFIXES
        annotations |= suffix in _ANNOTATION_SUFFIXES and path.name != CLASSES_FILE
        if (images and annotations) or path.name == "data.yaml":
            return True
        if number > _MAX_SCANNED_FILES:
            break
    return False


def _visible_files(folder: Path) -> Iterator[Path]:
    for here, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(here) / name for name in files)


def read_folder(folder: Path) -> list[Any]:
    """Annotated images of a folder (YOLO, COCO, Pascal VOC, GeoJSON): one stack for each size.

    Only images in the folder itself are opened, wherever its files point to.
    """
    pairs, notes = _pairs_inside(folder)
    stacks: dict[tuple[Any, ...], list[tuple[AnnotatedImageFile, Detections]]] = {}
    for pair in pairs[:_MAX_IMAGES]:
        try:
            pixels = read_image(pair.image).pixels
            detections = pair.read((pixels.shape[0], pixels.shape[1]))
        except FileError as error:
            notes.append(str(error))
            continue
        stacks.setdefault((pixels.shape, pixels.dtype.str), []).append((pair, detections))
    if not stacks:
        raise FileError(notes[0] if notes else f"{folder}: contains no readable annotated image.")
    if len(pairs) > _MAX_IMAGES:
        notes.append(f"{folder}: the first {_MAX_IMAGES} of {len(pairs)} images are opened.")
    if len(stacks) > _MAX_STACKS:
        notes.append(f"{folder}: images of {_MAX_STACKS} of {len(stacks)} sizes are opened.")
    _notify(notes)
    layers: list[Any] = []
    for shape, members in list(stacks.items())[:_MAX_STACKS]:
        layers += _stack_layers(folder, shape[0], np.dtype(shape[1]), members)
    return layers


def _pairs_inside(folder: Path) -> tuple[list[AnnotatedImageFile], list[str]]:
    """Pairs whose image lies in the folder, and sentences on the others."""
    pairs = discover_annotations(folder, ())
    home = folder.resolve()
    inside = [pair for pair in pairs.images if pair.image.resolve().is_relative_to(home)]
    notes = list(pairs.notes)
    outside = len(pairs.images) - len(inside)
    if outside:
        notes.insert(0, f"{folder}: {outside} of its images lie outside of it and are not opened.")
    return inside, notes


def image_with_boxes(pair: AnnotatedImageFile) -> list[LayerData]:
    """An image layer, and a layer of its boxes at the same place."""
    from napari_beerlanet.ui.viewer.planes import placement_kwargs

    image = read_image(pair.image)
    shape = (image.pixels.shape[0], image.pixels.shape[1])
    placement = placement_kwargs(image.pixel_size, _current_viewer())
    transform = {name: value for name, value in placement.items() if name != "metadata"}
    metadata = {"source": image.name, "image_shape": shape, "image": image.name}
    boxes = _boxes_layer({(): pair.read(shape)}, f"{image.name} · boxes", transform, metadata)
    return [(image.pixels, {"name": image.name, **placement}, "image"), boxes]


def _stack_layers(
    folder: Path,
    shape: tuple[int, ...],
    dtype: Any,
    members: list[tuple[AnnotatedImageFile, Detections]],
) -> list[LayerData]:
    """One image, or a stack that reads each when it is displayed, and the boxes of all."""
    if len(members) == 1:
        return image_with_boxes(members[0][0])
    import dask.array as da
    from dask.delayed import delayed

    load = delayed(lambda path: read_image(path).pixels, pure=True)
    planes = [da.from_delayed(load(pair.image), shape, dtype) for pair, _ in members]
    names = [pair.image.name for pair, _ in members]
    name = f"{folder.name}, {len(names)} images of {shape[1]} × {shape[0]}"
    metadata = {"source": name, "image_shape": shape[:2], "images": names}
    parts: dict[PlaneIndex, Detections] = {(k,): found for k, (_, found) in enumerate(members)}
    image = {"name": name, "rgb": True, "metadata": {"images": names}}
    boxes = _boxes_layer(parts, f"{name} · boxes", {}, metadata)
    return [(da.stack(planes), image, "image"), boxes]


def _notify(notes: Sequence[str]) -> None:
    if notes:
        from napari.utils.notifications import show_info

        more = f" And {len(notes) - 3} more." if len(notes) > 3 else ""
        show_info(" ".join(notes[:3]) + more)
