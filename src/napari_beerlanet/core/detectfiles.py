"""Objects in image files, written beside each other into a folder, leaving out what is done."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from napari_beerlanet import __version__

from .files import FileError, atomic_path, read_image
from .inputs import FOUND, OVERLAY, Job
from .progress import Report, tell, within
from .results import read_json
from .stamps import earlier_result, stamp, unchanged

# Loaded only where needed, as torch comes with them: finding that all is done should be quick.
if TYPE_CHECKING:
    from .boxes import Detections
    from .detector import Detector
    from .tiff import PixelSize

_KIND, _VERSION = "napari-beerlanet detections", 1
_LONGEST = 4096  # pixels of an overlay's side
ENDINGS = {
    "csv": f"{FOUND}.csv",
    "geojson": f"{FOUND}.geojson",
    "yolo": ".txt",
    "coco": f"{FOUND}.coco.json",
    "voc": f"{FOUND}.xml",
    "overlay": OVERLAY,
}
"""How the name of each kind of result ends. YOLO's, called as the image, are in a folder."""


@dataclass(frozen=True)
class DetectSettings:
    """What decides the detections; as for `Detector.detect`. Recorded beside each result."""

    confidence: float = 0.25
    iou: float = 0.7
    object_size: float | Literal["auto"] = "auto"
    tile: int | Literal["auto"] = "auto"
    pixel_size: float | None = None
    model: str = ""  # the checkpoint's digest


@dataclass(frozen=True)
class DetectFolder:
    """Where results go and which of them are written."""

    path: Path
    kinds: tuple[str, ...] = ("csv", "geojson", "yolo", "overlay")

    def files(self, name: str) -> dict[str, Path]:
        """The result of each kind."""
        places = {kind: self.path / "yolo" if kind == "yolo" else self.path for kind in self.kinds}
        return {kind: place / (name + ENDINGS[kind]) for kind, place in places.items()}

    def record(self, name: str) -> Path:
        """How the detections came about; written last, so it says that the others are there."""
        return self.path / f"{name}{FOUND}.json"


@dataclass(frozen=True)
class Outcome:
    """What became of a job; `detections` is None if it was skipped."""

    name: str
    detections: Detections | None = field(default=None)


def detect_file(
    job: Job,
    folder: DetectFolder,
    model: Detector,
    settings: DetectSettings,
    overwrite: bool = False,
    report: Report | None = None,
) -> Outcome:
    """Find the objects of one file and write the results, unless that is done already."""
    if job.source.is_dir():
        raise FileError(f"{job.source}: no images in this folder.")
    name, done = results_of(job, folder, settings)
    if done and not overwrite:
        return Outcome(name)
    tell(report, 0, 20, "reading")
    image = read_image(job.source)
    size = settings.pixel_size or image.pixel_size
    found = model.detect(
        image.pixels,
        settings.confidence,
        settings.iou,
        settings.object_size,
        settings.tile,
        within(report, 0.05, 0.95),
        pixel_size=size,
    )
    extra = {"settings": asdict(settings), "source": stamp(job.source)}
    write_found(folder, name, found, image.pixels, image.name, model.info.get("colours"), extra)
    return Outcome(name, found)


def results_of(job: Job, folder: DetectFolder, settings: DetectSettings) -> tuple[str, bool]:
    """What a job's results are called, and whether they are there."""
    name, record, source = earlier_result(job, lambda name: _record(folder, name))
    current = record.get("settings") == asdict(settings) and unchanged(record, source)
    return name, current and all(path.exists() for path in folder.files(name).values())


def write_found(
    folder: DetectFolder,
    name: str,
    found: Detections,
    pixels: Any,
    title: str,
    colours: list[str] | None,
    extra: dict[str, Any] | None = None,
) -> dict[str, Path]:
    """Write all kinds of results, all or none, and return their paths."""
    from .formats import write_detections

    files, record = folder.files(name), folder.record(name)
    if "yolo" in files:
        files["yolo"].parent.mkdir(exist_ok=True)
    with ExitStack() as stack:
        # Contexts end in reverse: all is written first, and the record gets its name last.
        last = stack.enter_context(atomic_path(record))
        for kind, path in files.items():
            unfinished = stack.enter_context(atomic_path(path))
            if kind == "overlay":
                _draw(unfinished, found, pixels, colours)
            else:
                write_detections(unfinished, found, title, format=kind, colours=colours)
        content = {**_describe(found, title), **(extra or {})}
        last.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        record.unlink(missing_ok=True)
    return files


def _draw(path: Path, found: Detections, pixels: Any, colours: list[str] | None) -> None:
    from PIL import Image

    from .overlay import draw_overlay

    picture = draw_overlay(pixels, found, colours, longest=_LONGEST)
    Image.fromarray(picture).save(path)


def _describe(found: Detections, title: str) -> dict[str, Any]:
    size: PixelSize | None = found.pixel_size
    return {
        "kind": _KIND,
        "version": _VERSION,
        "software": f"napari-beerlanet {__version__}",
        "image": title,
        "shape": list(found.image_shape or ()),
        "pixel_size_um": list(size) if size else None,
        "classes": found.names,
        "counts": found.counts(),
        "found": found.report,
    }


def _record(folder: DetectFolder, name: str) -> dict[str, Any]:
    try:
        return read_json(folder.record(name))
    except FileError:
        return {}
