"""What heads a model: a score only where it stands on enough, else what it was trained on."""

import pytest

from napari_beerlanet.core.checkpoints.checkpoint import read_info
from napari_beerlanet.core.checkpoints.model_card import headline, training_facts, training_size

FEW = {
    "data": "mine/data.yaml",
    "images": {"train": 2, "val": 1},
    "boxes": {"train": {"RBC": 40, "parasite": 1}, "val": {"RBC": 20, "parasite": 0}},
    "metrics": {"mAP50": 0.99, "mAP50-95": 0.7},
}
REFERENCE = {
    "reference": [{"mAP50": 0.957}, {"mAP50": 0.8183}],
    "forgotten": ["WBC: 98.6 → 45.2 %"],
}


def info(**training):
    return {"classes": ["RBC", "parasite"], "training": {**FEW, **training}}


def test_a_handful_of_boxes_heads_no_model():
    assert headline(info()) == "trained on 2 images, validated on 1"
    told = headline(info(compared=REFERENCE))
    assert told == "trained on 2 images, validated on 1; reference 95.7 → 81.8 %"


@pytest.mark.parametrize(
    ("images", "val_boxes", "scored"),
    [
        (5, {"RBC": 50, "parasite": 10}, True),
        (4, {"RBC": 50, "parasite": 10}, False),
        (30, {"RBC": 500, "parasite": 9}, False),
    ],
)
def test_a_score_needs_images_and_boxes_of_each_class(images, val_boxes, scored):
    boxes = {"train": {"RBC": 400, "parasite": 80}, "val": val_boxes}
    told = headline(info(images={"train": 40, "val": images}, boxes=boxes))
    assert (told == f"mAP50 99.0 % on {images} images") == scored
    assert ("trained on 40 images" in told) != scored


def test_models_of_earlier_versions_have_counted_images_only():
    many = info(images={"train": 80, "val": 20})
    few = info(images={"train": 8, "val": 2})
    for model in (many, few):
        del model["training"]["boxes"]
    assert headline(many) == "mAP50 99.0 % on 20 images"
    assert headline(few) == "trained on 8 images, validated on 2"


def test_the_facts_carry_their_counts_and_what_was_forgotten():
    facts = dict(training_facts(info(compared=REFERENCE)))
    assert facts["Trained on"] == "2 images of mine/data.yaml (40 RBC, 1 parasite)"
    assert facts["Validation"] == "mAP50 99.0 %, mAP50-95 70.0 % (1 image, 20 RBC, 0 parasite)"
    assert facts["Reference"] == "mAP50 95.7 % before, 81.8 % after"
    assert facts["Forgotten"] == "WBC: 98.6 → 45.2 %"
    assert training_size(info()) == "2 images"
    assert training_size({"training": None}) == ""


def test_the_packaged_model_is_headed_by_its_largest_test():
    assert headline(read_info("blood-cells")) == "mAP50 96.7 % on 500 images"
    assert headline({"classes": ["a"]}) == ""
