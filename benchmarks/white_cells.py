"""Make the packaged model `white-cells`: train on `wbc-types/pbc`, report on other laboratories.

    python benchmarks/white_cells.py --out white-cells

Writes OUT/white-cells.safetensors and OUT/report.json; an interrupted training is resumed. The
recipe was chosen with `classify.py`, with the same laboratories as the yardstick that are reported
here, so the numbers are optimistic. The result is the last epoch, whatever its numbers.
"""

import argparse
import json
from pathlib import Path

import torch
from classify import PRIOR, SHARED, write_white_cells

import napari_beerlanet as nb

RECIPE = {"front_end": "none", "input_size": 96, "fill": 0.8, "views": 4, "epochs": 12}
UNKNOWN = {
    "blasts": ["monocyte", "lymphocyte"],
    "immature granulocytes": ["neutrophil", "monocyte"],
    "erythroblasts": ["lymphocyte", "neutrophil"],
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--shared", type=Path, default=SHARED)
    parser.add_argument("--out", type=Path, default=Path("white-cells"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    out = options.out.resolve()
    labs = write_white_cells(options.shared, out / "data")
    run = out / f"run-{options.seed}"
    resume = (run / "state.pt").exists()
    nb.train_classifier(
        labs["pbc"].with_name("all.yaml"),
        run,
        "mobilenet_v2",
        weights=options.shared / "weights" / "mobilenet_v2.pt",
        seed=options.seed,
        resume=resume,
        progress=show,
        prior=PRIOR,
        **RECIPE,
    )
    model = nb.load_checkpoint(run / "last.safetensors", device="cpu")
    report = {lab: nb.evaluate(model, labs[lab]) for lab in ("bccd", "cellavision")}
    report["pbc, held out"] = model.info["training"]["metrics"]
    model.info.update(name="white-cells", applies_to=["WBC"], unknown=UNKNOWN)
    model.info["training"]["command"] = "python benchmarks/white_cells.py"
    model.info["training"]["metrics"] = report
    nb.save_checkpoint(model, out / "white-cells.safetensors")
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print({lab: round(found["balanced_accuracy"], 3) for lab, found in report.items()})


def show(event):
    if event["event"] != "batch":
        print(json.dumps(event), flush=True)


if __name__ == "__main__":
    main()
