"""Decompositions on disk: densities as OME-TIFF or OME-Zarr, spectra as JSON."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from napari_beerlanet._version import __version__
from napari_beerlanet.core.common.arrays import load_array
from napari_beerlanet.core.common.messages import format_percent
from napari_beerlanet.core.common.storage import atomic_path
from napari_beerlanet.core.images import PixelSize
from napari_beerlanet.core.images.files import xml_safe
from napari_beerlanet.core.images.rgb import hex_colour
from napari_beerlanet.core.stains.presets import FILE_VERSION, SPECTRA_KIND, read_named_spectra

if TYPE_CHECKING:
    from napari_beerlanet.core.stains.decomposition import Decomposition


_TILE_SIDE = 512
_MIN_BIGTIFF_BYTES = 1 << 31  # a classic TIFF ends at twice that, compressed or not


def component_names(decomposition: Decomposition) -> list[str]:
    """What each component is called in files: "eosin (62 %)", "Component 2 (inactive)"."""
    d = decomposition
    return [
        f"{label} ({format_percent(share) if active else 'inactive'})"
        for label, share, active in zip(d.labels, d.share, d.active, strict=True)
    ]


def write_densities(
    path: str | os.PathLike[str],
    decomposition: Decomposition,
    pixel_size: PixelSize | None = None,
    name: str = "",
    densities: Any = None,
) -> None:
    """Write the densities (r, H, W) float32 whole or not at all; `pixel_size` is (y, x) in µm.

    A path that ends in .zarr becomes an OME-Zarr 0.5 folder, any other an OME-TIFF. `densities`:
    lazy ones of a slide whose thumbnail the decomposition holds, written band by band.
    """
    planes = decomposition.densities if densities is None else densities
    with atomic_path(path) as unfinished:
        if Path(path).suffix.lower() == ".zarr":
            _write_zarr(unfinished, decomposition, planes, pixel_size, name)
        else:
            _write_tiff(unfinished, decomposition, planes, pixel_size, name)


def write_spectra(
    path: str | os.PathLike[str],
    decomposition: Decomposition,
    pixel_size: PixelSize | None = None,
    name: str = "",
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write as JSON everything but the densities; `extra` adds entries of the caller's own."""
    content = {**_spectra_content(decomposition, pixel_size, name), **(extra or {})}
    with atomic_path(path) as unfinished:
        unfinished.write_text(_format_json(content), encoding="utf-8")


def read_spectra(path: str | os.PathLike[str]) -> npt.NDArray[np.float64]:
    """The spectra (3, r) of a file by `write_spectra`, as `decompose(..., spectra=...)` takes them.

    Inactive components are there, too, so that each keeps its place.
    """
    return read_named_spectra(path)[0]


def _format_json(content: Mapping[str, Any]) -> str:
    """Indented for people, with a list of numbers on one line."""
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    return re.sub(r'\[\n[^][{}"]*\n\s*\]', lambda found: re.sub(r"\n\s*", " ", found[0]), text)


def _spectra_content(d: Decomposition, pixel_size: PixelSize | None, image: str) -> dict[str, Any]:
    names = d.names or ("",) * len(d.active)
    parts = zip(component_names(d), names, d.spectra.T, d.share, d.active, d.colours, strict=True)
    return {
        "kind": SPECTRA_KIND,
        "version": FILE_VERSION,
        "software": f"napari-beerlanet {__version__}",
        "image": image,
        "shape": list(d.image.shape),
        "pixel_size_um": list(pixel_size) if pixel_size else None,
        "domain": d.domain,
        "lambda": d.lam,
        "gamma": d.gamma,
        "fixed_spectra": d.fixed_spectra,
        "iterations": len(d.objective),
        "objective": float(d.objective[-1]) if len(d.objective) else None,
        "background": {"x0": d.background.tolist(), "light": d.light.tolist()},
        "components": [
            {
                "index": i,
                "name": label,
                "stain": name,
                "spectrum": spectrum.tolist(),
                "share": float(share),
                "active": bool(active),
                "colour": hex_colour(colour),
            }
            for i, (label, name, spectrum, share, active, colour) in enumerate(parts)
        ],
    }


def _write_tiff(
    path: Path, d: Decomposition, planes: Any, pixel_size: PixelSize | None, name: str
) -> None:
    import tifffile

    metadata: dict[str, Any] = {"axes": "CYX", "Channel": {"Name": component_names(d)}}
    if name:
        metadata["Name"] = xml_safe(name)
    if pixel_size:
        for axis, size in zip("YX", pixel_size, strict=True):
            metadata |= {f"PhysicalSize{axis}": size, f"PhysicalSize{axis}Unit": "µm"}
    high, wide = (min(_TILE_SIDE, -(-side // 16) * 16) for side in planes.shape[1:])
    lazy = not isinstance(planes, np.ndarray)
    tifffile.imwrite(
        path,
        _tiles(planes, high, wide) if lazy else planes,
        shape=planes.shape,
        dtype=np.float32,
        ome=True,
        bigtiff=planes.nbytes > _MIN_BIGTIFF_BYTES,
        photometric="minisblack",
        tile=(high, wide),
        compression="zlib",  # of those that every reader of OME-TIFF knows, the best
        metadata=metadata,
    )


def _tiles(planes: Any, high: int, wide: int) -> Iterator[npt.NDArray[np.float32]]:
    """Tiles of every plane in the order of a TIFF, read band by band."""
    for plane in planes:
        for top in range(0, planes.shape[1], high):
            band = load_array(plane[top : top + high])
            for left in range(0, planes.shape[2], wide):
                tile = np.zeros((high, wide), np.float32)
                part = band[:, left : left + wide]
                tile[: part.shape[0], : part.shape[1]] = part
                yield tile


def _write_zarr(
    path: Path, d: Decomposition, planes: Any, pixel_size: PixelSize | None, name: str
) -> None:
    import zarr

    unit = {"unit": "micrometer"} if pixel_size else {}
    scale = [{"type": "scale", "scale": [1.0, *(pixel_size or (1.0, 1.0))]}]
    image = {
        "name": xml_safe(name),
        "axes": [
            {"name": "c", "type": "channel"},
            {"name": "y", "type": "space", **unit},
            {"name": "x", "type": "space", **unit},
        ],
        "datasets": [{"path": "0", "coordinateTransformations": scale}],
    }
    ome: Any = {"version": "0.5", "multiscales": [image], "omero": {"channels": _omero_channels(d)}}
    group = zarr.open_group(str(path), mode="w", zarr_format=3, attributes={"ome": ome})
    array = group.create_array(
        "0",
        shape=planes.shape,
        dtype=np.float32,
        fill_value=0.0,
        chunks=(1, *(min(_TILE_SIDE, side) for side in planes.shape[1:])),
        dimension_names=("c", "y", "x"),
    )
    # In bands, so that little is under way when Ctrl-C comes. What is not written reads as zero.
    for top in range(0, planes.shape[1], 2 * _TILE_SIDE):
        band = slice(top, top + 2 * _TILE_SIDE)
        for i in (int(k) for k in np.flatnonzero(d.active)):
            array[i, band] = load_array(planes[i, band])


def _omero_channels(d: Decomposition) -> list[dict[str, Any]]:
    most = float(d.densities.max(initial=0.0)) or 1.0
    window = {"start": 0.0, "end": most, "min": 0.0, "max": most}
    parts = zip(component_names(d), d.colours, d.active, strict=True)
    return [
        {"label": label, "color": hex_colour(rgb)[1:], "active": bool(active), "window": window}
        for label, rgb, active in parts
    ]
