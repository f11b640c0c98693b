"""Do the first epochs pay for the front end? Validation after each of them, with and without it.

    python benchmarks/first_epochs.py --epochs 4 --out first_epochs

Trains YOLOv8n from COCO weights on BCCD's train split with and without the front end, with stain
jitter and without any, and once with a random 1×1 convolution in place of the one that is fitted
to the training images' colours. Prints a table and draws OUT/first_epochs.png. Needs the extra
`benchmark`.
"""

from pathlib import Path

import torch
from cross_domain import build, line, parse
from matplotlib import pyplot as plt
from smears import write_bccd

from napari_beerlanet.core.formats.dataset import read_dataset
from napari_beerlanet.core.training.trainer.data import StainJitter
from napari_beerlanet.core.training.trainer.trainer import StainTrainer

_NONE = StainJitter(share=0.0)
# name: settings of the front end (None: plain YOLO), stain jitter, colour and style in the picture
STARTS = {
    "plain, stain jitter": (None, StainJitter(), "C0-"),
    "front end, stain jitter": ({}, StainJitter(), "C1-"),
    "plain, no jitter": (None, _NONE, "C0--"),
    "front end, no jitter": ({}, _NONE, "C1--"),
    "front end, random start, stain jitter": ({}, StainJitter(), "C7:"),
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
    front, jitter, _ = STARTS[name]
    trainer = StainTrainer(settings, jitter=jitter, dataset=dataset)
    model = build(front, seed, options, dataset)
    if "random" in name:
        torch.manual_seed(seed)
        model.mix.reset_parameters()
    trainer.model = model.to(memory_format=torch.channels_last)
    trainer.add_callback(
        "on_fit_epoch_end", lambda t: values.append(float(t.metrics["metrics/mAP50(B)"]))
    )
    trainer.train()
    return values[: options.epochs]


def draw(curves, path):
    figure, axes = plt.subplots(figsize=(5.6, 3.6), layout="constrained")
    for name, values in curves.items():
        axes.plot(range(1, len(values) + 1), values, STARTS[name][2], marker="o", label=name)
    axes.set(
        xlabel="epoch", ylabel="mAP50, BCCD val", xticks=range(1, len(values) + 1), ylim=(0, 1)
    )
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
