"""Layers of components: added once, updated in place, and what the user set on them stays."""

import numpy as np
import pytest
from napari.components import ViewerModel
from napari.utils.colormaps import AVAILABLE_COLORMAPS
from qtpy.QtCore import QObject

from napari_beerlanet.core.stains.decompose import decompose
from napari_beerlanet.core.stains.settings import DecomposeSettings
from napari_beerlanet.ui.stains.density_layers import DensityLayers
from napari_beerlanet.ui.stains.fitting import (
    FitResult,
    FitTarget,
    density_data,
    shared_contrast_limit,
)
from napari_beerlanet.ui.viewer.layers import role_of
from napari_beerlanet.ui.viewer.planes import Plane


def fitted(image, **settings):
    d = decompose(image, **{"iterations": "converge", **settings})
    return FitResult(
        d, DecomposeSettings(), FitTarget((Plane("smear", (image,)),)), shared_contrast_limit(d)
    )


def test_what_is_transparent_does_not_set_the_contrast(smear):
    """Black that a scanner left out would be denser than any stain."""
    rgba = np.dstack([smear, np.full(smear.shape[:2], 255, np.uint8)])
    rgba[:, 40:] = 0
    d, bare = (decompose(image, iterations="converge") for image in (rgba, smear[:, :40]))
    assert shared_contrast_limit(d) == pytest.approx(shared_contrast_limit(bare), rel=0.1)


@pytest.fixture
def viewer(qapp, smear):
    made = ViewerModel()
    made.add_image(np.zeros((4, 5)), name="below")
    made.add_image(smear, rgb=True, name="smear", scale=(0.5, 0.25), translate=(3, 4), rotate=30)
    made.add_points(np.zeros((1, 2)), name="above")
    return made


@pytest.fixture
def group(viewer):
    parent = QObject()
    made = DensityLayers(viewer, viewer.layers["smear"], parent)
    yield made
    made.close()


@pytest.fixture
def shown(group, smear):
    """The group, after a first fit."""
    fit = fitted(smear)
    group.show(fit, density_data(fit))
    group.finish()
    return group


def again(group, image, **settings):
    fit = fitted(image, **settings)
    group.show(fit, density_data(fit))
    group.finish()
    return fit.decomposition


def names(viewer):
    return [layer.name for layer in viewer.layers]


def test_only_active_components_become_layers_directly_above_the_source(viewer, shown, smear):
    d = decompose(smear, iterations="converge")
    assert 0 < d.active.sum() < len(d.active)
    assert set(shown.layers) == set(np.flatnonzero(d.active))
    mine = [shown.layers[i].name for i in reversed(d.order)]
    assert names(viewer) == ["below", "smear", *mine, "above"]
    for k, i in enumerate(d.order):
        layer = shown.layers[i]
        assert layer.name == f"Stain {k + 1} · {100 * d.share[i]:.0f} %"
        np.testing.assert_array_equal(layer.data, d.densities[i])
        assert role_of(layer) == "density"


def test_they_lie_where_the_source_lies(viewer, shown):
    source = viewer.layers["smear"]
    for layer in shown.layers.values():
        np.testing.assert_allclose(layer.scale, source.scale)
        np.testing.assert_allclose(layer.translate, source.translate)
        np.testing.assert_allclose(layer.rotate, source.rotate)
        np.testing.assert_allclose(layer.affine.affine_matrix, source.affine.affine_matrix)
        assert layer.units == source.units
        assert layer.axis_labels == source.axis_labels


def test_only_the_largest_share_is_seen_and_the_selection_stays(viewer, shown, smear):
    d = decompose(smear, iterations="converge")
    assert shown.visible_components == {int(d.share.argmax())}
    assert viewer.layers["smear"].visible
    assert viewer.layers.selection.active is viewer.layers["above"]


def test_colormaps_go_from_white_to_the_components_colour(shown, smear):
    d = decompose(smear, iterations="converge")
    for i, layer in shown.layers.items():
        np.testing.assert_allclose(layer.colormap.colors[0, :3], 1)
        np.testing.assert_allclose(layer.colormap.colors[-1, :3], d.colours[i] / 255, atol=1e-6)


def test_one_contrast_scale_for_all(shown):
    limits = {tuple(layer.contrast_limits) for layer in shown.layers.values()}
    assert len(limits) == 1
    low, high = limits.pop()
    assert low == 0
    assert 0 < high <= max(layer.data.max() for layer in shown.layers.values())


def test_an_update_is_in_place(viewer, shown, smear):
    before, order = dict(shown.layers), list(viewer.layers)
    d = again(shown, smear[::-1].copy())
    assert shown.layers == before
    assert list(viewer.layers) == order
    for i, layer in before.items():
        np.testing.assert_array_equal(layer.data, d.densities[i])


def test_what_the_user_set_stays(viewer, shown, smear):
    first, second = (shown.layers[i] for i in sorted(shown.layers))
    first.name, first.colormap, first.visible = "nuclei", "viridis", True
    second.contrast_limits = (0.1, 0.9)
    viewer.layers.move(viewer.layers.index(first), 0)
    order = list(viewer.layers)
    again(shown, (smear * 0.7).astype(np.uint8))
    assert first.name == "nuclei"
    assert first.colormap.name == "viridis"
    assert first.visible
    assert list(viewer.layers) == order
    for layer in (first, second):
        assert tuple(layer.contrast_limits) == (0.1, 0.9)  # one scale, the user's


def test_what_nobody_touched_follows_the_fit(shown, smear):
    limits = {i: tuple(layer.contrast_limits) for i, layer in shown.layers.items()}
    d = again(shown, (255 * (smear / 255.0) ** 2).astype(np.uint8))
    for i, layer in shown.layers.items():
        assert layer.name == f"Stain {1 + d.order.index(i)} · {100 * d.share[i]:.0f} %"
        assert tuple(layer.contrast_limits) != limits[i]
        seen = 255 * layer.colormap.colors[-1, :3]
        np.testing.assert_allclose(seen, d.colours[i], atol=2.01)


def test_a_component_that_vanishes_is_hidden_and_then_goes(viewer, shown, smear):
    gone = max(shown.layers)
    layer = shown.layers[gone]
    again(shown, smear, components=1)
    assert layer in viewer.layers
    assert not layer.visible
    assert "inactive" in layer.name
    shown.remove_empty_layers()
    assert layer not in viewer.layers
    assert gone not in shown.layers


def test_a_component_that_vanishes_stays_if_the_user_touched_it(viewer, shown, smear):
    layer = shown.layers[max(shown.layers)]
    layer.name = "mine"
    layer.visible = True
    again(shown, smear, components=1)
    shown.remove_empty_layers()
    assert layer in viewer.layers
    assert layer.visible
    assert layer.name == "mine"


def test_a_component_that_comes_back_is_the_same_layer(shown, smear):
    before = dict(shown.layers)
    was = shown.visible_components
    again(shown, smear, components=1)
    again(shown, smear)
    assert shown.layers == before
    assert shown.visible_components >= was


def test_a_layer_that_the_user_took_away_stays_away_until_asked_for(viewer, shown, smear):
    gone = min(shown.layers)
    viewer.layers.remove(shown.layers[gone])
    again(shown, smear)
    assert gone not in shown.layers
    fit = fitted(smear)
    shown.show(fit, density_data(fit), restore=True)
    shown.finish()
    assert gone in shown.layers


@pytest.mark.parametrize("look", ["additive", "multiplicative"])
def test_all_together_without_the_source_and_back(viewer, shown, look):
    source, was = viewer.layers["smear"], shown.visible_components
    shown.set_blending(look)
    assert shown.visible_components == set(shown.layers)
    assert not source.visible
    for layer in shown.layers.values():
        assert layer.blending == look
        starts_black = look == "additive"
        np.testing.assert_allclose(layer.colormap.colors[0, :3], 0 if starts_black else 1)
    shown.set_blending("opaque")
    assert source.visible
    assert shown.visible_components == was


def test_a_source_that_the_user_hid_stays_hidden(viewer, shown):
    viewer.layers["smear"].visible = False
    shown.set_blending("additive")
    shown.set_blending("opaque")
    assert not viewer.layers["smear"].visible


def test_the_users_colormap_survives_another_look(shown):
    layer = shown.layers[min(shown.layers)]
    layer.colormap = "magma"
    shown.set_blending("additive")
    assert layer.colormap.name == "magma"


def test_show_only_one_and_then_the_image(shown):
    one = min(shown.layers)
    shown.show_only(one)
    assert shown.visible_components == {one}
    shown.show_only(one)
    assert shown.visible_components == set()
    assert shown.source.visible


def test_colormaps_do_not_pile_up(shown, smear):
    for strength in (0.5, 0.6, 0.7, 0.8):
        again(shown, (255 * (smear / 255.0) ** strength).astype(np.uint8))
    ours = [name for name in AVAILABLE_COLORMAPS if name.startswith(("dye #", "glow #"))]
    assert len(ours) <= len(shown.layers)


def test_nothing_is_added_when_the_source_is_gone(viewer, group, smear):
    fit = fitted(smear)
    group.show(fit, density_data(fit))
    viewer.layers.remove("smear")
    group.finish()
    assert names(viewer) == ["below", "above"]
