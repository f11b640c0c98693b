"""Studies with a classifier: types in every output, in the table, and on one page."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from napari_beerlanet.core.batch.counts import ImageCounts, StudyCounts
from napari_beerlanet.core.batch.settings import StudyConfig, StudySettings
from napari_beerlanet.core.batch.study import run_study
from napari_beerlanet.core.boxes.classes import wilson_interval
from napari_beerlanet.core.checkpoints.checkpoint import load_classifier, save_checkpoint
from napari_beerlanet.core.classification.crops import cut_crops
from napari_beerlanet.core.common.storage import file_hash
from napari_beerlanet.core.formats import read_detections
from napari_beerlanet.core.images.files import read_image
from napari_beerlanet.samples import blood_smear
from tinyclasses import SMALL, tiny_classifier

STAGES = ["uninfected", "ring", "schizont"]
SETTINGS = {
    "model": "blood-cells",
    "decompose": False,
    "densities": False,
    "object_size": 60,
    "device": "cpu",
}


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """Untrained, but so that half of the red cells are uninfected."""
    path = tmp_path_factory.mktemp("models") / "stages.safetensors"
    clf = tiny_classifier(SMALL, STAGES, info={"applies_to": ["RBC"]})
    smear = blood_smear((200, 260), cell_diameter=60, seed=0, white_cells=0.2)
    red = smear.boxes[smear.labels == smear.names.index("RBC")]
    network = clf.network.train()
    crops = cut_crops(smear.image, red, 24, 0.7)
    with torch.no_grad():
        for _ in range(60):  # until the batch norms know red cells; else all look alike
            network.forward(torch.from_numpy(crops).permute(0, 3, 1, 2).float() / 255)
        network.eval()
        said = np.log(clf.classify(smear.image, red).scores)
        head = [part for part in network.modules() if isinstance(part, torch.nn.Linear)][-1]
        head.bias[0] += float(np.median(said[:, 1:].max(1) - said[:, 0]))
    save_checkpoint(clf, path)
    return path


@pytest.fixture(scope="module")
def study(tmp_path_factory, classifier):
    """The folder of one image's results, and its settings."""
    folder = tmp_path_factory.mktemp("images")
    smear = blood_smear((200, 260), cell_diameter=60, seed=0, white_cells=0.2).image
    Image.fromarray(smear).save(folder / "a.png")
    settings = {**SETTINGS, "classifier": str(classifier), "formats": ("csv", "geojson", "coco")}
    done = run_study(folder / "a.png", folder / "out", settings, workers=0)
    assert done.failures == {}
    return folder / "out", settings


def test_types_are_in_every_output(study, classifier):
    out, _ = study
    found = read_detections(out / "a.detections.csv")
    rbc = found.labels == found.names.index("RBC")
    assert rbc.sum() > 3
    assert (~rbc).any()
    assert [name != "" for name in found.columns["type"]] == rbc.tolist()
    pixels = read_image(out.parent / "a.png").pixels
    expected = load_classifier(classifier, "cpu").classify(pixels, found.xyxy[rbc])
    # Boxes in the table are rounded, and this network makes much of a grey level.
    np.testing.assert_allclose(found.columns["probability"][rbc], expected.confidence, atol=0.05)
    for name in ("a.detections.geojson", "a.detections.coco.json"):
        again = read_detections(out / name)
        assert again.type_counts() == found.type_counts()
        assert again.counts() == found.counts()
    counts = found.type_counts()
    assert list(counts) == STAGES
    assert 0 < counts["uninfected"] < rbc.sum()
    (row,) = pd.read_csv(out / "summary.csv").to_dict("records")
    assert {name: row[f"type {name}"] for name in STAGES} == counts
    assert row["classified"] == rbc.sum()
    infected = rbc.sum() - counts["uninfected"]
    assert row["parasitaemia"] == pytest.approx(infected / rbc.sum())
    low, high = wilson_interval(counts["ring"], int(rbc.sum()))
    assert (row["ring share_low"], row["ring share_high"]) == pytest.approx((low, high))
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["settings"]["classifier_sha256"] == file_hash(classifier)
    report = (out / "a.report.html").read_text()
    assert file_hash(classifier) in report
    assert "Cell types" in report
    assert "Classifier" in report


def test_counts_of_a_study_have_types(study):
    counts = StudyCounts.read(study[0])
    found = read_detections(study[0] / "a.detections.csv")
    assert counts.types == STAGES
    assert counts.sum.types == found.type_counts()
    assert set(counts.type_colours) == set(STAGES)
    assert "only knows uninfected, ring and schizont" in " ".join(counts.reservations())
    assert "a parasitaemia needs at least 500" in " ".join(counts.reservations())


def test_what_the_classifier_knows_is_not_said_to_be_unknown(study):
    """The detector knows no parasites; the classifier's types are their stages."""
    text = " ".join(StudyCounts.read(study[0]).reservations())
    assert text.count("not know parasites") == 1
    assert "blood-cells does not know parasites: those outside of the red cells" in text
    assert "may call them WBC" not in text


def test_a_classified_study_resumes_and_another_classifier_starts_anew(study, tmp_path):
    out, settings = study
    again = run_study(out.parent / "a.png", out, settings, workers=0)
    assert again.count("skipped") == 1
    moved = tmp_path / "moved.safetensors"
    moved.write_bytes(Path(settings["classifier"]).read_bytes())
    same = run_study(out.parent / "a.png", out, {**settings, "classifier": str(moved)}, workers=0)
    assert same.count("skipped") == 1, "the same weights, wherever they lie"
    usual = {**settings, "classifier_sha256": "x", "model_sha256": "y"}
    for other in (
        {"classifier_sha256": "z"},
        {"classify_only": ("WBC",)},
        {"classify_fit": "image"},
        {"one_page": True},
    ):
        assert StudySettings(**{**usual, **other}).hash() != StudySettings(**usual).hash()


@pytest.mark.parametrize("other", [{"batch": 4}, {"device": "cpu"}, {"openvino": "off"}])
def test_what_changes_no_result_is_not_hashed(other):
    assert StudySettings(**other).hash() == StudySettings().hash()


def test_the_command_of_a_classified_study(tmp_path):
    settings = StudySettings(
        model="blood-cells", classifier="malaria", classify_only=("RBC",), one_page=True
    )
    command = StudyConfig(("a.png",), tmp_path, settings).command()
    assert command.endswith("--model blood-cells --classify malaria --classify-only RBC --one-page")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"classifier": "blood-cells"}, "a detector, where a classifier is needed"),
        ({"model": "CLASSIFIER"}, "a classifier, where a detector is needed"),
        ({"model": "", "decompose": True, "classifier": "CLASSIFIER"}, "needs cells"),
        ({"classifier": "CLASSIFIER", "classify_only": ("gland",)}, "no boxes of the class gland"),
        ({"classifier": "OTHER"}, "meant for nucleus, and the detector's classes are RBC, WBC"),
        ({"one_page": True}, "Reports of one page are on infected red cells"),
    ],
)
def test_what_does_not_fit_together_is_said_before_the_first_image(
    study, classifier, tmp_path, settings, words
):
    if settings.get("classifier") == "OTHER":
        other = tiny_classifier(SMALL, info={"applies_to": ["nucleus"]})
        save_checkpoint(other, tmp_path / "other.safetensors")
    known = {"CLASSIFIER": str(classifier), "OTHER": str(tmp_path / "other.safetensors")}
    given = {k: known.get(v, v) if isinstance(v, str) else v for k, v in settings.items()}
    with pytest.raises(ValueError, match=words):
        run_study(study[0].parent / "a.png", tmp_path / "out", {**SETTINGS, **given}, workers=0)
    assert not (tmp_path / "out").exists()


def test_one_page_on_an_image(study, tmp_path):
    out, settings = study
    chosen = {**settings, "one_page": True, "formats": ("csv",), "previews": False}
    done = run_study(out.parent / "a.png", tmp_path, chosen, workers=0)
    assert done.failures == {}
    page = (tmp_path / "a.report.html").read_text()
    assert "Research use only" in page
    assert "Red cells by stage" in page
    smear = (tmp_path / "smear.html").read_text()
    found = read_detections(tmp_path / "a.detections.csv")
    infected = sum(n for name, n in found.type_counts().items() if name != "uninfected")
    assert infected > 0, "or the rest says nothing"
    assert f"of {found.counts()['RBC']} counted" in smear
    assert smear.count("data:image/jpeg") == min(infected, 16)
    assert "1 field" in smear
    assert file_hash(Path(settings["classifier"])) in smear
    assert not (out / "smear.html").exists()


def test_sums_and_table_of_types():
    images = [
        ImageCounts(
            "a", "/a", "done", {"RBC": 400, "WBC": 2}, types={"uninfected": 390, "ring": 10}
        ),
        ImageCounts(
            "b", "/b", "done", {"RBC": 300, "WBC": 2}, types={"uninfected": 300, "ring": 0}
        ),
        ImageCounts("c", "/c", "waiting"),
    ]
    study = StudyCounts(images)
    assert study.sum.types == {"uninfected": 690, "ring": 10}
    low, high = wilson_interval(10, 700)
    assert f"ring 10 (1 %; 95 % interval {100 * low:.1f} to {100 * high:.1f} %)" in study.summary()
    assert "250 parasites per 100 white cells." in study.summary()
    assert not [s for s in study.reservations() if "at least 500" in s], "700 are enough"
    rows = [dict(zip(study.header(), row, strict=True)) for row in study.rows()]
    assert (rows[0]["type ring"], rows[0]["ring share"]) == (10, 0.025)
    assert (rows[2]["type ring"], rows[2]["ring share"]) == ("", "")
    assert rows[3]["parasitaemia"] == pytest.approx(10 / 700)
    assert rows[3]["parasites per 100 white cells"] == pytest.approx(250)
