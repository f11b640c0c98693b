"""Files of boxes opened in napari: onto the image that is open, or with the image beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from napari_beerlanet.core.boxes import Detections
from napari_beerlanet.core.files import SUFFIXES, FileError
from napari_beerlanet.core.foreign import find_pairs
from napari_beerlanet.core.formats import CLASSES, image_names, read_detections
from napari_beerlanet.folder_reader import image_with_boxes, looks_annotated, read_folder
from napari_beerlanet.layer_files import ENDINGS, Index, shapes_data

MANY = 3000
"""Boxes from which a layer shows those in view only, as napari is slow with more."""
NOTHING: list[Any] = [(None,)]
"""What a reader returns that has put its layers into the viewer itself."""


def get_reader(path: str | Sequence[str]) -> Callable[..., list[Any]] | None:
    """What opens a file of boxes, or a folder of annotated images; None if it is something else."""
    paths = [path] if isinstance(path, str) else list(path)
    if not all(_may_be_read(Path(one)) for one in paths):
        return None
    return read


def read(path: str | Sequence[str]) -> list[Any]:
    """Layers of one or several files or folders; what is wrong is a `FileError`."""
    paths = [path] if isinstance(path, str) else list(path)
    layers = []
    for one in map(Path, paths):
        layers += read_folder(one) if one.is_dir() else read_file(one)
    real = [layer for layer in layers if len(layer) > 1]
    return real or NOTHING


def read_file(path: Path) -> list[Any]:
    """A layer of boxes on the open image that they are of; YOLO's without one come with it."""
    viewer = _viewer()
    problems = []
    layers = _open_images(viewer)
    names = image_names(path) if layers else []
    for source in _in_order(viewer, layers, path, names):
        try:
            return _onto(viewer, source, path, names)
        except FileError as error:
            problems.append(error)
    if problems:
        raise problems[0]
    if path.suffix.lower() != ".txt":
        found = read_detections(path)
        shape = found.image_shape
        return [shapes_data({(): found}, path.name, {}, image_shape=shape, image="")]
    try:
        (pair,) = find_pairs(path, ()).found
    except FileError as error:
        raise FileError(
            f"{path}: YOLO's text needs the size of its image; open the image first."
        ) from error
    return image_with_boxes(pair)


def _may_be_read(path: Path) -> bool:
    if path.is_dir():
        return looks_annotated(path)
    suffix = path.suffix.lower()
    if suffix not in ENDINGS or path.name == CLASSES:
        return False
    return suffix != ".csv" or _has_our_header(path)


def _has_our_header(path: Path) -> bool:
    """napari has tables of its own, which end in .csv as well."""
    try:
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            head = file.readline(10_000)
    except OSError:
        return True  # reading it tells why not
    words = {
        word.strip().strip('"') for word in head.replace(";", ",").replace("\t", ",").split(",")
    }
    return {"class", "x1", "y1", "x2", "y2"} <= words


def _viewer() -> Any:
    import napari

    return napari.current_viewer()


def _open_images(viewer: Any) -> list[Any]:
    """Open colour images that are not of our making, the topmost first."""
    if viewer is None:
        return []
    from napari_beerlanet.ui.layers import role
    from napari_beerlanet.ui.planes import fitting_layers

    return [layer for layer in reversed(fitting_layers(viewer)) if role(layer) is None]


def _in_order(viewer: Any, layers: list[Any], path: Path, names: Sequence[str]) -> list[Any]:
    """Those first that are called as the file says, or as the file, then the active one."""
    wanted = {_stem(name) for name in names} or {_stem(path.name)}
    active = viewer.layers.selection.active if layers else None
    return sorted(layers, key=lambda k: (not wanted & _called(k), k is not active))


def _called(layer: Any) -> set[str]:
    """What an image layer may be called in a file: by its name, or by its file's."""
    source = getattr(layer.source, "path", None)
    return {_stem(name) for name in (layer.name, source) if name}


def _stem(name: str) -> str:
    stem = PurePosixPath(str(name).replace("\\", "/")).name
    for ending in sorted({*SUFFIXES, *ENDINGS}, key=len, reverse=True):
        stem = stem[: -len(ending)] if stem.lower().endswith(ending) else stem
    return stem.removesuffix(".coco").removesuffix(".detections")


def _onto(viewer: Any, source: Any, path: Path, names: Sequence[str]) -> list[Any]:
    """The boxes of a file on an image layer's plane that is shown."""
    from napari_beerlanet.ui.layers import spatial
    from napari_beerlanet.ui.planes import current_plane

    plane = current_plane(source, viewer)
    name = next((name for name in names if _stem(name) in _called(source)), "")
    if len(names) > 1 and not name:
        raise FileError(
            f"{path}: about {len(names)} images, none of which is open; "
            "open the image first, or the folder with all of them."
        )
    found = read_detections(path, plane.shape, image_name=name)
    if len(found) > MANY:
        _show_in_parts(viewer, source, found, plane.index)
        return NOTHING
    told = {"source": source.name, "image_shape": plane.shape, "image": name}
    colours = _model_colours(viewer)
    return [shapes_data({plane.index: found}, path.name, spatial(source), colours, **told)]


def _model_colours(viewer: Any) -> dict[str, str]:
    """The colours of the classes of the model that is loaded."""
    from napari_beerlanet.ui.session import session

    info = getattr(session(viewer).model, "info", None) or {}
    return dict(zip(info.get("classes", []), info.get("colours") or [], strict=False))


def _show_in_parts(viewer: Any, source: Any, found: Detections, index: Index) -> None:
    from napari_beerlanet.ui.detection_layer import DetectionLayer
    from napari_beerlanet.ui.session import session

    shower = DetectionLayer(viewer, source, found, index=index)
    shower.show(0.0)
    session(viewer).put_result(source, found, shower)
