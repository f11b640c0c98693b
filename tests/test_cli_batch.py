"""The command `batch`."""

import json

import pandas as pd
import pytest
import yaml
from PIL import Image

from napari_beerlanet.cli import main
from napari_beerlanet.sample_data import he_field

QUICK = ["--iterations", "2", "--no-previews", "--workers", "0"]


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    for seed in range(3):
        Image.fromarray(he_field((100, 120), seed=seed).image).save(folder / f"a{seed}.png")
    return folder


def test_a_folder(images, tmp_path, capsys):
    assert main(["batch", str(images), "--out", str(tmp_path / "out"), *QUICK]) == 0
    told = capsys.readouterr()
    assert "3 done, 0 skipped, 0 failed" in told.out
    assert "a1.png: " in told.err
    assert len(pd.read_csv(tmp_path / "out" / "summary.csv")) == 3
    assert main(["batch", str(images), "--out", str(tmp_path / "out"), *QUICK, "--quiet"]) == 0
    told = capsys.readouterr()
    assert "0 done, 3 skipped, 0 failed" in told.out
    assert not told.err


def test_a_failure_is_told_and_the_rest_done(images, tmp_path, capsys):
    (images / "b.tif").write_bytes(b"II*\0")
    assert main(["batch", str(images), "--out", str(tmp_path / "out"), *QUICK]) == 1
    told = capsys.readouterr()
    assert "3 done, 0 skipped, 1 failed" in told.out
    assert "b.tif: damaged or cut short" in told.err


def test_settings_of_a_file(images, tmp_path):
    content = {"images": ["images/a0.png", "images/a2.png"], "out": "results", "iterations": 2}
    config = tmp_path / "study.yaml"
    config.write_text(yaml.safe_dump({**content, "previews": False, "leave_out": [], "workers": 0}))
    assert main(["batch", str(config), "--quiet"]) == 0
    manifest = json.loads((tmp_path / "results" / "manifest.json").read_text())
    assert [image["name"] for image in manifest["images"]] == ["a0", "a2"]
    assert manifest["settings"]["leave_out"] == []
    assert main(["batch", str(config), "--iterations", "3", "--out", str(tmp_path / "b")]) == 0
    manifest = json.loads((tmp_path / "b" / "manifest.json").read_text())
    assert manifest["settings"]["iterations"] == 3


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("images: [a.png]\nout: x\nstains: 3\n", "Unknown setting 'stains'"),
        ("images: [a.png]\nout: x\niterations: some\n", "iterations is"),
        ("images: [a.png]\nout: x\nconfidence: 25\n", "confidence is a number from 0 to 1"),
        ("images: 3\nout: x\n", "a list of files"),
        ("images: [a.png]\n", "--out is needed"),
        ("out: x\n", "need at least `images`"),
        ("[: {\n", "cannot be read as settings"),
    ],
)
def test_wrong_settings_are_one_sentence(tmp_path, capsys, content, said):
    (tmp_path / "study.yaml").write_text(content)
    assert main(["batch", str(tmp_path / "study.yaml")]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1


def test_a_model_that_is_not_there(images, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert main(["batch", str(images), "--out", out, "--model", "none.safetensors", *QUICK]) == 2
    assert "no such file" in capsys.readouterr().err


def test_help_is_quick_and_complete(capsys):
    with pytest.raises(SystemExit) as end:
        main(["batch", "--help"])
    assert end.value.code == 0
    told = capsys.readouterr().out
    assert "--scheduler" in told
    assert "goes on with the same command" in " ".join(told.split())
