"""`benchmarks/paper_table.py` on a few images: its settings can be run, its section is right."""

import sys
from pathlib import Path

import pytest
import yaml
from PIL import Image

from discs import disc_detector
from napari_beerlanet.core.benchmark.benchmark import check_benchmark
from napari_beerlanet.core.benchmark.settings import METHODS, BenchmarkSettings
from napari_beerlanet.core.benchmark.table import Column, ResultTable
from napari_beerlanet.samples import blood_smear
from tinyclasses import cell
from tinydata import NAMES, write_smear

VOC = "<annotation>{}</annotation>"
OBJECT = (
    "<object><name>{}</name><bndbox><xmin>{:.0f}</xmin><ymin>{:.0f}</ymin><xmax>{:.0f}</xmax>"
    "<ymax>{:.0f}</ymax></bndbox></object>"
)


@pytest.fixture
def paper(root, monkeypatch):
    """The script; its data sets are as small as they can be."""
    monkeypatch.syspath_prepend(root / "benchmarks")
    import classify
    import paper_table

    monkeypatch.setattr(classify.nb, "load_checkpoint", lambda name: disc_detector())
    monkeypatch.setattr(classify, "HELD_OUT", 1)
    monkeypatch.setattr(classify, "SMALL", {"train": 1, "val": 1})
    yield paper_table
    for name in ("classify", "smears", "paper_table"):
        sys.modules.pop(name, None)


def write_shared(folder: Path) -> Path:
    """What `../shared` has of the three tasks, of a few images each."""
    bccd = folder / "data" / "bccd"
    for name in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (bccd / name).mkdir(parents=True)
    for seed, split in enumerate(("train", "val", "test")):
        field = blood_smear((200, 240), seed=seed, cell_diameter=50)
        found = zip(field.labels, field.boxes, strict=True)
        objects = "".join(OBJECT.format(NAMES[label], *box) for label, box in found)
        Image.fromarray(field.image).save(bccd / "JPEGImages" / f"smear{seed}.jpg")
        (bccd / "Annotations" / f"smear{seed}.xml").write_text(VOC.format(objects))
        (bccd / "ImageSets" / "Main" / f"{split}.txt").write_text(f"smear{seed}\n")
    smear = write_smear(folder / "new", "x", 7)
    for kind, path in (("images", smear), ("labels", folder / "new/labels/x/smear-7.txt")):
        place = folder / "data" / "other-lab" / kind
        place.mkdir(parents=True)
        path.rename(place / path.name)
    for number, lab in enumerate(("pbc", "bccd", "cellavision")):
        write_crops(folder / "data" / "wbc-types" / lab, ("lymphocyte", "monocyte"), 10 * number)
    for number, lab in enumerate(("turin", "lc25000")):
        write_crops(folder / "data" / "tumour-patches" / lab, ("healthy", "tumour"), 100 * number)
    (folder / "weights").mkdir()
    (folder / "weights" / "yolov8n.pt").touch()
    return folder


def write_crops(folder: Path, names: tuple[str, ...], first: int) -> None:
    for look, name in zip(("dark", "pale"), names, strict=True):
        (folder / name).mkdir(parents=True)
        for seed in range(first, first + 2):
            Image.fromarray(cell(look, seed)).save(folder / name / f"{seed}.png")


def test_its_settings_are_those_of_a_benchmark_that_can_run(paper, tmp_path):
    shared = write_shared(tmp_path / "shared")
    words = ["--out", str(tmp_path / "out"), "--shared", str(shared), "--seeds", "3"]
    file = paper.write_settings(paper.parsed([*words, "--budget", "quick", "--threads", "1"]))
    read = BenchmarkSettings.read(file)
    check_benchmark(read)
    assert read.methods == tuple(METHODS)
    assert (read.seeds, read.threads) == ((3,), 1)
    named = {task.name: [test.name for test in task.tests] for task in read.tasks}
    assert named == {
        "blood cells": ["other lab"],
        "white cells": ["bccd", "cellavision"],
        "tumour": ["lc25000"],
    }
    assert [task.image_size for task in read.tasks] == [224, 64, 64]
    content = file.read_bytes()
    paper.write_settings(paper.parsed([*words, "--budget", "quick", "--threads", "1"]))
    assert file.read_bytes() == content, "what is there is taken as it is"
    full = yaml.safe_load(paper.write_settings(paper.parsed([*words, "--full"])).read_text())
    assert [task["epochs"] for task in full["tasks"]] == [50, 20, 20]
    assert full["staingan"]["filters"] == 64


def test_its_section_of_a_page_says_where_beerlanet_does_not_win(paper, tmp_path, monkeypatch):
    results, page, kept = tmp_path / "results", tmp_path / "page.md", tmp_path / "kept"
    results.mkdir()
    monkeypatch.setattr(paper, "KEPT", kept)
    page.write_text(f"# Before\n\n{paper.MARKS[0]}\nold\n{paper.MARKS[1]}\n\nAfter\n")
    words = ["--out", str(tmp_path), "--docs", str(page), "--budget", "quick"]
    options = paper.parsed(words)
    assert paper.write_section(options) == 1
    task = {
        **{"name": "cells", "kind": "detect", "train": "a", "tests": {"there": "b"}},
        **{"image_size": 256, "epochs": 8, "batch": 8},
    }
    chosen = BenchmarkSettings(
        tasks=[task],
        methods=["none", "macenko", "beerlanet"],
        seeds=[0],
        staingan={"filters": 16, "blocks": 6, "crop": 96, "steps": 400},
    )
    chosen.write(tmp_path)
    first, second = (Column("detect", "cells", "there", m) for m in ("mAP50", "mAP50-95"))
    values = {
        **{("none", first): {0: 50.0}, ("macenko", first): {0: 70.0}},
        **{("beerlanet", first): {0: 60.0}, ("none", second): {0: 20.0}},
        **{("macenko", second): {0: 10.0}, ("beerlanet", second): {0: 30.0}},
    }
    table = ResultTable((first, second), chosen.methods, values, (0,))
    (results / "values.csv").write_text(table.values_csv())
    for _ in range(2):  # the second time it replaces what the first has written
        assert paper.write_section(options) == 0
    text = page.read_text()
    assert text.startswith("# Before\n")
    assert text.endswith("\n\nAfter\n")
    assert "\nold\n" not in text
    assert text.count(table.markdown()) == 1
    assert "| cells → there mAP50 | Macenko | 70.00 | 60.00 | 10.00 | 2 of 3 |" in text
    assert "| cells → there mAP50-95 | BeerLaNet | 30.00 | 30.00 | 0.00 | 1 of 3 |" in text
    assert "smears of 256 pixels, 8 epochs, batches of 8" in text
    assert "Of one seed, in percent" in text
    assert "48.66" in text, "the paper's own numbers"
    values = {("macenko", first): {1: 50.0}}
    table = ResultTable((first, second), chosen.methods, values, (1,))
    (results / "values.csv").write_text(table.values_csv())
    assert paper.write_section(options) == 0
    text = page.read_text()
    assert "60.00 ± 14.14" in text, "the values of both runs"
    assert "No normalization, cells → there (1 of 2 seeds)" in text
    assert len((kept / "paper_table_quick.csv").read_text().splitlines()) == 8
