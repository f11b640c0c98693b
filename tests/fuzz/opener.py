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
    from napari_beerlanet.core.formats import image_names, read_detections, write_detections
    from napari_beerlanet.core.formats.yolo import class_names_of, read_data_yaml

    suffix = path.suffix.lower()
    if suffix in (".safetensors", ".pt"):
        model = nb.load_checkpoint(path, "cpu")
        _ = limits_text(model.info), model_notes(model.info), headline(model.info)
        _ = training_facts(model.info), training_size(model.info)
        picture = np.full((100, 100, 3), 200, np.uint8)
        if isinstance(model, nb.Classifier):
            return model.classify([picture[:40, :40]])
        return model.detect(picture)
    if suffix in (".yaml", ".yml"):
        if not isinstance(read_yaml(path), dict):
            return None
        return class_names_of(read_data_yaml(path), path)
    if suffix in (".png", ".tif", ".tiff", ".jpg"):
        from napari_beerlanet.core.images.slide import open_slide

        with open_slide(path) as slide:
            return np.asarray(slide.levels[-1][:64, :64])
    names = image_names(path)
    found = read_detections(path, (480, 640), image_name=names[0] if names else "")
    with tempfile.TemporaryDirectory() as folder:
        write_detections(Path(folder) / "a.csv", found)
    return found


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
        if "\n" in text or len(text) > 600 or not text:
            return f"unexpected: no sentence: {text[:300]!r}"
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
