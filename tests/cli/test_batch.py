"""The command `batch`."""

import json
import shlex
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml
from PIL import Image

from napari_beerlanet.cli.main import main, parse_arguments
from napari_beerlanet.cli.study_commands import STUDY_COMMANDS
from napari_beerlanet.core.batch.settings import StudyConfig, StudySettings
from napari_beerlanet.samples import he_field

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
        ("images: [a.png]\nout: x\nstains: 3\n", "There is no setting 'stains'"),
        ("images: [a.png]\nout: x\niterations: some\n", "iterations must be"),
        ("images: [a.png]\nout: x\nconfidence: 25\n", "confidence must be a number from 0 to 1"),
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


def test_events_for_a_program(images, tmp_path, capsys):
    (images / "b.tif").write_bytes(b"II*\0")
    out = str(tmp_path / "out")
    assert main(["batch", str(images), "--out", out, *QUICK, "--json"]) == 1
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    ended = {Path(e["path"]).name: e for e in events if e["event"] == "image"}
    assert {name: e["status"] for name, e in ended.items()} == {
        "a0.png": "done",
        "a1.png": "done",
        "a2.png": "done",
        "b.tif": "failed",
    }
    assert "damaged" in ended["b.tif"]["error"]
    fractions = [e["fraction"] for e in events if e["event"] == "progress"]
    assert fractions[-1] == 1
    assert events[-1]["event"] == "end"
    assert (events[-1]["done"], events[-1]["failed"]) == (3, 1)
    assert main(["batch", str(images), "--out", out, "--model", "none.pt", *QUICK, "--json"]) == 2
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert events[-1]["event"] == "failed"
    assert "no such file" in events[-1]["message"]


def test_a_table_without_parquet_is_told(images, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    pytest.importorskip("pyarrow")
    assert main(["batch", str(images), "--out", str(out), *QUICK]) == 0
    assert (out / "summary.parquet").exists()
    assert "pip install" not in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert main(["batch", str(images / "a0.png"), "--out", str(out), *QUICK, "--quiet"]) == 0
    assert "pip install" in capsys.readouterr().err
    assert not (out / "summary.parquet").exists(), "it was of other images"


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"model": "blood-cells", "confidence": 0.4, "iou": 0.5, "object_size": 33.0},
        {"components": "auto", "iterations": 10, "lam": 1e-05, "gamma": 0.5, "leave_out": ()},
        {"model": "a model.safetensors", "decompose": False, "densities": False, "reports": False},
        {"previews": False, "skip_glass": False, "formats": ("coco", "voc"), "pixel_size": 0.25},
        {"tile": 512, "device": "cpu", "spectra": ((0.1, 0.2), (0.3, 0.4), (0.5, 0.6))},
    ],
)
@pytest.mark.parametrize("where", [{}, {"workers": 4}, {"scheduler": "tcp://head:8786"}])
def test_a_study_as_a_command_and_as_a_file_is_the_same_study(tmp_path, settings, where):
    order = StudyConfig(("my slides", "*.svs"), tmp_path / "o", StudySettings(**settings), **where)
    path = order.write()
    for text in (order.command(), shlex.join(["napari-beerlanet", "batch", str(path)])):
        own, given = STUDY_COMMANDS["batch"].read(parse_arguments(shlex.split(text)[1:]))
        assert StudySettings(**given) == order.settings
        assert [Path(one).name for one in own["images"]] == ["my slides", "*.svs"]
        assert Path(own["out"]) == tmp_path / "o"
        assert (own.get("workers", 1), own.get("scheduler")) == (order.workers, order.scheduler)


SPECTRA = ((0.1, 0.2), (0.3, 0.4), (0.5, 0.6))
OTHER_VALUES = {  # than the default, of every setting
    "components": "auto",
    "iterations": 10,
    "lam": 1e-05,
    "gamma": 0.5,
    "spectra": SPECTRA,
    "fixed_spectra": True,
    "stain_names": ("-a", "b c"),
    "domain": "intensity",
    "unit_spectra": False,
    "reference_pixels": 5e8,
    "method": "dense",
    "confidence": 0.4,
    "iou": 0.5,
    "object_size": 33.0,
    "tile": 512,
    "pixel_size": (0.25, 0.3),
    "densities": False,
    "skip_glass": False,
    "batch": 4,
    "openvino": "off",
    "model": "-my model.safetensors",
    "classifier": "malaria",
    "classify_only": ("-RBC", "white cell", "--all"),
    "classify_fit": "crop",
    "normalizer": "h&e.safetensors",
    "normalized_format": "png",
    "decompose": False,
    "reports": False,
    "previews": False,
    "density_maps": "zarr",
    "leave_out": (),
    "formats": (),
    "device": "cuda:1",
    "detections_file": "boxes.csv",
    "annotations_file": "true boxes.csv",
    "match_iou": 0.3,
    "report_file": "-a.html",
    "one_page": True,
}


@pytest.mark.parametrize("name", sorted(StudySettings.model_fields))
def test_every_setting_is_in_the_command(tmp_path, name):
    if name.endswith("_sha256"):
        pytest.skip("the study fills it in")
    needed = {"model": "blood-cells"} if name.startswith(("classif", "decompose")) else {}
    needed |= {"classifier": "malaria"} if name.startswith("classify") else {}
    needed |= {"spectra": SPECTRA} if name in ("fixed_spectra", "stain_names") else {}
    settings = StudySettings(**{**needed, name: OTHER_VALUES[name]})
    assert getattr(settings, name) != StudySettings.default(name)
    study = StudyConfig(("-a.png",), tmp_path / "o", settings)
    study.write()
    own, given = STUDY_COMMANDS["batch"].read(parse_arguments(shlex.split(study.command())[1:]))
    assert StudySettings(**given) == settings
    assert [Path(one).name for one in own["images"]] == ["-a.png"]
    assert Path(own["out"]) == study.out


def test_help_is_quick_and_complete(capsys):
    with pytest.raises(SystemExit) as end:
        main(["batch", "--help"])
    assert end.value.code == 0
    told = capsys.readouterr().out
    assert "--scheduler" in told
    assert "the same command resumes a run that was stopped" in " ".join(told.split())
