"""Known dyes, names of stains, presets and their files, stains measured in a region."""

import json
from threading import Thread

import numpy as np
import pytest

from napari_beerlanet import StainPreset, decompose, load_preset
from napari_beerlanet.core.common.storage import FileError
from napari_beerlanet.core.stains import presets
from napari_beerlanet.core.stains.files import read_spectra, write_spectra
from napari_beerlanet.core.stains.presets import (
    BUILT_IN_PRESETS,
    KNOWN_DYES,
    MAX_SUGGESTION_ANGLE,
    NamedSpectrum,
    StainLibrary,
    match_names,
    nearest_dyes,
    read_preset,
    spectral_angle,
    stain_of_region,
    suggest_names,
    write_preset,
)
from napari_beerlanet.samples import he_field
from pictures import section, smear

H, E = (0.650, 0.704, 0.286), (0.072, 0.990, 0.105)
MINE = StainPreset("Mine", (NamedSpectrum("nuclei", H), NamedSpectrum("Grund", (0.1, 0.9, 0.5))))


def turned(spectrum, degrees):
    """A spectrum so many degrees away, towards grey."""
    a = np.array(spectrum) / np.linalg.norm(spectrum)
    grey = np.ones(3) / np.sqrt(3)
    across = grey - (grey @ a) * a
    across /= np.linalg.norm(across)
    return np.cos(np.radians(degrees)) * a + np.sin(np.radians(degrees)) * across


# --- dyes ---


def test_angles():
    assert spectral_angle((1, 0, 0), (0, 2, 0)) == pytest.approx(90)
    assert spectral_angle(H, np.multiply(H, 7)) == pytest.approx(0, abs=1e-9)
    assert spectral_angle(H, turned(H, 1e-5)) == pytest.approx(1e-5, rel=1e-6)
    assert spectral_angle(H, (0, 0, 0)) == 90


def test_every_known_dye_has_a_source_and_scikit_images_numbers():
    from skimage.color import colorconv as sk

    assert all(len(dye.source) > 40 for dye in KNOWN_DYES)
    published = np.vstack(
        [
            getattr(sk, name)
            for name in dir(sk)
            if name.startswith("rgb_from_") and name != "rgb_from_xyz"
        ]
    )
    for dye in KNOWN_DYES:
        if dye.name != "haemoglobin":  # no part of it
            assert min(spectral_angle(dye.spectrum, row) for row in published if row.any()) < 0.6


def test_a_name_is_suggested_only_where_the_angle_is_small():
    near, far = turned(H, MAX_SUGGESTION_ANGLE - 0.5), turned(E, MAX_SUGGESTION_ANGLE + 5)
    first, second = suggest_names(np.stack([near, far], 1))
    assert first.name == "haematoxylin"
    assert first.angle == pytest.approx(MAX_SUGGESTION_ANGLE - 0.5)
    assert "Ruifrok" in first.source
    assert second is None


def test_no_two_common_dyes_are_near_enough_to_be_mistaken_for_each_other():
    common = [dye for dye in KNOWN_DYES if dye.common]
    for a in common:
        for b in common:
            if a.name != b.name:
                assert spectral_angle(a.spectrum, b.spectrum) > 2 * MAX_SUGGESTION_ANGLE - 0.5


def test_one_name_is_not_suggested_for_two_stains():
    names = suggest_names(np.stack([turned(H, 5), turned(H, 2)], 1))
    assert names[0] is None
    assert names[1].name == "haematoxylin"


def test_a_rare_dye_is_offered_but_not_suggested():
    aec = next(dye for dye in KNOWN_DYES if dye.name == "AEC")
    spectrum = np.array(aec.spectrum)
    assert suggest_names(spectrum[:, None])[0] is None
    offered = nearest_dyes(spectrum)
    assert (offered[0].name, offered[0].angle) == ("AEC", pytest.approx(0, abs=1e-6))
    assert [one.angle for one in offered] == sorted(one.angle for one in offered)
    assert len({one.name for one in offered}) == len(offered)


def test_what_the_user_has_named_is_suggested_too():
    odd = (0.4, 0.4, 0.8)
    assert suggest_names(np.array([odd]).T)[0] is None
    (found,) = suggest_names(np.array([turned(odd, 3)]).T, [NamedSpectrum("Perls", odd)])
    assert (found.name, found.source) == ("Perls", "named by you")


def test_names_follow_their_stains_and_not_their_places():
    S = np.array([turned(E, 4), turned(H, 6), (0, 0, 1)]).T
    named = [NamedSpectrum("nuclei", H), NamedSpectrum("plasma", E)]
    assert match_names(named, S) == ("plasma", "nuclei", "")
    assert match_names(named, S, np.array([False, True, True])) == ("", "nuclei", "")
    assert match_names(named, np.array([turned(H, 40)]).T) == ("",)
    assert match_names([], S) == ("", "", "")


# --- names of a decomposition ---


@pytest.fixture(scope="module")
def fit():
    return decompose(he_field((96, 96), nucleus_diameter=14, seed=3).image, iterations="converge")


def test_stains_are_numbered_by_share_and_components_keep_their_places(fit):
    first, second = fit.order
    assert fit.share[first] > fit.share[second]
    assert (fit.labels[first], fit.labels[second]) == ("Stain 1", "Stain 2")
    inactive = [i for i in range(8) if not fit.active[i]]
    assert [fit.labels[i] for i in inactive] == [f"Component {i + 1}" for i in inactive]


def test_names_replace_numbers_and_are_never_alike(fit):
    first, second = fit.order
    d = fit.with_names({second: " eosin "})
    assert (d.labels[first], d.labels[second]) == ("Stain 1", "eosin")
    assert d.named_stains == [NamedSpectrum("eosin", tuple(d.spectra[:, second]))]
    both = d.with_names({first: "eosin"}).labels
    assert {both[first], both[second]} == {"eosin", "eosin (2)"}
    assert d.with_names(()).labels == fit.labels
    with pytest.raises(ValueError, match="8 components, but 2 names"):
        fit.with_names(["a", "b"])
    with pytest.raises(ValueError, match="0 to 7"):
        fit.with_names({8: "no"})


def test_suggestions_are_of_active_stains_by_component(fit):
    first, second = fit.order
    found = fit.suggestions()
    assert {i: one.name for i, one in found.items()} == {first: "haematoxylin"}
    assert found[first].angle == pytest.approx(spectral_angle(fit.spectra[:, first], H))
    red = NamedSpectrum("plasma", tuple(turned(fit.spectra[:, second], 2)))
    assert fit.suggestions([red])[second].name == "plasma"


def test_start_spectra_give_their_names_to_what_stays_near():
    d = decompose(section(), spectra=load_preset("H&E"), iterations="converge")
    assert set(d.names) <= {"haematoxylin", "eosin", ""}
    far = StainPreset("far", (NamedSpectrum("a", (0, 0, 1)), NamedSpectrum("b", (1, 0, 0))))
    d = decompose(section(), spectra=far, iterations="converge")
    assert d.names == tuple(
        name if spectral_angle(d.spectra[:, i], far.spectra[:, i]) < 15 and d.active[i] else ""
        for i, name in enumerate(far.names)
    )


# --- presets ---


def test_built_in_presets():
    assert [preset.name for preset in BUILT_IN_PRESETS] == ["H&E", "H-DAB", "H&E-DAB", "Giemsa"]
    assert load_preset("h&e").names == ("haematoxylin", "eosin")
    assert load_preset("Giemsa").names == ("methylene blue / azure", "eosin")
    for preset in BUILT_IN_PRESETS:
        np.testing.assert_allclose(np.linalg.norm(preset.spectra, axis=0), 1)
        assert preset.source
    with pytest.raises(FileError, match=r"no such preset; there are H&E, H-DAB"):
        load_preset("Wright")


def test_a_preset_there_and_back(tmp_path):
    write_preset(tmp_path / "mine.json", MINE)
    assert read_preset(tmp_path / "mine.json") == MINE
    assert load_preset(tmp_path / "mine.json") == MINE
    assert (tmp_path / "mine.json").stat().st_size < 1000


def test_the_stains_of_a_spectra_file_are_a_preset(tmp_path, fit):
    first, second = fit.order
    write_spectra(tmp_path / "a.spectra.json", fit.with_names({first: "H"}), name="a.tif")
    preset = read_preset(tmp_path / "a.spectra.json")
    assert preset.name == "a"
    assert preset.names == ("H", "Stain 2")
    np.testing.assert_allclose(preset.spectra, fit.spectra[:, [first, second]])
    assert "a.tif" in preset.source
    np.testing.assert_array_equal(read_spectra(tmp_path / "a.spectra.json"), fit.spectra)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kind": "something"}, "not a preset"),
        ({"version": 9}, "version 9"),
        ({"stains": []}, "at least one stain"),
        ({"stains": [{"name": "x", "spectrum": [0, 0, 0]}]}, "absorbs nothing"),
        ({"stains": [{"name": "x", "spectrum": [1, -1, 0]}]}, "3 numbers of at least 0"),
        ({"stains": [{"name": "x", "spectrum": [1, 2]}]}, "3 numbers of at least 0"),
        ({"stains": [{"name": " ", "spectrum": [1, 2, 3]}]}, "needs a name"),
        ({"stains": [{"spectrum": [1, 2, 3]}]}, "damaged"),
        ({"name": ""}, "needs a name"),
    ],
)
def test_a_damaged_preset_is_one_sentence(tmp_path, change, reason):
    path = tmp_path / "mine.json"
    write_preset(path, MINE)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(FileError, match=reason) as error:
        read_preset(path)
    assert str(path) in str(error.value)


def test_two_stains_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two stains called “a”"):
        StainPreset("x", (NamedSpectrum("a", H), NamedSpectrum("a", E)))


# --- library ---


def test_a_library_keeps_presets_and_names(tmp_path):
    library = StainLibrary(tmp_path / "stains")
    assert library.presets() == []
    assert library.named_spectra() == []
    library.save(MINE)
    other = StainPreset("MINE!", (NamedSpectrum("x", E),))  # the same plain file name
    library.save(other)
    assert library.presets() == [MINE, other]
    library.save(StainPreset("Mine", MINE.stains[:1]))
    assert [len(preset.stains) for preset in library.presets()] == [1, 1]
    library.remove("Mine")
    library.remove("never there")
    assert library.presets() == [other]
    library.set_names("a.tif", MINE.stains)
    library.set_names("b.tif", [NamedSpectrum("later", E)])
    again = StainLibrary(tmp_path / "stains")
    assert again.names_of("a.tif") == list(MINE.stains)
    assert [one.name for one in again.named_spectra()] == ["x", "later", "nuclei", "Grund"]
    again.set_names("a.tif", [])
    assert again.names_of("a.tif") == []


def test_two_windows_that_name_stains_at_once_both_keep_theirs(tmp_path, monkeypatch):
    write, others = presets.write_json, []

    def write_after_the_other_window(path, content):
        if not others:
            library = StainLibrary(tmp_path)
            others.append(Thread(target=library.set_names, args=("b.tif", MINE.stains)))
            others[0].start()
            others[0].join(0.5)  # it has ended, or it waits
        write(path, content)

    monkeypatch.setattr(presets, "write_json", write_after_the_other_window)
    StainLibrary(tmp_path).set_names("a.tif", MINE.stains)
    others[0].join()
    assert StainLibrary(tmp_path).names_of("a.tif") == list(MINE.stains)
    assert StainLibrary(tmp_path).names_of("b.tif") == list(MINE.stains)


def test_a_preset_called_names_does_not_replace_the_names(tmp_path):
    library = StainLibrary(tmp_path)
    library.set_names("a.tif", MINE.stains)
    library.save(StainPreset("names", MINE.stains))
    assert library.names_of("a.tif") == list(MINE.stains)
    assert [preset.name for preset in library.presets()] == ["names"]


@pytest.mark.parametrize(
    "content", ["{nonsense", "[]", '{"images": 3}', '{"images": {"a": [{"name": 1}], "b": 2}}']
)
def test_damaged_files_of_a_library_are_passed_over(tmp_path, content):
    (tmp_path / "names.json").write_text(content)
    (tmp_path / "preset.json").write_text(content)
    library = StainLibrary(tmp_path)
    assert library.presets() == []
    assert library.names_of("a") == []
    library.set_names("a", MINE.stains)
    assert library.names_of("a") == list(MINE.stains)


# --- regions ---


def region(spectrum, light=(0.9, 0.95, 0.92), density=(0.0, 1.5), n=400, seed=0):
    d = np.random.default_rng(seed).uniform(*density, n)
    unit = np.array(spectrum) / np.linalg.norm(spectrum)
    return np.log(light), np.exp(np.log(light)[:, None] - unit[:, None] * d).T.astype(np.float32)


def test_the_stain_of_a_region_comes_back_also_with_gaps_in_it():
    x0, pixels = region(H)
    found = stain_of_region(pixels, x0)
    assert spectral_angle(found.spectrum, H) < 1e-3
    assert found.unexplained < 1e-3
    assert found.pixels == 400
    gaps = np.concatenate([pixels, np.broadcast_to(np.exp(x0), (300, 3)).astype(np.float32)])
    assert spectral_angle(stain_of_region(gaps, x0).spectrum, H) < 1e-3
    eight = np.round(255 * pixels).astype(np.uint8)
    assert spectral_angle(stain_of_region(eight, x0).spectrum, H) < 1


def test_a_mixed_region_says_that_it_is_one():
    x0, one = region(H)
    _, other = region(E, seed=1)
    assert stain_of_region(np.concatenate([one, other]), x0).unexplained > 0.2


def test_an_empty_region_is_refused_with_the_way_out():
    x0, pixels = region(H, density=(0, 0.01))
    with pytest.raises(ValueError, match="draw it where the stain is"):
        stain_of_region(pixels, x0)
    with pytest.raises(ValueError, match="no pixels"):
        stain_of_region(np.dstack([smear(), np.zeros((48, 64), np.uint8)]).reshape(-1, 4), x0)
