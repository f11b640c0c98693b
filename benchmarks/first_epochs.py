"""Do the first epochs pay for the front end? Validation after each of them, with and without it.

    python benchmarks/first_epochs.py --epochs 4 --out first_epochs

Trains YOLOv8n from COCO weights on BCCD's train split, as `cross_domain.py` does: plain, with the
front end as it starts (its 1×1 convolution fitted to the training images' colours), and with a
random 1×1 convolution. The front end comes with stain jitter, as `fine_tune` has it.
Prints a table and draws OUT/first_epochs.png. Needs the extra `benchmark`.
"""

from pathlib import Path

import torch
from cross_domain import build, line, parse
from matplotlib import pyplot as plt
from smears import write_bccd

from napari_beerlanet.core.augment import StainJitter
from napari_beerlanet.core.dataset import read_dataset
from napari_beerlanet.core.trainer import StainTrainer

# name: settings of the front end (None: plain YOLO), stain jitter (None: hue, saturation, value)
STARTS = {
    "plain YOLOv8n": (None, None),
    "front end, fitted start": ({}, StainJitter()),
    "front end, random start": ({}, StainJitter()),
}


def main():
    options = parse(__doc__.splitlines()[0], Path("first_epochs"), 4)
    out = options.out.resolve()
    data = write_bccd(options.shared, out / "bccd")
    curves = {name: curve(name, options, out, data) for name in STARTS}
    print(line(["BCCD val mAP50 after epoch", *(str(k + 1) for k in range(options.epochs))]))
    print("|---" * (options.epochs + 1) + "|")
    for name, values in curves.items():
        print(line([name, *(f"{v:.3f}" for v in values)]), flush=True)
    draw(curves, out / "first_epochs.png")


def curve(name, options, out, data):
    """mAP50 on BCCD's val split after each epoch."""
    seed = options.seeds[0]
    settings = {
        "model": "none.pt",
        "data": str(data),
        "epochs": options.epochs,
        "imgsz": options.size,
        "batch": options.batch,
        "device": "cpu",
        "seed": seed,
        "save_dir": str(out / name.replace(",", "").replace(" ", "-")),
    }
    dataset, values = read_dataset(data), []
    front, jitter = STARTS[name]
    trainer = StainTrainer(settings, jitter=jitter, dataset=dataset)
    model = build(front, seed, options, dataset)
    if name.endswith("random start"):
        torch.manual_seed(seed)
        model.mix.reset_parameters()
    trainer.model = model.to(memory_format=torch.channels_last)
    trainer.add_callback(
        "on_fit_epoch_end", lambda t: values.append(float(t.metrics["metrics/mAP50(B)"]))
    )
    trainer.train()
    return values[: options.epochs]


def draw(curves, path):
    figure, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
    for name, values in curves.items():
        axes.plot(range(1, len(values) + 1), values, marker="o", label=name)
    axes.set(
        xlabel="epoch", ylabel="mAP50, BCCD val", xticks=range(1, len(values) + 1), ylim=(0, 1)
    )
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
