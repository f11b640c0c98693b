"""Annotated images as YOLO lays them out: a data.yaml, folders of images and of label files.

    path: smears            # folder of the rest; where it is missing, the data.yaml's own
    train: images/train     # folders, text files with one image per line, or lists of these
    val: images/val
    names: [RBC, WBC]       # or {0: RBC, 1: WBC}

The label file of …/images/a.png is …/labels/a.txt, with a line `class x y w h` for each box, in
shares of the image. A key `download` is not looked at, and nothing is ever fetched or written.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from .files import FileError, read_image
from .labels import DataError, Item, images_of, read_item
from .progress import Report, tell
from .threads import run_all

SPLITS = ("train", "val", "test")
_LISTED = 10  # problems that one message names


@dataclass(frozen=True)
class ImageFacts:
    """What looking into an image file told: (H, W), the digest of its bytes, or a problem."""

    shape: tuple[int, int]
    digest: str
    problem: str = ""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Class names and, for each split that the file has, its items, sorted by path.

    `missing` says of other splits why there is nothing; `facts` fills as images are looked at,
    see `look_at_images`.
    """

    path: Path
    names: list[str]
    splits: dict[str, list[Item]]
    missing: dict[str, str] = field(default_factory=dict)
    facts: dict[Path, ImageFacts] = field(default_factory=dict, repr=False)


def read_dataset(path: str | os.PathLike[str]) -> Dataset:
    """Read a data.yaml (or the folder that holds it), find its images and read their labels.

    What is wrong with the file itself is a `DataError` here; what is wrong with labels and images
    is told by `check_dataset`.
    """
    file = Path(path)
    file = file / "data.yaml" if file.is_dir() else file
    content = _read_yaml(file)
    names, root = _names(content, file), _root(content, file)
    dataset = Dataset(file, names, {})
    for split in SPLITS:
        where = content.get(split) or (content.get("validation") if split == "val" else None)
        if not where:
            continue
        try:
            images = _find_images(where, root, split)
            dataset.splits[split] = [read_item(image, len(names)) for image in images]
        except DataError as error:
            dataset.missing[split] = str(error)
    return dataset


def check_dataset(
    dataset: Dataset, splits: Sequence[str] = ("train", "val"), report: Report | None = None
) -> list[str]:
    """Look at every image and label of `splits`; raise a `DataError` with all problems found.

    Returns sentences about what is odd and does no harm.
    """
    problems = [_nothing_in(dataset, split) for split in splits]
    items = [item for split in splits for item in dataset.splits.get(split, [])]
    look_at_images(dataset, items, report)
    for item in items:
        fact = dataset.facts[item.image]
        problems += [fact.problem, *item.problems]
    shared = _shared_images(dataset, splits)
    problems += [
        f"{b}: the same image as {a}, so {split} proves nothing." for a, b, split in shared
    ]
    found = list(dict.fromkeys(problem for problem in problems if problem))
    if found:
        more = [f"and {len(found) - _LISTED} more."] if len(found) > _LISTED else []
        raise DataError("\n".join([f"{dataset.path}: cannot be used:", *found[:_LISTED], *more]))
    return _oddities(dataset, splits, items)


def look_at_images(
    dataset: Dataset, items: Iterable[Item], report: Report | None = None, step: int = 16
) -> None:
    """Read the images of `items` and fill in `dataset.facts`."""
    paths = [p for p in dict.fromkeys(item.image for item in items) if p not in dataset.facts]
    for start in range(0, len(paths), step):
        tell(report, start, len(paths), "checking the data")
        part = paths[start : start + step]
        facts = run_all([lambda p=p: _look(p) for p in part])  # type: ignore[misc]
        dataset.facts.update(zip(part, facts, strict=True))


def data_hash(dataset: Dataset, splits: Sequence[str] = ("train", "val")) -> str:
    """SHA-256 over names, splits, images' and labels' contents, wherever the folder lies."""
    look_at_images(dataset, [item for split in splits for item in dataset.splits[split]])
    total = hashlib.sha256("\0".join(dataset.names).encode())
    for split in splits:
        for item in dataset.splits[split]:
            total.update(
                f"\0{split}\0{item.image.name}\0{dataset.facts[item.image].digest}".encode()
            )
            total.update(item.labels.tobytes() + item.cxcywh.tobytes())
    return total.hexdigest()


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        reason = "there is no such file" if not file.exists() else str(error.strerror).lower()
        raise DataError(f"{file}: {reason}.") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{file}: not a YAML file ({reason[:160]}).") from error
    if not isinstance(content, dict):
        raise DataError(f"{file}: not a data.yaml, which has `train:`, `val:` and `names:`.")
    return content


def _names(content: dict[str, Any], file: Path) -> list[str]:
    given, count = content.get("names"), content.get("nc")
    if given is None and isinstance(count, int) and 0 < count < 10_000:
        given = [f"class {k}" for k in range(count)]
    if isinstance(given, dict):
        keys = {str(key): str(name) for key, name in given.items()}
        if sorted(keys) != sorted(str(k) for k in range(len(keys))):
            raise DataError(f"{file}: `names` must number its classes 0, 1, 2 … without a gap.")
        given = [keys[str(k)] for k in range(len(keys))]
    if not isinstance(given, list) or not given:
        raise DataError(f"{file}: `names` must list the classes, for instance [RBC, WBC].")
    names = [str(name).strip() for name in given]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice or not all(names):
        raise DataError(f"{file}: `names` has {', '.join(twice) or 'an empty name'} twice.")
    if isinstance(count, int) and count != len(names):
        raise DataError(f"{file}: `nc` says {count} classes, but `names` lists {len(names)}.")
    return names


def _root(content: dict[str, Any], file: Path) -> Path:
    """The folder that splits are in: `path` beside the file or in the current folder."""
    here = file.resolve().parent
    given = content.get("path")
    if not given:
        return here
    for folder in (here / str(given), Path(str(given)).absolute()):
        if folder.is_dir():
            return folder
    raise DataError(f"{file}: `path` names {given}, and there is no such folder.")


def _find_images(where: Any, root: Path, split: str) -> list[Path]:
    found: list[Path] = []
    for place in where if isinstance(where, list) else [where]:
        if not isinstance(place, str):
            raise DataError(f"`{split}` must be a folder, a text file, or a list of these.")
        found += images_of(_place(place, root, split), root)
    return sorted(dict.fromkeys(found))


def _place(place: str, root: Path, split: str) -> Path:
    # Exports write ../train/images although the folder lies beside the data.yaml.
    for path in (root / place, root / place.removeprefix("../")):
        if path.exists():
            return path.resolve()
    raise DataError(f"`{split}` names {root / place}, which does not exist.")


def _look(path: Path) -> ImageFacts:
    try:
        pixels = read_image(path).pixels
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except (FileError, OSError) as error:
        return ImageFacts((0, 0), "", str(error))
    height, width = pixels.shape[:2]
    problem = f"{path}: only {width} × {height} pixels." if min(height, width) < 10 else ""
    return ImageFacts((height, width), digest, problem)


def _nothing_in(dataset: Dataset, split: str) -> str:
    items = dataset.splits.get(split)
    if items is None:
        return dataset.missing.get(split, f"there is no `{split}:` in it.")
    if not items:
        return f"`{split}` has no images."
    if not any(len(item.labels) or item.problems for item in items):
        return f"`{split}` has no boxes in any of its {len(items)} label files."
    return ""


def _shared_images(dataset: Dataset, splits: Sequence[str]) -> list[tuple[Path, Path, str]]:
    """(file, copy, split of the copy): other files of the same content in two splits."""
    first: dict[str, tuple[Path, str]] = {}
    found = []
    for split in splits:
        for item in dataset.splits.get(split, []):
            digest = dataset.facts[item.image].digest
            path, home = first.setdefault(digest, (item.image, split))
            if digest and home != split and path != item.image:
                found.append((path, item.image, split))
    return found


def _oddities(dataset: Dataset, splits: Sequence[str], items: list[Item]) -> list[str]:
    notes = [note for item in items for note in item.notes]
    for split in splits:
        mine = dataset.splits[split]
        bare = [item.image for item in mine if not len(item.labels)]
        if bare:
            some = f"{bare[0]}" + (f" and {len(bare) - 1} more" if len(bare) > 1 else "")
            notes.append(f"{split}: {some} without boxes, taken as background.")
        digests = [dataset.facts[item.image].digest for item in mine]
        if len(set(digests)) < len(digests):
            notes.append(f"{split}: {len(digests) - len(set(digests))} images are there twice.")
        seen = {int(label) for item in mine for label in item.labels}
        absent = [name for k, name in enumerate(dataset.names) if k not in seen]
        if absent:
            notes.append(f"{split}: no boxes of {', '.join(absent)}.")
    both = {i.image for i in dataset.splits[splits[0]]}.intersection(
        *({i.image for i in dataset.splits[split]} for split in splits[1:])
    )
    if both and len(splits) > 1:
        notes.append(f"{' and '.join(splits)} share {len(both)} images, so metrics will flatter.")
    return notes
