"""Which images teach and which validate: stable, seeded, both sides filled."""

from hypothesis import given
from hypothesis import strategies as st

from napari_beerlanet.core.split import TRAIN, VAL, assign, chance, describe, split_one

names = st.lists(st.text(min_size=1, max_size=6), unique=True, max_size=30)
numbered = st.dictionaries(st.text(min_size=1, max_size=6), st.integers(0, 3), max_size=30)
seeds = st.integers(0, 1000)


def filled(split, boxes):
    return [side for name, side in split.sides.items() if boxes[name]]


@given(numbered, seeds)
def test_both_sides_have_boxes_as_soon_as_two_images_do(boxes, seed):
    split = assign(boxes, {}, seed)
    assert split.sides.keys() == boxes.keys()
    sides = filled(split, boxes)
    if len(sides) > 1:
        assert set(sides) == {TRAIN, VAL}
    else:
        assert VAL not in sides


@given(numbered, numbered, seeds)
def test_no_image_moves_when_others_are_added(first, second, seed):
    before = assign(first, {}, seed)
    after = assign({**second, **first}, before.sides, seed)
    if sum(1 for n in first.values() if n) > 1:
        assert {name: after.sides[name] for name in first} == before.sides
        assert not after.notes


@given(names, seeds)
def test_added_one_by_one_none_moves_and_the_sides_stay_balanced(ids, seed):
    boxes, sides = {}, {}
    for name in ids:
        boxes[name] = 1
        split = assign(boxes, sides, seed)
        assert {n: split.sides[n] for n in sides} == sides
        sides = split.sides
        validating = list(sides.values()).count(VAL)
        if len(sides) > 1:
            assert 1 <= validating <= max(1, 0.3 * len(sides) + 1)


@given(numbered, seeds)
def test_the_order_in_which_images_are_given_does_not_matter(boxes, seed):
    turned = dict(reversed(list(boxes.items())))
    assert assign(boxes, {}, seed).sides == assign(turned, {}, seed).sides


def test_the_seed_matters():
    boxes = {f"image {k}": 1 for k in range(40)}
    sides = [tuple(sorted(assign(boxes, {}, seed).sides.items())) for seed in range(5)]
    assert len(set(sides)) == 5


def test_about_a_fifth_validates():
    boxes = {f"image {k}": 1 for k in range(200)}
    validating = list(assign(boxes, {}).sides.values()).count(VAL)
    assert 20 <= validating <= 60


def test_where_the_last_that_validates_is_gone_another_takes_its_place_and_it_is_told():
    boxes = {f"image {k}": 1 for k in range(5)}
    split = assign(boxes, {})
    left = {n: 1 for n, side in split.sides.items() if side == TRAIN}
    after = assign(left, split.sides)
    assert set(after.sides.values()) == {TRAIN, VAL}
    assert len(after.notes) == 1
    assert "now validates" in after.notes[0]


def test_an_image_that_has_lost_its_boxes_does_not_validate_alone():
    split = assign({"a": 1, "b": 1, "c": 1}, {"a": TRAIN, "b": TRAIN, "c": VAL})
    assert split.sides == {"a": TRAIN, "b": TRAIN, "c": VAL}
    after = assign({"a": 1, "b": 1, "c": 0}, split.sides)
    assert {after.sides["a"], after.sides["b"]} == {TRAIN, VAL}


def test_chance_is_the_same_on_every_machine():
    assert round(chance(0, "smear"), 9) == 0.300622395
    assert chance(0, "smear") != chance(1, "smear")


# --- one image -----------------------------------------------------------------------------------

pieces = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), min_size=1, max_size=12)


@given(pieces, seeds)
def test_an_only_image_is_split_by_groups_that_share_no_pixel(given_, seed):
    groups, boxes = zip(*given_, strict=True)
    sides = split_one(groups, boxes, seed)
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
    assert describe([]) == ["No image has been added yet."]
    assert "one of its regions validates" in describe([TRAIN], "regions")[0]
    assert "will flatter" in describe([TRAIN], "same")[0]
    assert describe([TRAIN, VAL])[0].startswith("1 image trains and 1 image validates;")
    assert describe([TRAIN] * 8 + [VAL] * 2) == [
        "8 images train and 2 images validate; all of an image is on one side."
    ]
