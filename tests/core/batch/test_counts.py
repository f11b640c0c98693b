"""The counts of a study: every image, sums, intervals, and what is known against them."""

import csv
import io
import json

import pytest
from PIL import Image

from napari_beerlanet.core.batch.counts import ALL_IMAGES, ImageCounts, StudyCounts
from napari_beerlanet.core.batch.study import run_study
from napari_beerlanet.core.boxes.classes import poisson_interval, wilson_interval
from napari_beerlanet.core.checkpoints.checkpoint import read_info
from napari_beerlanet.core.checkpoints.info import limits_text
from napari_beerlanet.core.formats import read_detections
from napari_beerlanet.samples import blood_smear

SETTINGS = {
    "model": "blood-cells",
    "decompose": False,
    "reports": False,
    "previews": False,
    "densities": False,
    "object_size": 60,
    "pixel_size": 0.25,
}


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Two smears, one of them in foreign colours, and a file that is no image."""
    folder = tmp_path_factory.mktemp("images")
    for seed in range(2):
        smear = blood_smear((200, 260), cell_diameter=60, seed=seed).image
        Image.fromarray(smear if seed == 0 else smear[..., [1, 0, 2]]).save(folder / f"a{seed}.png")
    (folder / "broken.png").write_bytes(b"no image")
    out = folder / "out"
    run_study(folder, out, SETTINGS, workers=0)
    return out


def test_every_image_is_counted_and_summed(study):
    counts = StudyCounts.read(study)
    assert [image.name for image in counts.images] == ["a0", "a1", "broken"]
    assert [image.status for image in counts.images] == ["done", "done", "failed"]
    assert counts.classes == ["RBC", "WBC", "Platelets"]
    for image in counts.counted:
        assert image.counts == read_detections(image.boxes).counts()
        assert image.area == pytest.approx(200 * 260 * 0.25**2 / 1e6)
    first, second, _ = counts.images
    assert first.total > 0
    assert counts.sum.counts == {n: first.counts[n] + second.counts[n] for n in counts.classes}
    assert counts.sum.area == pytest.approx(2 * first.area)
    assert counts.colours["RBC"].startswith("#")


def test_what_is_known_against_the_counts_is_said(study):
    counts = StudyCounts.read(study)
    text = " ".join(counts.reservations())
    assert "1 image failed: broken." in text
    assert "1 image is out of domain" in text
    assert "a1" in text
    assert "only knows RBC, WBC and Platelets" in text
    assert limits_text(read_info("blood-cells")) in text
    assert "Does not know" in text
    assert "not an image" in counts.images[2].remark or "broken.png" in counts.images[2].remark


def test_the_table_as_csv(study, tmp_path):
    counts = StudyCounts.read(study)
    counts.write_csv(tmp_path / "counts.csv")
    text = (tmp_path / "counts.csv").read_text(encoding="utf-8-sig")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["image"] for row in rows] == ["a0", "a1", "broken", ALL_IMAGES]
    first, last = counts.images[0], rows[-1]
    assert int(rows[0]["RBC"]) == first.counts["RBC"]
    low, high = poisson_interval(first.counts["RBC"])
    assert float(rows[0]["RBC per mm2"]) == pytest.approx(
        first.counts["RBC"] / first.area, rel=1e-4
    )
    assert float(rows[0]["RBC per mm2 low"]) == pytest.approx(low / first.area, rel=1e-4)
    assert float(rows[0]["RBC per mm2 high"]) == pytest.approx(high / first.area, rel=1e-4)
    assert int(last["total"]) == int(rows[0]["total"]) + int(rows[1]["total"])
    assert rows[2]["total"] == "", "a failed image has no count, not even 0"
    assert "failed" in last["remarks"]
    assert len(counts.text("\t").splitlines()[0].split("\t")) == len(counts.header())


def test_the_summary_has_intervals():
    images = [
        ImageCounts("a", "/a.png", "done", {"RBC": 90, "infected RBC": 10}, 0.5),
        ImageCounts("b", "/b.png", "skipped", {"RBC": 80, "infected RBC": 0}, 0.5),
    ]
    counts = StudyCounts(images)
    low, high = wilson_interval(170, 180)
    assert (
        f"RBC 170 (94 %; 95 % interval {100 * low:.1f} to {100 * high:.1f} %)" in counts.summary()
    )
    low, high = poisson_interval(180)
    assert f"180 per mm² (95 % interval {low:,.0f} to {high:,.0f})" in counts.summary()
    assert "Parasitaemia" in counts.summary()
    unknown = StudyCounts([*images, ImageCounts("c", "/c.png", "done", {"RBC": 5})])
    assert unknown.sum.area is None, "cells on an unknown area have no density"
    assert "mm²" not in unknown.summary()


def test_images_of_other_settings_and_those_that_wait_do_not_count(study, tmp_path):
    manifest = json.loads((study / "manifest.json").read_text())
    for k, status in enumerate(("waiting", "waiting", "failed")):
        manifest["images"][k]["status"] = status
    later = tmp_path / "later"
    (later / "records").mkdir(parents=True)
    for record in (study / "records").glob("*.json"):
        content = json.loads(record.read_text())
        kept = content["settings_sha256"]
        content["settings_sha256"] = "other" if content["name"] == "a1" else kept
        (later / "records" / record.name).write_text(json.dumps(content))
    (later / "manifest.json").write_text(json.dumps(manifest))
    counts = StudyCounts.read(later)
    assert [image.status for image in counts.images] == ["done", "waiting", "failed"]
    assert "1 image not processed yet." in counts.reservations()


def test_a_folder_without_counts(tmp_path):
    assert StudyCounts.read(tmp_path) is None
    (tmp_path / "manifest.json").write_text('{"images": [], "settings": {"model": ""}}')
    assert StudyCounts.read(tmp_path) is None


@pytest.mark.parametrize(
    ("count", "expected"), [(0, (0, 3.689)), (1, (0.0253, 5.572)), (10, (4.795, 18.390))]
)
def test_garwoods_interval(count, expected):
    assert poisson_interval(count) == pytest.approx(expected, abs=2e-3)
