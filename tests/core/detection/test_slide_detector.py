"""Objects in slides: as in memory, found once at every border, in any order, and gone on with."""

import dask.array as da
import numpy as np
import pytest

from discs import boxes_of, disc_detector, draw, scattered
from napari_beerlanet.core.boxes.matching import match_boxes
from napari_beerlanet.core.common.progress import Cancelled
from napari_beerlanet.core.common.storage import FileError
from napari_beerlanet.core.detection import pipeline
from napari_beerlanet.core.detection.slide_detector import SlideDetection, detect_slide
from napari_beerlanet.core.images.tissue import BACKGROUND, TISSUE, TissueMask
from napari_beerlanet.core.stains import slide_pixels
from napari_beerlanet.core.stains.palette import palette_of
from napari_beerlanet.core.stains.slide_pixels import SlidePixels

SHAPE = (700, 1000)
SETTINGS = {"object_size": 40, "tile": 256, "skip_glass": False}


@pytest.fixture(scope="module")
def model():
    return disc_detector()


@pytest.fixture(scope="module")
def discs():
    return scattered(SHAPE, 40, seed=1)


@pytest.fixture(scope="module")
def image(discs):
    return draw(SHAPE, discs)


@pytest.fixture(scope="module")
def whole(model, image):
    return model.detect(image, object_size=40, tile=256)


def same(found, right):
    np.testing.assert_array_equal(found.xyxy, right.xyxy)
    np.testing.assert_array_equal(found.labels, right.labels)
    np.testing.assert_array_equal(found.scores, right.scores)
    assert set(found.columns) == set(right.columns)
    for name, values in right.columns.items():
        np.testing.assert_array_equal(found.columns[name], values)


def lazy(image, chunks=(150, 170)):
    return da.from_array(image, chunks=(*chunks, image.shape[2]))


# --- as in memory --------------------------------------------------------------------------------


def test_a_slide_has_what_the_image_has(model, image, whole):
    same(detect_slide(model, lazy(image), **SETTINGS), whole)
    assert len(whole) > 50


@pytest.mark.parametrize("object_size", ["auto", 40, 13])
@pytest.mark.parametrize("side", [300, 700])
def test_resolutions_are_chosen_alike(model, image, object_size, side):
    part = image[:side, :side]
    right = model.detect(part, object_size=object_size)
    same(detect_slide(model, lazy(part), object_size=object_size, skip_glass=False), right)


def test_transparent_and_deep_images(model, image):
    holed = np.dstack([image, np.full(SHAPE, 255, np.uint8)])
    holed[:200, :300, 3] = 0
    settings = {"object_size": 40, "tile": 256}
    same(detect_slide(model, lazy(holed), **SETTINGS), model.detect(holed, **settings))
    deep = image.astype(np.uint16) * 257
    same(detect_slide(model, lazy(deep), **SETTINGS), model.detect(deep, **settings))


def test_a_palette_is_taken_where_it_is_there(model, image, whole):
    palette = palette_of(image.reshape(-1, 3))
    same(detect_slide(model, lazy(image), palette=palette, **SETTINGS), whole)


# --- borders -------------------------------------------------------------------------------------


def border_discs(plan):
    """A disc on every kind of place: mid of each inner edge, each corner, and about them."""
    tiles = plan.tiles
    edges_x = sorted({t.x for t in tiles} | {t.x + t.width for t in tiles})
    edges_y = sorted({t.y for t in tiles} | {t.y + t.height for t in tiles})
    return edges_x, edges_y


@pytest.mark.parametrize("shift", [-19, -7, 0, 5, 18])
def test_objects_on_every_border_are_found_once(model, shift):
    blank = draw(SHAPE, [])
    with SlideDetection(model, blank, **SETTINGS) as run:
        edges_x, edges_y = border_discs(run.grid)
    discs, taken = [], []
    for y in (*edges_y, 350):
        for x in (*edges_x, 500):
            cx, cy = x + shift, y + shift / 2
            inside = 25 < cx < SHAPE[1] - 25 and 25 < cy < SHAPE[0] - 25
            if inside and all(np.hypot(cx - a, cy - b) > 55 for a, b in taken):
                discs.append((cx, cy, 40))
                taken.append((cx, cy))
    assert len(discs) > 15
    found = detect_slide(model, lazy(draw(SHAPE, discs)), **SETTINGS)
    assert len(found) == len(discs)
    assert (match_boxes(found.xyxy, boxes_of(discs), 0.8) >= 0).all()


def test_objects_on_the_slides_own_edges_are_found_once(model):
    """Cut in half by an edge, quartered by a corner, where tiles end at that edge, too."""
    with SlideDetection(model, draw(SHAPE, []), **SETTINGS) as run:
        edges_x, edges_y = border_discs(run.grid)
    height, width = SHAPE
    ends = [(0, 0), (width, 0), (0, height), (width, height)]
    sides = [(x, y) for x in edges_x[1:-1] for y in (0, height)]
    sides += [(x, y) for y in edges_y[1:-1] for x in (0, width)]
    discs = []
    for x, y in ends + sides:
        if all(np.hypot(x - a, y - b) > 55 for a, b, _ in discs):
            discs.append((float(x), float(y), 40))
    found = detect_slide(model, lazy(draw(SHAPE, discs)), **SETTINGS)
    limits = np.array([width, height, width, height])
    assert len(found) == len(discs) > 8
    assert (match_boxes(found.xyxy, np.clip(boxes_of(discs), 0, limits), 0.7) >= 0).all()


@pytest.mark.parametrize("missing", [0, 1, 2, 3])
def test_objects_where_three_tiles_meet_are_found_once(model, missing):
    """One of the four about a corner is of glass and not looked at."""
    with SlideDetection(model, draw(SHAPE, []), **SETTINGS) as run:
        columns = len({t.x for t in run.grid.tiles})
        four = [0, 1, columns, columns + 1]
        tiles = [run.grid.tiles[k] for k in four]
    x = (tiles[1].x + tiles[0].x + tiles[0].width) / 2
    y = (tiles[2].y + tiles[0].y + tiles[0].height) / 2
    discs = [(x, y, 40)]
    with SlideDetection(model, lazy(draw(SHAPE, discs)), **SETTINGS) as run:
        order = [k for k in four if k != four[missing]]
        shown = []
        for step in run.detect_tiles(order=order):
            gone = {tuple(box) for box in step.removed.xyxy}
            shown = [box for box in shown if box not in gone]
            shown += [tuple(box) for box in step.added.xyxy]
        found = run.detections()
    assert len(found) == len(shown) == 1
    assert (match_boxes(found.xyxy, boxes_of(discs), 0.8) >= 0).all()


def test_what_steps_show_is_what_comes_out(model, image, whole, discs):
    """Boxes of all steps, without those that later steps supersede."""
    shown = {}
    with SlideDetection(model, lazy(image), **SETTINGS) as run:
        rng = np.random.default_rng(3)
        for step in run.detect_tiles(order=rng.permutation(run.tiles).tolist()):
            for box in step.removed.xyxy:
                assert shown.pop(tuple(box), None) is not None
            shown |= {tuple(box): True for box in step.added.xyxy}
        assert run.finished
    right = boxes_of(discs)
    boxes = np.array(list(shown))
    assert len(boxes) == len(discs)
    assert (match_boxes(boxes, right, 0.8) >= 0).all()


# --- order, glass --------------------------------------------------------------------------------


def test_first_where_someone_looks(model, image):
    with SlideDetection(model, lazy(image), **SETTINGS) as run:
        places = [(650, 950), (10, 10), (10, 10)]
        looked = iter(places)
        steps = run.detect_tiles(focus=lambda: next(looked, (350, 500)))
        first, second = next(steps), next(steps)
        steps.close()
    assert first.tile == run.grid.tiles[-1]
    assert second.tile == run.grid.tiles[0]
    assert (first.done, second.done, first.total) == (1, 2, len(run.grid.tiles))


def test_any_order_gives_the_same(model, image, whole):
    with SlideDetection(model, lazy(image), **SETTINGS) as run:
        for _ in run.detect_tiles(order=run.tiles[::-1]):
            pass
        same(run.detections(densities=True), whole)


def test_glass_is_skipped(model, image):
    kind = np.full((7, 10), BACKGROUND, np.uint8)
    kind[:3, :3] = TISSUE
    settings = {**SETTINGS, "skip_glass": True, "tissue": TissueMask(kind, SHAPE)}
    with SlideDetection(model, lazy(image), **settings) as run:
        looked_at = [step.tile for step in run.detect_tiles()]
        assert run.detections().report["tiles_looked_at"] == len(looked_at)
    assert 0 < len(looked_at) < len(run.grid.tiles)
    assert all(tile.y < 300 and tile.x < 300 for tile in looked_at)


def test_glass_is_found_by_itself(model):
    image = np.full((900, 1200, 3), 240, np.uint8)
    image[100:300, 100:300] = np.minimum(draw((200, 200), [(100, 100, 40)]), (200, 150, 190))
    with SlideDetection(model, image, **{**SETTINGS, "skip_glass": True}) as run:
        assert 0 < len(run.tiles) < len(run.grid.tiles) / 2


# --- stopped and gone on with --------------------------------------------------------------------


def test_a_run_goes_on_where_it_stopped(model, image, whole, tmp_path):
    results = tmp_path / "a.tiles"
    with SlideDetection(model, lazy(image), results=results, **SETTINGS) as run:
        for step in run.detect_tiles():
            if step.done == 5:
                break
    counted = CountsNetwork(model)
    with SlideDetection(model, lazy(image), results=results, **SETTINGS) as run:
        for step in run.detect_tiles():
            assert step.done > 5
        assert counted.looks() == len(run.grid.tiles) - 5, "nothing is done twice"
        same(run.detections(densities=True), whole)
    with SlideDetection(model, lazy(image), results=results, **SETTINGS) as run:
        assert run.finished
        assert not list(run.detect_tiles())
        same(run.detections(densities=True), whole)


class CountsNetwork:
    def __init__(self, model):
        self.network = model.runner.network
        self.before = self.network.looks

    def looks(self):
        return self.network.looks - self.before


@pytest.mark.parametrize("device_tile", [256, 512])
def test_a_run_goes_on_with_the_tiles_of_its_file(model, discs, tmp_path, monkeypatch, device_tile):
    """Whatever tiles a GPU, or what memory is left now, would have."""
    results, lazily = tmp_path / "a.tiles", lazy(draw((900, 1400), discs))
    settings = {"object_size": 40, "skip_glass": False, "results": results}
    monkeypatch.setitem(pipeline._DEFAULT_TILE, "cpu", 352)
    right = detect_slide(model, lazily, **settings | {"results": None})
    with SlideDetection(model, lazily, **settings) as run:
        before = run.grid
        for step in run.detect_tiles():
            if step.done == 5:
                break
    monkeypatch.setitem(pipeline._DEFAULT_TILE, "cpu", device_tile)
    with SlideDetection(model, lazily, **settings) as run:
        assert run.resumed == 5
        assert run.grid == before
        assert not run.changed
        for _ in run.detect_tiles():
            pass
        same(run.detections(densities=True), right)


@pytest.mark.parametrize("lost", [1, 7, 100, 3000, 20_000])
def test_damaged_tiles_are_done_again(model, image, whole, tmp_path, lost):
    results = tmp_path / "a.tiles"
    detect_slide(model, lazy(image), results=results, **SETTINGS)
    results.write_bytes(results.read_bytes()[:-lost] + b"\0" * 5)
    with SlideDetection(model, lazy(image), results=results, **SETTINGS) as run:
        assert not run.finished
        for _ in run.detect_tiles():
            pass
        same(run.detections(densities=True), whole)


@pytest.mark.parametrize(
    "other", [{"tile": 300}, {"object_size": 41}, {"source": {"path": "b", "size": 1}}]
)
def test_results_of_something_else_are_not_gone_on_with(model, image, tmp_path, other):
    results = tmp_path / "a.tiles"
    detect_slide(model, lazy(image), results=results, **SETTINGS)
    with SlideDetection(model, lazy(image), results=results, **{**SETTINGS, **other}) as run:
        assert not run.finished
    results.write_text("words\n")
    with SlideDetection(model, lazy(image), results=results, **SETTINGS) as run:
        assert not run.finished


def test_two_searches_do_not_write_to_one_file(model, image, whole, tmp_path):
    results = tmp_path / "a.tiles"
    with SlideDetection(model, lazy(image), results=results, **SETTINGS) as run:
        steps = run.detect_tiles()
        next(steps)
        for other in ({}, {"tile": 300}):
            with pytest.raises(FileError, match=r"a\.tiles: another search writes to it"):
                SlideDetection(model, lazy(image), results=results, **{**SETTINGS, **other})
        for _ in steps:
            pass
        same(run.detections(densities=True), whole)
    with SlideDetection(model, lazy(image), results=results, **SETTINGS) as run:
        assert run.finished


def test_cancelling_keeps_what_is_done(model, image, tmp_path):
    results = tmp_path / "a.tiles"

    def stop(progress):
        if progress.message == "finding cells" and progress.fraction > 0.5:
            raise Cancelled

    with pytest.raises(Cancelled):
        detect_slide(model, lazy(image), results=results, report=stop, **SETTINGS)
    with SlideDetection(model, lazy(image), results=results, **SETTINGS) as run:
        assert not run.finished
        assert len(list(run.detect_tiles())) < len(run.grid.tiles)


# --- pixels --------------------------------------------------------------------------------------


def test_lazy_pixels_are_sliced_like_an_image(image, monkeypatch):
    pixels = SlidePixels([lazy(image)])
    np.testing.assert_array_equal(pixels[10:300, 5:77], image[10:300, 5:77])
    np.testing.assert_array_equal(pixels[::7, ::7, :3], image[::7, ::7])
    monkeypatch.setattr(slide_pixels, "_OVERVIEW_SIDE", 250)
    coarse = SlidePixels([lazy(image)])
    palette = coarse.palette()
    np.testing.assert_array_equal(palette.counts, palette_of(image.reshape(-1, 3)).counts)
    np.testing.assert_array_equal(coarse[10:300, 5:77], image[10:300, 5:77])
    np.testing.assert_array_equal(coarse[::8, ::8], image[::8, ::8])


@pytest.mark.parametrize("killed_after", [0, 1])
def test_an_image_of_one_tile_has_the_same_stains_after_a_kill(
    model, image, tmp_path, killed_after
):
    """Its stains are fitted to what the network is shown, which is smaller than the image."""
    part = np.ascontiguousarray(image[:600, :640])
    settings = {"object_size": 80, "skip_glass": False}
    right = model.detect(part, object_size=80)
    file = tmp_path / "found.tiles"
    with SlideDetection(model, lazy(part), results=file, **settings) as run:
        assert len(run.grid.tiles) == 1
        for _ in range(killed_after):
            next(run.detect_tiles())
    with SlideDetection(model, lazy(part), results=file, **settings) as run:
        assert run.resumed == killed_after
        for _ in run.detect_tiles():
            pass
        found = run.detections(densities=True)
    same(found, right)
    assert found.report["stain"] == right.report["stain"]
