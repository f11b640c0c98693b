"""A decomposition to files and back: densities as OME-TIFF or OME-Zarr, spectra as JSON."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from napari_beerlanet import __version__

from .files import FileError, atomic_path
from .tiff import PixelSize

# Loaded only where needed, as torch comes with them: finding that all is done should be quick.
if TYPE_CHECKING:
    from .decompose import Decomposition

_KIND, _VERSION = "napari-beerlanet spectra", 1
_TILE = 512
_BIG = 1 << 31  # bytes; a classic TIFF ends at twice that, and compression may not help


def percent(share: float) -> str:
    """A share as people write it: "62 %", "<1 %"."""
    return "<1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"


def component_names(decomposition: Decomposition) -> list[str]:
    """What each component is called in files: "OD 1 (62 %)", "OD 2 (inactive)"."""
    return [
        f"OD {i + 1} ({percent(share) if active else 'inactive'})"
        for i, (share, active) in enumerate(
            zip(decomposition.share, decomposition.active, strict=True)
        )
    ]


def write_densities(
    path: str | os.PathLike[str],
    decomposition: Decomposition,
    pixel_size: PixelSize | None = None,
    name: str = "",
) -> None:
    """Write the densities (r, H, W) float32 whole or not at all; `pixel_size` is (y, x) in µm.

    A path that ends in .zarr becomes an OME-Zarr 0.5 folder, any other an OME-TIFF.
    """
    with atomic_path(path) as unfinished:
        if Path(path).suffix.lower() == ".zarr":
            _write_zarr(unfinished, decomposition, pixel_size, name)
        else:
            _write_tiff(unfinished, decomposition, pixel_size, name)


def write_spectra(
    path: str | os.PathLike[str],
    decomposition: Decomposition,
    pixel_size: PixelSize | None = None,
    name: str = "",
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write as JSON everything but the densities; `extra` adds entries of the caller's own."""
    content = {**_describe(decomposition, pixel_size, name), **(extra or {})}
    with atomic_path(path) as unfinished:
        unfinished.write_text(_json(content), encoding="utf-8")


def read_spectra(path: str | os.PathLike[str]) -> npt.NDArray[np.float64]:
    """The spectra (3, r) of a file by `write_spectra`, as `decompose(..., spectra=...)` takes them.

    Inactive components are there, too, so that each keeps its place.
    """
    from .spectra import check_spectra

    content = read_json(path)
    if content.get("kind") != _KIND:
        raise FileError(f"{path}: not a spectra file of napari-beerlanet.")
    if content.get("version") != _VERSION:
        raise FileError(
            f"{path}: a spectra file of version {content.get('version')!r}, where version "
            f"{_VERSION} is known; a newer napari-beerlanet may read it."
        )
    try:
        columns = [component["spectrum"] for component in content["components"]]
        spectra = check_spectra(np.array(columns, dtype=np.float64).T, len(columns) or 1)
    except (KeyError, TypeError, ValueError) as error:
        raise FileError(
            f"{path}: every one of its components needs a spectrum of 3 numbers of at least 0."
        ) from error
    if not spectra.any():
        raise FileError(f"{path}: all its spectra are zero, so nothing can start from them.")
    return spectra


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a JSON file that holds an object, or a `FileError`."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(f"{path}: {(error.strerror or str(error)).lower()}.") from error
    except ValueError as error:
        raise FileError(f"{path}: not a JSON file ({error}).") from error
    if not isinstance(content, dict):
        raise FileError(f"{path}: not a JSON file of ours, as it holds no object.")
    return content


def read_record(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of such a file, {} where there is none or it is damaged."""
    try:
        return read_json(path)
    except FileError:
        return {}


def _json(content: Mapping[str, Any]) -> str:
    """Indented for people, with a list of numbers on one line."""
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    return re.sub(r'\[\n[^][{}"]*\n\s*\]', lambda found: re.sub(r"\n\s*", " ", found[0]), text)


def _describe(d: Decomposition, pixel_size: PixelSize | None, name: str) -> dict[str, Any]:
    parts = zip(component_names(d), d.spectra.T, d.share, d.active, d.colours, strict=True)
    return {
        "kind": _KIND,
        "version": _VERSION,
        "software": f"napari-beerlanet {__version__}",
        "image": name,
        "shape": list(d.image.shape),
        "pixel_size_um": list(pixel_size) if pixel_size else None,
        "domain": d.domain,
        "lambda": d.lam,
        "gamma": d.gamma,
        "iterations": len(d.objective),
        "objective": float(d.objective[-1]) if len(d.objective) else None,
        "background": {"x0": d.background.tolist(), "light": d.light.tolist()},
        "components": [
            {
                "index": i,
                "name": label,
                "spectrum": spectrum.tolist(),
                "share": float(share),
                "active": bool(active),
                "colour": hex_colour(colour),
            }
            for i, (label, spectrum, share, active, colour) in enumerate(parts)
        ],
    }


def hex_colour(rgb: npt.ArrayLike) -> str:
    """RGB, 0 to 255, as "#a03c50"."""
    return "#" + "".join(f"{int(value):02x}" for value in np.asarray(rgb))


def _write_tiff(path: Path, d: Decomposition, pixel_size: PixelSize | None, name: str) -> None:
    import tifffile

    metadata: dict[str, Any] = {"axes": "CYX", "Channel": {"Name": component_names(d)}}
    if name:
        metadata["Name"] = _for_xml(name)
    if pixel_size:
        for axis, size in zip("YX", pixel_size, strict=True):
            metadata |= {f"PhysicalSize{axis}": size, f"PhysicalSize{axis}Unit": "µm"}
    tifffile.imwrite(
        path,
        d.densities,
        ome=True,
        bigtiff=d.densities.nbytes > _BIG,
        photometric="minisblack",
        tile=tuple(min(_TILE, -(-side // 16) * 16) for side in d.image.shape),
        compression="zlib",  # of those that every reader of OME-TIFF knows, the best
        metadata=metadata,
    )


def _for_xml(text: str) -> str:
    """A file name may hold what XML may not: control characters, bytes that are no text."""
    plain = text.encode("utf-8", "replace").decode("utf-8")
    return "".join(c if c.isprintable() else "?" for c in plain)


def _write_zarr(path: Path, d: Decomposition, pixel_size: PixelSize | None, name: str) -> None:
    import zarr

    unit = {"unit": "micrometer"} if pixel_size else {}
    scale = [{"type": "scale", "scale": [1.0, *(pixel_size or (1.0, 1.0))]}]
    image = {
        "name": _for_xml(name),
        "axes": [
            {"name": "c", "type": "channel"},
            {"name": "y", "type": "space", **unit},
            {"name": "x", "type": "space", **unit},
        ],
        "datasets": [{"path": "0", "coordinateTransformations": scale}],
    }
    ome: Any = {"version": "0.5", "multiscales": [image], "omero": {"channels": _channels(d)}}
    group = zarr.open_group(str(path), mode="w", zarr_format=3, attributes={"ome": ome})
    array = group.create_array(
        "0",
        shape=d.densities.shape,
        dtype=d.densities.dtype,
        fill_value=0.0,
        chunks=(1, *(min(_TILE, side) for side in d.image.shape)),
        dimension_names=("c", "y", "x"),
    )
    # In bands, so that little is under way when Ctrl-C comes. What is not written reads as zero.
    for i in (int(k) for k in np.flatnonzero(d.active)):
        for top in range(0, d.image.shape[0], 2 * _TILE):
            array[i, top : top + 2 * _TILE] = d.densities[i, top : top + 2 * _TILE]


def _channels(d: Decomposition) -> list[dict[str, Any]]:
    most = float(d.densities.max(initial=0.0)) or 1.0
    window = {"start": 0.0, "end": most, "min": 0.0, "max": most}
    parts = zip(component_names(d), d.colours, d.active, strict=True)
    return [
        {"label": label, "color": hex_colour(rgb)[1:], "active": bool(active), "window": window}
        for label, rgb, active in parts
    ]
