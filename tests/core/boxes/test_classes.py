"""Counts per class, infected red cells, and Wilson's interval."""

import itertools

import numpy as np
import pytest

from napari_beerlanet.core.boxes.annotations import Annotations
from napari_beerlanet.core.boxes.classes import (
    CHANGE_COLOURS,
    OUTCOME_COLOURS,
    ClassCounts,
    applicable_classes,
    assign_colours,
    class_colours,
    in_life_cycle_order,
    infected_types,
    is_infected,
    is_red_cell,
    is_white_cell,
    parasitaemia,
    parse_colour,
    wilson_interval,
)


@pytest.mark.parametrize(
    "name",
    ["ring", "Ring form", "trophozoite", "schizont", "gametocyte", "infected", "Infected_RBC",
     "infectedRBC", "parasite", "Parasitized", "P. falciparum", "P_vivax", "iRBC",
     "red blood cell (ring)"],
)  # fmt: skip
def test_infected_names(name):
    assert is_infected(name)
    assert not is_red_cell(name)


@pytest.mark.parametrize(
    "name",
    ["RBC", "rbcs", "red blood cell", "Red Cells", "erythrocyte", "uninfected", "non-infected RBC",
     "Uninfected_RBC", "unparasitized RBC", "healthy RBC"],
)  # fmt: skip
def test_names_of_red_cells(name):
    assert is_red_cell(name)
    assert not is_infected(name)


@pytest.mark.parametrize(
    "name", ["WBC", "Platelets", "leukocyte", "nucleus", "string", "signet ring cell", "carbon", ""]
)
def test_names_of_neither(name):
    assert not is_infected(name)
    assert not is_red_cell(name)


@pytest.mark.parametrize(
    ("part", "whole", "low", "high"),
    [  # R: prop.test(part, whole, correct = FALSE)
        (10, 100, 0.05522914, 0.17436566),
        (0, 10, 0.0, 0.27753280),
        (10, 10, 0.72246720, 1.0),
        (1, 5000, 0.00003530, 0.00113210),
    ],
)
def test_interval_is_wilsons(part, whole, low, high):
    assert wilson_interval(part, whole) == pytest.approx((low, high), abs=2e-6)


@pytest.mark.parametrize(("part", "whole"), [(1, 0), (0, 0), (-1, 5), (6, 5)])
def test_impossible_shares_are_refused(part, whole):
    with pytest.raises(ValueError, match="share"):
        wilson_interval(part, whole)


def test_parasitaemia_counts_infected_cells_among_all_red_cells():
    found = parasitaemia({"red blood cell": 190, "ring": 8, "trophozoite": 2, "leukocyte": 50})
    assert (found.infected, found.cells) == (10, 200)
    assert found.share == pytest.approx(0.05)
    assert str(found) == "5.0 % (2.7 % to 9.0 %)"


@pytest.mark.parametrize(
    "counts",
    [{"RBC": 5, "WBC": 2}, {"ring": 3}, {}, {"RBC": 0, "ring": 0}],
)
def test_no_share_where_there_is_none(counts):
    assert parasitaemia(counts) is None


def test_none_infected_is_a_share():
    assert str(parasitaemia({"RBC": 1000, "ring": 0})) == "0.00 % (0.00 % to 0.38 %)"


def test_what_is_copied():
    tally = ClassCounts({"RBC": 98, "ring": 2}, {"image": "a\tb"})
    lines = [line.split("\t") for line in tally.tsv().splitlines()]
    assert all(len(line) == 2 for line in lines)
    assert lines[:4] == [["image", "a b"], ["RBC", "98"], ["ring", "2"], ["total", "100"]]
    assert ["parasitaemia", "2.000 %"] in lines
    assert tally.text() == "98 RBC, 2 ring; infected: 2 of 100 red cells, 2.0 % (0.55 % to 7.0 %)."
    assert ClassCounts({}).text() == "nothing."


# --- cell types ----------------------------------------------------------------------------------

STAGES = ["uninfected", "ring", "trophozoite", "schizont", "gametocyte"]


def test_parasitaemia_by_types_counts_the_classified_red_cells():
    counts = {"RBC": 1000, "WBC": 8, "Platelets": 40}
    types = {"uninfected": 950, "ring": 30, "trophozoite": 10, "other": 3}
    found = parasitaemia(counts, types)
    assert (found.infected, found.cells) == (40, 990)  # "other" is no red cell
    assert found.stages == {"ring": 30, "trophozoite": 10}
    assert found.interval == wilson_interval(40, 990)
    assert found.unclassified == 7
    assert found.warnings == ["7 red cells were not classified and do not count."]
    assert found.per_100_white_cells == pytest.approx(500)
    low, high = found.per_100_white_cells_interval
    a, b = wilson_interval(40, 48)
    assert (low / (100 + low), high / (100 + high)) == pytest.approx((a, b))


def test_few_red_cells_are_warned_of_and_white_cells_may_be_absent():
    found = parasitaemia({"RBC": 499}, {"uninfected": 498, "ring": 1})
    assert found.warnings == [
        "Only 499 red cells counted: a parasitaemia needs at least 500; count more fields."
    ]
    assert (found.white_cells, found.per_100_white_cells) == (None, None)
    assert parasitaemia({"RBC": 500, "WBC": 0}, {"uninfected": 500, "ring": 0}).warnings == []
    none = parasitaemia({"RBC": 500, "WBC": 0}, {"uninfected": 500, "ring": 0})
    assert (none.white_cells, none.per_100_white_cells) == (0, None)


@pytest.mark.parametrize(
    ("types", "infected"),
    [
        (STAGES, STAGES[1:]),
        (["healthy", "ring"], ["ring"]),
        (["Uninfected", "early", "late"], ["early", "late"]),
        (["RBC", "infected RBC", "WBC", "artefact"], ["infected RBC"]),
        (["parasite negative", "parasite positive"], ["parasite positive"]),
        (["healthy", "tumour"], []),
        (["negative", "positive"], []),
        (["RBC", "WBC", "Platelets"], []),
        (["neutrophil", "lymphocyte"], []),
        (["ring", "schizont"], []),  # of infected cells alone: what they are a share of is unknown
    ],
)
def test_types_that_are_about_parasites(types, infected):
    assert infected_types(types) == infected
    whole = parasitaemia({"cell": 600}, dict.fromkeys(types, 300))
    assert (whole is None) == (not infected)
    if infected:
        assert list(whole.stages) == infected


def test_only_uninfected_cells_are_a_parasitaemia_of_none():
    assert str(parasitaemia({"cell": 1000}, {"uninfected": 1000})) == "0.00 % (0.00 % to 0.38 %)"


def test_stages_of_infected_cells_that_a_detector_has_found():
    types = {"ring": 9, "schizont": 1}
    found = parasitaemia({"RBC": 990, "infected": 10}, types)
    assert (found.infected, found.cells, found.stages) == (10, 1000, types)
    white = {"neutrophil": 3, "lymphocyte": 2}
    found = parasitaemia({"RBC": 990, "ring": 10, "WBC": 5}, white)
    assert (found.infected, found.cells, found.stages) == (10, 1000, {"ring": 10})


@pytest.mark.parametrize("name", ["WBC", "white blood cell", "Leukocyte", "leucocytes", "basophil"])
def test_names_of_white_cells(name):
    assert is_white_cell(name)
    assert not is_red_cell(name)


@pytest.mark.parametrize(
    ("meant", "names", "fits"),
    [
        ([], ["RBC", "WBC"], ["RBC", "WBC"]),
        (["WBC"], ["RBC", "WBC"], ["WBC"]),
        (["wbc"], ["RBC", "WBC"], ["WBC"]),
        (["RBC"], ["red blood cell", "leukocyte", "platelet"], ["red blood cell"]),
        (["WBC"], ["erythrocyte", "Leukocyte"], ["Leukocyte"]),
        (["neutrophil"], ["lymphocyte", "neutrophil"], ["neutrophil"]),
        (["WBC"], ["nucleus"], []),
    ],
)
def test_classes_that_a_classifier_is_meant_for(meant, names, fits):
    assert applicable_classes(meant, names) == fits


def test_types_have_shares_with_intervals_wherever_they_are_copied():
    boxes = Annotations(
        [[0, 0, 9, 9]] * 5, [0, 0, 0, 0, 1], ["RBC", "WBC"],
        types=["ring", "uninfected", "uninfected", "uninfected", ""],
    )  # fmt: skip
    tally = ClassCounts.of(boxes.to_detections(), {"image": "a"})
    assert tally.types == {"ring": 1, "uninfected": 3}
    low, high = wilson_interval(1, 4)
    lines = [line.split("\t") for line in tally.tsv().splitlines()]
    assert ["total", "5"] in lines
    assert ["ring", "1", "25.000 %", f"{100 * low:.3f} %", f"{100 * high:.3f} %"] in lines
    assert ["parasites per 100 white cells", "100.0"] in lines
    assert tally.text() == (
        "4 RBC, 1 WBC; types: 1 ring (25 %), 3 uninfected (75 %); infected: 1 of 4 red cells, "
        "25 % (4.6 % to 70 %); 100.0 per 100 white cells."
    )


# --- colours -------------------------------------------------------------------------------------

# Machado, Oliveira and Fernandes 2009: what people without one kind of cones see, in linear RGB.
VISION = {
    "normal": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
SMEARS = ["#c8bcbc", "#c49a9e", "#e6c8cd", "#f2f0f0"]  # background and red cells of laboratories


def lab(colour: str, vision: str) -> np.ndarray:
    c = np.array(parse_colour(colour)) / 255
    linear = np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.asarray(VISION[vision]) @ linear, 0, 1)
    xyz = (
        np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
        @ seen
        / [0.9505, 1, 1.089]
    )
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def difference(a: str, b: str) -> float:
    """CIE 1976, to the eyes that tell them apart least; 2.3 is just noticeable."""
    return min(float(np.linalg.norm(lab(a, v) - lab(b, v))) for v in VISION)


@pytest.mark.parametrize(
    ("colours", "least"),
    [
        (class_colours(3), 24),
        (class_colours(5), 16),
        (list(OUTCOME_COLOURS.values()), 22),
        (list(CHANGE_COLOURS.values()), 30),
    ],
    ids=["three classes", "five classes", "outcomes", "changes"],
)
def test_the_colour_blind_can_tell_colours_apart(colours, least):
    assert min(difference(a, b) for a, b in itertools.combinations(colours, 2)) >= least


def test_the_first_colours_are_seen_on_a_smear():
    assert min(difference(a, b) for a in class_colours(4) for b in SMEARS) >= 25


def test_a_class_keeps_its_colour_whatever_is_beside_it():
    first = assign_colours(["RBC", "WBC"])
    assert list(first.values()) == class_colours(2)
    assert assign_colours(["ring", "WBC", "RBC"], first) == {
        **first,
        "ring": class_colours(3)[2],
    }


def test_a_preferred_colour_is_given_only_once_and_a_fixed_one_always():
    preferred = {"a": "#111111", "b": "#111111", "c": "#222222"}
    given = assign_colours(["a", "b", "c"], {"c": "#111111"}, preferred)
    assert given["c"] == "#111111"
    assert "#111111" not in (given["a"], given["b"])
    assert len(set(given.values())) == 3
    assert assign_colours(["a"], None, preferred) == {"a": "#111111"}
    many = assign_colours([str(k) for k in range(40)])
    assert len(set(many.values())) == 40


def test_life_stages_are_listed_as_they_follow_each_other():
    names = ["gametocyte", "artefact", "ring", "Schizonts", "late_trophozoite", "uninfected"]
    expected = ["ring", "artefact", "late_trophozoite", "Schizonts", "gametocyte", "uninfected"]
    assert in_life_cycle_order(names) == expected
    cells = ["monocyte", "band", "signet ring", "basophil"]
    assert in_life_cycle_order(cells) == cells
    counts = ClassCounts({"RBC": 21}, types={name: k + 1 for k, name in enumerate(names)})
    assert list(counts.type_shares) == expected
    assert list(counts.parasitaemia.stages) == [
        name for name in expected if name not in ("artefact", "uninfected")
    ]
    assert counts.type_shares["ring"].part == 3
    assert counts.parasitaemia.stages["late_trophozoite"] == 5
