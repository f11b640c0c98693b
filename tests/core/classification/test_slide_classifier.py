"""Patches of slides: as crops, tissue alone, in any order, resumed after a kill; regions."""

import csv
import os
import signal
import subprocess
import sys

import dask.array as da
import numpy as np
import pytest
import tifffile

from napari_beerlanet.core.boxes.regions import Region
from napari_beerlanet.core.classification import slide_classifier
from napari_beerlanet.core.classification.slide_classifier import (
    PatchMap,
    SlideClassification,
    classify_slide,
    default_patch,
)
from napari_beerlanet.core.common.progress import Cancelled
from napari_beerlanet.core.images.rgb import PADDING_GREY
from napari_beerlanet.core.images.tissue import BACKGROUND, TISSUE, TissueMask
from napari_beerlanet.core.stains.domain_shift import describe_stains
from napari_beerlanet.core.stains.front_end import fit_stain
from tinyclasses import TYPES, cell, tiny_classifier

SHAPE, PATCH = (190, 275), 30  # 7 × 10 patches, those at two borders cut


def picture():
    """Tissue on the left, background on the right."""
    rows = [
        np.hstack([cell("dark" if (i + j) % 3 else "pale", 10 * i + j) for j in range(10)])
        for i in range(7)
    ]
    image = np.vstack(rows)[: SHAPE[0], : SHAPE[1]].copy()
    image[:, 185:] = 244
    return image


@pytest.fixture(scope="module")
def slide():
    return picture()


@pytest.fixture(scope="module")
def clf():
    return tiny_classifier()


def cut(image, row, column, side=PATCH):
    """A patch, and padding where there is no slide."""
    whole = np.full((side, side, 3), PADDING_GREY, np.uint8)
    part = image[row * side : (row + 1) * side, column * side : (column + 1) * side]
    whole[: part.shape[0], : part.shape[1]] = part
    return whole


@pytest.mark.parametrize("options", [{}, {"denoise": True}, {"front_end": "none"}])
def test_a_patch_is_what_classify_says_of_it_as_a_crop(slide, options):
    clf = tiny_classifier(**options)
    found = classify_slide(clf, da.from_array(slide, chunks=(64, 64, 3)), patch=PATCH, min_tissue=0)
    assert found.scores.shape == (7, 10, 2)
    assert found.scores.dtype == np.float32
    assert found.classified.all()
    crops = [cut(slide, i, j) for i in range(7) for j in range(10)]
    expected = clf.classify(crops).scores.reshape(7, 10, 2)
    np.testing.assert_allclose(found.scores, expected, atol=1e-6)
    assert np.ptp(expected[..., 0]) > 1e-3, "patches differ"


def test_patches_that_overlap_are_centred_on_the_cells_of_a_finer_map(slide, clf, tmp_path):
    file, step = tmp_path / "slide.patches", 12
    found = classify_slide(clf, slide, patch=PATCH, step=step, min_tissue=0, results=file)
    rows, columns = -(-SHAPE[0] // step), -(-SHAPE[1] // step)
    assert found.scores.shape == (rows, columns, 2)
    assert (found.cell, found.patch) == (step, PATCH)
    around = np.pad(slide, ((9, 60), (9, 60), (0, 0)), constant_values=PADDING_GREY)
    places = [(0, 0), (0, 5), (3, 4), (rows - 1, columns - 1), (7, 0)]
    crops = [around[step * i :, step * j :][:PATCH, :PATCH] for i, j in places]
    expected = clf.classify(crops).scores
    np.testing.assert_allclose([found.scores[place] for place in places], expected, atol=1e-6)
    table = {name: values.reshape(rows, columns) for name, values in found.table().items()}
    assert [table[name][0, 0] for name in ("x1", "y1", "x2", "y2")] == [0, 0, 21, 21]
    assert [table[name][3, 4] for name in ("x1", "y1", "x2", "y2")] == [39, 27, 69, 57]
    # A region counts the cells of the map, and what a file holds is of this distance.
    one = found.region_summary(Region.rectangle(48, 36, 60, 48))
    assert one.patches == pytest.approx(1)
    assert one.means["dark"] == pytest.approx(float(found.scores[3, 4, 0]), abs=1e-6)
    with SlideClassification(clf, slide, patch=PATCH, min_tissue=0, results=file) as other:
        assert other.changed == ["the distance of patches"]
    with pytest.raises(ValueError, match="step is 31 pixels, and patches are 30 wide"):
        SlideClassification(clf, slide, patch=PATCH, step=PATCH + 1)


def test_stains_of_the_whole_slide(slide, clf):
    found = classify_slide(clf, slide, patch=PATCH, min_tissue=0, fit="image")
    front = fit_stain(clf.network, slide)
    crops = clf.prepare_crops([cut(slide, 2, j) for j in range(10)])
    np.testing.assert_allclose(found.scores[2], clf.score_crops(crops, front), atol=1e-6)
    other = classify_slide(clf, slide, patch=PATCH, min_tissue=0, fit="crop")
    assert np.abs(found.scores - other.scores).max() > 1e-4


def test_only_patches_with_enough_tissue(slide, clf):
    kind = np.full((19, 11), BACKGROUND, np.uint8)  # cells of 10 × 25 pixels
    kind[:, :4] = TISSUE  # 100 pixels: three patches and a third
    tissue = TissueMask(kind, SHAPE)
    part = tissue.fractions(PATCH, (7, 10))
    np.testing.assert_allclose(part[0], [1, 1, 1, 1 / 3, 0, 0, 0, 0, 0, 0])
    np.testing.assert_allclose(part[6, 0], 10 / 30)  # beyond the slide there is none
    for least, columns in ((0.25, 4), (0.5, 3)):
        found = classify_slide(clf, slide, patch=PATCH, min_tissue=least, tissue=tissue)
        expected = np.zeros((7, 10), bool)
        expected[: 6 if least == 0.5 else 7, :columns] = True
        if least == 0.25:
            expected[6, 3] = False  # a ninth
        np.testing.assert_array_equal(found.classified, expected)
    run = SlideClassification(clf, slide, patch=PATCH, min_tissue=0.5, tissue=tissue)
    assert run.tiles == [0, 3], "tiles without tissue are not run"
    assert classify_slide(clf, slide, patch=PATCH).classified[:, :6].any(), "tissue is found"
    assert not classify_slide(clf, slide, patch=PATCH).classified[:, 7:].any()


def test_where_the_user_looks_comes_first(slide, clf):
    looks = iter([(180.0, 200.0), *[(10.0, 10.0)] * 20])
    with SlideClassification(clf, slide, patch=PATCH, min_tissue=0) as run:
        tiles = list(run.classify_tiles(lambda: next(looks)))
    corners = [(tile.rows.start, tile.columns.start) for tile in tiles]
    assert corners[:2] == [(4, 4), (0, 0)]
    assert [tile.done for tile in tiles] == [1, 2, 3, 4, 5, 6]
    assert {tile.total for tile in tiles} == {6}
    for tile in tiles:
        np.testing.assert_array_equal(run.map.scores[tile.rows, tile.columns], tile.scores)
    assert run.finished


def test_large_patches_come_in_smaller_tiles(slide, clf, monkeypatch):
    """What is in memory at a time does not grow with the patches."""
    whole = classify_slide(clf, slide, patch=PATCH, min_tissue=0)
    monkeypatch.setattr(slide_classifier, "_TILE_PIXELS", 70)
    with SlideClassification(clf, slide, patch=PATCH, min_tissue=0) as run:
        tiles = list(run.classify_tiles())
    assert {tile.scores.shape[:2] for tile in tiles} == {(2, 2), (1, 2)}
    np.testing.assert_allclose(run.map.scores, whole.scores, atol=1e-6)


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL")
def test_a_killed_run_is_resumed_and_ends_the_same(slide, clf, tmp_path, monkeypatch):
    code = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_slide_classifier import PATCH, picture
from tinyclasses import tiny_classifier
from napari_beerlanet.core.classification.slide_classifier import SlideClassification
run = SlideClassification(tiny_classifier(), picture(), patch=PATCH, min_tissue=0, fit="image",
                          results=Path(sys.argv[1]), source={"name": "a"})
for tile in run.classify_tiles():
    print(tile.done, flush=True)
    if tile.done == 3:
        sys.stdin.readline()
"""
    file, here = tmp_path / "slide.patches", os.path.dirname(__file__)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path])}
    command = [sys.executable, "-c", code, str(file), here]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        assert [int(process.stdout.readline()) for _ in range(3)] == [1, 2, 3]
        process.send_signal(signal.SIGKILL)
    settings = {"patch": PATCH, "min_tissue": 0, "fit": "image", "results": file}
    with SlideClassification(clf, slide, source={"name": "a"}, **settings) as run:
        assert run.resumed == 3
        assert run.map.classified.sum() == 4 * 10, "what was done is there at once"
        assert [tile.done for tile in run.classify_tiles()] == [4, 5, 6]
    plain = classify_slide(clf, slide, patch=PATCH, min_tissue=0, fit="image")
    np.testing.assert_array_equal(run.map.scores, plain.scores)
    with monkeypatch.context() as patched:  # all is done: nothing is classified again
        patched.setattr(type(clf), "score_crops", None)
        again = classify_slide(clf, slide, source={"name": "a"}, **settings)
        np.testing.assert_array_equal(again.scores, plain.scores)
    other = settings | {"patch": 45}
    with SlideClassification(clf, slide, source={"name": "b"}, **other) as run:
        assert run.resumed == 0
        assert run.changed == ["the image file", "the patch size"]


def test_cancelled_between_tiles(slide, clf):
    def stop(progress):
        if progress.fraction >= 0.5:
            raise Cancelled

    with SlideClassification(clf, slide, patch=PATCH, min_tissue=0) as run:
        with pytest.raises(Cancelled):
            list(run.classify_tiles(report=stop))
        assert 0 < run.resumed < 6


def test_a_strange_stain_is_told(slide):
    clf = tiny_classifier()
    crops = [clf.prepare_crops([cut(slide, 1, k)])[0] for k in range(5)]
    clf.info["stain_seen"] = describe_stains([fit_stain(clf.network, crop) for crop in crops])
    settings = {"patch": PATCH, "min_tissue": 0.5}
    assert classify_slide(clf, slide, **settings).report["warnings"] == []
    green = slide[..., [1, 0, 2]] // 2
    mask = TissueMask(np.full((5, 5), TISSUE, np.uint8), SHAPE)
    assert classify_slide(clf, green, tissue=mask, **settings).report["warnings"]


def test_the_size_of_patches_is_that_of_training(clf):
    assert default_patch(clf.info) == 24
    assert default_patch({**clf.info, "training": {"crop_side": 224}}) == 224
    assert default_patch({**clf.info, "training": None}) == 24


@pytest.fixture(scope="module")
def patches():
    random = np.random.default_rng(3)
    scores = random.dirichlet([1, 1], (7, 10)).astype(np.float32)
    scores[5:, 6:] = np.nan
    return PatchMap(scores, TYPES, 32, (7 * 32 - 5, 10 * 32), (0.5, 0.25))


def test_a_region_is_the_mean_of_its_patches_by_their_part_in_it(patches):
    x1, y1, x2, y2 = 3 * 32 + 8, 1 * 32 + 16, 9 * 32 + 24, 6 * 32 + 4
    covered = np.zeros((7 * 32, 320))
    covered[y1:y2, x1:x2] = 1
    weights = covered.reshape(7, 32, 10, 32).mean((1, 3))
    known = np.isfinite(patches.scores[..., 0])
    got = patches.region_summary(Region.rectangle(x1, y1, x2, y2), threshold=0.3)
    for k, name in enumerate(TYPES):
        score = patches.scores[..., k]
        mean = np.average(score[known].astype(float), weights=weights[known])
        above = np.average(score[known] >= 0.3, weights=weights[known])
        assert got.means[name] == pytest.approx(mean, abs=1e-7)
        assert got.fractions[name] == pytest.approx(above, abs=1e-7)
    assert got.patches == pytest.approx(weights[known].sum())
    assert got.classified == pytest.approx(weights[known].sum() / weights.sum())
    assert got.classified < 1


def test_any_shape_of_a_region(patches):
    triangle = Region("polygon", np.array([[0, 0], [160, 0], [0, 160]], float))
    assert patches.region_summary(triangle).patches == pytest.approx(12.5, abs=0.4)
    assert patches.region_summary(triangle).classified == 1
    inside = patches.region_summary(Region.rectangle(70, 70, 80, 80))  # smaller than a patch
    assert inside.means[TYPES[0]] == pytest.approx(float(patches.scores[2, 2, 0]))
    empty = patches.region_summary(Region.rectangle(6 * 32, 5 * 32, 320, 219))
    assert empty.classified == 0
    assert np.isnan(empty.means[TYPES[0]])
    beyond = patches.region_summary(Region.rectangle(500, 500, 600, 600))
    assert (beyond.patches, beyond.classified) == (0, 0)
    whole = patches.region_summary(Region.rectangle(-9, -9, 900, 900))
    assert whole.patches < 7 * 10 - 2 * 4, "what lies beyond the slide is no part of it"


def test_tables_and_pictures(patches, tmp_path):
    patches.write_csv(tmp_path / "a.csv")
    with (tmp_path / "a.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 70 - 8
    last = rows[-1]
    assert [last[k] for k in ("row", "column", "x1", "y1", "x2", "y2")] == [
        *("6", "5", "160", "192", "192", "219")
    ]
    assert float(last["P(dark)"]) == pytest.approx(float(patches.scores[6, 5, 0]), abs=1e-6)
    assert last["type"] == TYPES[int(patches.scores[6, 5].argmax())]
    patches.write_tiff(tmp_path / "a.ome.tiff")
    with tifffile.TiffFile(tmp_path / "a.ome.tiff") as file:
        np.testing.assert_array_equal(np.moveaxis(file.asarray(), 0, 2), patches.scores)
        assert 'PhysicalSizeX="8.0"' in file.ome_metadata
        assert 'Name="dark"' in file.ome_metadata


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"patch": 2}, "patch must be"), ({"min_tissue": 2.0}, "min_tissue must be")],
)
def test_wrong_settings_are_one_sentence(slide, clf, settings, words):
    with pytest.raises(ValueError, match=words):
        classify_slide(clf, slide, **settings)
