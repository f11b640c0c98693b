"""How long and how gently a model is trained further, by the number of fields."""

import itertools
from dataclasses import replace

import pytest

from napari_beerlanet.core.training.settings import (
    LARGE_DATASET_IMAGES,
    LENGTHS,
    SCOPES,
    TrainingSchedule,
    TrainSettings,
    choose_schedule,
)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("batch", [1, 2, 8, 16])
def test_steps_grow_with_the_fields_and_do_not_run_away(scope, length, batch):
    counts = (1, 2, 5, 20, 50, 200, 1000)
    plans = [choose_schedule(n, scope, length, batch) for n in counts]
    steps = [plan.steps(n, batch) for n, plan in zip(counts, plans, strict=True)]
    assert steps[0] >= 12
    assert all(after >= 0.8 * before for before, after in itertools.pairwise(steps))
    assert all(plan.epochs >= 2 for plan in plans)


def test_fifty_fields_do_not_take_fifty_times_as_long():
    one, fifty = (choose_schedule(n).steps(n) for n in (1, 50))
    assert fifty < 10 * one


def test_an_epoch_of_one_field_has_several_steps_with_full_batches():
    plan = choose_schedule(1, batch=8)
    assert plan.repeats % 8 == 0
    assert plan.repeats >= 32


def test_lengths_are_in_order():
    for fields in (1, 5, 20, 50, 300):
        steps = [choose_schedule(fields, "all", length).steps(fields) for length in LENGTHS]
        assert steps[0] < steps[1] < steps[2]


def test_statistics_of_few_fields_are_not_taken_over():
    assert choose_schedule(5).keep_statistics
    assert not choose_schedule(LARGE_DATASET_IMAGES).keep_statistics


def test_rates_are_gentler_where_more_is_trained():
    for fields in (5, 500):
        rates = [choose_schedule(fields, scope).learning_rate for scope in SCOPES]
        assert rates == sorted(rates)


def test_the_optimizer_goes_with_the_rate():
    plan = choose_schedule(5, "head")
    assert TrainSettings().resolved(plan).advanced["optimizer"] == plan.optimizer == "SGD"
    assert "optimizer" not in TrainSettings(learning_rate=1e-4).resolved(plan).advanced
    assert "optimizer" not in TrainSettings().resolved(replace(plan, learning_rate=None)).advanced
    overrides = TrainSettings(device="cpu").resolved(plan).overrides(320, "run")
    assert (overrides["optimizer"], overrides["lr0"]) == ("SGD", plan.learning_rate)


def test_few_fields_do_not_take_a_model_all_the_way():
    for scope in SCOPES:
        assert 0.3 < choose_schedule(5, scope).share < 1
        assert choose_schedule(LARGE_DATASET_IMAGES, scope).share == 1


def test_few_fields_are_shown_whole_and_near_the_size_they_are_detected_at():
    advanced = TrainSettings().resolved(choose_schedule(5)).advanced
    assert advanced["mosaic"] < 1
    assert advanced["scale"] < 0.3  # 1.3 is what detection takes for the same size
    assert "mosaic" not in TrainSettings().resolved(choose_schedule(LARGE_DATASET_IMAGES)).advanced


def test_a_run_stops_early_only_after_the_warm_up():
    for fields in (1, 5, 50, 500):
        advanced = TrainSettings().resolved(choose_schedule(fields)).advanced
        assert advanced["patience"] > advanced["warmup_epochs"]


def test_what_is_given_goes_before_the_plan():
    plan = TrainingSchedule(8, 16, 1e-4, "SGD", True, 10, advanced={"mosaic": 0.5, "lrf": 0.1})
    given = {"learning_rate": 1e-3, "keep_statistics": False, "average": 3, "repeats": 2}
    recipe = TrainSettings(**given, advanced={"mosaic": 0.0}).resolved(plan)
    assert {key: getattr(recipe, key) for key in given} == given
    assert recipe.advanced == {"mosaic": 0.0, "lrf": 0.1}
    assert recipe.epochs == 8
    assert recipe.is_resolved


def test_epochs_that_are_given_are_passes_through_the_data():
    plan = TrainingSchedule(8, 16, 1e-4, "SGD", True, 10, early_stopping=True)
    long = TrainSettings(epochs=50).resolved(plan)
    assert (long.repeats, long.advanced["patience"]) == (1, 25)
    assert TrainSettings().resolved(plan).repeats == 16


def test_a_settled_recipe_survives_being_written():
    recipe = TrainSettings(model="a", data="b").resolved(choose_schedule(5))
    assert TrainSettings(**recipe.model_dump()) == recipe
    command = recipe.command("data.yaml", "a")
    assert f"--set=repeats={recipe.repeats}" in command
    assert "--set=keep_statistics=true" in command


@pytest.mark.parametrize(
    "wrong",
    [{"length": "long"}, {"repeats": 0}, {"average": 1.5}, {"keep_statistics": "no"}, {"share": 0}],
)
def test_wrong_settings_are_named(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TrainSettings(**wrong)
