"""A benchmark.yaml: what it may say, and one sentence for each mistake."""

from pathlib import Path

import pytest
import yaml

from napari_beerlanet.core.benchmark.settings import (
    METHODS,
    BenchmarkSettings,
    TaskSettings,
    find_method,
)
from napari_beerlanet.core.common.storage import FileError

TASK = {"name": "cells", "kind": "detect", "train": "a/data.yaml", "tests": {"b": "b/data.yaml"}}


def benchmark(**changes):
    return BenchmarkSettings(**{"tasks": [TASK], **changes})


def test_a_file_is_read_with_paths_beside_it(tmp_path):
    (tmp_path / "yolo.pt").write_bytes(b"")
    task = {**TASK, "weights": "yolo.pt", "tests": [{"name": "b", "data": "b", "split": "test"}]}
    content = {"tasks": [task], "methods": ["none", "Stain jitter"], "seeds": [3, 1, 3]}
    file = tmp_path / "benchmark.yaml"
    file.write_text(yaml.safe_dump(content | {"template": "t.png", "staingan": {"steps": 5}}))
    read = BenchmarkSettings.read(file)
    assert read.methods == ("none", "stain-jitter")
    assert read.seeds == (3, 1), "each once, in the order given"
    assert read.template == str(tmp_path / "t.png")
    assert read.staingan == {"steps": 5}
    one = read.task("cells")
    assert one.train == str(tmp_path / "a" / "data.yaml")
    assert one.weights == str(tmp_path / "yolo.pt")
    assert [(t.name, t.data, t.split) for t in one.tests] == [("b", str(tmp_path / "b"), "test")]
    assert BenchmarkSettings(**read.as_dict()) == read, "workers get the same settings"


def test_defaults_are_those_of_the_paper():
    made = benchmark()
    assert made.methods == tuple(METHODS)
    assert len(made.seeds) == 3
    assert made.template == "random"
    assert made.tasks[0].columns == ("mAP50", "mAP50-95")
    crops = TaskSettings(**{**TASK, "kind": "classify"})
    assert crops.columns == ("accuracy", "balanced_accuracy")
    staged = TaskSettings(**{**TASK, "kind": "classify", "ordered": [["early", "late"]]})
    assert staged.columns == ("accuracy", "relaxed_accuracy")


@pytest.mark.parametrize("name", ["HED jitter", "hed_jitter", "hed-jitter"])
def test_words_of_a_method_may_be_joined_in_any_way(name):
    assert find_method(name).title == "HED jitter"


def test_methods_that_train_the_same_network_share_a_recipe():
    same = {name for name, method in METHODS.items() if method.recipe == METHODS["none"].recipe}
    assert same == {"none", "staingan", "batch-statistics"}
    assert len({method.recipe for method in METHODS.values()}) == len(METHODS) - 2


def with_task(**changes):
    return {"tasks": [{**TASK, **changes}]}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"seeds": []}, "seeds is empty: give at least one, for instance [0, 1, 2]."),
        ({"seeds": [0, "one"]}, "seeds must be whole numbers of at least 0, not [0, 'one']."),
        ({"seeds": [True]}, "seeds must be whole numbers of at least 0, not [True]."),
        ({"methods": []}, "methods is empty: give at least one"),
        ({"methods": ["makenko"]}, "There is no method 'makenko'; there are none, reinhard, "),
        ({"tasks": []}, "tasks is empty"),
        ({"tasks": ["a"]}, "Task 1 must have name, kind, train and tests, not 'a'."),
        ({"tasks": [TASK, TASK]}, "Two tasks are called 'cells'; give each a name of its own."),
        ({"epochs": 3}, "There is no setting 'epochs'; there are tasks, methods, seeds, "),
        ({"threads": 0}, "threads must be a whole number of at least 1"),
        (with_task(kind="segment"), 'Task \'cells\': kind must be one of "detect", "classify"'),
        (with_task(tests={}), "Task 'cells': tests must name data of other laboratories"),
        (with_task(tests="b"), "Task 'cells': tests must name data of other laboratories"),
        (with_task(tests={"b": {"split": "val"}}), "Task 'cells': The setting 'data' is missing."),
        (with_task(epoch=3), "Task 'cells': There is no setting 'epoch'; there are name, kind"),
        (with_task(epochs=0), "Task 'cells': epochs must be a whole number of at least 1"),
        (with_task(metrics=["accuracy"]), "Task 'cells': accuracy is no metric of detect; there"),
        (with_task(detector="x"), "Task 'cells': detector is for tasks of kind classify."),
        (
            with_task(kind="classify", metrics=["relaxed_accuracy"]),
            "Task 'cells': relaxed_accuracy needs `ordered`",
        ),
    ],
)
def test_each_mistake_is_one_sentence(changes, sentence):
    with pytest.raises(ValueError, match=r"\w") as told:
        benchmark(**changes)
    assert sentence in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "no such file"),
        ("a: [", "cannot be read as settings"),
        ("- a", "need at least `tasks`"),
        ("{1: 2, tasks: []}", "the names of settings are texts"),
        ("{tasks: [], seeds: []}", "tasks is empty"),
    ],
)
def test_a_file_that_is_none_is_named(tmp_path, text, sentence):
    file = tmp_path / "benchmark.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(FileError, match=sentence) as told:
        BenchmarkSettings.read(file)
    assert str(told.value).startswith(str(Path(file)))
