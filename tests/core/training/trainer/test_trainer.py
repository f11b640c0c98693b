"""Ultralytics' trainer as we use it: what it trains, what it repeats, what it leaves alone."""

import copy
import itertools
import logging
import os
import socket
import stat
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

from napari_beerlanet.core.common.progress import Cancelled
from napari_beerlanet.core.training.trainer import trainer as trainer_module
from napari_beerlanet.core.training.trainer.data import ReplayedPhotograph, StainJitter
from napari_beerlanet.core.training.trainer.deterministic import DeterministicTrainer
from napari_beerlanet.core.training.trainer.trainer import (
    RetainingLoss,
    StainTrainer,
    class_rows,
)
from tinydata import MODEL, NAMES, write_smears


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_smears(tmp_path_factory.mktemp("smears"), train=5, val=2, side=64)


@pytest.fixture(autouse=True)
def _nothing_elsewhere(monkeypatch, tmp_path):
    """No connection is made, and nothing appears in the current folder."""

    def refuse(*args, **kwargs):
        raise AssertionError("a connection was tried")

    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(socket.socket, "connect", refuse)
    yield
    assert not list((tmp_path / "here").iterdir())


class Memory:
    """A callback that remembers states, and stops after `most` batches."""

    def __init__(self, most=10**9):
        self.states, self.rows, self.batches, self.most = [], [], 0, most

    def on_batch_end(self, trainer):
        self.batches += 1
        if self.batches == self.most:
            raise Cancelled

    def on_validation_batch_end(self, trainer):
        pass

    def on_epoch_end(self, trainer):
        self.states.append(copy.deepcopy(trainer.state_dict()))
        self.rows.append(trainer.epoch_metrics)


OURS = ("repeats", "keep_statistics", "average", "share", "fitness_tolerance", "new_classes")


def trained(data, folder, watcher=None, state=None, scope="all", **overrides):
    """A trainer that has trained the tiny network; its weights before that."""
    ours = {key: overrides.pop(key) for key in OURS if key in overrides}
    settings = {"model": "none.pt", "data": str(data), "epochs": 1, "imgsz": 64, "batch": 2}
    settings |= {"device": "cpu", "save_dir": str(folder), **overrides}
    trainer = StainTrainer(
        settings,
        jitter=StainJitter(),
        front_end={},
        scope=scope,
        callback=watcher,
        state=state,
        **ours,
    )
    torch.manual_seed(0)
    trainer.model = trainer.get_model(MODEL)
    before = copy.deepcopy(trainer.model.state_dict())
    trainer.train()
    return trainer, before


def changed(before, after):
    return {name for name, value in after.items() if not torch.equal(value, before[name])}


def test_everything_learns(data, tmp_path):
    trainer, before = trained(data, tmp_path / "run")
    same = set(before) - changed(before, trainer.model.state_dict())
    assert all(name.endswith(("penalised", "dfl.conv.weight")) for name in same)


@pytest.mark.parametrize("scope", ["head", "stain"])
def test_only_the_scope_changes(data, tmp_path, scope):
    trainer, before = trained(data, tmp_path / "run", scope=scope)
    prefixes = {"head": ("model.5.",), "stain": ("stain.", "mix.")}[scope]
    for network in (trainer.model, trainer.ema.ema):
        moved = changed(before, network.state_dict())
        assert moved
        assert all(name.startswith(prefixes) for name in moved)
    learned = {name for name, _ in trainer.model.named_parameters() if name.startswith(prefixes)}
    assert learned - {"model.5.dfl.conv.weight"} <= moved


def test_stain_parameters_do_not_decay(data, tmp_path):
    trainer, _ = trained(data, tmp_path / "run")
    ours = {id(p) for m in (trainer.model.stain, trainer.model.mix) for p in m.parameters()}
    groups = trainer.optimizer.param_groups
    home = [group for group in groups if ours & {id(p) for p in group["params"]}]
    assert len(home) == 1
    assert home[0]["weight_decay"] == 0
    everything = [p for group in groups for p in group["params"]]
    assert len({id(p) for p in everything}) == len(everything)
    assert len(everything) == len(list(trainer.model.parameters()))


def test_kept_statistics_are_those_of_the_parent(data, tmp_path):
    trainer, before = trained(data, tmp_path / "run", keep_statistics=True)
    for network in (trainer.model, trainer.ema.ema):
        moved = changed(before, network.state_dict())
        assert not [name for name in moved if "running" in name or "num_batches" in name]
        assert "model.0.conv.weight" in moved
        assert "model.0.bn.weight" in moved


def without_class(folder, label):
    """Smears without any box of a class."""
    data = write_smears(folder, train=3, val=1, side=64)
    for labels in (folder / "labels").rglob("*.txt"):
        rows = [row for row in labels.read_text().splitlines() if not row.startswith(label)]
        labels.write_text("\n".join(rows) + "\n")
    return data


def test_a_class_without_boxes_is_held_to_the_parent(tmp_path):
    """Its scores drift less than where it counts as absent; a new one learns nothing at all."""
    data = without_class(tmp_path / "smears", "2")
    rates = {"optimizer": "AdamW", "lr0": 0.01, "weight_decay": 0.0, "warmup_epochs": 0}
    drift = {}
    for keep in (True, False):
        trainer, before = trained(data, tmp_path / f"run-{keep}", keep_statistics=keep, **rates)
        drift[keep] = score_drift(trainer, before)[2]
        rows = {name: row.detach() for name, row in class_rows(trainer.model).items()}
        assert all(not torch.equal(before[name][:2], row[:2]) for name, row in rows.items())
    assert drift[True] < 0.3 * drift[False]
    new = {"keep_statistics": True, "new_classes": ["Platelets"], "epochs": 2}
    trainer, before = trained(data, tmp_path / "run-new", **new, **rates)
    for name, row in class_rows(trainer.model).items():
        assert torch.equal(before[name][2], row.detach()[2])


def score_drift(trainer, before):
    """(classes,) mean change of the scores in a validation image since training began."""
    images = torch.stack([trainer.test_loader.dataset[0]["img"]]).float() / 255
    parent = copy.deepcopy(trainer.model).eval()
    parent.load_state_dict(before)
    with torch.no_grad():
        now, then = (m.eval()(images)[1]["scores"].sigmoid() for m in (trainer.model, parent))
    return (now - then).abs().mean((0, 2))


def test_a_class_with_a_few_boxes_is_taught_as_far_as_they_are_evidence(data, tmp_path):
    """Against the gradient of Ultralytics' loss: none where the model scores as its parent."""
    seen = []

    class Following(Memory):
        def on_batch_end(self, trainer):
            seen.append(trainer.model.criterion)

    trainer, _ = trained(data, tmp_path / "run", Following(), keep_statistics=True, lr0=1e-9)
    loss = seen[0]
    assert isinstance(loss, RetainingLoss)
    counts = np.bincount(np.concatenate([i.labels for i in trainer.dataset.splits["train"]]))
    expected = np.minimum(counts / 10, 1)
    np.testing.assert_allclose(loss._evidence, expected, atol=1e-6)
    assert 0 < expected.min() < 1

    logits = torch.randn(2, 5, 3, requires_grad=True)
    annotated = torch.randint(0, 2, (2, 5, 3)).float()
    loss._parent_scores = logits.detach().sigmoid()
    value = loss._cross_entropy(logits, annotated)
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    plain = logits.detach().sigmoid() - annotated
    torch.testing.assert_close(gradient, plain * torch.as_tensor(expected, dtype=torch.float32))
    assert (value > -1e-5).all()


def test_rare_classes_are_held_to_the_parent_in_a_real_run(tmp_path):
    """Scores of a class with one box move less, and those of a common class as before."""
    data = write_smears(tmp_path / "smears", train=3, val=1, side=64)
    kept = 0
    for labels in sorted((tmp_path / "smears" / "labels" / "train").iterdir()):
        rows = labels.read_text().splitlines()
        few = [row for row in rows if row.startswith("1")]
        rows = [row for row in rows if not row.startswith("1")] + few[: 1 - kept]
        kept += len(few[: 1 - kept])
        labels.write_text("\n".join(rows) + "\n")
    assert kept == 1
    settings = {"epochs": 3, "optimizer": "AdamW", "lr0": 0.01, "warmup_epochs": 0, "batch": 2}
    drift = {}
    for keep in (True, False):
        new = () if keep else ("WBC",)  # as if there were nothing to retain
        trainer, before = trained(
            data, tmp_path / f"run-{keep}", keep_statistics=True, new_classes=new, **settings
        )
        drift[keep] = score_drift(trainer, before)
    assert drift[True][1] < 0.5 * drift[False][1]


def test_what_the_parent_sees_of_a_rare_class_is_held_also_in_a_photograph(data, tmp_path):
    """Scores and outlines: no change where the model is the parent, a pull back where it is not."""
    trainer, _ = trained(data, tmp_path / "run", keep_statistics=True)
    model = trainer.model
    trainer._model_train()
    rows = {name: row for name, row in class_rows(model).items() if name.endswith("bias")}
    rare, bias = 2, rows["model.5.cv3.0.2.bias"]
    evidence = torch.ones(3)
    evidence[rare] = 0.1
    photograph = ReplayedPhotograph(64, None)
    assert RetainingLoss(model.init_criterion(), model, evidence, photograph)._replay is None
    with torch.no_grad():
        bias[rare] = 2.0  # the parent sees it everywhere, and so in the photograph
    loss = RetainingLoss(model.init_criterion(), model, evidence, photograph)
    assert loss._replay is photograph
    batch = trainer.preprocess_batch(next(iter(trainer.train_loader)))

    def value(replay):
        """Box, class and DFL loss, and the gradient of the biases of the classes."""
        loss._replay = replay
        parts = loss(model(batch["img"]), batch)[0]
        return parts.detach(), torch.autograd.grad(parts.sum(), bias)[0]

    for one, other in zip(value(photograph), value(None), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        bias[rare] -= 1.0
        model.model[-1].cv2[0][-1].bias += torch.linspace(-1, 1, 64)
    (held, pull), (without, less) = value(photograph), value(None)
    assert (held[:2] > without[:2] + 1e-3).all()
    assert pull[rare] < less[rare] < 0, "it is to be seen again"
    torch.testing.assert_close(pull[:rare], less[:rare], rtol=1e-4, atol=1e-4)


def test_outlines_are_held_where_the_parent_sees_a_rare_class(data, tmp_path):
    """By the divergence of the four sides, weighted with (1 − e) t; two anchors, two classes."""
    trainer, _ = trained(data, tmp_path / "run", keep_statistics=True)
    loss = trainer.model.criterion
    loss._evidence = torch.tensor([1.0, 0.25])
    generator = torch.Generator().manual_seed(3)
    ours, theirs = (torch.randn((1, 64, 2), generator=generator) for _ in range(2))
    scores = torch.logit(torch.tensor([[[0.9, 0.8], [0.6, 0.0001]]]))  # class, anchor
    held = loss._outlines({"boxes": ours}, {"boxes": theirs, "scores": scores})
    p, q = (x[0].T.reshape(2, 4, 16).softmax(2) for x in (theirs, ours))
    divergence = (p * (p / q).log()).sum(2).mean(1)
    expected = 0.75 * (0.6 * divergence[0] + 0.0001 * divergence[1])
    torch.testing.assert_close(held, expected, rtol=1e-4, atol=1e-6)
    assert loss._outlines({"boxes": theirs}, {"boxes": theirs, "scores": scores}).abs() < 1e-6


def test_rows_of_new_classes_learn_faster_and_are_not_held_back(data, tmp_path):
    settings = {"optimizer": "AdamW", "lr0": 1e-3, "weight_decay": 0.0, "warmup_epochs": 0}
    settings |= {"keep_statistics": True, "average": 1, "share": 0.25, "nbs": 2}
    trainer, before = trained(data, tmp_path / "run", new_classes=["WBC"], **settings)
    rows = class_rows(trainer.model)
    assert set(rows) == {
        f"model.5.cv3.{k}.2.{what}" for k in range(3) for what in ("weight", "bias")
    }
    held = trainer.ema.ema.state_dict()
    for name, row in rows.items():
        moved = (row.detach() - before[name]).abs().reshape(3, -1).amax(1)
        assert moved[1] > 4 * moved[0]
        torch.testing.assert_close(held[name][1], row.detach()[1])
        expected = before[name][0] + 0.25 * (row.detach()[0] - before[name][0])
        torch.testing.assert_close(held[name][0], expected)


def test_an_epoch_shows_every_image_as_often_as_asked(data, tmp_path):
    memory = Memory()
    trainer, _ = trained(data, tmp_path / "run", memory, repeats=3)
    assert memory.batches == 8  # 15 images, two in a batch
    assert len(trainer.test_loader.dataset) == 2


def test_weights_are_averaged_over_the_steps_that_are_asked_for(data, tmp_path):
    seen = []

    class Following(Memory):
        def on_batch_end(self, trainer):
            name = "model.0.conv.weight"
            states = trainer.model.state_dict(), trainer.ema.ema.state_dict()
            seen.append([state[name].clone() for state in states])

    settings = {"epochs": 2, "nbs": 2, "optimizer": "AdamW", "lr0": 0.01, "warmup_epochs": 0}
    _, before = trained(data, tmp_path / "run", Following(), average=3, **settings)
    now, mean = seen[0]
    torch.testing.assert_close(mean, (before["model.0.conv.weight"] + now) / 2)
    for (_, past), (now, mean) in itertools.pairwise(seen):
        torch.testing.assert_close(mean, past + (now - past) / 3)


@pytest.mark.parametrize("steps", [1, 3])
def test_averaged_weights_stay_part_of_the_way_to_the_parent(data, tmp_path, steps):
    """As if the plain average had been taken and then moved back along the straight line."""
    settings = {"epochs": 2, "nbs": 2, "optimizer": "AdamW", "lr0": 0.01, "average": steps}
    plain, before = trained(data, tmp_path / "plain", **settings)
    held, _ = trained(data, tmp_path / "held", share=0.25, **settings)
    for name, learned in plain.ema.ema.state_dict().items():
        if learned.dtype.is_floating_point:
            expected = before[name] + 0.25 * (learned - before[name])
            torch.testing.assert_close(held.ema.ema.state_dict()[name], expected)
    for name, value in plain.model.state_dict().items():  # what is trained does not notice
        assert torch.equal(value, held.model.state_dict()[name])


@pytest.mark.parametrize(
    ("fitness_tolerance", "best"),
    [(0.0, [True, True, False, False]), (0.1, [True, True, True, False])],
)
def test_a_later_epoch_is_the_best_unless_it_is_clearly_worse(
    data, tmp_path, monkeypatch, fitness_tolerance, best
):
    values = iter([0.5, 0.6, 0.55, 0.45])
    validate = DeterministicTrainer.validate

    def as_told(self):
        before = self.best_fitness
        metrics, fitness = validate(self)[0], next(values)
        self.best_fitness = fitness if before is None else max(before, fitness)
        return metrics, fitness

    monkeypatch.setattr(DeterministicTrainer, "validate", as_told)
    seen = []

    class Following(Memory):
        def on_epoch_end(self, trainer):
            seen.append(trainer.best_fitness == trainer.fitness)

    trained(data, tmp_path / "run", Following(), fitness_tolerance=fitness_tolerance, epochs=4)
    assert seen == best


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"nbs": 6},
        {"optimizer": "SGD", "cos_lr": True},
        {"repeats": 2, "keep_statistics": True, "average": 3},
    ],
)
def test_going_on_gives_the_same_numbers(data, tmp_path, settings):
    whole, part = Memory(), Memory()
    trained(data, tmp_path / "whole", whole, epochs=3, **settings)
    trained(data, tmp_path / "part", part, state=whole.states[0], epochs=3, **settings)
    assert part.rows == whole.rows[1:]
    for state, other in zip(part.states, whole.states[1:], strict=True):
        for kind in ("model", "ema"):
            assert changed(state[kind], other[kind]) == set()
        assert state["best_fitness"] == other["best_fitness"]
        assert state["updates"] == other["updates"]


def test_going_on_with_the_photograph_gives_the_same_numbers(data, tmp_path, monkeypatch):
    """Its turns and stains are those of the epoch, whether the run was interrupted or not."""
    monkeypatch.setattr(trainer_module, "_VISIBLE_SCORE", -1.0)
    settings = {"epochs": 2, "keep_statistics": True, "average": 3}
    whole, part = Memory(), Memory()
    trainer, _ = trained(data, tmp_path / "whole", whole, **settings)
    assert isinstance(trainer.model.criterion._replay, ReplayedPhotograph)
    trained(data, tmp_path / "part", part, state=whole.states[0], **settings)
    assert part.rows == whole.rows[1:]
    for kind in ("model", "ema"):
        assert changed(part.states[0][kind], whole.states[1][kind]) == set()


def test_epochs_end_with_a_step(data, tmp_path):
    memory = Memory()
    trained(data, tmp_path / "run", memory, epochs=3, nbs=8, warmup_epochs=0)  # 3 batches, 4 a step
    assert [state["updates"] for state in memory.states] == [1, 2, 3]


def test_seeds_differ(data, tmp_path):
    first, second = Memory(), Memory()
    trained(data, tmp_path / "first", first, seed=0)
    trained(data, tmp_path / "second", second, seed=1)
    assert first.rows != second.rows


def test_state_can_be_saved_without_pickled_code(data, tmp_path):
    memory = Memory()
    trained(data, tmp_path / "run", memory)
    torch.save(memory.states[0], tmp_path / "state.pt")
    torch.load(tmp_path / "state.pt", weights_only=True)


def test_a_watcher_stops_it(data, tmp_path):
    memory = Memory(most=2)
    with pytest.raises(Cancelled):
        trained(data, tmp_path / "run", memory, epochs=3)
    assert memory.batches == 2
    assert memory.states == []


def test_only_callbacks_of_ours_are_called(data, tmp_path, monkeypatch):
    from ultralytics.utils.callbacks import platform

    asked, seen = [], []
    monkeypatch.setitem(platform.callbacks, "on_train_start", lambda trainer: asked.append(1))
    settings = {"model": "none.pt", "data": str(data), "epochs": 1, "imgsz": 64, "batch": 2}
    trainer = StainTrainer({**settings, "save_dir": str(tmp_path / "run")}, front_end={})
    trainer.model = trainer.get_model(MODEL)
    for event in ("on_train_start", "on_fit_epoch_end"):
        trainer.add_callback(event, lambda trainer, event=event: seen.append(event))
    trainer.train()
    assert seen == ["on_train_start", "on_fit_epoch_end"]
    assert asked == []


def test_nothing_is_printed_and_nothing_lies_around(data, tmp_path, capfd, caplog):
    before = {path: path.stat().st_mtime_ns for path in data.parent.rglob("*")}
    with caplog.at_level(logging.WARNING):
        trained(data, tmp_path / "run", Memory())
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []
    assert {path: path.stat().st_mtime_ns for path in data.parent.rglob("*")} == before
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.skipif(os.name == "nt", reason="folders cannot be made read-only")
def test_data_may_be_read_only(tmp_path):
    data = write_smears(tmp_path / "smears", train=2, val=1, side=64)
    folders = [path for path in data.parent.rglob("*") if path.is_dir()]
    try:
        for folder in folders:
            folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
        trained(data, tmp_path / "run", Memory())
    finally:
        for folder in folders:
            folder.chmod(stat.S_IRWXU)


def test_a_loss_that_is_no_number_ends_it(data, tmp_path, monkeypatch):
    forward = torch.nn.Module.__call__

    def spoiled(self, *args, **kwargs):
        result = forward(self, *args, **kwargs)
        if isinstance(result, tuple) and isinstance(args[0], dict):
            return result[0] * float("nan"), result[1]
        return result

    monkeypatch.setattr(torch.nn.Module, "__call__", spoiled)
    with pytest.raises(ValueError, match="diverged"):
        trained(data, tmp_path / "run", Memory(), epochs=3)


def test_images_and_boxes_are_ultralytics_own(data, tmp_path):
    """Without augmentation, what the network sees is what Ultralytics would show it."""
    from napari_beerlanet.core.detection.ultralytics_api import YOLODataset

    trainer = StainTrainer(
        {"model": "none.pt", "data": str(data), "imgsz": 96, "save_dir": str(tmp_path / "run")},
        front_end={},
    )
    trainer.model = trainer.get_model(MODEL)
    ours = trainer.build_dataset(trainer.data["val"], "val", 2)
    theirs = YOLODataset(
        img_path=str(data.parent / "images" / "val"),
        data={"names": dict(enumerate(NAMES))},
        augment=False,
        imgsz=96,
        rect=True,
        batch_size=2,
        pad=0.5,
    )
    for cache in data.parent.rglob("*.cache"):
        cache.unlink()
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine["img"], other["img"])
        assert torch.equal(mine["bboxes"], other["bboxes"])
        assert torch.equal(mine["cls"], other["cls"])
        assert mine["im_file"] == other["im_file"]


def test_jitter_takes_the_place_of_hue_and_leaves_with_nothing_else(data, tmp_path):
    trainer = StainTrainer(
        {"model": "none.pt", "data": str(data), "imgsz": 64, "save_dir": str(tmp_path / "run")},
        jitter=StainJitter(share=1.0),
        front_end={},
    )
    trainer.model = trainer.get_model(MODEL)
    dataset = trainer.build_dataset(trainer.data["train"], "train", 2)
    names = [type(step).__name__ for step in dataset.transforms.transforms]
    assert names.count("StainJitter") == 1
    assert not {"RandomHSV", "Albumentations"} & set(names)
    dataset.close_mosaic(copy.copy(trainer.args))
    assert "StainJitter" in [type(step).__name__ for step in dataset.transforms.transforms]
    image = np.asarray(dataset[0]["img"])
    assert image.shape == (3, 64, 64)


def test_training_is_deterministic_without_loading_the_compiler():
    code = """
        import sys
        import torch
        from napari_beerlanet.core.detection.ultralytics_api import _engine
        before = torch.use_deterministic_algorithms
        _engine.init_seeds(1, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        _engine.unset_deterministic()
        assert not torch.are_deterministic_algorithms_enabled()
        assert torch.use_deterministic_algorithms is before

        from napari_beerlanet.core.detection.ultralytics_api import optimize_without_compiler

        def trained(kind):
            weight = torch.nn.Parameter(torch.linspace(-1, 1, 6))
            optimizer = kind([weight], lr=0.1, weight_decay=0.01)
            for _ in range(3):
                optimizer.zero_grad()
                (weight**3).sum().backward()
                optimizer.step()
                optimizer.load_state_dict(optimizer.state_dict())
            assert weight.requires_grad and torch.is_grad_enabled()
            return weight.detach()

        kinds = torch.optim.AdamW, torch.optim.SGD
        plain = [kind.step for kind in kinds]
        optimize_without_compiler()
        light = [trained(kind) for kind in kinds]
        assert not {"torch._inductor", "torch._dynamo"} & set(sys.modules)
        for kind, step in zip(kinds, plain):
            kind.step = step
        assert all(map(torch.equal, light, map(trained, kinds)))
        assert "torch._dynamo" in sys.modules  # so it was worth it

        import torch._inductor.config
        _engine.init_seeds(1, deterministic=True)
        assert torch._inductor.config.deterministic
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
