"""StainGAN at a tiny size: learning, kill and resume, what is distilled, a user's own generator."""

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import textwrap
import warnings

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from fuzz.corpus import HOSTILE
from napari_beerlanet.cli.main import main
from napari_beerlanet.core.common.events import RunState
from napari_beerlanet.core.common.progress import Cancelled
from napari_beerlanet.core.common.storage import DataError, FileError
from napari_beerlanet.core.normalization.methods import (
    TRAINED_METHODS,
    fitted_normalizer,
    load_normalizer,
    save_normalizer,
)
from napari_beerlanet.core.normalization.normalizer import Normalizer, NormalizerError
from napari_beerlanet.core.normalization.staingan import (
    ColourNetwork,
    Generator,
    StainGenerator,
    build_generator,
    colour_network,
    load_generator,
)
from napari_beerlanet.core.training.runs import TrainingDiverged, inspect_run
from napari_beerlanet.core.training.staingan import (
    StainGanSettings,
    StainGanTrainer,
    _Crops,
    distill,
    patch_gan,
    train_staingan,
)
from napari_beerlanet.samples import blood_smear

TINY = {"filters": 8, "blocks": 1, "crop": 32, "steps": 6, "save_every": 2, "pool": 2}
TINY |= {"device": "cpu", "distill_steps": 200}


@pytest.fixture(scope="module")
def laboratories(tmp_path_factory):
    """Folders with a few images of a bright and of a dark, yellowish laboratory."""
    root = tmp_path_factory.mktemp("laboratories")
    for name in ("bright", "dark"):
        (root / name).mkdir()
        for seed in range(3):
            image = blood_smear((60, 70), seed=seed, cell_diameter=20.0).image
            if name == "dark":
                image = (image * (0.75, 0.7, 0.5)).astype(np.uint8)
            Image.fromarray(image).save(root / name / f"{seed}.png")
    return root / "dark", root / "bright"


@pytest.fixture(scope="module")
def whole(laboratories, tmp_path_factory):
    """A run that nobody disturbed: its folder, what it gave, and its reports."""
    folder, told = tmp_path_factory.mktemp("runs") / "whole", []
    normalizer = train_staingan(*laboratories, folder, report=told.append, **TINY)
    return folder, normalizer, told


@pytest.fixture(scope="module")
def smear():
    return (blood_smear((50, 45), seed=9, cell_diameter=20.0).image * 0.7).astype(np.uint8)


def state(folder):
    return torch.load(folder / "state.pt", weights_only=True)


def assert_same_state(one, other):
    assert one["epoch"] == other["epoch"]
    for name, network in one["model"].items():
        for key, value in network.items():
            assert torch.equal(value, other["model"][name][key]), f"{name} {key}"
    for name, pool in one["pools"].items():
        assert all(map(torch.equal, pool, other["pools"][name]))


# --- training ------------------------------------------------------------------------------------


def test_a_run_leaves_what_is_needed(whole):
    folder, _, told = whole
    assert {path.name for path in folder.iterdir()} >= {
        *("run.json", "state.pt", "normalizer.safetensors", "generator.safetensors")
    }
    run = json.loads((folder / "run.json").read_text())
    assert (run["state"], run["epoch"], run["settings"]["filters"]) == ("finished", 6, 8)
    assert set(run["losses"]) == {"adversarial", "cycle", "identity", "judges"}
    assert [p.message.split(",")[0] for p in told[:2]] == ["step 1 of 6", "step 2 of 6"]
    fractions = [p.fraction for p in told]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1


def test_distillation_lowers_its_loss(whole, laboratories):
    before, after = json.loads((whole[0] / "run.json").read_text())["distillation"]
    assert after < before
    # What a generator does to colours alone is learned nearly all.
    files = [sorted(str(p) for p in folder.iterdir()) for folder in laboratories]
    run = StainGanTrainer(StainGanSettings(**TINY), *map(_Crops, files))
    run.a_to_b = _Dimmer()
    normalizer, (before, after) = distill(run)
    assert after < 0.1 * before
    colours = run.source.batch(1, 32, np.random.default_rng(5))[0].flatten(1).T.double().numpy()
    made = normalizer.target.map_colours((colours + 1) * 127.5) / 127.5 - 1
    assert np.abs(made - np.tanh(1.5 * colours[:, ::-1])).mean() < 0.05


class _Dimmer(torch.nn.Module):
    """A generator that changes red and blue, and contrast."""

    def forward(self, images):
        return torch.tanh(1.5 * images.flip(1))


def test_killed_and_resumed_it_is_the_same(whole, laboratories, tmp_path):
    folder = tmp_path / "killed"
    program = textwrap.dedent(f"""
        import os, signal
        from napari_beerlanet.core.training.staingan import train_staingan
        def report(progress):
            if progress.message.startswith("step 3 "):
                os.kill(os.getpid(), signal.SIGKILL)
        train_staingan({str(laboratories[0])!r}, {str(laboratories[1])!r}, {str(folder)!r},
                       report=report, **{TINY!r})
    """)
    killed = subprocess.run([sys.executable, "-c", program], env={**os.environ})
    assert killed.returncode == -signal.SIGKILL
    assert state(folder)["epoch"] == 2
    again = train_staingan(None, None, folder, resume=True, device="cpu")
    assert_same_state(state(folder), state(whole[0]))
    for name, array in whole[1].state()[0].items():
        np.testing.assert_array_equal(again.state()[0][name], array)
    right = (whole[0] / "normalizer.safetensors").read_bytes()
    assert (folder / "normalizer.safetensors").read_bytes() == right


def test_cancelled_and_resumed_it_is_the_same(whole, laboratories, tmp_path):
    def report(progress):
        if progress.message.startswith("step 3 "):
            raise Cancelled

    with pytest.raises(Cancelled):
        train_staingan(*laboratories, tmp_path, report=report, **TINY)
    run = json.loads((tmp_path / "run.json").read_text())
    assert (run["state"], run["epoch"]) == ("cancelled", 3)
    train_staingan(None, None, tmp_path, resume=True, device="cpu")
    assert_same_state(state(tmp_path), state(whole[0]))


def test_a_run_that_diverges_says_so_and_is_not_resumed(laboratories, tmp_path, monkeypatch):
    step = StainGanTrainer.train_step

    def worse(self):
        return step(self) | ({"cycle": float("nan")} if self.step == 3 else {})

    monkeypatch.setattr(StainGanTrainer, "train_step", worse)
    with pytest.raises(TrainingDiverged, match="diverged in step 3 of 6: its loss"):
        train_staingan(*laboratories, tmp_path, **TINY)
    monkeypatch.undo()
    run = inspect_run(tmp_path)
    assert (run.state, run.can_resume) == (RunState.DIVERGED, False)
    assert run.message.startswith("StainGAN diverged in step 3 of 6: its loss")
    with pytest.raises(ValueError, match="diverged and cannot be resumed; choose another folder"):
        train_staingan(*laboratories, tmp_path, resume=True, **TINY)
    assert inspect_run(tmp_path).state is RunState.DIVERGED


def test_a_run_that_fails_says_why(laboratories, tmp_path):
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "image.png").write_bytes(b"no image")
    with pytest.raises(FileError):
        train_staingan(tmp_path / "odd", laboratories[1], tmp_path / "run", **TINY)
    run = inspect_run(tmp_path / "run")
    assert run.state is RunState.FAILED
    assert "image.png" in run.message


def test_a_run_is_not_resumed_with_other_settings(laboratories, whole):
    folder, _, _ = whole
    again = train_staingan(*laboratories, folder, resume=True, **TINY)
    assert again.method == "staingan"
    with pytest.raises(ValueError, match=r"started with steps 6, not 7; .*choose another folder"):
        train_staingan(*laboratories, folder, resume=True, **TINY | {"steps": 7})


def test_images_of_a_resumed_run_may_have_moved_but_are_the_same(laboratories, tmp_path):
    def report(progress):
        if progress.message.startswith("step 1 "):
            raise Cancelled

    dark, bright = (shutil.copytree(path, tmp_path / path.name) for path in laboratories)
    with pytest.raises(Cancelled):
        train_staingan(dark, bright, tmp_path / "run", report=report, **TINY)
    bright = bright.rename(tmp_path / "moved")
    train_staingan(dark, bright, tmp_path / "run", resume=True, **TINY)
    Image.new("RGB", (60, 70)).save(dark / "another.png")
    with pytest.raises(ValueError, match=r"started with other images as source; .* another folder"):
        train_staingan(dark, bright, tmp_path / "run", resume=True, **TINY)


def test_more_steps_make_the_looks_of_the_other_laboratory(laboratories):
    """The cycle's own loss falls, and crops get brighter, as the target's are."""
    settings = StainGanSettings(**{**TINY, "steps": 60, "learning_rate": 2e-3})
    files = [sorted(str(p) for p in folder.iterdir()) for folder in laboratories]
    run = StainGanTrainer(settings, *map(_Crops, files))
    losses = [run.train_step() for _ in range(40)]
    assert losses[-1]["cycle"] < 0.5 * losses[0]["cycle"]
    numbers = np.random.default_rng(0)
    dark, bright = (data.batch(8, 32, numbers) for data in (run.source, run.target))
    with torch.no_grad():
        made = run.a_to_b(dark)
    off = (made.mean((0, 2, 3)) - bright.mean((0, 2, 3))).abs().mean()
    assert off < (dark.mean((0, 2, 3)) - bright.mean((0, 2, 3))).abs().mean()


def test_a_discriminator_sees_70_pixels():
    judge = patch_gan(4).eval()
    image = torch.rand(1, 3, 128, 128, requires_grad=True)
    plain = torch.nn.Sequential(*(m for m in judge if not isinstance(m, torch.nn.InstanceNorm2d)))
    out = plain(image)
    out[0, 0, out.shape[2] // 2, out.shape[3] // 2].backward()
    seen = (image.grad.abs().sum((0, 1)) > 0).nonzero()
    assert (seen.amax(0) - seen.amin(0) + 1).tolist() == [70, 70]


def test_bad_input_is_one_sentence(laboratories, whole, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty: there are no images in it"):
        train_staingan(tmp_path / "empty", laboratories[1], tmp_path / "a", **TINY)
    with pytest.raises(DataError, match=r"gone: not a folder"):
        train_staingan(tmp_path / "gone", laboratories[1], tmp_path / "a", **TINY)
    with pytest.raises(FileError, match="there is a run in this folder"):
        train_staingan(*laboratories, whole[0], **TINY)
    with pytest.raises(ValueError, match="no run to resume"):
        train_staingan(None, None, tmp_path / "b", resume=True)
    with pytest.raises(ValueError, match="crop must be a multiple of 4"):
        train_staingan(*laboratories, tmp_path / "c", **{**TINY, "crop": 34})


# --- the distilled network ------------------------------------------------------------------------


def test_the_palette_applies_the_network_exactly(smear):
    torch.manual_seed(1)
    network = colour_network().double()
    normalizer = Normalizer("staingan", ColourNetwork.from_network(network))
    x = torch.from_numpy(smear.transpose(2, 0, 1).astype(np.float64))[None] / 127.5 - 1
    with torch.no_grad():
        pixels = ((network(x)[0].permute(1, 2, 0).numpy() + 1) * 127.5).clip(0, 255)
    np.testing.assert_array_equal(normalizer.apply(smear).rgb, np.rint(pixels).astype(np.uint8))


def test_a_saved_one_is_the_same(whole, smear, tmp_path):
    back = load_normalizer(whole[0] / "normalizer.safetensors")
    assert back.method == "staingan"
    np.testing.assert_array_equal(back.apply(smear).rgb, whole[1].apply(smear).rgb)
    generator = load_normalizer(whole[0] / "generator.safetensors")
    assert generator.method == "staingan-generator"
    with torch.no_grad():
        network = StainGenerator(8, 1).eval()
        network.load_state_dict(state(whole[0])["model"]["a_to_b"])
        x = torch.from_numpy(smear[:48, :44].transpose(2, 0, 1).astype(np.float32))[None]
        made = ((network(x / 127.5 - 1)[0].permute(1, 2, 0).numpy() + 1) * 127.5).clip(0, 255)
    got = generator.apply(smear[:48, :44]).rgb.astype(int)
    assert np.abs(got - made).max() < 0.51


def test_a_template_is_refused_and_says_what_to_do(smear):
    for method in TRAINED_METHODS:
        with pytest.raises(NormalizerError, match="train_staingan"):
            fitted_normalizer(method, smear)


@pytest.mark.parametrize("level", [0, 255])
def test_one_colour_stays_with_a_note(whole, level):
    flat = np.full((20, 20, 3), level, np.uint8)
    generator = load_normalizer(whole[0] / "generator.safetensors")
    for normalizer in (whole[1], generator):
        done = normalizer.apply(flat)
        assert done.unchanged
        assert "one colour" in done.notes[0]
        np.testing.assert_array_equal(done.rgb, flat)


def test_types_and_alpha_are_kept(whole, smear):
    generator = load_normalizer(whole[0] / "generator.safetensors")
    for normalizer in (whole[1], generator):
        by_8_bits = normalizer.apply(smear).rgb
        deep = normalizer.apply(smear.astype(np.uint16) * 257).rgb
        assert deep.dtype == np.uint16
        assert np.abs(deep / 257.0 - by_8_bits).max() < 0.51
        floats = normalizer.apply(smear / np.float32(255)).rgb
        assert floats.dtype == np.float32
        assert np.abs(floats * 255 - by_8_bits).max() < 0.52
        alpha = np.dstack([smear, np.full(smear.shape[:2], 7, np.uint8)])
        np.testing.assert_array_equal(normalizer.apply(alpha).rgb[..., 3], 7)


def test_tiles_have_no_seams(monkeypatch, smear):
    """A generator that looks at single pixels does in tiles what it does in the whole image."""
    from napari_beerlanet.core.normalization import staingan

    normalizer = Generator(StainGenerator(4, 1))
    normalizer._run = lambda x: 0.5 * x + 0.1
    normalizer._device = torch.device("cpu")
    image = torch.from_numpy(smear.transpose(2, 0, 1).astype(np.float32)) / 127.5 - 1
    monkeypatch.setattr(staingan, "_TILE", 24)
    monkeypatch.setattr(staingan, "_OVERLAP", 8)
    torch.testing.assert_close(normalizer.generate(image), 0.5 * image + 0.1, atol=1e-6, rtol=0)


# --- a user's own generator -----------------------------------------------------------------------


def test_weights_of_a_cyclegan_load(whole, smear, tmp_path):
    """By the names of pytorch-CycleGAN-and-pix2pix, with statistics as old files have them."""
    weights = state(whole[0])["model"]["a_to_b"]
    names = ["model.1.weight", "model.4.bias", "model.7.weight", "model.10.conv_block.1.weight"]
    names += ["model.10.conv_block.5.bias", "model.11.weight", "model.14.weight", "model.18.bias"]
    assert set(names) <= weights.keys()
    path = tmp_path / "mine.safetensors"
    save_file({**weights, "model.2.running_mean": torch.zeros(8)}, path)
    mine = load_generator(path)
    right = load_normalizer(whole[0] / "generator.safetensors")
    np.testing.assert_array_equal(mine.apply(smear).rgb, right.apply(smear).rgb)
    save_normalizer(mine, tmp_path / "saved.safetensors")
    back = load_normalizer(tmp_path / "saved.safetensors")
    np.testing.assert_array_equal(back.apply(smear).rgb, right.apply(smear).rgb)


def changed(weights, **changes):
    return {k: v for k, v in {**weights, **changes}.items() if v is not None}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model.1.weight": None}, "has not the weights"),
        ({"model.4.weight": None}, r"such as model\.4\.weight"),
        ({"model.4.weight": torch.zeros(3, 3)}, r"such as model\.4\.weight"),
        ({"other": torch.zeros(3)}, "such as other"),
        ({"model.4.bias": torch.full((16,), torch.nan)}, "no numbers"),
        ({"model.1.weight": torch.zeros(5000, 3, 7, 7)}, "5000 filters"),
    ],
)
def test_other_weights_are_one_sentence(whole, tmp_path, change, reason):
    weights = state(whole[0])["model"]["a_to_b"]
    path = tmp_path / "mine.safetensors"
    save_file(changed(weights, **change), path)
    with pytest.raises(
        FileError, match=rf"^{path}: no generator that can be used: .*{reason}.*\.$"
    ):
        load_generator(path)


def test_no_file_of_a_generator_is_one_sentence(tmp_path):
    for name, content in (
        ("gone.onnx", None),
        ("cut.safetensors", b"\x08\0\0\0\0\0\0\0{"),
        ("a.pt", b"x"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(FileError, match=rf"{name}: no generator that can be used: .*\.$"):
            load_generator(tmp_path / name)


# --- ONNX: a file is written by hand, as no other package here can --------------------------------


def field(number, value):
    """A field of a protocol buffer: a number, bytes, or text."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    value = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value):
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def tensor_type(name, shape):
    dims = b"".join(field(1, field(1, n) if isinstance(n, int) else field(2, n)) for n in shape)
    return field(1, name) + field(2, field(1, field(1, 1) + field(2, dims)))


def onnx_file(weight, bias, shape=("n", 3, "h", "w")):
    """A 1×1 convolution with weight (out, 3) and bias (out,)."""

    def constant(name, values, dims):
        data = struct.pack(f"<{values.size}f", *values.ravel())
        return b"".join(field(1, n) for n in dims) + field(2, 1) + field(8, name) + field(9, data)

    node = field(1, "x") + field(1, "w") + field(1, "b") + field(2, "y") + field(4, "Conv")
    out = len(weight)
    graph = field(1, node) + field(2, "generator")
    graph += field(5, constant("w", weight, (out, 3, 1, 1))) + field(5, constant("b", bias, (out,)))
    graph += field(11, tensor_type("x", shape)) + field(12, tensor_type("y", ("n", out, "h", "w")))
    return field(1, 8) + field(7, graph) + field(8, field(2, 13))


def test_an_onnx_generator_runs(smear, tmp_path):
    pytest.importorskip("onnxruntime")
    weight, bias = np.diag([0.5, 0.6, 0.7]).astype(np.float32), np.float32([0.1, 0.2, 0.0])
    path = tmp_path / "mine.onnx"
    path.write_bytes(onnx_file(weight, bias))
    mine = load_generator(path)
    x = smear / 127.5 - 1
    expected = (x @ weight.T + bias + 1) * 127.5
    assert np.abs(mine.apply(smear).rgb - expected).max() < 0.51
    save_normalizer(mine, tmp_path / "saved.safetensors")
    back = load_normalizer(tmp_path / "saved.safetensors")
    np.testing.assert_array_equal(back.apply(smear).rgb, mine.apply(smear).rgb)


def test_another_onnx_file_is_one_sentence(tmp_path):
    pytest.importorskip("onnxruntime")
    path = tmp_path / "mine.onnx"
    weight, bias = np.ones((1, 3), np.float32), np.zeros(1, np.float32)
    for content, reason in (
        (b"no network", "not an ONNX network"),
        (onnx_file(weight, bias)[:60], "not an ONNX network"),
        (onnx_file(weight, bias), "it makes 1 × 1 × 64 × 64 numbers"),
        (onnx_file(weight, bias, ("n", 3)), "not an ONNX network|something else than"),
    ):
        path.write_bytes(content)
        with pytest.raises(FileError, match=reason) as raised:
            load_generator(path)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("enlarged", "more memory than any generator"),
        ("doubled", "more memory than any generator"),
        ("loop", "a layer is 'Loop', which no generator of images has"),
        ("constant", "more memory than any generator"),
        ("elsewhere", "its weights are in another file; save it as one"),
    ],
)
def test_an_onnx_file_gets_no_more_than_a_generator_needs(tmp_path, name, reason):
    pytest.importorskip("onnxruntime")
    path = tmp_path / f"{name}.onnx"
    HOSTILE[path.name](path)
    with pytest.raises(FileError, match=reason):
        load_generator(path)


def test_a_generator_that_torch_has_exported_runs(whole, smear, tmp_path):
    """Its paddings are computed by a dozen layers each."""
    pytest.importorskip("onnxruntime")
    generator = build_generator(load_file(whole[0] / "generator.safetensors"))
    path = tmp_path / "mine.onnx"
    names = {"input_names": ["x"], "dynamic_axes": {"x": {0: "n", 2: "h", 3: "w"}}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(generator, torch.zeros(1, 3, 64, 64), path, dynamo=False, **names)
    made = load_generator(path).apply(smear).rgb.astype(int)
    itself = Normalizer("staingan-generator", Generator(generator))
    assert np.abs(made - itself.apply(smear).rgb).max() <= 1


def test_without_onnxruntime_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    path = tmp_path / "mine.onnx"
    path.write_bytes(b"something")
    with pytest.raises(FileError, match=r"pip install \"napari-beerlanet\[onnx\]\"\.$"):
        load_generator(path)


def test_nothing_of_a_generator_is_lost_in_a_file(whole):
    kept = load_file(whole[0] / "generator.safetensors")
    right = state(whole[0])["model"]["a_to_b"]
    assert kept.keys() == right.keys()
    assert all(torch.equal(kept[name], right[name]) for name in right)


# --- on the command line --------------------------------------------------------------------------


def test_the_command_trains_and_normalizes(laboratories, smear, tmp_path, capfd):
    dark, bright = laboratories
    out = tmp_path / "out"
    size = ["--steps=2", "--filters=4", "--blocks=1", "--crop=32", "--device=cpu", "--quiet"]
    command = ["normalize", str(dark), "--method=staingan", f"--out={out}", "--format=png"]
    assert main([*command, f"--train-from={dark}", f"--reference={bright}", *size]) == 0
    normalizer = load_normalizer(out / "staingan" / "normalizer.safetensors")
    image = np.asarray(Image.open(dark / "0.png"))
    made = np.asarray(Image.open(out / "0.normalized.png"))
    np.testing.assert_array_equal(made, normalizer.apply(image).rgb)
    capfd.readouterr()
    wrong = [*command[:2], "--method=macenko", f"--out={tmp_path / 'b'}", f"--train-from={dark}"]
    with pytest.raises(SystemExit) as end:
        sys.exit(main(wrong))
    assert end.value.code == 2
    assert "--train-from is for --method staingan" in capfd.readouterr().err


def test_a_generator_of_ones_own_is_a_reference(whole, smear, tmp_path):
    own = tmp_path / "mine.safetensors"
    save_file(state(whole[0])["model"]["a_to_b"], own)
    mine = fitted_normalizer("staingan-generator", own)
    saved = fitted_normalizer("staingan-generator", whole[0] / "generator.safetensors")
    np.testing.assert_array_equal(mine.apply(smear).rgb, saved.apply(smear).rgb)
    (tmp_path / "no.onnx").write_bytes(b"no network")
    with pytest.raises(FileError, match=r"no\.onnx: no generator that can be used"):
        fitted_normalizer("staingan-generator", tmp_path / "no.onnx")
