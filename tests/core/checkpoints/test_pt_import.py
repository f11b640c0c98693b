"""`.pt` files: models of Ultralytics come in, and whatever else a pickle asks for does not run."""

import copy
import io
import os
import pickle
import re
import socket
import struct
import zipfile

import pytest
import torch

from napari_beerlanet.core.checkpoints.checkpoint import (
    CheckpointError,
    load_checkpoint,
    save_checkpoint,
)
from napari_beerlanet.core.detection.network import StainDetectionModel
from napari_beerlanet.core.detection.ultralytics_api import DetectionModel

TINY = {
    "nc": 2,
    "reg_max": 1,
    "backbone": [[-1, 1, "Conv", [8, 3, 4]], [-1, 1, "Conv", [8, 3, 2]]],
    "head": [[-1, 1, "C2f", [8]], [[1, 2], 1, "Detect", ["nc"]]],
}


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """Whoever asks for the network is caught."""
    asked = []

    def refuse(self, address, *_):
        asked.append(address)
        raise OSError("no network in tests")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    yield
    assert not asked


@pytest.fixture
def marker(tmp_path):
    """A folder that only a payload makes."""
    return tmp_path / "ran"


def plain_network():
    torch.manual_seed(0)
    network = DetectionModel(copy.deepcopy(TINY), nc=2, verbose=False).eval()
    network.names = {0: "red", 1: "white"}
    return network


def trained_record(network):
    """What Ultralytics writes at the end of each epoch."""
    moments = {k: {"momentum_buffer": p.detach() + 1} for k, p in enumerate(network.parameters())}
    return {
        **{"epoch": 3, "best_fitness": 0.5, "model": None, "ema": network.half(), "updates": 10},
        **{"optimizer": {"state": moments}, "scaler": {}, "date": "2026-01-02"},
        **{"train_args": {"imgsz": 96, "data": "x.yaml"}, "version": "8.4.0"},
    }


def refused(path):
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, "cpu")
    sentence = str(caught.value)
    assert sentence.startswith(str(path))
    assert "\n" not in sentence
    return sentence


def archive(path, program, **parts):
    """A `.pt` with this pickle program."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a/data.pkl", program)
        for name, content in parts.items():
            file.writestr(f"a/{name}", content)
    return path


# --- models come in ------------------------------------------------------------------------------


def test_plain_yolo_gets_an_untrained_front_end_and_says_so(tmp_path):
    network = plain_network()
    torch.save({"model": network, "train_args": {"imgsz": 96}}, tmp_path / "plain.pt")
    model = load_checkpoint(tmp_path / "plain.pt", "cpu")
    assert model.info["training"] is None
    assert "untrained" in model.info["notes"][0]
    assert model.info["classes"] == ["red", "white"]
    assert model.info["image_size"] == 96
    assert model.info["reference_pixels"] == 96**2
    own = model.network.state_dict()
    for name, value in network.state_dict().items():
        assert torch.equal(own[name], value), name
    assert model.network.mix.weight.abs().max() > 0.1


def test_head_that_kept_the_width_of_pretrained_weights(tmp_path):
    network = plain_network()
    network.load(DetectionModel({**copy.deepcopy(TINY), "nc": 40}, nc=40, verbose=False), False)
    torch.save({"model": network}, tmp_path / "wide.pt")
    own = load_checkpoint(tmp_path / "wide.pt").network.state_dict()
    for name, value in network.state_dict().items():
        assert torch.equal(own[name].cpu(), value), name


def test_front_end_of_an_import_shows_much_the_same_colours(tmp_path):
    torch.save({"model": plain_network()}, tmp_path / "plain.pt")
    expected = StainDetectionModel(copy.deepcopy(TINY), nc=2, imgsz=640)
    expected.fit_mix()
    found = load_checkpoint(tmp_path / "plain.pt", "cpu").network
    assert torch.equal(found.mix.weight, expected.mix.weight)


def test_ours_of_an_interrupted_training(tmp_path):
    torch.manual_seed(0)
    settings = {"imgsz": 96, "components": 3, "iterations": 4, "light": False, "lam": 1.2e-5}
    network = StainDetectionModel(copy.deepcopy(TINY), nc=2, **settings)
    network.fit_mix()
    network.names = {0: "red", 1: "white"}
    network.stain.reference_pixels = 1234.0
    network.args = type(plain_network())  # anything: it is not looked at
    torch.save(trained_record(copy.deepcopy(network)), tmp_path / "last.pt")
    model = load_checkpoint(tmp_path / "last.pt", "cpu")
    assert "not finished" in model.info["notes"][0]
    assert model.info["components"] == 3
    assert model.info["reference_pixels"] == 1234.0
    assert model.network.light is False
    for name, value in network.half().state_dict().items():
        found = model.network.state_dict()[name]
        assert torch.equal(found, value.to(found.dtype)), name
    save_checkpoint(model, tmp_path / "ours.safetensors")
    assert load_checkpoint(tmp_path / "ours.safetensors", "cpu").info == model.info


def test_yolov8n_is_what_ultralytics_reads(shared):
    path = shared / "weights" / "yolov8n.pt"
    if not path.is_file():
        pytest.skip("yolov8n.pt is not there")
    from ultralytics.nn.tasks import torch_safe_load

    expected = torch_safe_load(str(path), safe_only=True)[0]["model"].float()
    found = load_checkpoint(path, "cpu").network
    assert found.names == expected.names
    assert found.yaml["backbone"] == expected.yaml["backbone"]
    theirs = expected.state_dict()
    own = {k: v for k, v in found.state_dict().items() if k.startswith("model.")}
    assert own.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in own.items())
    image = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(found.predict_mixed(image)[0], expected.eval()(image)[0])


def test_nothing_is_looked_for_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("yolov8n.pt", "https://example.org/yolov8n.pt", "yolov5s.pt"):
        with pytest.raises(CheckpointError, match="no such file"):
            load_checkpoint(name, "cpu")
    assert not list(tmp_path.iterdir())


# --- other models --------------------------------------------------------------------------------


def test_weights_alone_are_no_model(tmp_path):
    torch.save(plain_network().state_dict(), tmp_path / "a.pt")
    assert "holds no model" in refused(tmp_path / "a.pt")


def test_other_module(tmp_path):
    torch.save({"model": torch.nn.Linear(2, 2)}, tmp_path / "a.pt")
    assert "holds Linear, not a detection model" in refused(tmp_path / "a.pt")


def test_fused_network(tmp_path):
    torch.save({"model": plain_network().fuse(verbose=False)}, tmp_path / "a.pt")
    assert "lacks" in refused(tmp_path / "a.pt")


def test_torchscript(tmp_path):
    archive(tmp_path / "a.pt", pickle.dumps(1, 2), **{"constants.pkl": b""})
    assert "TorchScript" in refused(tmp_path / "a.pt")


def test_old_or_foreign_formats(tmp_path):
    torch.save({"a": 1}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    assert "not a .pt of Ultralytics" in refused(tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "b.pt", "w") as file:
        file.writestr("readme.txt", "hello")
    assert "a zip file, but not a .pt" in refused(tmp_path / "b.pt")


def test_cut_short(tmp_path):
    torch.save({"model": plain_network()}, tmp_path / "whole.pt")
    data = (tmp_path / "whole.pt").read_bytes()
    for length in range(1, len(data), len(data) // 12):
        (tmp_path / "cut.pt").write_bytes(data[:length])
        assert "cut short" in refused(tmp_path / "cut.pt")


# --- pickles with a payload ----------------------------------------------------------------------


class Call:
    def __init__(self, function, *arguments):
        self.parts = function, arguments

    def __reduce__(self):
        return self.parts


@pytest.mark.parametrize("place", ["model", "ema", "train_args", "deep inside"])
def test_payload_does_not_run(tmp_path, marker, place):
    network = plain_network()
    payload = Call(os.mkdir, str(marker))
    if place == "deep inside":
        network.model[0].extra = payload
    torch.save({"model": network, **({} if " " in place else {place: payload})}, tmp_path / "a.pt")
    assert "nothing was run" in refused(tmp_path / "a.pt")
    assert not marker.exists()


@pytest.mark.parametrize("source", ["eval", "exec", "__import__", "open", "compile"])
def test_builtins_are_not_called(tmp_path, marker, source):
    text = f"__import__('os').mkdir({str(marker)!r})"
    program = f"cbuiltins\n{source}\n(V{text}\ntR.".encode()
    assert f"it asks for builtins.{source}" in refused(archive(tmp_path / "a.pt", program))
    assert not marker.exists()


def test_known_classes_are_not_called(tmp_path, marker):
    """Ultralytics' restricted loader runs the second file's payload here."""
    from ultralytics.nn.distill_model import DistillationModel

    torch.save({"model": Call(os.mkdir, str(marker))}, tmp_path / "second.pt")
    student = DetectionModel.__new__(DetectionModel)
    object.__setattr__(student, "__dict__", {"yaml": {}})
    chained = Call(DistillationModel, str(tmp_path / "second.pt"), student)
    torch.save({"model": chained}, tmp_path / "first.pt")
    assert "holds DistillationModel, not a detection model" in refused(tmp_path / "first.pt")
    assert not marker.exists()


def test_layers_that_download_are_not_called(tmp_path):
    from ultralytics.nn.modules.block import TorchVision

    network = plain_network()
    network.extra = Call(TorchVision, "resnet18", "DEFAULT")
    torch.save({"model": network}, tmp_path / "a.pt")
    assert load_checkpoint(tmp_path / "a.pt", "cpu").info["classes"] == ["red", "white"]


def test_loaders_of_torch_are_not_called(tmp_path, marker):
    torch.save({"model": Call(os.mkdir, str(marker))}, tmp_path / "second.pt")
    torch.save({"model": Call(torch.load, str(tmp_path / "second.pt"))}, tmp_path / "first.pt")
    assert "not a detection model" in refused(tmp_path / "first.pt")
    assert not marker.exists()


def test_layout_in_a_pickle_is_not_evaluated(tmp_path, marker):
    network = plain_network()
    network.yaml = {**TINY, "activation": f"__import__('os').mkdir({str(marker)!r}) or nn.SiLU()"}
    torch.save({"model": network}, tmp_path / "a.pt")
    assert "activation" in refused(tmp_path / "a.pt")
    assert not marker.exists()


# --- pickles that eat memory ---------------------------------------------------------------------


def test_huge_memo(tmp_path):
    program = b"\x80\x02}r" + struct.pack("<I", 2**32 - 1) + b"."
    assert "more memory than any model needs" in refused(archive(tmp_path / "a.pt", program))


def test_one_number_as_a_huge_tensor(tmp_path):
    network = plain_network()
    network.model[0].conv.weight = torch.nn.Parameter(torch.zeros(1).expand(8, 3, 3, 3))
    torch.save({"model": network}, tmp_path / "a.pt")
    assert "larger than the numbers that it is made of" in refused(tmp_path / "a.pt")


def test_the_same_numbers_many_times(tmp_path):
    network = plain_network()
    numbers = torch.zeros(100_000)
    for k in range(50):
        network.register_buffer(f"extra{k}", numbers)
    torch.save({"model": network}, tmp_path / "a.pt")
    assert "larger than the file" in refused(tmp_path / "a.pt")


NESTED = b"K\x01\x85" + b"q\x00h\x00h\x00\x86" * 60  # (t, t) of itself, sixty times
"""Hashing it takes 2⁶⁰ steps."""


@pytest.mark.parametrize(
    "program",
    [
        b"\x80\x02}" + NESTED + b"K\x01s.",
        b"\x80\x04\x8f(" + NESTED + b"\x90.",
        b"\x80\x04(" + NESTED + b"\x91.",
    ],
    ids=["key of a dictionary", "member of a set", "member of a frozenset"],
)
def test_a_tuple_that_takes_for_ever_to_hash(tmp_path, program):
    assert "a tuple that is larger" in refused(archive(tmp_path / "a.pt", program))


def test_numbers_that_all_collide_in_a_dictionary(tmp_path):
    entries = b"".join(
        b"\x8a\x0c" + (k * (2**61 - 1)).to_bytes(12, "little") + b"K\x01" for k in range(1, 2000)
    )
    path = archive(tmp_path / "a.pt", b"\x80\x02}(" + entries + b"u.")
    assert "a number that no model needs" in refused(path)


@pytest.mark.parametrize("made", [b"]", b"\x8f", b"}"], ids=["lists", "sets", "dictionaries"])
def test_millions_of_empty_containers(tmp_path, made):
    path = archive(tmp_path / "a.pt", b"\x80\x04" + made * 3_000_000 + b".")
    assert "larger than any model's" in refused(path)


def test_names_of_a_megabyte(tmp_path):
    network = plain_network()
    network.model[0]._modules["a" * 1_000_000] = torch.nn.Identity()
    torch.save({"model": network}, tmp_path / "a.pt")
    assert "no proper name" in refused(tmp_path / "a.pt")


def test_a_storage_is_read_once_for_all_its_tensors(tmp_path, monkeypatch):
    """Thousands of small tensors on one large storage."""
    network = plain_network()
    numbers = torch.zeros(100_000)
    for k in range(200):
        network.register_buffer(f"extra{k}", numbers[k : k + 1])
    torch.save({"model": network}, tmp_path / "a.pt")
    reads = []
    read = zipfile.ZipFile.read
    monkeypatch.setattr(
        zipfile.ZipFile, "read", lambda self, name: reads.append(name) or read(self, name)
    )
    assert "no place in its network" in refused(tmp_path / "a.pt")
    assert len(reads) == len(set(reads))


def test_network_within_itself(tmp_path):
    network = plain_network()
    network.model[0]._modules["again"] = network.model
    torch.save({"model": network}, tmp_path / "a.pt")
    assert "not built as Ultralytics" in refused(tmp_path / "a.pt")


def test_layout_within_itself(tmp_path):
    network = plain_network()
    rows = copy.deepcopy(TINY["backbone"])
    rows[0][3].append(rows)
    network.yaml = {**TINY, "backbone": rows}
    torch.save({"model": network}, tmp_path / "a.pt")
    assert "layer 0 (Conv) has arguments" in refused(tmp_path / "a.pt")


def test_compressed_parts(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.pt", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a/data.pkl", b"\0" * 1_000_000)
    assert "larger than the file" in refused(tmp_path / "a.pt")


@pytest.mark.parametrize("seed", range(40))
def test_damaged_anywhere(tmp_path, seed):
    """Loaded, or told in a sentence with what to do; nothing else."""
    buffer = io.BytesIO()
    torch.save({"model": plain_network(), "train_args": {"imgsz": 96}}, buffer)
    data = bytearray(buffer.getvalue())
    generator = torch.Generator().manual_seed(seed)
    for place in torch.randint(0, len(data) // (1 + seed % 3), (4,), generator=generator).tolist():
        data[place] ^= 1 << (seed % 8)
    (tmp_path / "a.pt").write_bytes(data)
    try:
        load_checkpoint(tmp_path / "a.pt", "cpu")
    except CheckpointError as error:
        assert str(error).startswith(str(tmp_path))  # noqa: PT017
        assert not re.search(r"\(\w+Error\)", str(error))  # noqa: PT017
        if "damaged" in str(error):
            assert str(error).endswith("; copy or download it again.")  # noqa: PT017


@pytest.mark.parametrize("seed", range(3))
def test_parts_that_no_longer_fit_are_one_sentence_with_the_way_out(tmp_path, seed):
    buffer = io.BytesIO()
    torch.save({"model": plain_network()}, buffer)
    with zipfile.ZipFile(buffer) as file:
        parts = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as file:  # with checksums that fit
        for name, data in parts.items():
            half = len(data) // (seed + 2) if name.endswith("data.pkl") else len(data)
            file.writestr(name, data[:half])
    assert refused(tmp_path / "a.pt") == (
        f"{tmp_path / 'a.pt'}: damaged, as its parts do not fit together any more; copy or "
        "download it again."
    )
