"""The command `classify`: what crops show, or the cells of images."""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from napari_beerlanet.cli.common import (
    UsageError,
    add_device_option,
    add_setting,
    prepare_folder,
    print_message,
    raise_if_interrupted,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    from napari_beerlanet.core.boxes.detections import Detections
    from napari_beerlanet.core.classification.classifier import Classification, Classifier
    from napari_beerlanet.core.detection.detector import Detector

HELP = "say what crops, or the cells of images, show"
DESCRIPTION = (
    "Classify crops with a cell in the middle of each; types.csv has a line for each. With --boxes "
    "or --detect the cells of whole images are classified, and for each image NAME there is "
    "NAME.types.csv with boxes, types and the probability of every type."
)

_CHUNK = 64  # crops that are in memory at a time
_TABLE = "types.csv"


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    from napari_beerlanet.core.classification.settings import ClassifierSettings

    add = command.add_argument
    add("images", nargs="+", metavar="IMAGE", help="files, folders, or patterns such as '*.png'")
    add("--model", required=True, metavar="MODEL", help="a classifier: a name, or a path")
    add("--out", required=True, type=Path, metavar="DIR", help="folder for the results")
    where = command.add_mutually_exclusive_group()
    where.add_argument(
        "--boxes", type=Path, metavar="FILE", help="boxes of the cells: CSV, GeoJSON, YOLO, …"
    )
    where.add_argument("--detect", metavar="MODEL", help="a detector that finds the cells")
    add(
        "--only",
        action="append",
        default=[],
        metavar="CLASS",
        help="classify boxes of this class alone, for instance WBC; may be repeated; by default "
        "those of the classes that the model is meant for",
    )
    add_setting(command, ClassifierSettings, "fit")
    add("--recursive", action="store_true", help="include subfolders")
    add("--quiet", action="store_true", help="print nothing but errors and the summary")
    add_device_option(command)


def run(options: argparse.Namespace) -> int:
    """Classify files; 0 if all went well, 1 if some failed."""
    from napari_beerlanet.core.batch.inputs import find_images
    from napari_beerlanet.core.checkpoints.checkpoint import load_classifier, load_detector
    from napari_beerlanet.core.checkpoints.info import model_notes

    try:
        model = load_classifier(options.model, options.device)
        detector = load_detector(options.detect, options.device) if options.detect else None
    except ValueError as error:
        raise UsageError(str(error)) from error
    paths = list(find_images(options.images, options.out, options.recursive))
    _check_boxes_file(options.boxes, paths)
    if options.only and options.boxes is None and detector is None:
        raise UsageError("--only is for boxes; give --boxes or --detect, too.")
    prepare_folder(options.out)
    for note in [*model_notes(model.info), *(model_notes(detector.info) if detector else ())]:
        print_message(note)
    task = _Task(model, detector, options)
    counts = task.crops(paths) if options.boxes is None and detector is None else task.fields(paths)
    total = ", ".join(f"{number} {name}" for name, number in counts.items())
    print(f"{total}; {options.out}", flush=True)
    return 1 if task.failed else 0


def _check_boxes_file(boxes: Path | None, paths: Sequence[Path]) -> None:
    if boxes is None:
        return
    from napari_beerlanet.core.formats import image_names

    try:
        named = image_names(boxes)
    except ValueError as error:
        raise UsageError(str(error)) from error
    missing = [path.name for path in paths if path.name not in named]
    if len(paths) > 1 and missing:
        raise UsageError(
            f"{boxes}: it has no boxes of {missing[0]}; with several images the file has to name "
            "each of them."
        )


class _Task:
    def __init__(
        self, model: Classifier, detector: Detector | None, options: argparse.Namespace
    ) -> None:
        self.model, self.detector, self.options = model, detector, options
        self.fit = getattr(options, "fit", None)
        self.failed = 0
        self._warned: set[str] = set()

    def crops(self, paths: Sequence[Path]) -> Counter[str]:
        """Classify files that are crops, and write one table."""
        rows: list[tuple[str, dict[str, Any]]] = []
        with self._bar(len(paths)) as bar:
            for start in range(0, len(paths), _CHUNK):
                read = [(path, self._read(path)) for path in paths[start : start + _CHUNK]]
                good = [(path, image.pixels) for path, image in read if image is not None]
                result = self.model.classify([pixels for _, pixels in good], fit=self.fit)
                table = {name: list(values) for name, values in result.table().items()}
                rows += [
                    (str(path), {name: values[k] for name, values in table.items()})
                    for k, (path, _) in enumerate(good)
                ]
                self._warn("", result)
                bar.update(len(read))
        if rows:
            self._write_table(rows)
        return self._counts(row["type"] for _, row in rows)

    def fields(self, paths: Sequence[Path]) -> Counter[str]:
        """Classify the cells of images, and write a table for each."""
        from napari_beerlanet.core.batch.inputs import name_jobs
        from napari_beerlanet.core.formats import write_csv

        types: list[str] = []
        with self._bar(len(paths)) as bar:
            for job in name_jobs(paths):
                image = self._read(job.source)
                if image is not None:
                    try:
                        found = self._boxes(job.source, image.pixels, image.pixel_size)
                        result = self.model.classify(image.pixels, found, fit=self.fit)
                    except ValueError as error:
                        self._fail(job.source, error)
                    else:
                        columns = {**found.columns, **result.table()}
                        file = self.options.out / f"{job.name}.types.csv"
                        write_csv(file, replace(found, columns=columns), job.source.name)
                        types += result.table()["type"].tolist()
                        self._warn(f"{job.source}: ", result)
                bar.update()
        return self._counts(types)

    def _boxes(
        self, path: Path, pixels: npt.NDArray[Any], pixel_size: tuple[float, float] | None
    ) -> Detections:
        if self.detector is not None:
            found = self.detector.detect(pixels, pixel_size=pixel_size, report=_check_signals)
        else:
            from napari_beerlanet.core.formats import read_detections

            found = read_detections(self.options.boxes, pixels.shape[:2], image_name=path.name)
            found = replace(found, pixel_size=pixel_size)
        meant = set(self.model.info.get("applies_to") or ()) & set(found.names)
        only = set(self.options.only) or meant
        if only - set(found.names):
            raise ValueError(
                f"There are no boxes of the class {min(only - set(found.names))}; the classes are "
                f"{', '.join(found.names)}."
            )
        return found[[not only or found.names[k] in only for k in found.labels]]

    def _read(self, path: Path) -> Any:
        raise_if_interrupted()
        from napari_beerlanet.core.images.files import read_image

        try:
            return read_image(path)
        except ValueError as error:
            self._fail(path, error)
            return None

    def _fail(self, path: Path, error: ValueError) -> None:
        self.failed += 1
        text = str(error)
        print_message(text if str(path) in text else f"{path}: {text}")

    def _warn(self, start: str, result: Classification) -> None:
        for text in [*result.report["warnings"], *result.report["notes"]]:
            if f"{start}{text}" not in self._warned:
                self._warned.add(f"{start}{text}")
                print_message(f"{start}{text}")

    def _counts(self, types: Any) -> Counter[str]:
        counts = Counter(types)
        return Counter({name: counts[name] for name in self.model.classes})

    def _write_table(self, rows: Sequence[tuple[str, dict[str, Any]]]) -> None:
        from napari_beerlanet.core.common.storage import atomic_path

        text = io.StringIO(newline="")
        writer = csv.writer(text)
        writer.writerow(["image", *rows[0][1]])
        for path, row in rows:
            cells = (f"{v:.6f}" if not isinstance(v, str) else v for v in row.values())
            writer.writerow([path, *cells])
        with atomic_path(self.options.out / _TABLE) as unfinished:
            unfinished.write_text(text.getvalue(), encoding="utf-8", newline="")

    @contextmanager
    def _bar(self, total: int) -> Iterator[Any]:
        from tqdm import tqdm

        hidden = self.options.quiet or not sys.stderr.isatty()
        with tqdm(total=total, unit="image", disable=hidden, dynamic_ncols=True) as bar:
            yield bar


def _check_signals(progress: Any) -> None:
    raise_if_interrupted()
