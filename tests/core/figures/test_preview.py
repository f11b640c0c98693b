"""The preview picture: what is in it, that it is bounded, and that it always comes out."""

import numpy as np
import pytest
from PIL import Image

from napari_beerlanet.core.figures import drawing
from napari_beerlanet.core.figures import preview as module
from napari_beerlanet.core.figures.drawing import elide, printable, thumbnail
from napari_beerlanet.core.figures.preview import draw_preview
from napari_beerlanet.core.stains.decompose import decompose

STAINS = np.array([[0.57, 0.22], [0.72, 0.80], [0.41, 0.56]])


def field(height: int, width: int, dtype: str = "uint8") -> np.ndarray:
    """Two stains on bright light: one on the left, one at the top."""
    y, x = np.mgrid[0:height, 0:width]
    D = np.stack([x < width / 2, y < height / 2]).reshape(2, -1).astype(float)
    light = 0.94 * np.exp(-STAINS @ D).T.reshape(height, width, 3)
    if dtype == "float32":
        return light.astype(np.float32)
    return np.rint(light * np.iinfo(dtype).max).astype(dtype)


def unrolled(rgb, **settings):
    return decompose(rgb, **{"iterations": 5, "lam": 0.001, "gamma": 0.01, **settings})


def image_panel(result) -> np.ndarray:
    """The pixels of the picture that show the image, a frame of 5 left out."""
    grid = module._PanelGrid.of(result.image.shape, 1 + int(result.active.sum()))
    x, y = grid.corner(0)
    panel = np.asarray(draw_preview(result))[y + module._CAPTION :, x:]
    return panel[5 : grid.panel[1] - 5, 5 : grid.panel[0] - 5]


def colours_in(picture: Image.Image) -> set[tuple[int, int, int]]:
    found = picture.getcolors(picture.width * picture.height)
    assert found is not None
    return {colour for _, colour in found}


@pytest.fixture(scope="module")
def result():
    return decompose(field(60, 80), components=4, iterations="converge", lam=0.05, gamma=0.01)


def test_shows_the_light_and_every_active_component(result):
    assert 0 < result.active.sum() < 4
    shown = colours_in(draw_preview(result, "field.png", (0.25, 0.25)))
    assert tuple(np.rint(255 * result.light).astype(int).tolist()) in shown
    for colour, active in zip(result.colours.tolist(), result.active, strict=True):
        assert (tuple(colour) in shown) or not active


def test_same_result_same_picture(result):
    assert draw_preview(result, "a").tobytes() == draw_preview(result, "a").tobytes()


def test_name_is_drawn(result):
    assert draw_preview(result, "a").tobytes() != draw_preview(result, "b").tobytes()


@pytest.mark.parametrize("shape", [(60, 80), (1, 1), (1, 2), (3, 5), (4, 900), (900, 4), (700, 90)])
@pytest.mark.parametrize("components", [1, 8])
def test_any_shape_of_image(shape, components):
    result = unrolled(field(*shape), components=components)
    picture = draw_preview(result, "n" * 300, (0.1, 0.2))
    assert picture.mode == "RGB"
    assert 500 <= picture.width <= 1900
    assert 200 <= picture.height <= 2600


def test_nothing_active():
    result = decompose(np.full((40, 60, 3), 230, np.uint8), iterations="converge")
    assert not result.active.any()
    assert draw_preview(result, "blank.png").width < 700


@pytest.mark.parametrize("dtype", ["uint16", "float32"])
def test_depth_does_not_change_the_look(dtype):
    same = [unrolled(field(30, 40, kind), components=2) for kind in ("uint8", dtype)]
    first, second = (np.asarray(draw_preview(result), dtype=int) for result in same)
    assert np.abs(first - second).mean() < 1


def test_dark_12_bit_is_brightened():
    """Unchanged, white would be 16 of 255."""
    dark, bright = (
        image_panel(unrolled(field(30, 40, "uint16") // divisor, components=2)).max()
        for divisor in (16, 1)
    )
    assert bright > 235
    assert dark > 200


def test_intensity_domain():
    assert draw_preview(unrolled(field(30, 40), domain="intensity")).width > 500


def test_transparent_pixels_are_white():
    image = field(40, 40)
    alpha = np.zeros((40, 40, 1), np.uint8)
    alpha[20:] = 255
    result = unrolled(np.concatenate([image, alpha], axis=2), components=2)
    shown = image_panel(result)
    middle = len(shown) // 2
    assert (shown[: middle - 5] == 255).all()
    assert (shown[middle + 5 :] < 255).any()


def test_what_is_transparent_has_no_density():
    image, alpha = field(40, 40), np.full((40, 40, 1), 255, np.uint8)
    image[:, :20], alpha[:, :20] = 0, 0
    d = unrolled(np.concatenate([image, alpha], axis=2), components=2)
    grid = module._PanelGrid.of((40, 40), 3)
    x, y = grid.corner(1)
    picture = np.asarray(draw_preview(d))[y + module._CAPTION :, x:]
    panel = picture[5 : grid.panel[1] - 5, 5 : grid.panel[0] - 5]
    middle = panel.shape[1] // 2
    assert (panel[:, : middle - 20] == 255).all()
    assert (panel[:, middle + 20 :].min(0) < 128).any(), "the scale is that of what is shown"


def test_a_slide_costs_no_more_than_what_is_shown(monkeypatch):
    """Only every n-th pixel of a large image is looked at."""
    sizes = []
    copy = drawing.np.asarray

    def spy(array, *args, **kwargs):
        made = copy(array, *args, **kwargs)
        sizes.append(made.size)
        return made

    slide = np.broadcast_to(np.float32(1), (40_000, 60_000))  # 9.6 GB if anyone copied it
    monkeypatch.setattr(drawing.np, "asarray", spy)
    assert thumbnail(slide, (300, 200)).shape == (200, 300)
    assert max(sizes) < 4_000_000


def test_thumbnail_averages_and_enlarges():
    board = np.indices((80, 80)).sum(0) % 2
    np.testing.assert_allclose(thumbnail(board, (40, 40)), 0.5)
    np.testing.assert_array_equal(thumbnail(board[:2, :2], (4, 4))[0], [0, 0, 1, 1])
    assert thumbnail(np.zeros((80, 60, 4), np.uint8), (6, 8)).shape == (8, 6, 4)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("smear 1.tif", "smear 1.tif"),
        ("Größe é µm", "Gro?e e um"),
        ("日本", "??"),
        ("a·b…", "a·b…"),
        ("\ud83d\x07", "??"),
    ],
)
def test_text_is_what_the_font_has(text, shown):
    assert printable(text) == shown


def test_long_name_is_shortened_in_its_middle():
    short = elide("slide number one " * 20 + "level 3.tif", 300, 20)
    assert short.startswith("slide number")
    assert short.endswith("level 3.tif")
    assert "…" in short
    assert elide("short", 300, 20) == "short"
