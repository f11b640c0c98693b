"""Sentences for people."""

import ast
from pathlib import Path

import pytest

import napari_beerlanet
from napari_beerlanet.core.classification.settings import ClassifierSettings
from napari_beerlanet.core.common.messages import (
    error_detail,
    error_message,
    name_list,
    path_text,
    quoted,
    shortened,
)
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


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["RBC"], "RBC"),
        (["RBC", "WBC"], "RBC, WBC"),
        (["a" * 30, "b" * 30, "c" * 30], f"{'a' * 30}, {'b' * 30} and 1 more"),
        (["a" * 1000, "b"], f"{'a' * 79}… and 1 more"),
        (["two\nlines", "b"], "two lines, b"),
    ],
)
def test_of_names_as_many_are_listed_as_fit_into_eighty_characters(names, text):
    assert name_list(names) == text


def test_a_long_name_is_cut():
    assert shortened("RBC") == "RBC"
    assert shortened("a" * 1000) == "a" * 79 + "…"


def test_a_path_is_named_in_full_unless_no_file_can_have_it():
    path = "/".join(["", *["folder" * 20] * 5, "a.png"])
    assert path_text(path) == path
    assert len(path_text(f"/data/{'a' * 5000}")) == 80


def test_what_a_library_quotes_is_cut():
    detail = error_detail(ValueError(f"could not convert string to float: '{'x' * 1000}'"))
    assert detail == f"could not convert string to float: '{'x' * 78}…'"


def test_a_file_name_that_is_too_long_is_cut():
    with pytest.raises(OSError, match="too long") as error:
        Path("a" * 5000).read_text()
    assert error_message(error.value) == f"{'a' * 79}…: file name too long."


def raised():
    """The expression of every error that is raised, and where."""
    root = Path(napari_beerlanet.__file__).parent
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise):
                yield path.relative_to(root), node


def test_errors_quote_nothing_at_length():
    """Whatever is written into the message of an error as Python writes it is cut."""
    found = [
        f"{path}:{value.lineno}"
        for path, error in raised()
        for value in ast.walk(error)
        if isinstance(value, ast.FormattedValue)
        and value.conversion == ord("r")
        and value.format_spec is None
    ]
    assert [place for place in found if not place.startswith(("samples", "__init__"))] == []


def test_errors_list_no_names_at_length():
    """Names that come from a file or a caller are listed by `name_list`, ours may be joined."""
    ours = {"METHODS", "STATUSES", "FORMATS", "ORDERS", "available_devices()", "present"}
    ours |= {"kinds", "known", "close", "missing"}  # local, and of constants
    found = [
        f"{path}:{call.lineno}: {ast.unparse(call)}"
        for path, error in raised()
        for call in ast.walk(error)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == "join"
        and ast.unparse(call.func.value) != "' '"
        and ast.unparse(call.args[0]) not in ours
    ]
    assert found == []
