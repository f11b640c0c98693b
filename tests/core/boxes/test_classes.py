"""Counts per class, infected red cells, and Wilson's interval."""

import pytest

from napari_beerlanet.core.boxes.classes import (
    ClassCounts,
    is_infected,
    is_red_cell,
    parasitaemia,
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
