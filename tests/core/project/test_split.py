"""Which images teach and which validate: stable, seeded, both sides filled."""

from hypothesis import given
from hypothesis import strategies as st

from napari_beerlanet.core.common.storage import seeded_fraction
from napari_beerlanet.core.project.split import (
    TRAIN,
    VAL,
    describe_split,
    split_images,
    split_single_image,
)

names = st.lists(st.text(min_size=1, max_size=6), unique=True, max_size=30)
numbered = st.dictionaries(st.text(min_size=1, max_size=6), st.integers(0, 3), max_size=30)
seeds = st.integers(0, 1000)


def filled(split, boxes):
    return [side for name, side in split.by_image.items() if boxes[name]]


@given(numbered, seeds)
def test_both_sides_have_boxes_as_soon_as_two_images_do(boxes, seed):
    split = split_images(boxes, {}, seed)
    assert split.by_image.keys() == boxes.keys()
    sides = filled(split, boxes)
    if len(sides) > 1:
        assert set(sides) == {TRAIN, VAL}
    else:
        assert VAL not in sides


@given(numbered, numbered, seeds)
def test_no_image_moves_when_others_are_added(first, second, seed):
    before = split_images(first, {}, seed)
    after = split_images({**second, **first}, before.by_image, seed)
    if sum(1 for n in first.values() if n) > 1:
        assert {name: after.by_image[name] for name in first} == before.by_image
        assert not after.notes


@given(names, seeds)
def test_added_one_by_one_none_moves_and_the_sides_stay_balanced(ids, seed):
    boxes, sides = {}, {}
    for name in ids:
        boxes[name] = 1
        split = split_images(boxes, sides, seed)
        assert {n: split.by_image[n] for n in sides} == sides
        sides = split.by_image
        validating = list(sides.values()).count(VAL)
        if len(sides) > 1:
            assert 1 <= validating <= max(1, 0.3 * len(sides) + 1)


@given(numbered, seeds)
def test_the_order_in_which_images_are_given_does_not_matter(boxes, seed):
    turned = dict(reversed(list(boxes.items())))
    assert split_images(boxes, {}, seed).by_image == split_images(turned, {}, seed).by_image


def test_the_seed_matters():
    boxes = {f"image {k}": 1 for k in range(40)}
    sides = [tuple(sorted(split_images(boxes, {}, seed).by_image.items())) for seed in range(5)]
    assert len(set(sides)) == 5


def test_about_a_fifth_validates():
    boxes = {f"image {k}": 1 for k in range(200)}
    validating = list(split_images(boxes, {}).by_image.values()).count(VAL)
    assert 20 <= validating <= 60


def test_where_the_last_that_validates_is_gone_another_takes_its_place_and_it_is_told():
    boxes = {f"image {k}": 1 for k in range(5)}
    split = split_images(boxes, {})
    left = {n: 1 for n, side in split.by_image.items() if side == TRAIN}
    after = split_images(left, split.by_image)
    assert set(after.by_image.values()) == {TRAIN, VAL}
    assert len(after.notes) == 1
    assert "now used for validation" in after.notes[0]


def test_an_image_that_has_lost_its_boxes_does_not_validate_alone():
    split = split_images({"a": 1, "b": 1, "c": 1}, {"a": TRAIN, "b": TRAIN, "c": VAL})
    assert split.by_image == {"a": TRAIN, "b": TRAIN, "c": VAL}
    after = split_images({"a": 1, "b": 1, "c": 0}, split.by_image)
    assert {after.by_image["a"], after.by_image["b"]} == {TRAIN, VAL}


def test_chance_is_the_same_on_every_machine():
    assert round(seeded_fraction(0, "smear"), 9) == 0.300622395
    assert seeded_fraction(0, "smear") != seeded_fraction(1, "smear")


# --- one image -----------------------------------------------------------------------------------

pieces = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), min_size=1, max_size=12)


@given(pieces, seeds)
def test_an_only_image_is_split_by_groups_that_share_no_pixel(given_, seed):
    groups, boxes = zip(*given_, strict=True)
    sides = split_single_image(groups, boxes, seed)
    filled_groups = {g for g, n in given_ if n}
    if len(filled_groups) < 2:
        assert sides is None
        return
    by_group = {}
    for group, side in zip(groups, sides, strict=True):
        by_group.setdefault(group, set()).add(side)
    assert all(len(found) == 1 for found in by_group.values())
    for side in (TRAIN, VAL):
        assert any(s == side and n for s, n in zip(sides, boxes, strict=True))


def test_what_is_done_is_told():
    assert describe_split([]) == ["No image has been added yet."]
    assert "one of its regions is used for validation" in describe_split([TRAIN], "regions")[0]
    assert "will be optimistic" in describe_split([TRAIN], "same")[0]
    assert describe_split([TRAIN, VAL])[0].startswith("1 image for training, 1 for validation;")
    assert describe_split([TRAIN] * 8 + [VAL] * 2) == [
        "8 images for training, 2 for validation; all crops of an image are in one split."
    ]
