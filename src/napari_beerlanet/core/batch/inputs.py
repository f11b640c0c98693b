"""Input images of a study: which files are meant, the names of results, and changed files."""

from __future__ import annotations

import glob
import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from napari_beerlanet.core.common.storage import file_stamp
from napari_beerlanet.core.images.files import IMAGE_SUFFIXES

DENSITY_SUFFIXES = {"ome-tiff": ".densities.ome.tiff", "zarr": ".densities.zarr"}
PREVIEW_SUFFIX, SPECTRA_SUFFIX = ".preview.png", ".spectra.json"
DETECTIONS_SUFFIX, OVERLAY_SUFFIX, REPORT_SUFFIX = ".detections", ".overlay.png", ".report.html"
TYPES_SUFFIX = ".types.csv"
NORMALIZED_SUFFIXES = {"ome-tiff": ".normalized.ome.tiff", "png": ".normalized.png"}
SUFFIXES_OF_ONE_RESULT = {
    "spectra": (*DENSITY_SUFFIXES.values(), PREVIEW_SUFFIX, SPECTRA_SUFFIX, OVERLAY_SUFFIX),
    "normalization": tuple(NORMALIZED_SUFFIXES.values()),
}
"""By the kind of their record: files that are not left beside those of other settings."""
RESULT_SUFFIXES = tuple(suffix for kind in SUFFIXES_OF_ONE_RESULT.values() for suffix in kind)
"""Suffixes of results that could be taken for images, and of spectra."""


@dataclass(frozen=True)
class ImageJob:
    """An image file and the name of its results."""

    source: Path
    name: str


def find_images(given: Iterable[str], out: Path, recursive: bool = False) -> Iterator[Path]:
    """The image files that are meant by files, folders and patterns such as ``slides/*.tif``.

    Each once, in the order given, a folder's and a pattern's sorted. What does not exist is passed
    on, so that it is reported as a failure, and a folder without images as itself. Results of
    earlier runs and hidden files in a folder are left out. Links to folders below the one that is
    given are not followed, as they may lead back up or anywhere; they are reported, too.
    """
    seen = set()
    for text in given:
        for path in _expand(text, out, recursive):
            key = os.path.abspath(path)
            if key not in seen:
                seen.add(key)
                yield path


def name_jobs(sources: Sequence[Path]) -> list[ImageJob]:
    """Give each source a name of its own.

    That is the file's name without its ending; where several share one, as much of the rest as it
    takes: a.png and a.jpg keep their ending, A1/a.png and A2/a.png become A1_a and A2_a.
    """
    groups = defaultdict(list)  # folded, as a.png and A.png are one name to many disks
    for path in sources:
        groups[_stem(path).casefold()].append(path)
    names: dict[Path, str] = {}
    for group in groups.values():
        names.update(zip(group, _distinct_names(group), strict=True))
    taken: set[str] = set()
    jobs = []
    for path in sources:
        name = names[path]
        if name.casefold() in taken:
            name = unique_name(name, path)
        taken.add(name.casefold())
        jobs.append(ImageJob(path, name))
    return jobs


def _expand(text: str, out: Path, recursive: bool) -> list[Path]:
    path = Path(text)
    if os.path.isdir(path):  # False, too, where no folder can have such a name
        return _images_in(path, recursive) or [path.resolve() if path.is_symlink() else path]
    if os.path.exists(path) or not glob.has_magic(text):
        is_result = path.parent.resolve() == out.resolve() and path.name.endswith(RESULT_SUFFIXES)
        return [] if is_result else [path]
    matches = _matches_in_subfolders(path) if "**" in path.parts else map(Path, glob.glob(text))
    return [one for one in sorted(matches) if not one.name.endswith(RESULT_SUFFIXES)] or [path]


def _matches_in_subfolders(pattern: Path) -> list[Path]:
    """Files that a pattern with ``**`` matches; `glob` would follow links, in circles, too."""
    fixed = next(k for k, part in enumerate(pattern.parts) if glob.has_magic(part))
    wanted = [p if p == "**" else p.replace("**", "*") for p in pattern.parts[fixed:]]
    wanted += ["*"] if wanted[-1] == "**" else []
    hidden = any(part.startswith(".") for part in wanted)
    return [
        match
        for match in Path(*pattern.parts[:fixed]).glob("/".join(wanted))
        if match.is_file() and (hidden or not any(p.startswith(".") for p in match.parts[fixed:]))
    ]


def _images_in(folder: Path, recursive: bool) -> list[Path]:
    images, folders = [], []
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name.endswith(RESULT_SUFFIXES):
            continue
        if path.is_dir() and not path.is_symlink():
            folders.append(path)
        elif path.is_dir():
            images += [path] if recursive else []
        elif path.suffix.lower() in IMAGE_SUFFIXES:
            images.append(path)
    deeper = [image for inner in folders if recursive for image in _images_in(inner, True)]
    return images + deeper


def _stem(path: Path) -> str:
    return path.stem.removesuffix(".ome")


def _distinct_names(group: list[Path]) -> list[str]:
    """The shortest distinct names for files with the same stem."""
    parents = [os.path.dirname(os.path.abspath(path)) for path in group]
    try:
        root = os.path.commonpath(parents)
    except ValueError:  # several drives on Windows
        root = os.sep
    relative = [Path(os.path.relpath(p, root)).parts if p.startswith(root) else () for p in parents]
    for names in (
        [_stem(path) for path in group],
        [path.name for path in group],
        ["_".join((*parts, _stem(path))) for parts, path in zip(relative, group, strict=True)],
    ):
        if len({name.casefold() for name in names}) == len(group):
            return names
    return ["_".join((*parts, path.name)) for parts, path in zip(relative, group, strict=True)]


def unique_name(name: str, path: Path) -> str:
    """A name that no other file's results have, with a hash of the file's whole path."""
    whole = os.path.abspath(path).encode("utf-8", "surrogateescape")
    return f"{name}-{hashlib.sha256(whole).hexdigest()[:8]}"


def find_earlier_result(
    job: ImageJob, read: Callable[[str], dict[str, Any]]
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """The name of a job's results, the record of those that are there, and the file's stamp.

    `read` gives the record of the results of a name, {} if there are none.
    """
    source = file_stamp(job.source)
    name, record = job.name, read(job.name)
    if record and not is_same_file(record, source):
        name = unique_name(name, job.source)  # by an earlier run, from another file of that name
        record = read(name)
    return name, record, source


def is_same_file(record: dict[str, Any], source: dict[str, Any]) -> bool:
    """True for the same path, and for the same file that moved with its folder."""
    before = record.get("source")
    if not isinstance(before, dict) or not source:
        return False
    old, new = str(before.get("path", source["path"])), source["path"]
    same_name = os.path.basename(old) == os.path.basename(new)
    return old == new or (same_name and is_unchanged(record, source))


def is_unchanged(record: dict[str, Any], source: dict[str, Any]) -> bool:
    """Whether a result's record names the file as it is now, wherever it lies."""
    before = record.get("source")
    return isinstance(before, dict) and {**before, "path": source.get("path")} == source
