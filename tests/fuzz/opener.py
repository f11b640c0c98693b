"""Open the files whose paths come in, one at a time, and say how it went and what it cost.

A process of its own: it has limits on memory and time, and may be killed. Each line out is JSON:
`answer` ("result", or the sentence of an error that was expected, or "unexpected …"), `seconds` of
the processor, as others may be at work on it, and `megabytes` beyond what the process had before.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path

MAX_BYTES = 1 << 30
MAX_SECONDS = 10
MAX_SENTENCE = 600  # characters, without the path
MAX_QUOTED = 80


class TooLongError(BaseException):
    """The time is up; nobody may take it for an error of a file."""


def memory(field: str) -> int:
    """Bytes of a line in the process's status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return 0


def open_file(path: Path) -> object:
    """As a user would: load a model and use it, read boxes, images, settings."""
    import numpy as np

    import napari_beerlanet as nb
    from napari_beerlanet.core.checkpoints.info import limits_text, model_notes
    from napari_beerlanet.core.checkpoints.model_card import headline, training_facts, training_size
    from napari_beerlanet.core.common.storage import read_yaml
    from napari_beerlanet.core.evaluation.live import unify_classes
    from napari_beerlanet.core.formats import image_names, read_detections, write_detections
    from napari_beerlanet.core.formats.yolo import class_names_of, read_data_yaml
    from napari_beerlanet.core.images.files import IMAGE_SUFFIXES
    from napari_beerlanet.core.project.import_annotations import to_annotations

    suffix = path.suffix.lower()
    kind = path.name.partition(".")[2]
    if kind in OWN_KINDS:
        return OWN_KINDS[kind](path)
    if suffix in (".safetensors", ".pt"):
        model = nb.load_checkpoint(path, "cpu")
        _ = limits_text(model.info), model_notes(model.info), headline(model.info)
        _ = training_facts(model.info), training_size(model.info)
        picture = np.full((100, 100, 3), 200, np.uint8)
        if isinstance(model, nb.Classifier):
            return model.classify([picture[:40, :40]])
        return model.detect(picture)
    if suffix == ".onnx":
        from napari_beerlanet.core.normalization.staingan import load_generator

        return load_generator(path).apply(np.full((96, 128, 3), 200, np.uint8))
    if suffix in (".yaml", ".yml"):
        if not isinstance(read_yaml(path), dict):
            return None
        return class_names_of(read_data_yaml(path), path)
    if suffix in IMAGE_SUFFIXES:
        from napari_beerlanet.core.images.files import read_image
        from napari_beerlanet.core.images.slide import open_slide

        def corner() -> object:
            with open_slide(path) as slide:
                return np.array(slide.levels[-1][:64, :64])

        try:
            return corner()
        finally:
            read_image(path)  # with nothing of the slide left in memory
    names = image_names(path)
    found = read_detections(path, (480, 640), image_name=names[0] if names else "")
    with tempfile.TemporaryDirectory() as folder:
        write_detections(Path(folder) / "a.csv", found)
    annotations, _ = to_annotations(found, (480, 640), ["RBC"], {}, str(path))
    return unify_classes([found, annotations])


def _study(path: Path) -> object:
    from napari_beerlanet.cli.common import UsageError
    from napari_beerlanet.cli.main import parse_arguments
    from napari_beerlanet.cli.study_commands import STUDY_COMMANDS
    from napari_beerlanet.core.batch.settings import StudySettings

    try:
        _, settings = STUDY_COMMANDS["batch"].read(parse_arguments(["batch", str(path)]))
    except UsageError as error:  # which the command prints
        raise ValueError(str(error)) from error
    return StudySettings(**settings)


def _benchmark(path: Path) -> object:
    from napari_beerlanet.core.benchmark.settings import BenchmarkSettings

    return BenchmarkSettings.read(path)


def _layout(path: Path) -> object:
    from napari_beerlanet.core.training.setup import untrained_detector

    return untrained_detector(path, 0)


def _review(path: Path) -> object:
    import numpy as np

    from napari_beerlanet.core.boxes.detections import Detections
    from napari_beerlanet.core.review.review import load_review

    boxes = np.array([[1, 1, 5, 5], [20, 20, 40, 40]], np.float32)
    return load_review(path, Detections(boxes, np.zeros(2, int), np.ones(2), ["RBC"]))


def _preset(path: Path) -> object:
    from napari_beerlanet.core.stains.presets import read_preset, read_start

    return read_preset(path), read_start(path)


def _normalizer(path: Path) -> object:
    import numpy as np

    from napari_beerlanet.core.normalization.methods import load_normalizer

    return load_normalizer(path).apply(np.full((32, 32, 3), 200, np.uint8))


def _tiles(path: Path) -> object:
    from corpus import IDENTITY

    from napari_beerlanet.core.boxes.detections import DetectionTiles

    resumed = DetectionTiles.resume(path, IDENTITY)
    if resumed is not None:
        resumed.close()
    return resumed


def _project(path: Path) -> object:
    """A project in which one file is this one."""
    from napari_beerlanet.core.formats.class_folders import read_crop_dataset
    from napari_beerlanet.core.project.files import read_annotations, read_image_source
    from napari_beerlanet.core.project.project import Project

    kind = path.name.partition(".")[2]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "project"
        with Project.create(folder, ["RBC"]):
            (folder / "annotations").mkdir(exist_ok=True)
        name = "annotations/a.json" if kind == "annotations.json" else kind
        (folder / name).write_bytes(path.read_bytes())
        if kind == "annotations.json":
            return read_annotations(folder / name, read_image_source(folder / name))
        try:
            with Project.open(folder) as project:
                return project.crops, project.classes
        finally:
            if kind == "cells.csv":
                read_crop_dataset(folder)


OWN_KINDS = {
    "study.yaml": _study,
    "benchmark.yaml": _benchmark,
    "layout.yaml": _layout,
    "review.json": _review,
    "preset.json": _preset,
    "normalizer.safetensors": _normalizer,
    "tiles": _tiles,
    **dict.fromkeys(("project.json", "crops.csv", "cells.csv", "annotations.json"), _project),
}
"""How files of ours are opened, by what comes after the first stop of their names."""


def quotes_at_length(text: str, content: bytes) -> bool:
    """Whether more than 80 characters in a row are the file's."""
    parts = (text[k : k + MAX_QUOTED + 1] for k in range(len(text) - MAX_QUOTED))
    return any(part.encode("utf-8", "replace") in content for part in parts)


def answer(path: Path) -> str:
    """How it ended, in a few words."""

    def too_long(signum: int, frame: object) -> None:
        raise TooLongError

    signal.signal(signal.SIGPROF, too_long)
    signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
    try:
        open_file(path)
    except TooLongError:
        return f"unexpected: more than {MAX_SECONDS} s"
    except ValueError as error:  # FileError, CheckpointError, ImageError: sentences
        text = str(error)
        said = text.replace(str(path), "")
        if "\n" in text or len(said) > MAX_SENTENCE or not text:
            return f"unexpected: no sentence: {text[:300]!r}"
        if quotes_at_length(said, path.read_bytes()):
            return f"unexpected: quotes more than {MAX_QUOTED} characters: {text[:300]!r}"
        return text[:200]
    except MemoryError as error:
        # The sentence that a user would read; within the limit it is an answer.
        return f"unexpected: MemoryError {error}"
    except BaseException as error:
        return f"unexpected: {type(error).__name__}: {str(error)[:300]}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return "result"


def main() -> None:
    """Warm up, set the limits, then open what comes."""
    for path in sys.argv[1:]:
        open_file(Path(path))  # what is good, and loads and compiles what the others need, too
    limit = memory("VmSize") + 2 * MAX_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        path = Path(line.rstrip("\n"))
        os.chdir(path.parent)
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before, start = memory("VmRSS"), time.process_time()
        text = answer(path)
        seconds = time.process_time() - start
        megabytes = (memory("VmHWM") - before) / 2**20
        print(json.dumps({"answer": text, "seconds": seconds, "megabytes": megabytes}), flush=True)


if __name__ == "__main__":
    main()
