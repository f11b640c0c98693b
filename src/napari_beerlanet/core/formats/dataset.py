"""YOLO datasets: a data.yaml, folders of images and of label files; read, check and hash them.

    path: smears            # folder of the rest; where it is missing, the data.yaml's own
    train: images/train     # folders, text files with one image per line, or lists of these
    val: images/val
    names: [RBC, WBC]       # or {0: RBC, 1: WBC}

The label file of …/images/a.png is …/labels/a.txt, see `yolo`. A key `download` is ignored:
nothing is ever fetched or written.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.common.messages import count_of, name_list, path_text, shortened
from napari_beerlanet.core.common.progress import Report, report_progress
from napari_beerlanet.core.common.storage import DataError, FileError
from napari_beerlanet.core.common.threads import run_parallel
from napari_beerlanet.core.formats.yolo import class_names_of, parse_yolo_line, read_data_yaml
from napari_beerlanet.core.images.files import IMAGE_SUFFIXES, read_image

SPLITS = ("train", "val", "test")
_MAX_LISTED_PROBLEMS = 10  # problems that one message names
# What other programs write beside them, named here so that a sentence tells that we cannot read it.
_DATASET_IMAGE_SUFFIXES = IMAGE_SUFFIXES | {".avif", ".dng", ".heic", ".heif", ".mpo"}


@dataclass(frozen=True, eq=False)
class LabelledImage:
    """An image and its n boxes.

    `labels` (n,) int64 are indices into the names, `cxcywh` (n, 4) float64 centres and sizes
    relative to the image. `problems` and `notes` are sentences about its label file.
    """

    image: Path
    labels: npt.NDArray[np.int64]
    cxcywh: npt.NDArray[np.float64]
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ImageInspection:
    """What was found in an image file: (H, W), the digest of its bytes, or a problem."""

    shape: tuple[int, int]
    digest: str
    problem: str = ""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Class names and, for each split that the file has, its items, sorted by path.

    `unreadable` says of other splits why there is nothing; `inspections` fills as images are read,
    see `inspect_images`.
    """

    path: Path
    names: list[str]
    splits: dict[str, list[LabelledImage]]
    unreadable: dict[str, str] = field(default_factory=dict)
    inspections: dict[Path, ImageInspection] = field(default_factory=dict, repr=False)


def read_dataset(path: str | os.PathLike[str]) -> Dataset:
    """Read a data.yaml (or the folder that holds it), find its images and read their labels.

    What is wrong with the file itself is a `DataError` here; what is wrong with labels and images
    is reported by `check_dataset`.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "data.yaml"
        if not file.exists():
            raise DataError(
                f"{file.parent}: there is no data.yaml in it, which says where images with boxes "
                "are; a folder per class is for classifiers alone."
            )
    content = read_data_yaml(file)
    names, root = class_names_of(content, file), _dataset_root(content, file)
    dataset = Dataset(file, names, {})
    for split in SPLITS:
        where = content.get(split) or (content.get("validation") if split == "val" else None)
        if not where:
            continue
        try:
            images = _find_images(where, root, split)
            dataset.splits[split] = [read_labelled_image(image, len(names)) for image in images]
        except DataError as error:
            dataset.unreadable[split] = str(error)
    return dataset


def check_dataset(
    dataset: Dataset, splits: Sequence[str] = ("train", "val"), report: Report | None = None
) -> list[str]:
    """Look at every image and label of `splits`; raise a `DataError` with all problems found.

    Returns sentences about what is odd and does no harm.
    """
    problems = [_why_unusable(dataset, split) for split in splits]
    items = [item for split in splits for item in dataset.splits.get(split, [])]
    inspect_images(dataset, items, report)
    for item in items:
        fact = dataset.inspections[item.image]
        problems += [fact.problem, *item.problems]
    shared = _images_in_two_splits(dataset, splits)
    problems += [
        f"{b}: the same image as {a}, so metrics on {split} are not valid."
        for a, b, split in shared
    ]
    problems = list(dict.fromkeys(problem for problem in problems if problem))
    if problems:
        raise DataError(describe_problems(dataset.path, problems))
    return _dataset_warnings(dataset, splits, items)


def describe_problems(path: Path, problems: Sequence[str]) -> str:
    """All problems of a dataset, a line each; of very many the first."""
    more = len(problems) - _MAX_LISTED_PROBLEMS
    rest = [f"and {more} more."] if more > 0 else []
    return "\n".join([f"{path}: cannot be used:", *problems[:_MAX_LISTED_PROBLEMS], *rest])


def inspect_images(
    dataset: Dataset, items: Iterable[LabelledImage], report: Report | None = None, step: int = 16
) -> None:
    """Read the images of `items` and fill in `dataset.inspections`."""
    paths = [p for p in dict.fromkeys(item.image for item in items) if p not in dataset.inspections]
    for start in range(0, len(paths), step):
        report_progress(report, start, len(paths), "checking the data")
        part = paths[start : start + step]
        facts = run_parallel([lambda p=p: _inspect_image(p) for p in part])  # type: ignore[misc]
        dataset.inspections.update(zip(part, facts, strict=True))


def dataset_hash(dataset: Dataset, splits: Sequence[str] = ("train", "val")) -> str:
    """SHA-256 over names, splits, images' and labels' contents, wherever the folder lies."""
    inspect_images(dataset, [item for split in splits for item in dataset.splits[split]])
    total = hashlib.sha256("\0".join(dataset.names).encode())
    for split in splits:
        for item in dataset.splits[split]:
            total.update(
                f"\0{split}\0{item.image.name}\0{dataset.inspections[item.image].digest}".encode()
            )
            total.update(item.labels.tobytes() + item.cxcywh.tobytes())
    return total.hexdigest()


def label_path(image: Path) -> Path:
    """Where the labels of an image are: its last folder `images` becomes `labels`."""
    before, cut, after = str(image).rpartition(f"{os.sep}images{os.sep}")
    where = f"{before}{os.sep}labels{os.sep}{after}" if cut else str(image)
    return Path(where).with_suffix(".txt")


def list_images(place: Path, root: Path) -> list[Path]:
    """The images in a folder and the folders in it, in a text file of paths, or `place` itself.

    A line of a text file that begins with ./ is relative to that file, any other to `root` or the
    current folder.
    """
    if place.is_dir():
        depth = len(place.parts)
        return [
            path
            for path in place.rglob("*")
            if path.suffix.lower() in _DATASET_IMAGE_SUFFIXES
            and not any(part.startswith(".") for part in path.parts[depth:])
        ]
    if place.suffix.lower() in _DATASET_IMAGE_SUFFIXES:
        return [place]
    try:
        if not place.is_file():  # reading from a pipe would wait for ever
            raise OSError("not a regular file")
        lines = place.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{place}: not a folder, an image, or a list of images.") from error
    return [_resolve_listed_image(line.strip(), place, root) for line in lines if line.strip()]


def _resolve_listed_image(line: str, listing: Path, root: Path) -> Path:
    folders = [root, Path.cwd()] if not line.startswith("./") else []
    for folder in folders:
        if os.path.exists(folder / line):  # False, too, where no file can have such a name
            return Path(os.path.abspath(folder / line))
    return Path(os.path.abspath(listing.parent / line))


def read_labelled_image(image: Path, classes: int) -> LabelledImage:
    """An image with its label file read; without one it has no boxes."""
    file = label_path(image)
    problems: list[str] = []
    rows: list[tuple[float, ...]] = []
    for number, line in enumerate(_read_label_lines(file, problems), 1):
        if line.strip():
            try:
                rows.append(_parse_label(line, classes))
            except ValueError as error:
                problems.append(f"{file}, line {number}: {error}")
    unique = list(dict.fromkeys(rows))
    duplicates = len(rows) - len(unique)
    notes = (
        (f"{file}: {count_of(duplicates, 'duplicate box', 'duplicate boxes')} ignored.",)
        if duplicates
        else ()
    )
    table = np.array(unique, np.float64).reshape(-1, 5)
    return LabelledImage(image, table[:, 0].astype(np.int64), table[:, 1:], tuple(problems), notes)


def _read_label_lines(file: Path, problems: list[str]) -> list[str]:
    if not os.path.lexists(file):
        return []
    try:
        if not file.is_file():  # reading from a pipe would wait for ever
            raise OSError("not a regular file")
        return file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError):
        problems.append(f"{file}: not a text file that can be read.")
        return []


def _parse_label(line: str, classes: int) -> tuple[float, ...]:
    """(class, x, y, w, h) of a line to learn from, which has no confidence and some area."""
    label, cxcywh, score = parse_yolo_line(line)
    if score is not None:
        raise ValueError("6 numbers; `class x y width height` is needed.")
    if label >= classes:
        raise ValueError(f"class {label}, but the classes are 0 to {classes - 1}.")
    if min(cxcywh[2:]) <= 0:
        raise ValueError("a box without area.")
    return (label, *cxcywh)


def _dataset_root(content: dict[str, Any], file: Path) -> Path:
    """The folder that splits are in: `path` beside the file or in the current folder."""
    here = file.resolve().parent
    given = content.get("path")
    if not given:
        return here
    for folder in (here / str(given), Path(str(given)).absolute()):
        if os.path.isdir(folder):
            return folder
    raise DataError(f"{file}: `path` names {shortened(given)}, and there is no such folder.")


def _find_images(where: Any, root: Path, split: str) -> list[Path]:
    images: list[Path] = []
    for place in where if isinstance(where, list) else [where]:
        if not isinstance(place, str):
            raise DataError(f"`{split}` must be a folder, a text file, or a list of these.")
        images += list_images(_resolve_split_path(place, root, split), root)
    return sorted(dict.fromkeys(images))


def _resolve_split_path(place: str, root: Path, split: str) -> Path:
    # Exports write ../train/images although the folder lies beside the data.yaml.
    for path in (root / place, root / place.removeprefix("../")):
        if os.path.exists(path):
            return path.resolve()
    raise DataError(f"`{split}` names {path_text(root / place)}, which does not exist.")


def _inspect_image(path: Path) -> ImageInspection:
    try:
        pixels = read_image(path).pixels
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except (FileError, OSError) as error:
        return ImageInspection((0, 0), "", str(error))
    height, width = pixels.shape[:2]
    problem = f"{path}: only {width} × {height} pixels." if min(height, width) < 10 else ""
    return ImageInspection((height, width), digest, problem)


def _why_unusable(dataset: Dataset, split: str) -> str:
    items = dataset.splits.get(split)
    if items is None:
        return dataset.unreadable.get(split, f"there is no `{split}:` in it.")
    if not items:
        return f"`{split}` has no images."
    if not any(len(item.labels) or item.problems for item in items):
        return f"`{split}` has no boxes in any of its {len(items)} label files."
    return ""


def _images_in_two_splits(dataset: Dataset, splits: Sequence[str]) -> list[tuple[Path, Path, str]]:
    """(file, copy, split of the copy): other files of the same content in two splits."""
    first: dict[str, tuple[Path, str]] = {}
    copies = []
    for split in splits:
        for item in dataset.splits.get(split, []):
            digest = dataset.inspections[item.image].digest
            path, home = first.setdefault(digest, (item.image, split))
            if digest and home != split and path != item.image:
                copies.append((path, item.image, split))
    return copies


def _dataset_warnings(
    dataset: Dataset, splits: Sequence[str], items: list[LabelledImage]
) -> list[str]:
    notes = [note for item in items for note in item.notes]
    for split in splits:
        mine = dataset.splits[split]
        bare = [item.image for item in mine if not len(item.labels)]
        if bare:
            some = f"{bare[0]}" + (f" and {len(bare) - 1} more" if len(bare) > 1 else "")
            notes.append(f"{split}: {some} without boxes, used as background.")
        digests = [dataset.inspections[item.image].digest for item in mine]
        if len(set(digests)) < len(digests):
            duplicates = len(digests) - len(set(digests))
            notes.append(f"{split}: {count_of(duplicates, 'duplicate image')}.")
        seen = {int(label) for item in mine for label in item.labels}
        absent = [name for k, name in enumerate(dataset.names) if k not in seen]
        if absent:
            what = {"train": "training", "val": "validation"}.get(split, split)
            notes.append(f"There are no boxes of {name_list(absent)} for {what}.")
    both = {i.image for i in dataset.splits[splits[0]]}.intersection(
        *({i.image for i in dataset.splits[split]} for split in splits[1:])
    )
    if both and len(splits) > 1:
        notes.append(
            f"{' and '.join(splits)} share {count_of(len(both), 'image')}, so metrics will be "
            "optimistic."
        )
    return notes
