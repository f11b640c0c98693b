"""What “before and after” does in threads; what takes long to load is loaded there, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from napari_beerlanet.core.progress import Report, within
from napari_beerlanet.ui.planes import Plane


def compare_on(plane: Plane, size: Any, before: Any, after: Any, report: Report) -> Any:
    """Both models on one plane."""
    from napari_beerlanet.core.comparing import compare
    from napari_beerlanet.ui.detection_mesh import fast

    fast()  # what drawing needs is compiled here, not while the window waits
    pixels = plane.read()
    found = [
        model.detect(
            pixels, pixel_size=size, densities=False, report=within(report, start, start + 0.5)
        )
        for model, start in ((before, 0.0), (after, 0.5))
    ]
    return compare(*found)


def judge_run(folder: Path, report: Report, fields: int | None = None) -> Any:
    """A `Judged` of a run; `fields` is the size of the reference."""
    from napari_beerlanet.judging import judge

    return judge(folder, report) if fields is None else judge(folder, report, fields)


def keep_model(folder: Path, name: str, judged: Any) -> tuple[Path, Any]:
    """Save a run's best model under a name; its file, and the model itself."""
    from napari_beerlanet.core.checkpoint import load_checkpoint
    from napari_beerlanet.judging import keep

    path = keep(folder, name, judged)
    return path, load_checkpoint(path)
