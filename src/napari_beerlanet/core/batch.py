"""Image files into a folder of results, leaving out what is done."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .files import FileError, atomic_path, read_image, remove
from .images import Domain
from .inputs import DENSITIES, OURS, PREVIEW, SPECTRA, Job
from .progress import Report, tell
from .results import read_record, write_densities, write_spectra
from .stamps import earlier_result, unchanged
from .tiff import PixelSize

# Loaded only where needed, as torch comes with them: finding that all is done should be quick.
if TYPE_CHECKING:
    from .decompose import Decomposition, Method

Format = Literal["ome-tiff", "zarr"]


@dataclass(frozen=True)
class Settings:
    """What decides the numbers; as for `decompose`. Recorded beside each result."""

    components: int = 8
    iterations: int | Literal["converge"] = "converge"
    lam: float | Literal["auto"] = "auto"
    gamma: float | Literal["auto"] = "auto"
    domain: Domain = "log"
    method: Method = "auto"
    spectra: list[list[float]] | None = None


@dataclass(frozen=True)
class Folder:
    """Where results go and which of them are written."""

    path: Path
    format: Format = "ome-tiff"
    preview: bool = True

    def spectra_file(self, name: str) -> Path:
        """Written last, so it says that the others are there."""
        return self.path / (name + SPECTRA)

    def others(self, name: str) -> list[Path]:
        """The files beside it, densities first."""
        endings = [DENSITIES[self.format], *([PREVIEW] if self.preview else [])]
        return [self.path / (name + ending) for ending in endings]


@dataclass(frozen=True)
class Outcome:
    """What became of a job: `stains` is the number of active components, None if skipped."""

    name: str
    stains: int | None


def decompose_file(
    job: Job,
    folder: Folder,
    settings: Settings,
    device: str = "auto",
    overwrite: bool = False,
    report: Report | None = None,
) -> Outcome:
    """Decompose one file and write its results, unless that is done already."""
    if job.source.is_dir():
        raise FileError(f"{job.source}: no images in this folder.")
    name, record, source = earlier_result(job, lambda name: read_record(folder.spectra_file(name)))
    current = record.get("settings") == asdict(settings) and unchanged(record, source)
    if current and not overwrite and all(path.exists() for path in folder.others(name)):
        return Outcome(name, None)

    tell(report, 0, 3, "reading")
    from .decompose import decompose

    image = read_image(job.source)
    result = decompose(image.pixels, device=device, report=report, **asdict(settings))
    extra = {"settings": asdict(settings), "source": source}
    written = write_results(folder, name, result, image.pixel_size, image.name, extra)
    if record and not current:  # no result of other settings may stand beside these
        for path in {folder.path / (name + ending) for ending in OURS}.difference(written):
            remove(path)
    return Outcome(name, int(result.active.sum()))


def write_results(
    folder: Folder,
    name: str,
    result: Decomposition,
    pixel_size: PixelSize | None,
    title: str,
    extra: dict[str, Any] | None = None,
) -> list[Path]:
    """Write densities, preview and spectra, all or none, and return their paths."""
    densities, *preview_file = folder.others(name)
    spectra = folder.spectra_file(name)
    with ExitStack() as stack:
        # Contexts end in reverse: all is written first, and the spectra get their name last.
        last = stack.enter_context(atomic_path(spectra))
        pictures = [stack.enter_context(atomic_path(path)) for path in preview_file]
        first = stack.enter_context(atomic_path(densities))
        write_densities(first, result, pixel_size, title)
        for picture in pictures:
            from .preview import preview

            preview(result, title, pixel_size).save(picture)
        write_spectra(last, result, pixel_size, title, extra)
        spectra.unlink(missing_ok=True)
    return [densities, *preview_file, spectra]
