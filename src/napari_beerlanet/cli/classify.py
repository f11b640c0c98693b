"""The command `classify`: what crops show, or the cells of images."""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from napari_beerlanet.cli.common import (
    UsageError,
    add_settings,
    echo,
    prepare_folder,
    print_message,
    raise_if_interrupted,
)
from napari_beerlanet.cli.study import ConsoleOutput, run_files

if TYPE_CHECKING:
    from napari_beerlanet.core.batch.manifest import StudyEntry
    from napari_beerlanet.core.batch.study import StudyResult
    from napari_beerlanet.core.boxes.regions import Region
    from napari_beerlanet.core.classification.classifier import Classification, Classifier
    from napari_beerlanet.core.classification.settings import PatchSettings
    from napari_beerlanet.core.classification.slide_classifier import PatchMap
    from napari_beerlanet.core.images.slide import Slide

HELP = "say what crops, or the cells of images, show"
DESCRIPTION = (
    "Classify crops with a cell in the middle of each; types.csv has a line for each. With --boxes "
    "or --detect the cells of images or slides are classified, and for each image NAME there is "
    "NAME.types.csv with boxes, types and the probability of every type, and NAME.detections.json "
    "(how they came about). Images that are done are skipped. With --patches the tissue of slides "
    "is classified patch by patch: NAME.patches.csv has a line for each patch, "
    "NAME.patches.ome.tiff a heat map for each class, and NAME.CLASS.png shows it over the slide; "
    "with --regions, NAME.regions.csv has a line for each region. A run that was stopped is "
    "resumed."
)

_CHUNK = 64  # crops that are in memory at a time
_TABLE = "types.csv"
_PICTURE_SIDE = 2048  # pixels of the longer side of a heat map over a slide


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    from napari_beerlanet.core.batch.settings import StudySettings
    from napari_beerlanet.core.classification.settings import ClassifierSettings, PatchSettings

    add = command.add_argument
    add("images", nargs="+", metavar="IMAGE", help="files, folders, or patterns such as '*.png'")
    add("--model", required=True, metavar="MODEL", help="a classifier: a name, or a path")
    add("--out", required=True, type=Path, metavar="DIR", help="folder for the results")
    where = command.add_mutually_exclusive_group()
    where.add_argument(
        "--boxes", type=Path, metavar="FILE", help="boxes of the cells: CSV, GeoJSON, YOLO, …"
    )
    where.add_argument("--detect", metavar="MODEL", help="a detector that finds the cells")
    where.add_argument(
        "--patches",
        nargs="?",
        const="auto",
        type=_patch_side,
        metavar="PIXELS",
        help="classify slides patch by patch; PIXELS is the side of a patch (as in training)",
    )
    add(
        "--regions",
        type=Path,
        metavar="FILE",
        help="with --patches: a GeoJSON file of polygons (QuPath's annotations), of which "
        "NAME.regions.csv has the mean of each class and the part above the threshold",
    )
    add_settings(command, PatchSettings, ("step", "min_tissue", "threshold"))
    add(
        "--only",
        action="append",
        default=[],
        metavar="CLASS",
        help="classify boxes of this class alone, for instance WBC; may be repeated (default: the "
        "classes that the classifier is meant for)",
    )
    add_settings(command, ClassifierSettings, ["fit"])
    add("--recursive", action="store_true", help="include subfolders")
    add("--overwrite", action="store_true", help="process images again that are done")
    add("--quiet", action="store_true", help="print nothing but errors and the summary")
    add_settings(command, StudySettings, ["device"])
    command.set_defaults(device="auto")


def _patch_side(text: str) -> int | str:
    return text if text == "auto" else int(text)


def run(options: argparse.Namespace) -> int:
    """Classify files; 0 if all went well, 1 if some failed."""
    from napari_beerlanet.core.batch.inputs import find_images
    from napari_beerlanet.core.checkpoints.checkpoint import check_kind, load_classifier
    from napari_beerlanet.core.checkpoints.info import model_notes
    from napari_beerlanet.core.common.device import pick_device

    try:
        check_kind(options.model, "classifier")
        if options.detect:
            check_kind(options.detect, "detector")
        pick_device(options.device)
    except ValueError as error:
        raise UsageError(str(error)) from error
    paths = list(find_images(options.images, options.out, options.recursive))
    _check_boxes_file(options.boxes, paths)
    if options.regions is not None and options.patches is None:
        raise UsageError("--regions is for patches; give --patches, too.")
    if options.regions is not None and len(paths) > 1:
        raise UsageError(
            f"{options.regions}: regions are of one slide, and {len(paths)} are given."
        )
    if options.boxes is not None or options.detect:
        return _classify_fields(options)
    if options.only:
        raise UsageError("--only is for boxes; give --boxes or --detect, too.")
    model = load_classifier(options.model, options.device)
    prepare_folder(options.out)
    for note in model_notes(model.info):
        print_message(note)
    if options.patches is not None:
        slides = _SlideTask(model, options)
        slides.run(paths)
        return 1 if slides.failed else 0
    task = _CropTask(model, options)
    counts = task.run(paths)
    echo(f"{_counts_text(counts)}; {options.out}")
    return 1 if task.failed else 0


def _classify_fields(options: argparse.Namespace) -> int:
    """The cells of images: a study that writes nothing but types."""
    from napari_beerlanet.core.batch.settings import DETECT_PRESET

    settings = DETECT_PRESET | {
        "model": options.detect or "",
        "detections_file": str(options.boxes.absolute()) if options.boxes else "",
        "classifier": options.model,
        "classify_only": tuple(options.only),
        "classify_fit": getattr(options, "fit", None),
        "device": options.device,
        "formats": ("types",),
        "previews": False,
    }
    return run_files(
        options.images,
        options.out,
        settings,
        TypesOutput(options.out, options.quiet, options.debug),
        layout="files",
        workers=0,
        recursive=options.recursive,
        overwrite=options.overwrite,
    )


class TypesOutput(ConsoleOutput):
    """A progress bar, what is to be said of each image, and the types of all."""

    def __init__(self, out: Path, quiet: bool, debug: bool) -> None:
        super().__init__(quiet, debug)
        self._out = out
        self._types: Counter[str] = Counter()

    def on_image(self, entry: StudyEntry) -> None:
        """Print the outcome of an image."""
        super().on_image(entry)
        self._types.update(entry.record.get("types") or {})
        warnings = " ".join(entry.record.get("warnings", [])) if entry.status == "done" else ""
        if warnings and not self._quiet:
            self._bar.clear()
            print_message(f"{entry.job.source}: {warnings}")

    def finish(self, study: StudyResult, layout: str) -> None:
        """Print how many there are of each type."""
        self._bar.close()
        echo(f"{_counts_text(self._types) or 'no cells'}; {self._out}")
        for text in [*study.notes, *([study.stopped] if study.stopped else [])]:
            print_message(text)


def _counts_text(counts: Counter[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in counts.items())


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


class _CropTask:
    """Crops, of which so many are in memory at a time as are classified at once."""

    def __init__(self, model: Classifier, options: argparse.Namespace) -> None:
        self.model, self.options = model, options
        self.failed = 0
        self._warned: set[str] = set()

    def run(self, paths: Sequence[Path]) -> Counter[str]:
        """Classify files that are crops, and write one table."""
        fit = getattr(self.options, "fit", None)
        rows: list[tuple[str, dict[str, Any]]] = []
        with _progress_bar(self.options.quiet, len(paths), "image") as bar:
            for start in range(0, len(paths), _CHUNK):
                read = [(path, self._read(path)) for path in paths[start : start + _CHUNK]]
                good = [(path, image.pixels) for path, image in read if image is not None]
                result = self.model.classify([pixels for _, pixels in good], fit=fit)
                table = {name: list(values) for name, values in result.table().items()}
                rows += [
                    (str(path), {name: values[k] for name, values in table.items()})
                    for k, (path, _) in enumerate(good)
                ]
                self._warn(result)
                bar.update(len(read))
        if rows:
            self._write_table(rows)
        counts = Counter(row["type"] for _, row in rows)
        return Counter({name: counts[name] for name in self.model.classes})

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

    def _warn(self, result: Classification) -> None:
        for text in [*result.report["warnings"], *result.report["notes"]]:
            if text not in self._warned:
                self._warned.add(text)
                print_message(text)

    def _write_table(self, rows: Sequence[tuple[str, dict[str, Any]]]) -> None:
        from napari_beerlanet.core.common.storage import atomic_path, csv_cell

        text = io.StringIO(newline="")
        writer = csv.writer(text)
        writer.writerow(["image", *map(csv_cell, rows[0][1])])
        for path, row in rows:
            cells = (f"{v:.6f}" if not isinstance(v, str) else csv_cell(v) for v in row.values())
            writer.writerow([csv_cell(path), *cells])
        with atomic_path(self.options.out / _TABLE) as unfinished:
            unfinished.write_text(text.getvalue(), encoding="utf-8", newline="")


class _SlideTask:
    """Slides patch by patch, one after the other."""

    def __init__(self, model: Classifier, options: argparse.Namespace) -> None:
        self.model, self.options = model, options
        self.failed = 0
        self.regions: list[tuple[str, Region]] = []

    def _read_regions(self) -> list[tuple[str, Region]]:
        from napari_beerlanet.core.formats.geojson import read_regions

        if self.options.regions is None:
            return []
        try:
            regions = read_regions(self.options.regions)
        except ValueError as error:
            raise UsageError(str(error)) from error
        if not regions:
            raise UsageError(f"{self.options.regions}: there are no regions in it.")
        return regions

    def run(self, paths: Sequence[Path]) -> None:
        """Classify slides, and write tables and heat maps of each."""
        from napari_beerlanet.core.batch.inputs import name_jobs
        from napari_beerlanet.core.classification.settings import PatchSettings

        given = vars(self.options)
        chosen = {k: given[k] for k in ("step", "min_tissue", "threshold") if k in given}
        try:
            settings = PatchSettings(patch=self.options.patches, **chosen)
        except ValueError as error:
            raise UsageError(str(error)) from error
        self.regions = self._read_regions()
        for job in name_jobs(paths):
            try:
                echo(f"{job.source.name}: {self._slide(job.source, job.name, settings)}")
            except ValueError as error:
                self.failed += 1
                text = str(error)
                print_message(text if str(job.source) in text else f"{job.source}: {text}")

    def _slide(self, path: Path, name: str, settings: PatchSettings) -> str:
        """Classify the patches of one slide, write its files, and sum it up in one sentence."""
        from napari_beerlanet.core.boxes.regions import Region
        from napari_beerlanet.core.classification.slide_classifier import (
            PATCH_SUFFIX,
            SlideClassification,
            write_region_table,
        )
        from napari_beerlanet.core.common.storage import (
            file_stamp,
            staged_folder,
            with_file_check,
        )
        from napari_beerlanet.core.common.tile_store import remove_tiles
        from napari_beerlanet.core.images.slide import open_slide

        raise_if_interrupted()
        start = self.options.out / name
        results = start.with_name(f"{name}{PATCH_SUFFIX}")
        if self.options.overwrite:
            remove_tiles(results)
        source = {k: v for k, v in file_stamp(path).items() if k != "path"}
        report = with_file_check(path, _check_signals)
        with open_slide(path) as slide, _progress_bar(self.options.quiet, 1, "tile") as bar:
            with SlideClassification(
                self.model,
                slide.levels,
                patch=settings.patch,
                step=settings.step,
                min_tissue=settings.min_tissue,
                fit=getattr(self.options, "fit", None),
                pixel_size=slide.pixel_size,
                results=results,
                source=source,
                report=report,
            ) as run:
                bar.total = len(run.tiles)
                bar.update(run.resumed)
                for _ in run.classify_tiles(report=report):
                    bar.update()
            with staged_folder(self.options.out) as stage:  # all files of a slide, or none
                self._write_map(run.map, slide, stage / name)
                if self.regions:
                    summaries = run.map.region_summaries(self.regions, settings.threshold)
                    write_region_table(stage / f"{name}.regions.csv", summaries)
        for text in run.map.report["warnings"]:
            print_message(f"{path}: {text}")
        if not run.map.classified.any():
            return "no patch has enough tissue; set --min-tissue lower"
        whole = run.map.region_summary(Region.whole_image(run.map.shape), settings.threshold)
        parts = [
            f"{k} mean {whole.means[k]:.3f}, {whole.fractions[k]:.1%} above {settings.threshold:g}"
            for k in run.map.names
        ]
        return f"{int(run.map.classified.sum())} patches; {'; '.join(parts)}"

    def _write_map(self, patches: PatchMap, slide: Slide, start: Path) -> None:
        import numpy as np
        from PIL import Image, ImageColor

        from napari_beerlanet.core.common.storage import atomic_path
        from napari_beerlanet.core.figures.heatmap import draw_probabilities
        from napari_beerlanet.core.images.pyramid import read_thumbnail
        from napari_beerlanet.core.images.rgb import fill_transparent, to_uint8

        patches.write_csv(start.with_name(f"{start.name}.patches.csv"))
        patches.write_tiff(start.with_name(f"{start.name}.patches.ome.tiff"))
        small = fill_transparent(to_uint8(read_thumbnail(slide.levels, _PICTURE_SIDE)))
        colours = self.model.info["colours"]
        for k, (name, colour) in enumerate(zip(patches.names, colours, strict=True)):
            rgb = np.array(ImageColor.getrgb(colour))
            scores = patches.scores[..., k]
            picture = draw_probabilities(small, scores, patches.cell, patches.shape, rgb)
            safe = "".join(c if c.isalnum() or c in "-_ " else "_" for c in name)
            with atomic_path(start.with_name(f"{start.name}.{safe}.png")) as unfinished:
                Image.fromarray(picture).save(unfinished, format="PNG")


def _check_signals(progress: Any) -> None:
    raise_if_interrupted()


@contextmanager
def _progress_bar(quiet: bool, total: int, unit: str) -> Iterator[Any]:
    from tqdm import tqdm

    hidden = quiet or not sys.stderr.isatty()
    with tqdm(total=total, unit=unit, disable=hidden, dynamic_ncols=True) as bar:
        yield bar
