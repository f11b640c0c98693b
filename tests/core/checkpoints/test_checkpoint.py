"""Checkpoints: the same model comes back, and whatever is wrong with a file has its sentence."""

import copy
import hashlib
import json
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, load_file, save, save_file

from napari_beerlanet.core.checkpoints import checkpoint
from napari_beerlanet.core.checkpoints.checkpoint import (
    CheckpointError,
    checkpoint_hash,
    load_checkpoint,
    packaged_models,
    read_info,
    save_checkpoint,
)
from napari_beerlanet.core.checkpoints.info import METADATA_KEY, limits_text, still_unknown
from napari_beerlanet.core.checkpoints.serialize import _checksum, describe_network
from napari_beerlanet.core.common.storage import FileError
from napari_beerlanet.core.detection.detector import Detector
from napari_beerlanet.core.detection.network import StainDetectionModel
from napari_beerlanet.core.detection.ultralytics_api import DetectionModel

TINY = {
    "nc": 2,
    "reg_max": 1,
    "backbone": [[-1, 1, "Conv", [8, 3, 4]], [-1, 1, "Conv", [8, 3, 2]]],
    "head": [[-1, 1, "C2f", [8]], [[1, 2], 1, "Detect", ["nc"]]],
}
RECORD = {
    **{"data_hash": "ab" * 32, "data": "smears", "images": 12, "seed": 0, "date": "2026-01-02"},
    **{"settings": {"epochs": 3}, "versions": {"torch": "2"}, "parent": None, "scope": "all"},
    **{"metrics": {"mAP50": 0.9, "mAP50-95": 0.6, "per_class": {"a": 0.9}}, "epochs": 3},
}


def tiny_model(seed=0, **front):
    torch.manual_seed(seed)
    settings = {"imgsz": 96, "components": 3, "iterations": 4, **front}
    network = StainDetectionModel(copy.deepcopy(TINY), nc=2, **settings)
    network.fit_mix()
    network.stain.reference_pixels = 5000.0
    known = {
        "object_sizes": {"a": {"low": 8.0, "median": 11.5, "high": 20.0, "count": 40}},
        "stain_seen": {"background": {"mean": [-0.1] * 3, "sd": [0.01] * 3}, "spectra": [[0.5]]},
        "densities_seen": {"Zelle ß": {"mean": [0.1, 0.2, 0.0], "sd": [0.05, 0, 0.1], "count": 7}},
        "pixel_size": 0.25,
        "training": RECORD,
    }
    return Detector(
        network, describe_network(network, "tiny", ["a", "Zelle ß"], 96, **known), "cpu"
    )


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """The bytes of a good checkpoint."""
    path = tmp_path_factory.mktemp("good") / "tiny.safetensors"
    save_checkpoint(model, path)
    return path.read_bytes()


@pytest.fixture
def good(whole, tmp_path):
    path = tmp_path / "tiny.safetensors"
    path.write_bytes(whole)
    return path


def split(data):
    """A safetensors file as its table and its numbers."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def join(table, numbers):
    text = json.dumps(table).encode()
    return len(text).to_bytes(8, "little") + text + numbers


def changed(data, info=None, weights=None, also=None):
    """A checkpoint with other content and a checksum that fits it, as a forger would write it."""
    tensors = load(data)
    described = json.loads(split(data)[0]["__metadata__"][METADATA_KEY])
    del described["checksum"]
    described.update(info or {})
    tensors.update(weights or {})
    if also:
        also(described, tensors)
    text = json.dumps({**described, "checksum": _checksum(described, tensors)})
    return save(tensors, {METADATA_KEY: text})


def refused(path, data=None):
    """The sentence with which a file is refused."""
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, "cpu")
    sentence = str(caught.value)
    assert sentence.startswith(str(path))
    assert sentence.endswith((".", "?"))
    assert "\n" not in sentence
    return sentence


# --- there and back ------------------------------------------------------------------------------


def test_what_is_saved_comes_back(model, good):
    again = load_checkpoint(good, "cpu")
    assert again.info == {**model.info, "model_yaml": again.info["model_yaml"]}
    assert again.info["model_yaml"]["backbone"] == TINY["backbone"]
    assert again.network.names == {0: "a", 1: "Zelle ß"}
    assert not again.network.training
    assert again.device == torch.device("cpu")
    own = model.network.state_dict()
    for name, value in again.network.state_dict().items():
        kept = own[name].half().float() if own[name].is_floating_point() else own[name]
        expected = own[name] if name.startswith(("stain.", "mix.")) else kept
        assert value.dtype == own[name].dtype
        assert torch.equal(value, expected), name


def test_settings_of_the_front_end_come_back(tmp_path):
    odd = tiny_model(light=False, domain="intensity", unit_spectra=False, lam=0.0)
    odd.network.stain.padding = None
    odd.network.stain.reference_pixels = None
    save_checkpoint(odd, tmp_path / "odd.safetensors")
    again = load_checkpoint(tmp_path / "odd.safetensors", "cpu").network
    assert again.light is False
    for name in ("domain", "unit_spectra", "padding", "reference_pixels", "components"):
        assert getattr(again.stain, name) == getattr(odd.network.stain, name)
    image = torch.rand(1, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(again.apply_front_end(image), odd.network.apply_front_end(image))


def test_a_small_penalty_survives(tmp_path):
    save_checkpoint(tiny_model(lam=1.234567e-5), tmp_path / "a.safetensors")
    lam = load_checkpoint(tmp_path / "a.safetensors", "cpu").network.stain.lam.item()
    assert lam == pytest.approx(1.234567e-5, rel=1e-5)


def test_types_in_the_file(good):
    types = {name: value.dtype for name, value in load_file(good).items()}
    assert types["model.0.conv.weight"] == torch.float16
    assert types["model.0.bn.num_batches_tracked"] == torch.int64
    assert types["stain.penalised"] == torch.bool
    ours = {v for k, v in types.items() if k.startswith(("stain.", "mix."))}
    assert ours == {torch.float32, torch.bool}


def test_values_beyond_half_precision_stay_float32(tmp_path):
    model = tiny_model()
    with torch.no_grad():
        model.network.model[0].bn.running_var[0] = 1e6
    save_checkpoint(model, tmp_path / "a.safetensors")
    again = load_checkpoint(tmp_path / "a.safetensors", "cpu").network
    assert again.model[0].bn.running_var[0] == 1e6


def test_same_model_same_bytes(whole, good, tmp_path):
    save_checkpoint(tiny_model(), tmp_path / "second.safetensors")
    assert (tmp_path / "second.safetensors").read_bytes() == whole
    save_checkpoint(load_checkpoint(good, "cpu"), tmp_path / "third.safetensors")
    assert checkpoint_hash(tmp_path / "third.safetensors") == hashlib.sha256(whole).hexdigest()


def test_order_of_entries_does_not_matter(model, whole, tmp_path):
    shuffled = Detector(model.network, dict(reversed(model.info.items())), "cpu")
    save_checkpoint(shuffled, tmp_path / "a.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == whole


def test_numbers_of_numpy_and_nan_are_made_plain(tmp_path):
    model = tiny_model()
    metrics = {"mAP50": np.float32(0.5), "loss": float("nan"), "n": np.arange(2), "p": tmp_path}
    model.info["training"] = {"metrics": metrics}
    save_checkpoint(model, tmp_path / "a.safetensors")
    found = read_info(tmp_path / "a.safetensors")["training"]["metrics"]
    assert found == {"mAP50": 0.5, "loss": None, "n": [0, 1], "p": str(tmp_path)}


def test_loading_leaves_random_numbers_alone(good):
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    load_checkpoint(good, "cpu")
    assert torch.equal(torch.rand(3), expected)


def test_loaded_model_finds_the_same(tmp_path, good):
    image = np.random.default_rng(0).integers(0, 255, (96, 96, 3), np.uint8)
    first = load_checkpoint(good, "cpu")
    save_checkpoint(first, tmp_path / "again.safetensors")
    second = load_checkpoint(tmp_path / "again.safetensors", "cpu")
    a, b = (m.detect(image, confidence=0.02, object_size=10.0) for m in (first, second))
    np.testing.assert_array_equal(a.xyxy, b.xyxy)


def test_width_of_a_head_from_pretrained_weights_comes_back(tmp_path):
    donor = DetectionModel({**copy.deepcopy(TINY), "nc": 40}, nc=40, verbose=False)
    model = tiny_model()
    model.network.load(donor, verbose=False)
    assert model.network.head_width == 40
    save_checkpoint(model, tmp_path / "wide.safetensors")
    again = load_checkpoint(tmp_path / "wide.safetensors", "cpu").network
    assert again.head_width == 40
    kept = model.network.state_dict()["model.3.cv3.0.0.conv.weight"].half().float()
    assert torch.equal(again.state_dict()["model.3.cv3.0.0.conv.weight"], kept)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["yolov8n.yaml", "yolo11n.yaml", "yolo26n.yaml"])
def test_layouts_of_ultralytics_come_back(layout, tmp_path):
    network = StainDetectionModel(layout, nc=3, imgsz=96)
    names = ["RBC", "WBC", "Platelets"]
    model = Detector(network, describe_network(network, "cells", names, 96), "cpu")
    save_checkpoint(model, tmp_path / "a.safetensors")
    again = load_checkpoint(tmp_path / "a.safetensors", "cpu")
    image = torch.rand(1, 3, 96, 96)
    with torch.no_grad():
        expected, found = (m.network(image)[0] for m in (model, again))
    torch.testing.assert_close(found, expected, atol=0.5, rtol=0.05)
    assert (tmp_path / "a.safetensors").stat().st_size < 8e6


# --- header, hash, names -------------------------------------------------------------------------


def test_info_is_read_without_torch(good):
    code = (
        "import sys\n"
        "from napari_beerlanet.core.checkpoints.checkpoint import packaged_models, read_info\n"
        f"packaged_models(); print(read_info({str(good)!r})['classes'])\n"
        "print({'torch', 'ultralytics', 'safetensors', 'qtpy'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-X", "utf8", "-c", code], capture_output=True, encoding="utf-8"
    )
    assert done.stdout.splitlines() == ["['a', 'Zelle ß']", "set()"], done.stderr


def test_a_header_is_read_once_for_every_state_of_a_file(good, tmp_path, monkeypatch):
    """Lists of models ask for it with every refresh, on the GUI thread."""
    reads, read = [], checkpoint.read_header
    monkeypatch.setattr(checkpoint, "read_header", lambda *given: reads.append(1) or read(*given))
    path = tmp_path / "model.safetensors"
    path.write_bytes(good.read_bytes())
    read_info(path)["classes"].append("of the caller alone")
    assert "of the caller alone" not in read_info(path)["classes"]
    assert len(reads) == 1
    os.utime(path, ns=(0, 0))
    read_info(path)
    assert len(reads) == 2, "it may have changed"
    path.unlink()
    with pytest.raises(CheckpointError):
        read_info(path)


def test_read_info_is_what_load_gives(good):
    assert read_info(good) == load_checkpoint(good, "cpu").info


def test_packaged_model_goes_by_its_name(whole, tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "small-cells.safetensors").write_bytes(whole)
    monkeypatch.setattr(checkpoint, "_models_folder", lambda: tmp_path / "models")
    assert packaged_models() == ["small-cells"]
    assert load_checkpoint("small-cells", "cpu").info["name"] == "tiny"
    assert checkpoint_hash("small-cells") == hashlib.sha256(whole).hexdigest()
    with pytest.raises(CheckpointError, match='no such file, did you mean "small-cells"'):
        load_checkpoint("small-cell")


def test_every_packaged_model_describes_itself():
    for name in packaged_models():
        assert read_info(name)["format"] == 1


def test_missing_file_names_its_neighbours(good):
    assert 'did you mean "tiny.safetensors"?' in refused(good.with_name("tny.safetensors"))


def test_error_is_a_file_error():
    assert issubclass(CheckpointError, FileError)


def test_unknown_device_is_refused(good):
    with pytest.raises(ValueError, match="no device name"):
        load_checkpoint(good, "toaster")


# --- files that are no checkpoints ---------------------------------------------------------------


def test_folder(good):
    assert 'a folder; name a file in it, did you mean "tiny.safetensors"?' in refused(good.parent)


def test_other_suffix(tmp_path):
    assert "ends in .safetensors" in refused(tmp_path / "model.onnx", b"abc")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.safetensors")
    assert "not a regular file" in refused(tmp_path / "pipe.safetensors")


def test_no_permission(good, monkeypatch):
    def deny(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.read_bytes", deny)
    assert refused(good).endswith("no permission to read it.")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read all")
def test_no_permission_on_the_disk(good):
    good.chmod(0)
    assert refused(good).endswith("no permission to read it.")


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("content", [b"", b"x", b"\0" * 8, b"hello world, no model at all" * 50])
def test_no_checkpoint_at_all(tmp_path, content, suffix):
    sentence = refused(tmp_path / f"a{suffix}", content)
    assert ("empty" if not content else "not a ") in sentence


def test_truncated_anywhere(whole, tmp_path):
    for length in [*range(0, 64, 7), *range(64, len(whole), 1009), len(whole) - 1]:
        sentence = refused(tmp_path / "cut.safetensors", whole[:length])
        assert "cut short" in sentence or "empty" in sentence


def test_bytes_too_many(whole, tmp_path):
    assert "5 bytes belong to no tensor" in refused(tmp_path / "a.safetensors", whole + b"\0" * 5)


def test_safetensors_of_something_else(tmp_path):
    path = tmp_path / "other.safetensors"
    save_file({"weight": torch.zeros(3)}, path)
    assert "a safetensors file, but not a checkpoint of napari-beerlanet" in refused(path)
    save_file({"weight": torch.zeros(3)}, path, {"format": "pt"})
    assert "a safetensors file, but not" in refused(path)


def test_flipped_weight_is_noticed(whole, tmp_path):
    data = bytearray(whole)
    data[-300] ^= 1
    assert "damaged: its checksum differs" in refused(tmp_path / "a.safetensors", bytes(data))


class Payload:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_renamed_pickle_runs_nothing(tmp_path, protocol):
    data = pickle.dumps(Payload(tmp_path / "ran"), protocol)
    sentence = refused(tmp_path / "a.safetensors", data)
    assert ("a pickle" in sentence) == (protocol > 0)
    torch.save({"model": Payload(tmp_path / "ran")}, tmp_path / "b.safetensors")
    assert "a pickle, which may hold a program" in refused(tmp_path / "b.safetensors")
    assert not (tmp_path / "ran").exists()


# --- headers that lie ----------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 2**24 + 1, 2**40, 2**63, 2**64 - 1])
def test_length_of_the_header_lies(whole, tmp_path, length):
    data = length.to_bytes(8, "little") + whole[8:]
    assert "not a checkpoint, or cut short" in refused(tmp_path / "a.safetensors", data)


def _beyond(entry):
    entry["data_offsets"] = [n + 10_000_000 for n in entry["data_offsets"]]


def _overlap(entry):
    entry["data_offsets"] = [n - 8 for n in entry["data_offsets"]]


def _gap(entry):
    entry["data_offsets"] = [n + 8 for n in entry["data_offsets"]]


def _huge(entry):
    entry.update(shape=[2**20, 2**20], data_offsets=[0, 2**41])


def _endless(entry):
    entry.update(shape=[2**62, 2**62, 2**62])


def _negative(entry):
    entry["data_offsets"] = [-8, 8]


def _wrong_size(entry):
    entry["shape"] = [7]


def _odd_type(entry):
    entry["dtype"] = "F8_E4M3"


LIES = {
    _beyond: "beyond the file",
    _overlap: "overlaps",
    _gap: "gap|overlaps|beyond",
    _huge: "beyond the file|overlaps|does not say|size of its shape",
    _endless: "does not say where",
    _negative: "does not say where",
    _wrong_size: "does not have the size of its shape",
    _odd_type: "is of type F8_E4M3, which no checkpoint holds",
    dict.clear: "does not say where",
}


@pytest.mark.parametrize("lie", LIES)
def test_place_of_a_tensor_lies(whole, tmp_path, lie):
    table, numbers = split(whole)
    last = max((k for k in table if k != "__metadata__"), key=lambda k: table[k]["data_offsets"][1])
    lie(table[last])
    sentence = refused(tmp_path / "a.safetensors", join(table, numbers))
    assert any(part in sentence for part in LIES[lie].split("|")), sentence


@pytest.mark.parametrize(
    "header",
    [
        b"[1, 2]",
        b'{"a": ',
        b"\xff\xfe{}",
        b'{"a": 1, "a": 2}',
        b'{"a": NaN}',
        b"[" * 100_000,
        b"null",
    ],
)
def test_header_is_no_table(tmp_path, header):
    data = len(header).to_bytes(8, "little") + header + b"\0" * 64
    assert "not a checkpoint, or damaged" in refused(tmp_path / "a.safetensors", data)


def test_future_version(whole, tmp_path):
    data = changed(whole, {"format": 2, "classes": "spelled differently by then"})
    sentence = refused(tmp_path / "a.safetensors", data)
    assert "written in format 2 by a newer napari-beerlanet" in sentence
    assert "update" in sentence


SEEN = {"mean": [0.1] * 3, "sd": [0.1] * 3, "count": 9}
BAD = {
    "format": [None, 0, "1", True],
    "name": ["", 3, "x" * 201],
    "classes": [[], ["a"], ["a", "a"], ["a", 3], "ab", ["a", ""], {"a": 1}],
    "colours": [["#ff0000"], ["red", "blue"], None, ["#ff0000", "#00ff0"]],
    "components": [0, 65, 4, "3", 3.0, True, None],
    "iterations": [0, 10**9, "converge"],
    "domain": ["sqrt", ["log"], None],
    "unit_spectra": [1, None],
    "light": ["yes"],
    "reference_pixels": [0, -1, 1e300, "big"],
    "padding": [1.5, -0.1, []],
    "image_size": [0, 16, 10**6, 96.5],
    "pixel_size": [0, -1.0, "0.25"],
    "object_sizes": [
        [],
        {"b": {}},
        {"a": {}},
        {"a": {"low": 1, "median": 0, "high": 2}},
        {"a": {"low": 1, "median": 3, "high": 2, "count": 4}},
        {"a": {"low": 1, "median": 10**5, "high": 10**6, "count": 4}},
    ],
    "stain_seen": [
        [],
        {},
        {"background": {"mean": [1, 2], "sd": [1, 2, 3]}, "spectra": []},
        {"background": {"mean": [1, 2, 3], "sd": [1, 2, 3]}, "spectra": [[1, 2], [1], [1, 2]]},
        {"background": {"mean": [1, 2, 3], "sd": [1, 2, 3]}, "spectra": [["a"], [1], [2]]},
        {"background": {"mean": [1, 2, 3], "sd": [1, 2, 3]}, "spectra": [1, 2, 3]},
    ],
    "densities_seen": [
        [],
        {"b": SEEN},
        {"a": [SEEN]},
        {"a": {**SEEN, "mean": [0.1] * 2}},
        {"a": {**SEEN, "mean": [0.1] * 4}},
        {"a": {**SEEN, "mean": 0.1}},
        {"a": {**SEEN, "mean": ["0.1"] * 3}},
        {"a": {**SEEN, "sd": [0.1, None, 0.1]}},
        {"a": {**SEEN, "sd": [0.1, -0.1, 0.1]}},
        {"a": {**SEEN, "count": 0}},
        {"a": {"mean": [0.1] * 3, "sd": [0.1] * 3}},
    ],
    "training": [
        "yesterday",
        [],
        {"images": [2, 1]},
        {"images": {"train": "two"}},
        {"images": {"train": -1}},
        {"boxes": {"train": {"a": 3}}},
        {"boxes": {"train": 3, "val": 2}},
        {"epochs": "many"},
        {"date": 2026},
        {"data": ["a.yaml"]},
        {"metrics": {"mAP50": "high"}},
        {"metrics": {"test": {"mAP50": [0.5]}}},
        {"metrics": {"test": {"mAP50": 0.5, "images": "all"}}},
        {"metrics": [0.5]},
        {"compared": {"reference": [0.5, 0.6]}},
        {"compared": {"reference": [{}, {}]}},
        {"compared": {"forgotten": "a"}},
        {"versions": ["torch"]},
        {"crop_side": "wide"},
    ],
    "notes": ["text", [1]],
    "unknown": ["parasites", ["parasites"], {"parasites": "a"}, {"parasites": ["c"]}, {"": []}],
    "model_yaml": [None, [], {}, {"nc": 2}, "yolov8n.yaml"],
}


@pytest.mark.parametrize(("key", "value"), [(k, v) for k, values in BAD.items() for v in values])
def test_entry_that_does_not_fit(whole, tmp_path, key, value):
    refused(tmp_path / "a.safetensors", changed(whole, {key: value}))


def test_wrong_densities_are_named(whole, tmp_path):
    data = changed(whole, {"densities_seen": {"a": {**SEEN, "mean": [0.1] * 2}}})
    assert "densities_seen must be none, or mean" in refused(tmp_path / "a.safetensors", data)
    (tmp_path / "b.safetensors").write_bytes(changed(whole, {"densities_seen": {"a": SEEN}}))
    assert load_checkpoint(tmp_path / "b.safetensors", "cpu").info["densities_seen"] == {"a": SEEN}


def test_an_older_checkpoint_tells_no_densities(model, whole, tmp_path):
    path = tmp_path / "old.safetensors"
    path.write_bytes(changed(whole, also=lambda info, _: info.pop("densities_seen")))
    old = load_checkpoint(path, "cpu")
    assert "densities_seen" not in old.info
    image = np.random.default_rng(0).integers(0, 255, (96, 96, 3), np.uint8)
    columns, more = (m.detect(image, 0.0).candidates.columns for m in (old, model))
    assert set(more) - set(columns) == {"unlike training", "class agreement"}
    save_checkpoint(old, path)
    assert "densities_seen" not in load_checkpoint(path, "cpu").info


def test_what_a_model_does_not_know_is_in_its_file(model, tmp_path):
    model = Detector(model.network, {**model.info, "unknown": {"ghosts": [], "parasites": ["a"]}})
    save_checkpoint(model, tmp_path / "a.safetensors")
    info = load_checkpoint(tmp_path / "a.safetensors", "cpu").info
    assert info["unknown"] == {"ghosts": [], "parasites": ["a"]}
    text = "Does not know ghosts. Does not know parasites; may call them a."
    assert limits_text(info) == text
    assert limits_text({}) == limits_text({"unknown": {}}) == ""
    assert limits_text({"unknown": {"x": ["a", "b", "c"]}}).endswith("may call them a, b or c.")


@pytest.mark.parametrize(
    ("classes", "left"),
    [
        (["RBC", "WBC"], {"parasites": ["WBC"], "blasts": ["WBC"]}),
        (["RBC", "WBC", "ring"], {"blasts": ["WBC"]}),
        (["Infected_RBC"], {"blasts": []}),
        (["lympho_blast", "WBC"], {"parasites": ["WBC"]}),
    ],
)
def test_what_was_trained_since_is_no_longer_unknown(classes, left):
    unknown = {"parasites": ["WBC", "Platelets"], "blasts": ["WBC"]}
    assert still_unknown(unknown, classes) == left
    assert still_unknown(None, classes) == {}


def test_deeply_nested_record(whole, tmp_path):
    deep: list = []
    for _ in range(200):
        deep = [deep]
    sentence = refused(tmp_path / "a.safetensors", changed(whole, {"training": {"x": deep}}))
    assert "nested too deeply" in sentence


@pytest.mark.parametrize(
    "key", sorted(BAD.keys() - {"notes", "format", "densities_seen", "unknown"})
)
def test_entry_that_is_missing(whole, tmp_path, key):
    data = changed(whole, also=lambda info, _: info.pop(key))
    assert f"lacks {key}" in refused(tmp_path / "a.safetensors", data)


# --- weights that do not fit ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.0.conv.weight", "stain.log_lam", "mix.bias"])
def test_missing_weight(whole, tmp_path, name):
    data = changed(whole, also=lambda _, tensors: tensors.pop(name))
    sentence = refused(tmp_path / "a.safetensors", data)
    assert f"it lacks 1 weights of its network, such as {name}" in sentence


@pytest.mark.parametrize("name", ["model.9.conv.weight", "stain.more", "other"])
def test_weight_without_a_place(whole, tmp_path, name):
    data = changed(whole, weights={name: torch.zeros(2)})
    sentence = refused(tmp_path / "a.safetensors", data)
    assert f"1 weights have no place in its network, such as {name}" in sentence


@pytest.mark.parametrize("name", ["model.0.conv.weight", "stain.raw_spectra", "mix.weight"])
def test_wrong_shape(whole, tmp_path, name):
    data = changed(whole, weights={name: torch.zeros(3, 5)})
    assert f"{name} has shape (3, 5)" in refused(tmp_path / "a.safetensors", data)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["model.0.conv.weight", "stain.log_gamma"])
def test_weights_that_are_no_numbers(whole, tmp_path, name, value):
    weight = load(whole)[name]
    weight.view(-1)[0] = value
    data = changed(whole, weights={name: weight})
    assert f"{name} holds values that are no numbers" in refused(tmp_path / "a.safetensors", data)


def test_weights_of_a_wrong_type(whole, tmp_path):
    def worse(_, tensors):
        tensors["stain.log_lam"] = tensors["stain.log_lam"].half()

    data = changed(whole, also=worse)
    assert "stain.log_lam is of type torch.float16" in refused(tmp_path / "a.safetensors", data)


# --- saving --------------------------------------------------------------------------------------


def test_failed_write_leaves_the_old_file(model, good, whole, monkeypatch):
    def fails(self, data):
        with open(self, "wb") as file:
            file.write(data[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", fails)
    with pytest.raises(CheckpointError, match=r"cannot write it \(no space left on device\)"):
        save_checkpoint(model, good)
    assert good.read_bytes() == whole
    assert [p.name for p in good.parent.iterdir()] == [good.name]


def test_where_nothing_can_be_written(model, tmp_path):
    (tmp_path / "taken.safetensors").mkdir()
    for name, reason in {
        "taken.safetensors": "a folder of this name",
        "none/a.safetensors": "cannot write it",
        "a.pt": "must end in .safetensors",
    }.items():
        with pytest.raises(CheckpointError, match=reason):
            save_checkpoint(model, tmp_path / name)
    assert [p.name for p in tmp_path.iterdir()] == ["taken.safetensors"]


def test_model_that_could_not_be_loaded_is_not_saved(tmp_path):
    broken = tiny_model()
    with torch.no_grad():
        broken.network.model[0].conv.weight[0] = float("nan")
    with pytest.raises(CheckpointError, match="no numbers"):
        save_checkpoint(broken, tmp_path / "a.safetensors")
    fused = tiny_model()
    fused.network.fuse(verbose=False)
    with pytest.raises(CheckpointError, match="lacks"):
        save_checkpoint(fused, tmp_path / "a.safetensors")
    nameless = tiny_model()
    nameless.info["classes"] = ["a"]
    with pytest.raises(CheckpointError, match="colours"):
        save_checkpoint(nameless, tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())


# --- damage of any kind --------------------------------------------------------------------------


def equal_or_refused(path, data, model):
    """A damaged file is told, or the damage changed nothing that counts."""
    path.write_bytes(data)
    try:
        again = load_checkpoint(path, "cpu")
    except CheckpointError:
        return
    assert again.info == {**model.info, "model_yaml": again.info["model_yaml"]}
    for name, value in again.network.state_dict().items():
        own = model.network.state_dict()[name]
        assert torch.allclose(value.float(), own.float(), atol=1e-2, rtol=1e-2), name


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    flips=st.lists(st.tuples(st.floats(0, 1), st.integers(1, 255)), min_size=1, max_size=4),
    early=st.booleans(),
)
def test_flipped_bytes(model, whole, tmp_path, flips, early):
    data = bytearray(whole)
    span = 8 + int.from_bytes(whole[:8], "little") if early else len(data)
    for place, mask in flips:
        data[int(place * (span - 1))] ^= mask
    equal_or_refused(tmp_path / "a.safetensors", bytes(data), model)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(start=st.floats(0, 1), length=st.integers(1, 400), what=st.binary(max_size=40))
def test_replaced_stretches(model, whole, tmp_path, start, length, what):
    place = int(start * len(whole))
    equal_or_refused(
        tmp_path / "a.safetensors", whole[:place] + what + whole[place + length :], model
    )
