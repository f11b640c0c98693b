"""A folder of annotated images opened in napari: its images, those of one size as a stack."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from napari_beerlanet.core.boxes import Detections
from napari_beerlanet.core.files import SUFFIXES, FileError, read_image
from napari_beerlanet.core.foreign import Pair, find_pairs
from napari_beerlanet.core.formats import CLASSES
from napari_beerlanet.layer_files import ENDINGS, LayerData, shapes_data

_MOST_IMAGES = 500
_MOST_STACKS = 12  # images of different sizes
_LOOKED_AT = 3000  # entries of a folder, to see whether there are annotations in it


def read_folder(folder: Path) -> list[Any]:
    """Annotated images of a folder (YOLO, COCO, Pascal VOC, GeoJSON): one stack for each size.

    Only images in the folder itself are opened, wherever its files point to.
    """
    pairs, notes = _inside(folder)
    stacks: dict[tuple[Any, ...], list[tuple[Pair, Detections]]] = {}
    for pair in pairs[:_MOST_IMAGES]:
        try:
            pixels = read_image(pair.image).pixels
            found = pair.read((pixels.shape[0], pixels.shape[1]))
        except FileError as error:
            notes.append(str(error))
            continue
        stacks.setdefault((pixels.shape, pixels.dtype.str), []).append((pair, found))
    if not stacks:
        raise FileError(notes[0] if notes else f"{folder}: no annotated image can be read in it.")
    if len(pairs) > _MOST_IMAGES:
        notes.append(f"{folder}: the first {_MOST_IMAGES} of {len(pairs)} images are opened.")
    if len(stacks) > _MOST_STACKS:
        notes.append(f"{folder}: images of {_MOST_STACKS} of {len(stacks)} sizes are opened.")
    _tell(notes)
    layers: list[Any] = []
    for shape, members in list(stacks.items())[:_MOST_STACKS]:
        layers += _stack(folder, shape[0], np.dtype(shape[1]), members)
    return layers


def looks_annotated(folder: Path) -> bool:
    """Whether there are images and files that may be annotations; without opening any."""
    images = labels = False
    for number, path in enumerate(_walk(folder)):
        suffix = path.suffix.lower()
        images |= suffix in SUFFIXES
        labels |= suffix in ENDINGS[:-1] and path.name != CLASSES
        if (images and labels) or path.name == "data.yaml":
            return True
        if number > _LOOKED_AT:
            break
    return False


def _walk(folder: Path) -> Iterator[Path]:
    for here, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(here) / name for name in files)


def image_with_boxes(pair: Pair) -> list[LayerData]:
    """An image layer, and a layer of its boxes at the same place."""
    image = read_image(pair.image)
    shape = (image.pixels.shape[0], image.pixels.shape[1])
    place: dict[str, Any] = {}
    if image.pixel_size:
        place = {"scale": image.pixel_size, "units": ("um", "um")}
    told = {"source": image.name, "image_shape": shape, "image": image.name}
    boxes = shapes_data({(): pair.read(shape)}, f"{image.name} · boxes", place, **told)
    return [(image.pixels, {"name": image.name, **place}, "image"), boxes]


def _inside(folder: Path) -> tuple[list[Pair], list[str]]:
    """Pairs whose image lies in the folder, and sentences on the others."""
    pairs = find_pairs(folder, ())
    home = folder.resolve()
    kept = [pair for pair in pairs.found if pair.image.resolve().is_relative_to(home)]
    notes = list(pairs.notes)
    outside = len(pairs.found) - len(kept)
    if outside:
        notes.insert(0, f"{folder}: {outside} of its images lie outside of it, so are not opened.")
    return kept, notes


def _stack(
    folder: Path, shape: tuple[int, ...], dtype: Any, members: list[tuple[Pair, Detections]]
) -> list[LayerData]:
    """One image, or a stack that reads each when it is looked at, and the boxes of all."""
    if len(members) == 1:
        return image_with_boxes(members[0][0])
    import dask
    import dask.array as da

    load = dask.delayed(lambda path: read_image(path).pixels, pure=True)
    planes = [da.from_delayed(load(pair.image), shape, dtype) for pair, _ in members]
    names = [pair.image.name for pair, _ in members]
    name = f"{folder.name}, {len(names)} images" + f" of {shape[1]} × {shape[0]}"
    told = {"source": name, "image_shape": shape[:2], "images": names}
    boxes = {(k,): found for k, (_, found) in enumerate(members)}
    image = {"name": name, "rgb": True, "metadata": {"images": names}}
    return [(da.stack(planes), image, "image"), shapes_data(boxes, f"{name} · boxes", {}, **told)]


def _tell(notes: Sequence[str]) -> None:
    if notes:
        from napari.utils.notifications import show_info

        more = f" And {len(notes) - 3} more." if len(notes) > 3 else ""
        show_info(" ".join(notes[:3]) + more)
