"""Which image files are meant, and what the results of each are called."""

from __future__ import annotations

import glob
import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .files import SUFFIXES

DENSITIES = {"ome-tiff": ".densities.ome.tiff", "zarr": ".densities.zarr"}
PREVIEW, SPECTRA = ".preview.png", ".spectra.json"
FOUND, OVERLAY, REPORT = ".detections", ".overlay.png", ".report.html"
OURS = (*DENSITIES.values(), PREVIEW, SPECTRA, OVERLAY)
"""How the names of results end that could be taken for images, and of spectra."""


@dataclass(frozen=True)
class Job:
    """An image file and what its results are called."""

    source: Path
    name: str


def find_images(given: Iterable[str], out: Path, recursive: bool = False) -> Iterator[Path]:
    """The image files that are meant by files, folders and patterns such as ``slides/*.tif``.

    Each once, in the order given, a folder's and a pattern's sorted. What does not exist is passed
    on for `decompose_file` to say so, and a folder without images as itself. Results of ours
    and hidden files in a folder are left out.
    """
    seen = set()
    for text in given:
        for path in _meant_by(text, out, recursive):
            key = os.path.abspath(path)
            if key not in seen:
                seen.add(key)
                yield path


def name_jobs(sources: Sequence[Path]) -> list[Job]:
    """Give each source a name of its own.

    That is the file's name without its ending; where several share one, as much of the rest as it
    takes: a.png and a.jpg keep their ending, A1/a.png and A2/a.png become A1_a and A2_a.
    """
    groups = defaultdict(list)  # folded, as a.png and A.png are one name to many disks
    for path in sources:
        groups[_stem(path).casefold()].append(path)
    names: dict[Path, str] = {}
    for group in groups.values():
        names.update(zip(group, _distinct(group), strict=True))
    taken: set[str] = set()
    jobs = []
    for path in sources:
        name = names[path]
        if name.casefold() in taken:
            name = marked(name, path)
        taken.add(name.casefold())
        jobs.append(Job(path, name))
    return jobs


def _meant_by(text: str, out: Path, recursive: bool) -> list[Path]:
    path = Path(text)
    if path.is_dir():
        return _images_in(path, recursive) or [path]
    if path.exists() or not glob.has_magic(text):
        ours = path.parent.resolve() == out.resolve() and path.name.endswith(OURS)
        return [] if ours else [path]
    found = [Path(match) for match in sorted(glob.glob(text, recursive=True))]
    return [match for match in found if not match.name.endswith(OURS)] or [path]


def _images_in(folder: Path, recursive: bool) -> list[Path]:
    images, folders = [], []
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name.endswith(OURS):
            continue
        if path.is_dir():
            folders += [path] if not path.is_symlink() else []  # a link may lead back up
        elif path.suffix.lower() in SUFFIXES:
            images.append(path)
    deeper = [image for inner in folders if recursive for image in _images_in(inner, True)]
    return images + deeper


def _stem(path: Path) -> str:
    return path.stem.removesuffix(".ome")


def _distinct(group: list[Path]) -> list[str]:
    """Names for files with the same stem, as short as tells them apart."""
    parents = [os.path.dirname(os.path.abspath(path)) for path in group]
    try:
        root = os.path.commonpath(parents)
    except ValueError:  # several drives on Windows
        root = os.sep
    ways = [Path(os.path.relpath(p, root)).parts if p.startswith(root) else () for p in parents]
    for names in (
        [_stem(path) for path in group],
        [path.name for path in group],
        ["_".join((*way, _stem(path))) for way, path in zip(ways, group, strict=True)],
    ):
        if len({name.casefold() for name in names}) == len(group):
            return names
    return ["_".join((*way, path.name)) for way, path in zip(ways, group, strict=True)]


def marked(name: str, path: Path) -> str:
    """A name that no other file's results have: with a digest of the file's whole path."""
    whole = os.path.abspath(path).encode("utf-8", "surrogateescape")
    return f"{name}-{hashlib.sha256(whole).hexdigest()[:8]}"
