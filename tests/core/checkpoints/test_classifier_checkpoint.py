"""Checkpoints of classifiers: the same model comes back, and hostile files are harmless."""

import json
import os

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

import napari_beerlanet as nb
from napari_beerlanet.core.checkpoints import checkpoint
from napari_beerlanet.core.checkpoints.checkpoint import (
    CheckpointError,
    learned_spectra,
    load_checkpoint,
    load_classifier,
    load_detector,
    read_info,
    save_checkpoint,
)
from napari_beerlanet.core.checkpoints.info import METADATA_KEY, limits_text
from napari_beerlanet.core.checkpoints.pt_import import read_state_dict
from napari_beerlanet.core.checkpoints.serialize import _checksum
from napari_beerlanet.core.classification.classifier import Classifier
from tinyclasses import SMALL, TYPES, cell, tiny_backbone, tiny_classifier
from tinydata import write_smears

CROPS = [cell(kind, seed) for kind in TYPES for seed in range(2)]


@pytest.fixture(scope="module")
def clf():
    known = {"temperature": 1.7, "training": {"metrics": {"accuracy": 0.9}}}
    return tiny_classifier(SMALL, info=known, fill=0.6, normalize=True, standardize=False)


@pytest.fixture(scope="module")
def whole(clf, tmp_path_factory):
    path = tmp_path_factory.mktemp("good") / "types.safetensors"
    save_checkpoint(clf, path)
    return path.read_bytes()


@pytest.fixture
def good(whole, tmp_path):
    path = tmp_path / "types.safetensors"
    path.write_bytes(whole)
    return path


def changed(data, info=None, weights=None, also=None):
    """A checkpoint with other content and a checksum that fits it, as a forger would write it."""
    tensors = load(data)
    length = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + length])
    described = json.loads(table["__metadata__"][METADATA_KEY])
    del described["checksum"]
    described.update(info or {})
    tensors.update(weights or {})
    if also:
        also(described, tensors)
    text = json.dumps({**described, "checksum": _checksum(described, tensors)})
    return save(tensors, {METADATA_KEY: text})


def refused(path, data=None, load=load_checkpoint):
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        load(path, "cpu")
    sentence = str(caught.value)
    assert sentence.startswith(str(path))
    assert "\n" not in sentence
    return sentence


def test_what_is_saved_comes_back(clf, good):
    again = nb.load_checkpoint(good, "cpu")
    assert isinstance(again, Classifier)
    assert again.info == clf.info
    assert again.network.settings == clf.network.settings
    assert not again.network.training
    own = clf.network.state_dict()
    for name, value in again.network.state_dict().items():
        exact = name.startswith(("stain.", "mix.")) or not own[name].is_floating_point()
        assert torch.equal(value, own[name] if exact else own[name].half().float()), name
    np.testing.assert_allclose(again.classify(CROPS).scores, clf.classify(CROPS).scores, atol=1e-2)


def test_a_file_from_before_there_were_views(whole, tmp_path):
    data = changed(whole, also=lambda info, _: (info.pop("views"), info.pop("prior")))
    (tmp_path / "old.safetensors").write_bytes(data)
    assert load_checkpoint(tmp_path / "old.safetensors", "cpu").network.settings.views == 1


def test_the_file_describes_itself(clf, good):
    info = read_info(good)
    assert info == clf.info
    assert (info["kind"], info["backbone"], info["front_end"]) == ("classifier", SMALL, "beerlanet")
    assert (info["input_size"], info["fill"], info["normalize"]) == (24, 0.6, True)
    assert (info["temperature"], info["standardize"], info["classes"]) == (1.7, False, TYPES)
    assert learned_spectra(good).shape == (3, 3)


def test_same_model_same_bytes(whole, good, tmp_path):
    save_checkpoint(load_checkpoint(good, "cpu"), tmp_path / "second.safetensors")
    assert (tmp_path / "second.safetensors").read_bytes() == whole


@pytest.mark.parametrize("front_end", ["none", "grey"])
def test_without_a_stain_front_end(tmp_path, front_end):
    clf = tiny_classifier(SMALL, front_end=front_end, denoise=True, fit="image")
    save_checkpoint(clf, tmp_path / "a.safetensors")
    again = load_classifier(tmp_path / "a.safetensors", "cpu")
    assert again.network.settings == clf.network.settings
    assert not any(name.startswith(("stain.", "mix.")) for name in again.network.state_dict())
    with pytest.raises(CheckpointError, match="no spectra"):
        learned_spectra(tmp_path / "a.safetensors")


def test_an_own_backbone_has_to_be_given_again(tmp_path):
    clf = tiny_classifier()
    path = tmp_path / "own.safetensors"
    save_checkpoint(clf, path)
    assert "backbone=" in refused(path)
    again = load_classifier(path, "cpu", backbone=tiny_backbone(seed=9))
    np.testing.assert_allclose(again.classify(CROPS).scores, clf.classify(CROPS).scores, atol=1e-2)
    with pytest.raises(CheckpointError, match="has shape"):
        load_checkpoint(path, "cpu", backbone=tiny_backbone(classes=5))


def test_loading_leaves_random_numbers_alone(good):
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    load_checkpoint(good, "cpu")
    assert torch.equal(torch.rand(3), expected)


# --- one kind where the other is needed ----------------------------------------------------------


def test_a_classifier_is_no_detector(good, tmp_path, clf):
    sentence = refused(good, load=load_detector)
    assert "a classifier, where a detector is needed" in sentence
    data = write_smears(tmp_path / "smears", train=1, val=1, side=64)
    for start in (good, clf):
        with pytest.raises(ValueError, match="a classifier, where a detector is needed"):
            nb.fine_tune(start, data, tmp_path / f"run-{type(start).__name__}")


def test_a_detector_is_no_classifier():
    with pytest.raises(CheckpointError, match="a detector, where a classifier is needed"):
        load_classifier("blood-cells", "cpu")
    assert isinstance(load_detector("blood-cells", "cpu"), nb.Detector)


def test_a_detector_with_a_classifiers_label_is_refused(tmp_path, good, whole):
    """And the reverse: the label alone changes nothing about what has to be there."""
    assert "lacks" in refused(tmp_path / "a.safetensors", changed(whole, {"kind": "detector"}))
    sentence = refused(tmp_path / "b.safetensors", changed(whole, {"kind": "segmenter"}))
    assert "a model of the kind 'segmenter'" in sentence


def test_packaged_models_by_their_kind(whole, tmp_path, monkeypatch):
    detector = (checkpoint._models_folder() / "blood-cells.safetensors").read_bytes()
    (tmp_path / "cells.safetensors").write_bytes(detector)
    (tmp_path / "types.safetensors").write_bytes(whole)
    monkeypatch.setattr(checkpoint, "_models_folder", lambda: tmp_path)
    assert checkpoint.packaged_models() == ["cells", "types"]
    assert checkpoint.packaged_models("detector") == ["cells"]
    assert checkpoint.packaged_models("classifier") == ["types"]
    assert isinstance(load_checkpoint("types", "cpu"), Classifier)


def test_classes_that_are_seldom_recognised_are_told_beside_counts(clf, tmp_path):
    a, b = clf.classes[:2]
    clf = Classifier(clf.network, {**clf.info, "recognised": {a: [2, 17], b: [10, 20]}})
    save_checkpoint(clf, tmp_path / "a.safetensors")
    info = load_checkpoint(tmp_path / "a.safetensors", "cpu").info
    assert info["recognised"] == {a: [2, 17], b: [10, 20]}
    text = f"Seldom recognises, in images that it was not trained on: {a} (2 of 17)."
    assert limits_text(info) == text
    both = limits_text({**info, "unknown": {"ghosts": []}})
    assert both == f"{text} Does not know ghosts."


def test_stages_that_malaria_seldom_recognises_are_told():
    text = limits_text(read_info("malaria"))
    assert all(stage in text for stage in ("trophozoite", "schizont", "gametocyte"))
    assert "ring (" not in text


# --- hostile and damaged -------------------------------------------------------------------------

BAD = {
    "kind": [None, 3, ["classifier"], ""],
    "backbone": ["resnet19", "vit_h_14", "resnet18", "", "../x", "__import__('os')", 3, None],
    "front_end": ["yolo", None, "none"],
    "input_size": [0, 15, 10**6, "24", 24.5],
    "fill": [0, 2, "half", None],
    "fit": ["slide", 1],
    "normalize": ["yes", None],
    "beside_rgb": [True, 1],  # there are no weights for it
    "denoise": [0],
    "standardize": ["imagenet"],
    "views": [0, 9, 2.5, "all"],
    "prior": [[1.0], [1.0, 0.0], [1.0, -1.0], ["a", "b"], None, 3],
    "prevalence": [0, 1, -0.1, "few", [0.1]],
    "recognised": [{"a": 3}, {"a": [1]}, {"a": [-1, 2]}, {"a": [3, 2]}, {"z": [1, 2]}, [], None],
    "temperature": [0, -1, 1e9, "hot", None],
    "classes": [[], ["a"], ["a", "b", "c"], ["a", "a"], "ab"],
    "components": [4, 0, 10**9],
    "iterations": [0, 10**9],
    "name": ["", 3],
    "colours": [["red", "blue"], None],
    "stain_seen": [[], {}],
    "training": ["yesterday"],
}


@pytest.mark.parametrize(("key", "value"), [(k, v) for k, values in BAD.items() for v in values])
def test_entry_that_does_not_fit(whole, tmp_path, key, value):
    refused(tmp_path / "a.safetensors", changed(whole, {key: value}))


OPTIONAL = {"kind", "views", "prior", "prevalence", "recognised"}


@pytest.mark.parametrize("key", sorted(BAD.keys() - OPTIONAL))
def test_entry_that_is_missing(whole, tmp_path, key):
    data = changed(whole, also=lambda info, _: info.pop(key))
    assert f"lacks {key}" in refused(tmp_path / "a.safetensors", data)


@pytest.mark.parametrize(
    ("name", "words"), [("vit_h_14", "lacks"), ("regnet_y_128gf", "weights are too few")]
)
def test_a_huge_network_is_not_built_for_a_small_file(whole, tmp_path, monkeypatch, name, words):
    """Shapes are compared where they cost no memory; nothing else is allocated."""
    from napari_beerlanet.core.classification import network

    def real(name, classes):
        assert torch.empty(1).device.type == "meta", "memory was allocated"
        return build(name, classes)

    build = network.build_backbone
    monkeypatch.setattr(network, "build_backbone", real)
    assert words in refused(tmp_path / "a.safetensors", changed(whole, {"backbone": name}))


def test_a_network_whose_layout_is_computed_with_tensors_comes_back(tmp_path):
    clf = tiny_classifier("regnet_y_400mf", front_end="none", input_size=32)
    save_checkpoint(clf, tmp_path / "a.safetensors")
    again = load_checkpoint(tmp_path / "a.safetensors", "cpu")
    np.testing.assert_allclose(again.classify(CROPS).scores, clf.classify(CROPS).scores, atol=1e-2)


@pytest.mark.parametrize("name", ["backbone.fc.weight", "stain.log_lam", "mix.bias"])
def test_weights_that_do_not_fit(whole, tmp_path, name):
    path = tmp_path / "a.safetensors"
    data = changed(whole, also=lambda _, tensors: tensors.pop(name))
    assert "it lacks 1 weights" in refused(path, data)
    assert "has shape" in refused(path, changed(whole, weights={name: torch.zeros(7, 5)}))
    broken = load(whole)[name]
    broken.view(-1)[0] = float("nan")
    assert "no numbers" in refused(path, changed(whole, weights={name: broken}))


@pytest.mark.parametrize("name", ["backbone.more", "stain.more", "other", "fc.weight"])
def test_weight_without_a_place(whole, tmp_path, name):
    data = changed(whole, weights={name: torch.zeros(2)})
    assert "1 weights have no place" in refused(tmp_path / "a.safetensors", data)


def test_truncated_anywhere(whole, tmp_path):
    for length in [*range(0, 64, 7), *range(64, len(whole), 40_009), len(whole) - 1]:
        sentence = refused(tmp_path / "cut.safetensors", whole[:length])
        assert "cut short" in sentence or "empty" in sentence


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    flips=st.lists(st.tuples(st.floats(0, 1), st.integers(1, 255)), min_size=1, max_size=4),
    early=st.booleans(),
)
def test_flipped_bytes(clf, whole, tmp_path, flips, early):
    data = bytearray(whole)
    span = 8 + int.from_bytes(whole[:8], "little") if early else len(data)
    for place, mask in flips:
        data[int(place * (span - 1))] ^= mask
    (tmp_path / "a.safetensors").write_bytes(data)
    try:
        again = load_checkpoint(tmp_path / "a.safetensors", "cpu")
    except CheckpointError:
        return
    assert again.info == clf.info


# --- starting weights without running them -------------------------------------------------------


class Payload:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_state_dict_is_read_in_its_order(tmp_path, zipped):
    """Also of torch before 1.6, as many files of torchvision are."""
    state = tiny_backbone().state_dict()
    torch.save(state, tmp_path / "a.pth", _use_new_zipfile_serialization=zipped)
    found = read_state_dict(tmp_path / "a.pth")
    assert list(found) == list(state)
    assert all(torch.equal(found[name], state[name]) for name in state)
    torch.save({"epoch": 3, "state_dict": state}, tmp_path / "b.pt")
    assert list(read_state_dict(tmp_path / "b.pt")) == list(state)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_program_in_a_weights_file_does_not_run(tmp_path, zipped):
    marker = tmp_path / "ran"
    content = {"weight": torch.zeros(2), "more": Payload(marker)}
    torch.save(content, tmp_path / "a.pth", _use_new_zipfile_serialization=zipped)
    with pytest.raises(ValueError, match="nothing was run"):
        read_state_dict(tmp_path / "a.pth")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (lambda: tiny_backbone(), "a whole network, not its state_dict"),
        (lambda: {"epoch": 3}, "no weights"),
        (lambda: [torch.zeros(2)], "not its state_dict"),
    ],
)
def test_files_without_a_state_dict(tmp_path, content, words):
    torch.save(content(), tmp_path / "a.pth")
    with pytest.raises(ValueError, match=words):
        read_state_dict(tmp_path / "a.pth")


def test_a_damaged_weights_file(tmp_path):
    (tmp_path / "a.pth").write_bytes(b"no weights at all" * 9)
    with pytest.raises(ValueError, match=r"not a file that torch\.save has written"):
        read_state_dict(tmp_path / "a.pth")


@pytest.mark.parametrize("seed", range(30))
def test_an_old_weights_file_damaged_anywhere(tmp_path, seed):
    """Read as it was, or refused: never anything else."""
    path = tmp_path / "a.pth"
    state = tiny_backbone().state_dict()
    torch.save(state, path, _use_new_zipfile_serialization=False)
    data, random = bytearray(path.read_bytes()), np.random.default_rng(seed)
    if seed % 2:
        data = data[: random.integers(1, len(data))]
    else:
        for place in random.integers(15, len(data), 3):
            data[place] ^= int(random.integers(1, 256))
    path.write_bytes(data)
    try:
        found = read_state_dict(path)
    except ValueError:
        return
    assert seed % 2 == 0, "a file that is cut short was read"
    assert all(isinstance(value, torch.Tensor) for value in found.values())
