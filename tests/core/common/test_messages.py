"""Sentences for people."""

import ast
from pathlib import Path

import pytest

import napari_beerlanet
from napari_beerlanet.core.classification.settings import ClassifierSettings
from napari_beerlanet.core.common.messages import error_message, quoted
from napari_beerlanet.core.common.progress import Cancelled


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (FileNotFoundError(2, "No such file or directory", "a.png"), "a.png: no such file or"),
        (OSError(28, "No space left on device"), "No space left on device."),
        (ValueError("a.csv: two\n  lines."), "a.csv: two lines."),
        (Cancelled("stopped"), "stopped"),
        (MemoryError(), "Not enough memory: use smaller images."),
        (RuntimeError("CUDA out of memory. Tried to …"), "Not enough memory: use smaller images."),
        (KeyError("x"), "Unexpected KeyError: 'x' (see the log)."),
        (ValueError(), "Unexpected ValueError (see the log)."),
    ],
)
def test_an_error_is_one_sentence(error, message):
    said = error_message(error, " (see the log)", "use smaller images")
    assert said.startswith(message)
    assert "\n" not in said


@pytest.mark.parametrize("value", ["a" * 78, 3, None, ("log", 1.5), [1, 2, 3], "it's"])
def test_a_short_value_is_quoted_as_it_is(value):
    assert quoted(value) == repr(value)


@pytest.mark.parametrize(
    "value",
    ["x" * 10**6, 10**4000, list(range(10**6)), {"a" * 500: ["b" * 500]}, [["c" * 90] * 9] * 9],
)
def test_of_a_long_value_eighty_characters_are_quoted(value):
    assert len(quoted(value)) <= 80


def test_a_setting_that_is_wrong_is_not_repeated_at_length():
    with pytest.raises(ValueError, match=r"^input_size must be .*, not 'xxx") as error:
        ClassifierSettings(input_size="x" * 10**6)
    assert len(str(error.value)) < 300


def test_errors_quote_nothing_at_length():
    """Whatever is written into the message of an error as Python writes it is cut."""
    root = Path(napari_beerlanet.__file__).parent
    found = [
        f"{path.relative_to(root)}:{value.lineno}"
        for path in sorted(root.rglob("*.py"))
        for error in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(error, ast.Raise)
        for value in ast.walk(error)
        if isinstance(value, ast.FormattedValue)
        and value.conversion == ord("r")
        and value.format_spec is None
    ]
    assert [place for place in found if not place.startswith(("samples", "__init__"))] == []
