"""Settings: checked when given, refused with one sentence, described for forms and commands."""

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, field_validator

from napari_beerlanet.core.common.settings import Settings


class Example(Settings):
    scope: Literal["all", "head"] = Field("all", description="What is trained.")
    epochs: int | None = Field(None, ge=1, description="Passes through the data.")
    batch: Annotated[int, Field(ge=1)] | Literal["auto"] = 8
    share: float | None = Field(None, gt=0, le=1)
    keep: bool = False
    advanced: dict[str, Any] = Field(default_factory=dict)

    @field_validator("advanced")
    @classmethod
    def _check(cls, value: dict[str, Any]) -> dict[str, Any]:
        if "lr0" in value:
            raise ValueError("lr0 is called learning_rate here.")
        return value


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"scope": "tail"}, 'scope must be one of "all", "head", not \'tail\'.'),
        ({"epochs": 0}, "epochs must be a whole number of at least 1, not 0."),
        ({"epochs": 1.5}, "epochs must be a whole number of at least 1, not 1.5."),
        ({"epochs": True}, "epochs must be a whole number of at least 1, not True."),
        ({"batch": "all"}, "batch must be a whole number of at least 1 or \"auto\", not 'all'."),
        ({"batch": 0}, 'batch must be a whole number of at least 1 or "auto", not 0.'),
        ({"share": 0}, "share must be a number above 0 and at most 1, not 0."),
        ({"share": float("nan")}, "share must be a number above 0 and at most 1, not nan."),
        ({"share": "much"}, "share must be a number above 0 and at most 1, not 'much'."),
        ({"keep": "yes"}, "keep must be true or false, not 'yes'."),
        ({"advanced": {"lr0": 1}}, "lr0 is called learning_rate here."),
        ({"advanced": 3}, "advanced must be a dict, not 3."),
    ],
)
def test_a_wrong_value_is_refused_with_one_sentence(wrong, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole message is compared
        Example(**wrong)
    assert str(caught.value) == message


def test_an_unknown_setting_is_named():
    with pytest.raises(ValueError, match=r"^There is no setting 'speed'; there are scope, epochs"):
        Example(speed=1)


def test_whole_numbers_pass_for_numbers():
    assert Example(share=1).share == 1.0


def test_a_replacement_is_checked_and_the_original_stays():
    first = Example(epochs=2)
    assert first.replace(epochs=3).epochs == 3
    assert first.epochs == 2
    with pytest.raises(ValueError, match="epochs must be"):
        first.replace(epochs=-1)


def test_a_form_learns_type_bounds_default_and_description():
    epochs = Example.spec("epochs")
    assert (epochs.types, epochs.minimum, epochs.optional) == ((int,), 1, True)
    assert epochs.description == "Passes through the data."
    share = Example.spec("share")
    assert (share.above, share.maximum, share.default) == (0, 1, None)
    batch = Example.spec("batch")
    assert (batch.types, batch.choices, batch.minimum, batch.default) == ((int,), ("auto",), 1, 8)
    assert Example.spec("scope").choices == ("all", "head")
    assert Example.default("advanced") == {}
