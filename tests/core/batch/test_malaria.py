"""The Malaria preset: which objects are classified, what counts, and what is said against it."""

import csv

import dask.array as da
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from napari_beerlanet.core.batch import image
from napari_beerlanet.core.batch.malaria import (
    claim_red_cells,
    count_malaria,
    describe_smear,
    find_red_cells,
    load_models,
)
from napari_beerlanet.core.batch.settings import MALARIA_PRESET
from napari_beerlanet.core.batch.study import run_study
from napari_beerlanet.core.boxes.detections import AGREEMENT_COLUMN, TYPE_COLUMN, Detections
from napari_beerlanet.core.checkpoints.checkpoint import read_info, save_checkpoint
from napari_beerlanet.core.classification.classifier import adapt_to_share
from tinyclasses import SMALL, tiny_classifier

NAMES = ["RBC", "WBC", "Platelets"]
STAGES = ["gametocyte", "ring", "schizont", "trophozoite", "uninfected"]
DETECTOR = {"name": "finder", "classes": NAMES, "unknown": {"parasites": ["WBC", "Platelets"]}}
NEAR_TWIN = 3  # pixels by which two boxes of one cell differ


class _Darkness(nn.Module):
    """Dark crops are rings, all others uninfected: the weights are made up, the rest is real."""

    def forward(self, x):
        dark = 0.5 - x.mean((1, 2, 3))
        nothing = torch.full_like(dark, -1.0)
        return 20 * torch.stack([nothing, dark, nothing, nothing, -dark], 1)


@pytest.fixture(scope="module")
def classifier():
    info = {"applies_to": ["RBC"]}
    return tiny_classifier(
        _Darkness(), STAGES, info=info, front_end="none", standardize=False, fill=1.0
    )


def smear(*objects):
    """An image and its detections: (class, dark, agreement), the most certain first."""
    pixels = np.full((24, 24 * len(objects), 3), 230, np.uint8)
    boxes = []
    for k, (_, dark, _) in enumerate(objects):
        boxes.append([24 * k + 2, 2, 24 * k + 22, 22])
        pixels[2:22, 24 * k + 2 : 24 * k + 22] = 40 if dark else 200
    return pixels, Detections(
        np.array(boxes, float),
        np.array([NAMES.index(name) for name, _, _ in objects]),
        np.linspace(0.9, 0.2, len(objects)),
        NAMES,
        columns={AGREEMENT_COLUMN: np.array([agreement for *_, agreement in objects], np.float32)},
        image_shape=pixels.shape[:2],
    )


OBJECTS = (
    ("RBC", True, np.nan),
    ("RBC", False, np.nan),
    ("WBC", True, 1.0),  # a white cell: dark, and as large and dark as one
    ("WBC", True, 0.1),  # a parasite
    ("WBC", False, 0.1),  # something else that is no white cell
    ("WBC", True, np.nan),  # at the border, so nothing is known of its size
    ("Platelets", True, 0.9),
    ("RBC", False, np.nan),
    ("RBC", True, np.nan),  # below the threshold
)


def found_in(objects=OBJECTS, confidence=0.25):
    pixels, everything = smear(*objects)
    return pixels, everything.above(confidence)


def classified(classifier, pixels, found, confidence=0.25):
    claimed = claim_red_cells(found, DETECTOR, classifier.info)
    return classifier.classify_detections(pixels, claimed, confidence=confidence)


def test_red_cells_and_objects_that_are_not_what_they_are_called(classifier):
    _, found = found_in()
    assert len(found) == 8
    rows, twice = find_red_cells(found, DETECTOR, classifier.info)
    assert (rows.tolist(), twice.tolist()) == ([0, 1, 3, 4, 7], [])


def test_a_detector_that_knows_parasites_is_believed(classifier):
    _, found = found_in()
    rows, _ = find_red_cells(found, DETECTOR | {"unknown": {"blasts": ["WBC"]}}, classifier.info)
    assert rows.tolist() == [0, 1, 7]


def test_a_cell_that_is_found_twice_counts_once(classifier):
    pixels, found = found_in()
    found.xyxy[0] = found.xyxy[3] + NEAR_TWIN
    found.candidates.xyxy[0] = found.xyxy[0]
    rows, twice = find_red_cells(found, DETECTOR, classifier.info)
    assert (rows.tolist(), twice.tolist()) == ([0, 1, 4, 7], [3])
    typed = classified(classifier, pixels, found)
    assert typed.counts() == {"RBC": 4, "WBC": 2, "Platelets": 1}
    assert len(typed.above(0.1)) == 8


def test_what_has_the_size_and_stain_of_a_red_cell_is_one(classifier):
    pixels, found = found_in()
    typed = classified(classifier, pixels, found)
    types = typed.columns[TYPE_COLUMN].tolist()
    assert types == ["ring", "uninfected", "", "ring", "uninfected", "", "", "uninfected"]
    assert typed.counts() == {"RBC": 5, "WBC": 2, "Platelets": 1}
    assert typed.report["notes"] == ["2 red cells were called WBC by the detector."]
    assert typed.report["classifier"] == "tiny"
    infected = describe_smear(typed, DETECTOR, classifier.info).parasitaemia
    assert (infected.infected, infected.cells, infected.stages["ring"]) == (2, 5, 2)
    assert (infected.white_cells, infected.per_100_white_cells) == (2, 100)


def test_the_threshold_can_be_lowered_and_nothing_is_claimed_of_what_comes(classifier):
    pixels, found = found_in()
    lower = classified(classifier, pixels, found).above(0.1)
    assert lower.columns[TYPE_COLUMN].tolist()[-1] == ""
    result = describe_smear(lower, DETECTOR, classifier.info)
    assert (result.parasitaemia.cells, result.parasitaemia.unclassified) == (5, 1)


def test_with_a_threshold_for_each_class_other_candidates_are_given_up(classifier):
    _, everything = smear(*OBJECTS)
    found = everything.above({"RBC": 0.1, "WBC": 0.6})
    claimed = claim_red_cells(found, DETECTOR, classifier.info)
    assert claimed.xyxy.tolist() == found.xyxy.tolist()
    assert claimed.labels.tolist() == [0, 0, 1, 0, 0, 0]
    assert len(claimed.above(0)) == 6


class _Brightness(nn.Module):
    """The paler a crop, the less it looks infected; between, it may be either."""

    def forward(self, x):
        lead = 10 * (0.5 - x.mean((1, 2, 3)))
        nothing = torch.full_like(lead, -30.0)
        return torch.stack([nothing, lead, nothing, nothing, torch.zeros_like(lead)], 1)


def test_a_faint_parasite_is_likelier_where_many_cells_are_infected():
    """A grey cell is a ring among dark cells and none among pale ones, wherever it is counted."""
    info = {"applies_to": ["RBC"], "prevalence": 0.05}
    model = tiny_classifier(
        _Brightness(), STAGES, info=info, front_end="none", standardize=False, fill=1.0
    )
    types, alone = {}, model.classify([np.full((20, 20, 3), 118, np.uint8)])
    for among, grey in (("dark", 10), ("pale", 245)):
        pixels, found = smear(*[("RBC", False, np.nan)] * 40)
        pixels[:, 24:] = np.where(pixels[:, 24:] == 200, grey, pixels[:, 24:])
        pixels[2:22, 2:22] = 118
        typed = model.classify_detections(pixels, found)
        types[among] = typed.columns[TYPE_COLUMN].tolist()
        # Boxes that do not count do not change the others.
        twice = Detections(
            np.concatenate([found.xyxy, found.xyxy[:30]]),
            np.zeros(len(found) + 30, int),
            np.ones(len(found) + 30),
            NAMES,
        )
        counted = np.arange(len(twice)) < len(found)
        again = model.classify_detections(pixels, twice, counted=counted)
        for name in STAGES:
            np.testing.assert_allclose(
                again.columns[f"P({name})"][: len(found)], typed.columns[f"P({name})"], atol=1e-6
            )
    assert types["dark"] == ["ring"] * 40
    assert types["pale"] == ["uninfected"] * 40
    assert alone.scores[0, 1] == pytest.approx(1 / (1 + np.exp(-10 * (0.5 - 118 / 255))), abs=1e-4)


class _Darkest(nn.Module):
    """The darker the darkest pixel, the more a crop looks infected."""

    def forward(self, x):
        lead = 20 * (0.3 - x.amin((1, 2, 3)))
        nothing = torch.full_like(lead, -30.0)
        return torch.stack([nothing, lead, nothing, nothing, torch.zeros_like(lead)], 1)


@pytest.mark.parametrize("lazy", [False, True])
def test_a_parasite_between_two_cells_counts_once(lazy):
    """Crops show a part of the cells around: what these have is not the cell's own."""
    info = {"applies_to": ["RBC"], "prevalence": 0.05}
    model = tiny_classifier(
        _Darkest(), STAGES, info=info, front_end="none", standardize=False, fill=0.6, views=2
    )
    pixels = np.full((60, 400, 3), 220, np.uint8)
    boxes = np.array([[x, 20, x + 20, 40] for x in (20, 38, 120, 138, 220, 300)], float)
    for x1, y1, x2, y2 in boxes.astype(int):
        pixels[y1:y2, x1:x2] = 150
    for x in (42, 123, 146, 227):  # one of the first pair, two of the second, one of a single cell
        pixels[28:32, x : x + 4] = 10
    count = len(boxes)
    found = Detections(boxes, np.zeros(count, int), np.ones(count), NAMES)
    image = da.from_array(pixels, chunks=(60, 50, 3)) if lazy else pixels
    shown = model.classify([pixels[10:50, x - 10 : x + 30] for x in (20, 38)]).labels
    assert [STAGES[k] for k in shown] == ["ring", "ring"], "both crops show the parasite"
    types = model.classify_detections(image, found).columns[TYPE_COLUMN].tolist()
    assert types == ["uninfected", "ring", "ring", "ring", "ring", "uninfected"]
    # Boxes that do not count hide nothing and are not looked at again.
    counted = np.array([True, False, True, True, True, True])
    again = model.classify_detections(image, found, counted=counted).columns[TYPE_COLUMN].tolist()
    assert again == ["ring", "ring", "ring", "ring", "ring", "uninfected"]


def test_a_share_is_found_without_labels():
    """Cells drawn from a known share: the estimate is near it, from 2 to 30 % infected."""
    random = np.random.default_rng(0)
    healthy, expected = np.array([True, False]), 0.05
    for share in (0.02, 0.1, 0.3):
        infected = random.random(4000) < share
        likelihood = np.where(infected, 1, -1) * 2 + 2 * random.normal(size=4000)  # ln p / q
        odds = np.exp(likelihood) * expected / (1 - expected)
        scores = np.stack([1 / (1 + odds), odds / (1 + odds)], 1).astype(np.float32)
        adapted, found = adapt_to_share(scores, healthy, expected)
        near = pytest.approx(infected.mean(), rel=0.1, abs=0.005)
        assert found == near
        assert adapted[:, 1].mean() == near
        assert scores[:, 1].mean() != near
        np.testing.assert_allclose(adapted.sum(1), 1, atol=1e-6)
    nothing, found = adapt_to_share(np.empty((0, 2), np.float32), healthy, expected)
    assert len(nothing) == 0
    assert found == expected


def test_few_red_cells_are_a_warning_and_so_is_what_the_models_do_not_know(classifier):
    pixels, found = found_in()
    info = classifier.info | {"unknown": {"dirt": ["ring"]}}
    result = describe_smear(classified(classifier, pixels, found), DETECTOR, info)
    assert len(result.warnings) == 1
    assert "5 red cells" in result.warnings[0]
    assert "500" in result.warnings[0]
    assert "finder does not know parasites" in result.limits[0]
    assert result.limits[1:] == ["tiny: Does not know dirt; may call them ring."]


def test_no_cells_at_all(classifier):
    pixels, everything = smear(*OBJECTS)
    typed = classified(classifier, pixels, everything.above(0.99), 0.99)
    result = describe_smear(typed, DETECTOR, classifier.info)
    assert len(typed) == 0
    assert result.parasitaemia is None
    assert result.warnings[0] == "No red cells were found."


def test_enough_red_cells_are_no_warning(classifier):
    pixels, found = found_in([("RBC", k == 0, np.nan) for k in range(500)], 0.1)
    typed = classified(classifier, pixels, found, 0.1)
    result = describe_smear(typed, DETECTOR, classifier.info)
    assert (result.parasitaemia.infected, result.parasitaemia.cells) == (1, 500)
    assert result.warnings == []


def test_a_study_counts_them_as_the_preset_does(tmp_path, monkeypatch):
    """Detection is made up; the classifier is real and its weights are not."""
    pixels, found = found_in(confidence=MALARIA_PRESET["confidence"])
    Image.fromarray(pixels).save(tmp_path / "field.png")
    types = tmp_path / "types.safetensors"
    save_checkpoint(tiny_classifier(SMALL, STAGES, info={"applies_to": ["RBC"]}), types)
    monkeypatch.setattr(image, "detect_objects", lambda *_: found)
    settings = MALARIA_PRESET | {"classifier": str(types), "reports": False, "previews": False}
    out = tmp_path / "out"
    assert run_study(tmp_path / "field.png", out, settings, workers=0).failures == {}
    with (out / "summary.csv").open(newline="", encoding="utf-8") as file:
        (row,) = csv.DictReader(file)
    assert [int(row[f"count {name}"]) for name in NAMES] == [6, 2, 1]
    assert int(row["classified"]) == 6
    assert "2 red cells were called WBC" in row["notes"]


def test_a_classifier_of_other_cells_is_refused():
    with pytest.raises(ValueError, match="dark, pale"):
        load_models("blood-cells", tiny_classifier(), "cpu")


def test_the_packaged_model_says_what_it_is():
    info = read_info("malaria")
    assert sorted(info["classes"]) == STAGES
    assert info["applies_to"] == ["RBC"]
    assert info["unknown"]


def test_a_field_of_a_real_smear(shared):
    """A part of a field that the model has learned from, so this measures nothing."""
    from napari_beerlanet.core.images.files import read_image

    path = shared / "data/malaria-fields/falciparum/images/1704282807-0019-R_G.jpg"
    result = count_malaria(read_image(path).pixels[:320, :800], device="cpu", object_size=95)
    # Seven cells with rings are found there, in clumps, and as many again without.
    assert 5 <= result.parasitaemia.infected <= 10
    assert 5 <= result.parasitaemia.cells - result.parasitaemia.infected <= 15
    assert result.warnings[0].startswith("Only ")
