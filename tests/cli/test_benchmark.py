"""The command `benchmark`."""

import json

import pytest
import yaml

from napari_beerlanet.cli.main import main
from napari_beerlanet.core.benchmark import example
from napari_beerlanet.core.benchmark.settings import METHODS, BenchmarkSettings


@pytest.fixture
def small_example(monkeypatch):
    """The example with fewer images, methods and epochs."""
    monkeypatch.setattr(example, "_COUNTS", {"train": 4, "val": 2, "test": 2})
    content = example.example_content()
    content |= {"methods": ["none", "reinhard"], "tasks": content["tasks"][:1]}
    content["tasks"][0]["epochs"] = 1
    monkeypatch.setattr(example, "example_content", lambda: content)


def test_the_example_is_a_benchmark_of_all_methods(tmp_path):
    read = BenchmarkSettings(**example.example_content())
    assert read.methods == tuple(METHODS)
    assert {task.kind for task in read.tasks} == {"detect", "classify"}


def test_the_example_runs_and_prints_the_table(small_example, tmp_path, capsys):
    words = ["benchmark", "--example", "--out", str(tmp_path), "--workers", "0"]
    assert main([*words, "--quiet"]) == 0
    told = capsys.readouterr().out
    assert "| No normalization |" in told
    assert "2 done, 0 skipped, 0 failed" in told
    assert (tmp_path / "benchmark.html").is_file()
    assert main([*words, "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [e["status"] for e in events if e["event"] == "job"] == ["skipped", "skipped"]
    assert events[-1]["event"] == "end"
    assert events[-1]["page"] == str(tmp_path / "benchmark.html")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "Give either a benchmark.yaml or --example."),
        (["x.yaml", "--example"], "Give either a benchmark.yaml or --example."),
        (["x.yaml"], "--out is needed: the folder for the results."),
        (["x.yaml", "--out", "OUT"], "x.yaml: no such file or directory."),
        (["seeds.yaml", "--out", "OUT"], "seeds.yaml: seeds is empty: give at least one"),
        (["method.yaml", "--out", "OUT"], "method.yaml: There is no method 'x'; there are none,"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path, monkeypatch, capsys, words, sentence):
    monkeypatch.chdir(tmp_path)
    task = {"name": "a", "kind": "detect", "train": "a", "tests": {"b": "b"}}
    for name, more in {"seeds": {"seeds": []}, "method": {"methods": ["x"]}}.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"tasks": [task], **more}))
    assert main(["benchmark", *words]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    assert sentence in told[0]
