"""How fast and how lean the engine is, against a straightforward dense version of Algorithm 1.

    python benchmarks/decompose.py [--repeats 5] [--shared ../shared]

Both run the same algorithm (r = 8, K = 10) on the same image with the same number of threads, in
one process, best of several. Images are real smears where ../shared is there, synthetic ones
otherwise. Peak memory is measured in a process of its own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch
from PIL import Image

import napari_beerlanet as nb
from napari_beerlanet.core.common.threads import thread_count
from napari_beerlanet.core.stains.solver.spectra import default_spectra
from napari_beerlanet.samples import blood_smear

R, K, LAM, GAMMA = 8, 10, 0.1, 0.1
SIZES = ((480, 640), (1024, 1024), (3360, 3840))


def dense(X: torch.Tensor, S: torch.Tensor, lam: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    """Algorithm 1 as one would write it in torch: X (3, p) float32 to D (p, r)."""
    D = X.new_zeros((X.shape[1], S.shape[1]))
    for _ in range(K):
        x0 = (X + S @ D.T).mean(1, keepdim=True)
        tau = 1 / (S**2).sum()
        D = D - tau * (D @ S.T @ S + X.T @ S - x0.T @ S)
        norm = S.norm(dim=0)
        D = torch.relu(D - lam * gamma * tau * norm)
        size = D.norm(dim=0)
        D = D * (1 - torch.minimum(size, lam * tau * norm) / size.clamp_min(1e-12))
        tau = 1 / (D**2).sum().clamp_min(1e-12)
        S = torch.relu(S - tau * (S @ (D.T @ D) + X @ D - x0 * D.sum(0)))
        size = S.norm(dim=0)
        weight = lam * tau * (gamma * D.sum(0) + D.norm(dim=0))
        S = S * (1 - torch.minimum(size, weight) / size.clamp_min(1e-12))
        size = S.norm(dim=0)
        S, D = S / size.clamp_min(1e-12), D * size
    return D


def smear(shape: tuple[int, int], shared: Path) -> np.ndarray:
    """A real smear cut or tiled to `shape`, or a synthetic one."""
    folder = "bccd/JPEGImages" if shape[0] < 1000 else "malaria/images"
    files = sorted((shared / "data" / folder).glob("*.jpg"))
    if not files:
        return blood_smear(shape, seed=1).image
    tiles = [np.asarray(Image.open(f).convert("RGB")) for f in files[:4]]
    tiles = [t[: tiles[0].shape[0], : tiles[0].shape[1]] for t in tiles]
    wide = np.vstack([np.hstack(tiles[:2]), np.hstack(tiles[2:])])
    source = wide if shape[0] > tiles[0].shape[0] else tiles[0]
    return source[: shape[0], : shape[1]].copy()


def mosaic(shared: Path) -> np.ndarray:
    """640 × 640: four smears scaled about a random centre and hue-jittered, as YOLO trains on."""
    rng = np.random.default_rng(0)
    out = np.full((640, 640, 3), 114, np.uint8)
    files = sorted((shared / "data/bccd/JPEGImages").glob("*.jpg"))
    for k, (y, x) in enumerate(((0, 0), (0, 320), (320, 0), (320, 320))):
        if files:
            image = Image.open(files[17 * k]).convert("RGB")
        else:
            image = Image.fromarray(blood_smear(seed=k, shift=k / 4).image)
        scale = rng.uniform(0.5, 1.5)
        image = image.resize((int(640 * scale), int(480 * scale)), Image.BILINEAR)
        hsv = np.asarray(image.convert("HSV")).astype(int)
        gain = 1 + rng.uniform(-1, 1, 3) * (0.015, 0.7, 0.4)  # Ultralytics' own strengths
        hsv = (hsv * gain).clip(0, 255).astype(np.uint8)
        tile = np.asarray(Image.fromarray(hsv, "HSV").convert("RGB"))[:320, :320]
        out[y : y + tile.shape[0], x : x + tile.shape[1]] = tile
    return out


def best(
    call: Callable[[], object], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds of the fastest of `repeats` calls, after one to warm up."""
    return best_of_each([call], repeats, clock)[0]


def best_of_each(
    calls: list[Callable[[], object]],
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Seconds of the fastest of `repeats` calls of each, taken in turn: all see the same noise."""
    fastest = [float("inf")] * len(calls)
    for repeat in range(repeats + 1):
        for k, call in enumerate(calls):
            start = clock()
            call()
            if repeat:  # the first warms up
                fastest[k] = min(fastest[k], clock() - start)
    return fastest


def write_limit(shape: tuple[int, int], repeats: int) -> float:
    """Seconds to write r float32 planes of fresh memory once: what no decomposition can beat."""

    def fill() -> None:
        planes = torch.empty((R, shape[0] * shape[1]))
        planes.fill_(1.0)

    return best(fill, repeats)


def forward_table(repeats: int, shared: Path) -> None:
    print(
        f"\nDecomposition, r = {R}, K = {K}, {torch.get_num_threads()} threads, best of {repeats}\n"
    )
    print(
        "| image | distinct colours | dense float32 | ours | ratio | writing the output once "
        "| ours / writing | processor time |"
    )
    print("|---|---|---|---|---|---|---|---|")
    S = torch.tensor(default_spectra(R), dtype=torch.float32)
    for shape in SIZES:
        image = smear(shape, shared)

        def plain(image: np.ndarray = image) -> None:
            X = torch.from_numpy(image).reshape(-1, 3).T.float().clamp_min(1).div(255).log()
            dense(X, S, torch.tensor(LAM), torch.tensor(GAMMA)).T.contiguous()

        def ours(image: np.ndarray = image) -> None:
            nb.decompose(image, R, K, lam=LAM, gamma=GAMMA)

        colours = len(np.unique(image.reshape(-1, 3) @ np.array([65536, 256, 1])))
        slow, fast = best(plain, min(repeats, 2)), best(ours, repeats)
        busy = best(ours, repeats, time.process_time)
        write = write_limit(shape, repeats)
        print(
            f"| {shape[1]} × {shape[0]} | {colours:,} | {slow:.3f} s | {fast * 1e3:.1f} ms "
            f"| {slow / fast:.0f}× | {write * 1e3:.1f} ms | {fast / write:.1f} "
            f"| {busy * 1e3:.1f} ms |",
            flush=True,
        )


def training_table(repeats: int, shared: Path) -> None:
    image = torch.from_numpy(mosaic(shared)).permute(2, 0, 1)[None].float() / 255
    layer = nb.BeerLaNet(R, K, lam=LAM, gamma=GAMMA)
    S = torch.tensor(default_spectra(R), dtype=torch.float32, requires_grad=True)
    lam = torch.tensor(LAM, requires_grad=True)
    gamma = torch.tensor(GAMMA, requires_grad=True)

    def plain() -> None:
        dense(image.flatten(2)[0].clamp_min(1 / 255).log(), S, lam, gamma).square().sum().backward()

    def ours() -> None:
        layer(image).square().sum().backward()

    slow, fast = best_of_each([plain, ours], repeats)
    names = "train-dense", "train-ours"
    more, less = (in_own_process(name, shared) for name in names)
    first_more, first_less = (in_own_process(f"{name}-first", shared) for name in names)
    colours = torch.unique((image[0] * 255).round().flatten(1), dim=1).shape[1]
    print(f"\nForward and backward, 640 × 640 mosaic of {colours:,} colours\n")
    print("| | dense autograd | ours | ratio |\n|---|---|---|---|")
    print(f"| time | {slow:.3f} s | {fast * 1e3:.1f} ms | {slow / fast:.0f}× |")
    print(f"| peak extra memory | {more:.0f} MB | {less:.0f} MB | {more / max(less, 1):.1f}× |")
    print(
        f"| of the first call, with all that it loads | {first_more:.0f} MB | {first_less:.0f} MB "
        f"| {first_more / max(first_less, 1):.1f}× |"
    )


def memory_table(shared: Path) -> None:
    peak = in_own_process("forward", shared)
    output = R * 4 * SIZES[-1][0] * SIZES[-1][1] / 1e6
    print(f"\nPeak memory at {SIZES[-1][1]} × {SIZES[-1][0]}: ", end="")
    print(f"{peak:.0f} MB, of which {output:.0f} MB are the densities")


def in_own_process(what: str, shared: Path) -> float:
    """MB that the work added to the resident memory of a fresh process, at its peak.

    The median of three. After a small image has warmed it up, unless `what` ends with "-first".
    Kernels are on disk.
    """
    command = [sys.executable, __file__, "--measure", what, "--shared", str(shared)]
    runs = [subprocess.run(command, check=True, capture_output=True, text=True) for _ in range(3)]
    return median(float(run.stdout) for run in runs)


def measure(what: str, shared: Path) -> None:
    """Run on the image, and before that on a small one unless the first run is to be measured."""
    layer = nb.BeerLaNet(R, K, lam=LAM, gamma=GAMMA)
    S = torch.tensor(default_spectra(R), dtype=torch.float32, requires_grad=True)
    weights = torch.tensor(LAM, requires_grad=True), torch.tensor(GAMMA, requires_grad=True)

    def work(image: np.ndarray) -> None:
        if what == "forward":
            nb.decompose(image, R, K, lam=LAM, gamma=GAMMA)
            return
        x = torch.from_numpy(image).permute(2, 0, 1)[None].float() / 255
        if what.startswith("train-ours"):
            layer(x).square().sum().backward()
        else:
            dense(x.flatten(2)[0].clamp_min(1 / 255).log(), S, *weights).square().sum().backward()

    image = smear(SIZES[-1], shared) if what == "forward" else mosaic(shared)
    if not what.endswith("-first"):
        work(image[:64, :64])
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    work(image)
    print(resident("VmHWM") - before)


def resident(key: str) -> float:
    """Resident memory now (VmRSS) or at its peak (VmHWM), in MB; on Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line for line in lines if line.startswith(key)).split()[1]) / 1024


def converge_table(repeats: int, shared: Path) -> None:
    print("\nConverged, λ, γ and number of stains chosen from the image\n")
    print("| image | time | sweeps | stains |\n|---|---|---|---|")
    for shape in SIZES[:2]:
        image = smear(shape, shared)
        seconds = best(lambda image=image: nb.decompose(image, iterations="converge"), repeats)
        found = nb.decompose(image, iterations="converge")
        sweeps, stains = len(found.objective), int(found.active.sum())
        print(f"| {shape[1]} × {shape[0]} | {seconds:.2f} s | {sweeps} | {stains} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shared", type=Path, default=Path(__file__).parents[2] / "shared")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(thread_count())
    if options.measure:
        measure(options.measure, options.shared)
        return
    forward_table(options.repeats, options.shared)
    training_table(options.repeats, options.shared)
    memory_table(options.shared)
    converge_table(options.repeats, options.shared)


if __name__ == "__main__":
    main()
