"""Train StainGAN: a CycleGAN from one laboratory's images to another's, without labels.

Two generators and two 70×70 PatchGAN discriminators (Zhu et al., 2017; Shaban et al., 2019):
least-squares GAN loss, cycle weight 10, identity 0.5 of it, a pool of 50 images for the
discriminators, Adam at 2e-4, which falls to 0 in the second half. What is random in a step depends
on the seed and the step alone, and the state is saved every few steps: a run that was killed ends
with the weights of one that was not.

In the end the generator is distilled into a network of 1×1 convolutions, see
`core.normalization.staingan`. The folder of a run has normalizer.safetensors (that network),
generator.safetensors, run.json and state.pt.
"""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from napari_beerlanet.core.common.device import pick_device
from napari_beerlanet.core.common.messages import (
    count_of,
    error_message,
    format_duration,
    quoted,
)
from napari_beerlanet.core.common.progress import (
    Cancelled,
    Report,
    eta_seconds,
    report_progress,
    subprogress,
)
from napari_beerlanet.core.common.storage import DataError, FileError
from napari_beerlanet.core.detection.ultralytics_api import cv2
from napari_beerlanet.core.images.files import IMAGE_SUFFIXES, read_image
from napari_beerlanet.core.images.rgb import fill_transparent, to_uint8
from napari_beerlanet.core.normalization.methods import save_normalizer
from napari_beerlanet.core.normalization.normalizer import Normalizer
from napari_beerlanet.core.normalization.staingan import (
    ColourNetwork,
    Generator,
    StainGenerator,
    colour_network,
)
from napari_beerlanet.core.training.runs import MEMORY_ADVICE, RunFolder, TrainingDiverged
from napari_beerlanet.core.training.settings import StainGanSettings as StainGanSettings

Pixels = npt.NDArray[np.uint8]

_MAX_KEPT_BYTES = 1 << 30  # of images in memory; others are read again
_DISTILL_CROPS = 48  # whose colours the distilled network learns
_DISTILL_PIXELS = 4096  # in each of its steps
_DISTILL_RATE = 5e-3
_GAN_FRACTION = 0.97  # of the reported progress


def train_staingan(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None,
    target: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None,
    output: str | os.PathLike[str],
    *,
    resume: bool = False,
    report: Report | None = None,
    **settings: Any,
) -> Normalizer:
    """Learn to show images of one laboratory as those of another; no labels are needed.

    Parameters
    ----------
    source, target
        Folders with images (or lists of files) of the laboratory to convert, and of the one whose
        looks are taken over: that which a detector or classifier was trained on.
    output
        Folder of the run; its normalizer.safetensors is what is returned.
    resume
        Resume after the last saved step of the run in `output`, with its settings; `source` and
        `target` may be None then.
    report
        Called after every step, with the time that is left; `Cancelled` raised in it ends the run,
        which can be resumed.
    settings
        `StainGanSettings`: filters=16, blocks=6, crop=128, steps=2000, seed=0, …
    """
    chosen = StainGanSettings(**settings)
    with RunFolder(output) as folder:
        earlier = folder.read_run()
        images = {"source": source, "target": target}
        whole = None not in images.values()
        if resume and earlier is not None and (folder.state_file.exists() or not whole):
            if earlier["settings"].get("task") != "staingan":
                raise FileError(f"{folder.path}: the run in this folder trains no StainGAN.")
            chosen = StainGanSettings(**earlier["settings"]).replace(device=chosen.device)
            _check_resumable(folder, earlier, chosen, settings)
            files = _same_files(folder, earlier["files"], images)
        else:
            if folder.normalizer.exists():
                raise FileError(f"{folder.path}: there is a run in this folder; resume it.")
            folder.check_not_overwriting()
            if not whole:
                raise ValueError(f"{folder.path}: no run to resume; give source and target.")
            files = {name: _image_files(given) for name, given in images.items()}
            chosen = chosen.replace(**{name: _folder_name(given) for name, given in images.items()})
        folder.write_run(
            settings=chosen.model_dump(),
            files=files,
            state="running",
            message="",
            process=os.getpid(),
        )
        try:
            return _run(folder, chosen, files, report)
        except BaseException as error:
            stopped = isinstance(error, Cancelled) or not isinstance(error, Exception)
            diverged = isinstance(error, TrainingDiverged)
            folder.write_run(
                state="cancelled" if stopped else "diverged" if diverged else "failed",
                message="" if stopped else error_message(error, memory_advice=MEMORY_ADVICE),
            )
            raise


def _check_resumable(
    folder: RunFolder, earlier: dict[str, Any], own: StainGanSettings, requested: dict[str, Any]
) -> None:
    if earlier.get("state") == "diverged":  # the same numbers lead to the same end
        raise ValueError(
            f"{folder.path}: this run diverged and cannot be resumed; choose another folder, and a "
            "lower learning rate or another seed."
        )
    for name in [name for name, value in requested.items() if value != getattr(own, name)]:
        raise ValueError(
            f"{folder.path}: the run in this folder was started with {name} "
            f"{quoted(getattr(own, name))}, not {quoted(requested[name])}; ask for the same, or "
            "choose another folder."
        )


def _same_files(
    folder: RunFolder, files: dict[str, list[str]], images: dict[str, Any]
) -> dict[str, list[str]]:
    """The images of a run, where they are now if they are given again; others are refused."""
    now = {name: _image_files(given) for name, given in images.items() if given is not None}
    for name, paths in now.items():
        if [Path(path).name for path in paths] != [Path(path).name for path in files[name]]:
            raise ValueError(
                f"{folder.path}: the run in this folder was started with other images as {name}; "
                "give the same, or choose another folder."
            )
    return {**files, **now}


def _run(
    folder: RunFolder,
    settings: StainGanSettings,
    files: dict[str, list[str]],
    report: Report | None,
) -> Normalizer:
    run = StainGanTrainer(settings, _Crops(files["source"]), _Crops(files["target"]))
    state = folder.read_state()
    if state is not None:
        run.load_state(state)
    _train(run, folder, subprogress(report, 0.0, _GAN_FRACTION))
    normalizer, losses = distill(run, subprogress(report, _GAN_FRACTION, 1.0))
    generator = Generator(copy.deepcopy(run.a_to_b))
    save_normalizer(Normalizer("staingan-generator", generator), folder.path / _GENERATOR)
    save_normalizer(normalizer, folder.normalizer)
    folder.write_run(state="finished", epoch=run.step, distillation=[round(x, 5) for x in losses])
    report_progress(report, 1, 1, "done")
    return normalizer


_GENERATOR = "generator.safetensors"


def _train(run: StainGanTrainer, folder: RunFolder, report: Report | None) -> None:
    """From the next step to the last; the state is saved every few steps."""
    steps, first, started = run.settings.steps, run.step, time.monotonic()
    while run.step < steps:
        losses = run.train_step()
        if not all(map(math.isfinite, losses.values())):
            raise TrainingDiverged(
                f"StainGAN diverged in step {run.step} of {steps}: its loss is no finite number; "
                "use a lower learning rate, or another seed."
            )
        if run.step % run.settings.save_every == 0 or run.step == steps:
            folder.write_state(run.state_dict())
            folder.write_run(epoch=run.step, losses=losses)
        left = eta_seconds(time.monotonic() - started, (run.step - first) / max(steps - first, 1))
        eta = f", {format_duration(left)} left" if left is not None else ""
        try:
            report_progress(report, run.step, steps, f"step {run.step} of {steps}{eta}")
        except Cancelled:
            folder.write_state(run.state_dict())
            folder.write_run(epoch=run.step, losses=losses)
            raise


class StainGanTrainer:
    """The four networks and their training, step by step; a is the source, b the target."""

    def __init__(self, settings: StainGanSettings, source: _Crops, target: _Crops) -> None:
        self.settings, self.source, self.target = settings, source, target
        self.device = pick_device(settings.device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            size = settings.filters, settings.blocks
            self.a_to_b, self.b_to_a = StainGenerator(*size), StainGenerator(*size)
            self.judge_a, self.judge_b = (patch_gan(settings.filters) for _ in range(2))
            for network in self._networks.values():
                network.apply(_initialise)
                network.to(self.device)
        generators = [*self.a_to_b.parameters(), *self.b_to_a.parameters()]
        judges = [*self.judge_a.parameters(), *self.judge_b.parameters()]
        self.optimizers = [
            torch.optim.Adam(part, lr=settings.learning_rate, betas=(0.5, 0.999))
            for part in (generators, judges)
        ]
        self.pools: dict[str, list[Tensor]] = {"a": [], "b": []}
        self.step = 0

    @property
    def _networks(self) -> dict[str, nn.Module]:
        return {
            **{"a_to_b": self.a_to_b, "b_to_a": self.b_to_a},
            **{"judge_a": self.judge_a, "judge_b": self.judge_b},
        }

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on."""
        return {
            "epoch": self.step,
            "model": {name: network.state_dict() for name, network in self._networks.items()},
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "pools": self.pools,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        for name, network in self._networks.items():
            network.load_state_dict(state["model"][name])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.pools, self.step = state["pools"], state["epoch"]

    def train_step(self) -> dict[str, float]:
        """One step of all four networks; returns their losses."""
        settings, numbers = self.settings, np.random.default_rng([self.settings.seed, self.step])
        a, b = (
            data.batch(settings.batch, settings.crop, numbers).to(self.device)
            for data in (self.source, self.target)
        )
        self._set_learning_rate()
        fake_b, fake_a, losses = self._train_generators(a, b)
        shown_a, shown_b = (
            self._from_pool(name, fake.detach(), numbers)
            for name, fake in (("a", fake_a), ("b", fake_b))
        )
        losses["judges"] = self._train_judges(a, b, shown_a, shown_b)
        self.step += 1
        return losses

    def _train_generators(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, dict[str, float]]:
        s, l1 = self.settings, functional.l1_loss
        for judge in (self.judge_a, self.judge_b):
            judge.requires_grad_(False)
        fake_b, fake_a = self.a_to_b(a), self.b_to_a(b)
        adversarial = _least_squares(self.judge_b(fake_b), 1.0)
        adversarial = adversarial + _least_squares(self.judge_a(fake_a), 1.0)
        cycle = l1(self.b_to_a(fake_b), a) + l1(self.a_to_b(fake_a), b)
        identity = l1(self.a_to_b(b), b) + l1(self.b_to_a(a), a)
        loss = adversarial + s.cycle * (cycle + s.identity * identity)
        self.optimizers[0].zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizers[0].step()
        parts = {"adversarial": adversarial, "cycle": cycle, "identity": identity}
        return fake_b, fake_a, {name: round(float(v.detach()), 5) for name, v in parts.items()}

    def _train_judges(self, a: Tensor, b: Tensor, fake_a: Tensor, fake_b: Tensor) -> float:
        loss = a.new_zeros(())
        for judge, real, fake in ((self.judge_a, a, fake_a), (self.judge_b, b, fake_b)):
            judge.requires_grad_(True)
            loss = loss + 0.5 * (
                _least_squares(judge(real), 1.0) + _least_squares(judge(fake), 0.0)
            )
        self.optimizers[1].zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizers[1].step()
        return round(float(loss.detach()), 5)

    def _from_pool(self, name: str, fakes: Tensor, numbers: np.random.Generator) -> Tensor:
        """Generated crops, half of them earlier ones, which the new ones take the place of."""
        pool, shown = self.pools[name], []
        for fake in fakes:
            if len(pool) < self.settings.pool:
                pool.append(fake.cpu())
            elif pool and numbers.random() < 0.5:
                place = int(numbers.integers(len(pool)))
                fake, pool[place] = pool[place].to(fake.device), fake.cpu()
            shown.append(fake)
        return torch.stack(shown)

    def _set_learning_rate(self) -> None:
        done = self.step / self.settings.steps
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.settings.learning_rate * min(1.0, 2 * (1 - done))


def distill(
    run: StainGanTrainer, report: Report | None = None
) -> tuple[Normalizer, tuple[float, float]]:
    """The 1×1 network that does to colours what the generator does, and its loss before and after.

    The loss is the mean difference in −1 … 1 over pixels of the source's crops.
    """
    settings, device = run.settings, run.device
    numbers = np.random.default_rng([settings.seed, settings.steps, 1])
    run.a_to_b.eval()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        network = colour_network().to(device)
        crops = [
            run.source.batch(1, settings.crop, numbers).to(device) for _ in range(_DISTILL_CROPS)
        ]
        x = torch.cat([crop.flatten(2) for crop in crops], 2)[0]  # (3, n)
        y = torch.cat([run.a_to_b(crop).flatten(2) for crop in crops], 2)[0]

    def loss(places: Any = slice(None)) -> Tensor:
        return functional.l1_loss(network(x[None, :, places, None])[0, :, :, 0], y[:, places])

    with torch.no_grad():
        before = float(loss())
    optimizer = torch.optim.Adam(network.parameters(), lr=_DISTILL_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.distill_steps)
    for step in range(settings.distill_steps):
        if step % 50 == 0:
            report_progress(report, step, settings.distill_steps, "distilling the generator")
        places = torch.from_numpy(numbers.integers(0, x.shape[1], _DISTILL_PIXELS)).to(device)
        optimizer.zero_grad(set_to_none=True)
        loss(places).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        after = float(loss())
    return Normalizer("staingan", ColourNetwork.from_network(network)), (before, after)


def patch_gan(filters: int) -> nn.Sequential:
    """A discriminator of 70×70 pixels: (N, 3, H, W) to (N, 1, h, w), a number for each patch."""
    layers: list[nn.Module] = [nn.Conv2d(3, filters, 4, 2, 1), nn.LeakyReLU(0.2, True)]
    for k, stride in ((1, 2), (2, 2), (4, 1)):
        layers += [nn.Conv2d(k * filters, 2 * k * filters, 4, stride, 1)]
        layers += [nn.InstanceNorm2d(2 * k * filters), nn.LeakyReLU(0.2, True)]
    return nn.Sequential(*layers, nn.Conv2d(8 * filters, 1, 4, 1, 1))


def _least_squares(judged: Tensor, wanted: float) -> Tensor:
    return functional.mse_loss(judged, torch.full_like(judged, wanted))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(module.weight, 0.0, 0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


# --- images --------------------------------------------------------------------------------------


class _Crops:
    """Random crops of some image files."""

    def __init__(self, files: Sequence[str]) -> None:
        self.files = list(files)
        self._kept: dict[int, Pixels] = {}
        self._kept_bytes = 0

    def batch(self, count: int, side: int, numbers: np.random.Generator) -> Tensor:
        """(count, 3, side, side) in −1 … 1, turned and mirrored at random."""
        crops = np.stack([self._crop(side, numbers) for _ in range(count)])
        return torch.from_numpy(crops.transpose(0, 3, 1, 2).copy()).float() / 127.5 - 1

    def _crop(self, side: int, numbers: np.random.Generator) -> Pixels:
        image = self._read(int(numbers.integers(len(self.files))))
        if min(image.shape[:2]) < side:
            scale = side / min(image.shape[:2])
            size = [max(round(n * scale), side) for n in image.shape[1::-1]]
            image = np.asarray(cv2.resize(image, size, interpolation=cv2.INTER_LINEAR))
        y, x = (int(numbers.integers(n - side + 1)) for n in image.shape[:2])
        crop = np.rot90(image[y : y + side, x : x + side], int(numbers.integers(4)))
        return crop[:, ::-1] if numbers.random() < 0.5 else crop

    def _read(self, k: int) -> Pixels:
        if k in self._kept:
            return self._kept[k]
        pixels = fill_transparent(to_uint8(read_image(self.files[k]).pixels))
        pixels = np.ascontiguousarray(pixels)
        if self._kept_bytes + pixels.nbytes <= _MAX_KEPT_BYTES:
            self._kept_bytes += pixels.nbytes
            self._kept[k] = pixels
        return pixels


def _image_files(given: Any) -> list[str]:
    """Absolute paths of the images in a folder, or of those listed; none is a `DataError`."""
    if not isinstance(given, (str, os.PathLike)):
        found = [Path(path) for path in given]
    elif Path(given).is_dir():
        inside = sorted(Path(given).rglob("*"))
        found = [p for p in inside if p.suffix.lower() in IMAGE_SUFFIXES and p.is_file()]
    else:
        raise DataError(f"{given}: not a folder of images.")
    missing = [path for path in found if not path.is_file()]
    if missing:
        raise DataError(f"{missing[0]}: there is no such image.")
    if not found:
        raise DataError(f"{given}: there are no images in it; {count_of(1, 'image')} is needed.")
    return [str(path.resolve()) for path in found]


def _folder_name(given: Any) -> str:
    path = Path(given) if isinstance(given, (str, os.PathLike)) else Path(next(iter(given))).parent
    return "/".join(path.resolve().parts[-2:])
