"""Slides that are cut, written to, replaced or removed while something reads them.

Whatever happens to the file, there is the result of the file as it was opened, or one sentence:
never a mixture of two files.
"""

import os
import shutil

import numpy as np
import pytest
import tifffile

from discs import disc_detector, draw, scattered
from napari_beerlanet.core.batch import image as batch_image
from napari_beerlanet.core.batch.study import run_study
from napari_beerlanet.core.classification.slide_classifier import classify_slide
from napari_beerlanet.core.common.progress import Progress
from napari_beerlanet.core.common.storage import FileError, with_file_check
from napari_beerlanet.core.detection.slide_detector import detect_slide
from napari_beerlanet.core.images.rgb import ImageError
from napari_beerlanet.core.images.slide import open_slide
from napari_beerlanet.core.normalization.methods import fitted_normalizer
from napari_beerlanet.core.normalization.slide import normalize_slide
from napari_beerlanet.core.stains import slide_pixels
from napari_beerlanet.core.stains.slide import SlideScan, fit_slide, scan_slide_colours
from tinyclasses import tiny_classifier

SHAPE = (420, 540)


def write_slide(path, image):
    tifffile.imwrite(path, image, photometric="rgb", tile=(128, 128))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two slides of one size, in files of one length."""
    folder = tmp_path_factory.mktemp("slides")
    for seed in (1, 2):
        write_slide(folder / f"{seed}.tif", draw(SHAPE, scattered(SHAPE, 40, seed=seed)))
    return folder


@pytest.fixture
def slide_file(files, tmp_path):
    return shutil.copy(files / "1.tif", tmp_path / "slide.tif")


def cut(path, other):
    os.truncate(path, path.stat().st_size // 3)


def emptied(path, other):
    os.truncate(path, 0)


def written_to(path, other):
    with path.open("r+b") as file:
        file.write(other.read_bytes())


def replaced(path, other):
    shutil.copy(other, path.with_name("new.tif"))
    os.replace(path.with_name("new.tif"), path)


def removed(path, other):
    path.unlink()


NOT_ON_WINDOWS = pytest.mark.skipif(
    os.name == "nt", reason="what is open can be neither replaced nor removed"
)


class Changing:
    """A report after the k-th of which the file is changed."""

    def __init__(self, change, path, other, k):
        self.change, self.given, self.left = change, (path, other), k

    def __call__(self, progress):
        self.left -= 1
        if self.left == 0:
            self.change(*self.given)


@pytest.fixture(scope="module")
def models():
    return disc_detector(), tiny_classifier()


def detected(models, slide, report):
    settings = {"object_size": 40, "tile": 128, "skip_glass": False}
    return detect_slide(models[0], slide.levels, report=report, **settings).xyxy


def classified(models, slide, report):
    return classify_slide(models[1], slide.levels, patch=30, min_tissue=0.0, report=report).scores


def decomposed(models, slide, report):
    colours = scan_slide_colours(slide.levels, SlideScan(leave_out=()), report)
    return np.asarray(fit_slide(colours, iterations=2).densities()[0])


def normalized(models, slide, report):
    normalizer = fitted_normalizer("reinhard", draw((60, 80), scattered((60, 80), 20, seed=3)))
    return np.asarray(normalize_slide(slide.levels, normalizer, report=report).levels[0][:, :])


@pytest.mark.parametrize(
    ("work", "change"),
    [
        (detected, cut),
        pytest.param(detected, replaced, marks=NOT_ON_WINDOWS),
        (classified, written_to),
        (decomposed, emptied),
        (normalized, cut),
        pytest.param(normalized, removed, marks=NOT_ON_WINDOWS),
    ],
)
def test_a_slide_changes_while_it_is_worked_on(
    models, files, slide_file, monkeypatch, work, change
):
    monkeypatch.setattr(slide_pixels, "_OVERVIEW_SIDE", 100)  # as of one that is not in memory
    report = Changing(change, slide_file, files / "2.tif", 1 if work is decomposed else 3)
    with open_slide(slide_file) as slide:
        try:
            found = work(models, slide, report)
        except ValueError as error:
            found, said = None, str(error)
    assert report.left <= 0, "it was changed"
    if change in (replaced, removed):  # the system keeps what is open as it was
        with open_slide(files / "1.tif") as slide:
            right = work(models, slide, lambda progress: None)
        np.testing.assert_array_equal(found, right)
    else:
        assert found is None
        assert said == f"{slide_file}: changed after it was opened; open it again."


@pytest.mark.parametrize("change", [cut, written_to, pytest.param(replaced, marks=NOT_ON_WINDOWS)])
def test_a_lazy_layer_says_what_happened(files, slide_file, change):
    """As napari shows it: dask arrays, of which it reads what is in the window."""
    with open_slide(slide_file) as slide:
        lazy = slide.dask()[0]
        before = lazy[:128, :128].compute(scheduler="synchronous")
        change(slide_file, files / "2.tif")
        if change is replaced:
            again = lazy[:128, :128].compute(scheduler="synchronous")
            np.testing.assert_array_equal(again, before)
            return
        with pytest.raises(ImageError, match="changed after it was opened; open it again"):
            lazy[:128, :128].compute(scheduler="synchronous")
    if change is written_to:
        open_slide(slide_file).close()


@pytest.mark.parametrize("change", [cut, emptied, written_to, replaced, removed])
def test_a_task_in_the_viewer_is_told(files, slide_file, change):
    heard = []
    report = with_file_check(slide_file, heard.append)
    report(Progress(0, 2))
    change(slide_file, files / "2.tif")
    said = "no longer there" if change is removed else "changed while it was being read"
    with pytest.raises(FileError, match=said):
        report(Progress(1, 2))
    assert len(heard) == 1


STUDY = {"iterations": 2, "leave_out": (), "density_maps": "ome-tiff", "previews": False}


@pytest.fixture(scope="module")
def right_study(files, tmp_path_factory):
    out = tmp_path_factory.mktemp("right")
    return run_study(files / "1.tif", out, STUDY, workers=0).entries[0], out


@pytest.mark.parametrize(
    ("moment", "change"),
    [
        ("read", cut),
        ("read", written_to),
        ("hash", written_to),
        pytest.param("hash", replaced, marks=NOT_ON_WINDOWS),
        pytest.param("write", removed, marks=NOT_ON_WINDOWS),
    ],
)
def test_an_image_of_a_study_changes(
    files, slide_file, tmp_path, monkeypatch, right_study, change, moment
):
    """It fails with a sentence, or its results are of the file whose hash is recorded."""
    module, name = {
        "read": (batch_image, "decompose_image"),
        "hash": (batch_image, "file_hash"),
        "write": (batch_image, "ImageResult"),
    }[moment]
    real = getattr(module, name)

    def changed_first(*given, **more):
        if moment == "hash":
            done = real(*given, **more)
            change(slide_file, files / "2.tif")
            return done
        change(slide_file, files / "2.tif")
        return real(*given, **more)

    right, right_folder = right_study
    monkeypatch.setattr(module, name, changed_first)
    done = run_study(slide_file, tmp_path / "out", STUDY, workers=0)
    entry = done.entries[0]
    written = list((tmp_path / "out").glob("*.ome.tiff"))
    if entry.status == "failed":
        assert str(slide_file) in entry.error
        assert "changed" in entry.error
        assert entry.error.endswith(".")
        assert not written
    else:
        assert moment == "write"  # after all was read
        assert entry.record["source_sha256"] == right.record["source_sha256"]
        (same,) = right_folder.glob("*.ome.tiff")
        np.testing.assert_array_equal(tifffile.imread(written[0]), tifffile.imread(same))
    assert not list((tmp_path / "out").rglob(".*.partial*"))
