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


def test_one_field_is_validated_after_several_steps_with_full_batches():
    plan = choose_schedule(1, batch=8)
    assert plan.validate_every % 8 == 0
    assert plan.validate_every >= 32
    assert plan.epochs % plan.validate_every == 0


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
        assert 0.3 < choose_schedule(16, scope).share < 1
        assert choose_schedule(LARGE_DATASET_IMAGES, scope).share == 1


def test_a_handful_of_fields_moves_all_weights_less_than_a_dozen():
    """From one to nine; the head and the front end alone forget too little to be held back."""
    shares = [choose_schedule(fields).share for fields in (1, 4, 9, 10, 50)]
    assert shares == [0.3, 0.3, 0.3, 0.5, 0.5]
    for length in ("quick", "thorough"):
        assert choose_schedule(4, "all", length).share == 0.3
    assert choose_schedule(4, "head").share == choose_schedule(4, "stain").share == 0.5
    assert TrainSettings().resolved(choose_schedule(4)).share == 0.3
    assert TrainSettings(share=0.8).resolved(choose_schedule(4)).share == 0.8


def test_few_fields_are_shown_whole_and_near_the_size_they_are_detected_at():
    advanced = TrainSettings().resolved(choose_schedule(5)).advanced
    assert advanced["mosaic"] < 1
    assert advanced["scale"] < 0.3  # 1.3 is what detection takes for the same size
    assert "mosaic" not in TrainSettings().resolved(choose_schedule(LARGE_DATASET_IMAGES)).advanced


def test_a_run_stops_early_only_after_the_warm_up():
    for fields in (1, 5, 50, 500):
        settings = TrainSettings(device="cpu").resolved(choose_schedule(fields))
        assert settings.advanced["patience"] > settings.advanced["warmup_epochs"]
        overrides = settings.overrides(320, "run")  # Ultralytics counts rounds
        assert overrides["warmup_epochs"] == 1
        assert overrides["patience"] == max(overrides["epochs"] // 2, 3)


def test_what_is_given_goes_before_the_plan():
    plan = TrainingSchedule(8, 2, 1e-4, "SGD", True, 10, advanced={"mosaic": 0.5, "lrf": 0.1})
    given = {"learning_rate": 1e-3, "keep_statistics": False, "average": 3, "repeats": 2}
    recipe = TrainSettings(**given, advanced={"mosaic": 0.0}).resolved(plan)
    assert {key: getattr(recipe, key) for key in given} == given
    assert recipe.advanced == {"mosaic": 0.0, "lrf": 0.1}
    assert recipe.epochs == 8
    assert recipe.is_resolved


@pytest.mark.parametrize("fields", [1, 2, 5, 20, 300])
@pytest.mark.parametrize("epochs", [1, 6, 7, 50, 144])
def test_the_same_number_of_epochs_is_the_same_number_of_passes(fields, epochs):
    settings = TrainSettings(epochs=epochs, device="cpu").resolved(choose_schedule(fields))
    passes = settings.overrides(320, "run")["epochs"] * settings.validate_every * settings.repeats
    assert passes == settings.epochs == epochs
    assert settings.rounds >= min(epochs, 8)
    again = settings.replace(validate_every=None, epochs=settings.epochs)
    assert again.epochs == epochs


@pytest.mark.parametrize("fields", [1, 2, 5, 20, 300])
def test_epochs_that_are_chosen_are_passes_too(fields):
    plan = choose_schedule(fields)
    settings = TrainSettings(device="cpu").resolved(plan)
    assert settings.rounds * settings.validate_every * settings.repeats == plan.epochs
    typed = TrainSettings(epochs=plan.epochs).resolved(plan)
    assert typed.epochs == settings.epochs


def test_validation_in_between_divides_the_epochs():
    plan = choose_schedule(1)
    assert TrainSettings(epochs=12, validate_every=5).resolved(plan).validate_every == 4
    assert TrainSettings(epochs=12, validate_every=6).resolved(plan).validate_every == 6
    assert TrainSettings(epochs=50).resolved(plan).advanced["patience"] == 25


def test_runs_of_earlier_versions_validate_after_each_of_their_epochs():
    old = TrainSettings(epochs=10, repeats=12, keep_statistics=True, device="cpu")
    assert old.is_resolved
    assert (old.rounds, old.overrides(320, "run")["epochs"]) == (10, 10)


def test_a_settled_recipe_survives_being_written():
    recipe = TrainSettings(model="a", data="b").resolved(choose_schedule(5))
    assert TrainSettings(**recipe.model_dump()) == recipe
    command = recipe.command()
    assert f"--epochs={recipe.epochs}" in command
    assert f"--set=validate_every={recipe.validate_every}" in command
    assert "--set=keep_statistics=true" in command


@pytest.mark.parametrize(
    "wrong",
    [{"length": "long"}, {"repeats": 0}, {"average": 1.5}, {"keep_statistics": "no"}, {"share": 0}],
)
def test_wrong_settings_are_named(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TrainSettings(**wrong)
