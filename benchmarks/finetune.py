"""Fine-tune the packaged model on 1, 5 and 20 fields of another laboratory: what is won and lost.

    python benchmarks/finetune.py --out finetune

Every run starts from "blood-cells" and takes the settings that `fine_tune` chooses by itself. It is
measured on fields of that laboratory that no run has seen, and on BCCD's test split, where the
parent comes from. "all" fields are the yardstick: everything that is not held out. A finished run
is a line of OUT/finetune.jsonl and is not done again; the table is printed and in OUT/finetune.md.

    python benchmarks/finetune.py --out finetune --fields --platelets 1 2 --scopes all

Four fields with so many platelets among them, and none in the field that validates: what a rare
class loses, a second table. AP50 of some 150 platelets changes by a point if all objects are shown
0.5 % larger, so parent and child are both measured at five such sizes, and averaged.

    python benchmarks/finetune.py --out finetune --fields 5 --scopes all --interpolate 0.2 0.3 0.5 1

Without another training, every child also as it is so far from the parent: a third table.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from smears import NAMES, write_bccd, write_other_lab

import napari_beerlanet as nb
from napari_beerlanet.core.formats.dataset import Dataset, read_dataset

SHARED = Path(__file__).resolve().parents[2] / "shared"
PARENT = "blood-cells"
SCOPES = ("all", "head", "stain")
LABS = ("other", "bccd")
APS = ("AP50", "AP50-95")
MAPS = ("mAP50", "mAP50-95")
RARE, RARE_FIELDS = "rare", 4  # what the fields are called, and how many there are
RARE_SIZES = (0.992, 0.996, 1.0, 1.004, 1.008)  # of the objects, beside those of training


def main():
    options = parse()
    out = options.out.resolve()
    bccd = write_bccd(options.shared, out / "bccd", together=True)
    lab = Laboratory(write_other_lab(options.shared, out / "other-lab"), options.held_out)
    sets = {"other": lab.held_out, "bccd": read_dataset(bccd)}
    done = Results(out / "finetune.jsonl")
    done.once({"fields": 0, "scope": "none", "seed": 0}, lambda key: before(sets))
    if options.platelets:
        parent = {"fields": RARE, "platelets": 0, "scope": "none", "seed": 0}
        done.once(parent, lambda key: before(sets, RARE_SIZES))
    for key in wanted(options):
        done.once(key, lambda key: one_run(key, lab, sets, out, options))
        print(table(done.rows), flush=True)
        (out / "finetune.md").write_text(table(done.rows))
    print(table(done.rows))
    print(rare_class_table(done.rows))
    print(interpolation_table(done.rows))


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fields", type=int, nargs="*", default=[1, 5, 20])
    parser.add_argument("--platelets", type=int, nargs="*", default=[], help="of a rare class")
    parser.add_argument("--interpolate", type=float, nargs="*", default=[], help="further shares")
    parser.add_argument("--scopes", nargs="+", choices=SCOPES, default=SCOPES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--yardsticks", type=int, nargs="*", default=[0], help="seeds of `all`")
    parser.add_argument("--held-out", type=int, default=100, help="fields to measure on")
    parser.add_argument("--length", choices=("quick", "normal", "thorough"), default="normal")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--shared", type=Path, default=SHARED)
    parser.add_argument("--out", type=Path, default=Path("finetune"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    return options


def wanted(options):
    """The runs, those first that tell most if there is no time for all."""
    for seed in options.seeds:
        for fields in sorted(options.fields, key=lambda n: (n != 5, n)):
            for scope in options.scopes:
                yield {"fields": fields, "scope": scope, "seed": seed}
            if fields == 5 and seed in options.yardsticks:
                yield {"fields": "all", "scope": "all", "seed": seed}
        for platelets in options.platelets:
            for scope in options.scopes:
                yield {"fields": RARE, "platelets": platelets, "scope": scope, "seed": seed}


class Laboratory:
    """Its fields, some of them held out."""

    def __init__(self, data, held_out):
        dataset = read_dataset(data)
        self.items = sorted(dataset.splits["val"], key=lambda item: item.image.name)
        order = np.random.default_rng(0).permutation(len(self.items))
        self.pool = order[held_out:]
        measured = [self.items[k] for k in order[:held_out]]
        self.held_out = Dataset(dataset.path, dataset.names, {"test": measured})

    def draw(self, fields, seed, folder):
        """A data.yaml of so many fields; one in five validates, an only one does both."""
        order = np.random.default_rng([seed, 1]).permutation(self.pool)
        chosen = order if fields == "all" else order[:fields]
        back = min(len(chosen) // 5, 30)
        return self._write(chosen[back:], chosen[: max(back, 1)], folder)

    def draw_rare(self, platelets, seed, folder):
        """A data.yaml of four fields with one platelet in each of so many, and none elsewhere."""
        order = np.random.default_rng([seed, 7]).permutation(self.pool)
        counts = [(self.items[k].labels == NAMES.index("Platelets")).sum() for k in order]
        one, none = (order[np.equal(counts, count)] for count in (1, 0))
        train = [*one[:platelets], *none[: RARE_FIELDS - platelets]]
        return self._write(train, none[RARE_FIELDS : RARE_FIELDS + 1], folder)

    def _write(self, train, validation, folder):
        folder.mkdir(parents=True, exist_ok=True)
        for split, numbers in {"train": train, "val": validation}.items():
            lines = [str(self.items[k].image) for k in numbers]
            (folder / f"{split}.txt").write_text("\n".join(lines) + "\n")
        data = folder / "data.yaml"
        data.write_text(f"train: train.txt\nval: val.txt\nnames: [{', '.join(NAMES)}]\n")
        return data


class Results:
    """Finished runs, one JSON object per line."""

    def __init__(self, path):
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.rows = [json.loads(text) for text in lines]

    def once(self, key, run):
        """Do a run that is not there yet."""
        if not any(key.items() <= row.items() for row in self.rows):
            self.rows.append({**key, **run(key)})
            with self.path.open("a") as file:
                file.write(json.dumps(self.rows[-1]) + "\n")


def before(sets, sizes=(1.0,)):
    return measured(nb.load_checkpoint(PARENT, device="cpu"), sets, sizes)


def one_run(key, lab, sets, out, options):
    """Train and measure; a run that was interrupted goes on."""
    folder = out / "runs" / "-".join(str(value) for value in key.values())
    if key["fields"] == RARE:
        data = lab.draw_rare(key["platelets"], key["seed"], folder / "data")
    else:
        data = lab.draw(key["fields"], key["seed"], folder / "data")
    steps = []
    began = time.perf_counter()
    model = nb.fine_tune(
        PARENT,
        data,
        output=folder / "run",
        scope=key["scope"],
        seed=key["seed"],
        device="cpu",
        length=options.length,
        resume=True,
        progress=lambda event: steps.append(event["event"] == "batch"),
    )
    seconds = time.perf_counter() - began
    settings = model.info["training"]["settings"]
    chosen = {
        k: settings[k]
        for k in ("epochs", "validate_every", "learning_rate", "keep_statistics", "share")
    }
    facts = {"seconds": round(seconds, 1), "steps": sum(steps), "settings": chosen}
    sizes = RARE_SIZES if key["fields"] == RARE else (1.0,)
    row = {**facts, "best": model.info["training"]["epochs"], **measured(model, sets, sizes)}
    if options.interpolate:
        row["interpolated"] = {
            str(share): measured(interpolated(folder / "run", share, chosen["share"]), sets, sizes)
            for share in options.interpolate
        }
    return row


def interpolated(run, share, trained_share):
    """The best model of a run that kept `trained_share` of what it learned, with another share."""
    parent = nb.load_checkpoint(PARENT, device="cpu").network.state_dict()
    model = nb.load_checkpoint(run / "best.safetensors", device="cpu")
    weights = model.network.state_dict()
    for name, value in weights.items():
        if value.dtype.is_floating_point:
            weights[name] = parent[name].lerp(value, share / trained_share)
    model.network.load_state_dict(weights)
    return model


def measured(model, sets, sizes=(1.0,)):
    """What a user gets who sets nothing, without the curves; the mean over sizes of objects."""
    trained, found = model.info["object_sizes"], {name: [] for name in sets}
    for factor in sizes:
        model.info["object_sizes"] = {
            name: {**size, "median": factor * size["median"]} for name, size in trained.items()
        }
        for name, data in sets.items():
            found[name].append(nb.evaluate(model, data, "test"))
    model.info["object_sizes"] = trained
    return {name: mean_result(results) for name, results in found.items()}


def mean_result(results):
    """mAP50, mAP50-95 and both of each class."""
    mean = {key: float(np.mean([r[key] for r in results])) for key in MAPS}
    mean["per_class"] = {
        name: {
            key: float(np.mean([r["per_class"][name][key] for r in results])) if key in APS else v
            for key, v in first.items()
        }
        for name, first in results[0]["per_class"].items()
    }
    return mean


# --- the table -----------------------------------------------------------------------------------


def table(rows):
    """Means over seeds, with the standard deviation where there are several."""
    parent = next(row for row in rows if row["fields"] == 0)
    best = [row for row in rows if row["fields"] == "all"]
    head = ["fields", "scope", "runs", "other lab mAP50", "mAP50-95", "gap closed", "of mAP50-95"]
    head += ["BCCD mAP50", "change", "BCCD mAP50-95", "change", "steps", "seconds"]
    lines = [line(head), "|---" * len(head) + "|", line(cells([parent], parent, best))]
    others = {r["fields"] for r in rows} - {0, 1, 5, 20, "all", RARE}
    for fields in (1, 5, 20, *sorted(others), "all"):
        for scope in SCOPES:
            same = [r for r in rows if (r["fields"], r["scope"]) == (fields, scope)]
            lines += [line(cells(same, parent, best))] if same else []
    return "\n".join(lines) + "\n"


def rare_class_table(rows):
    """Per run, what the class with few boxes and the others have become, in percent."""
    parent = next((row for row in rows if row.get("platelets") == 0), None)
    head = ["platelets", "scope", "seed"]
    head += [f"{lab} {name} {key}" for lab in LABS for name in NAMES for key in APS]
    lines = [line(head), "|---" * len(head) + "|"]
    for row in (r for r in rows if r["fields"] == RARE and r is not parent):
        texts = [str(row[key]) for key in ("platelets", "scope", "seed")]
        for lab in LABS:
            for name in NAMES:
                old, new = (r[lab]["per_class"][name] for r in (parent, row))
                texts += [f"{100 * old[k]:.1f} → {100 * new[k]:.1f}" for k in APS]
        lines.append(line(texts))
    return "\n".join(lines) + "\n" if len(lines) > 2 else ""


def interpolation_table(rows):
    """Per share the change of mAP50 and mAP50-95 against the parent in points, mean and spread."""
    parents = {
        row.get("fields") == RARE: row for row in rows if row["scope"] == "none"
    }  # measured at several sizes, or at one
    head = ["fields", "share", "runs"] + [f"{lab} {key}" for lab in LABS for key in MAPS]
    lines = [line(head), "|---" * len(head) + "|"]
    some = [row for row in rows if "interpolated" in row]
    for fields in dict.fromkeys(row["fields"] for row in some):
        same = [row for row in some if row["fields"] == fields]
        for share in sorted({s for row in same for s in row["interpolated"]}, key=float):
            mine = [row for row in same if share in row["interpolated"]]
            texts = [str(fields), share, str(len(mine))]
            for lab in LABS:
                for key in MAPS:
                    before = parents[fields == RARE][lab][key]
                    changes = [row["interpolated"][share][lab][key] - before for row in mine]
                    texts.append(spread(100 * np.array(changes)))
            lines.append(line(texts))
    return "\n".join(lines) + "\n" if some else ""


def cells(same, parent, best):
    known = same[0]["fields"], same[0]["scope"], len(same)
    texts = [str(value) for value in known]
    texts += [spread([r["other"][key] for r in same]) for key in MAPS]
    texts += [gap(same, parent, best, key) for key in MAPS]
    for key in MAPS:
        values = [r["bccd"][key] for r in same]
        texts += [spread(values), f"{100 * (np.mean(values) - parent['bccd'][key]):+.1f}"]
    for key in ("steps", "seconds"):
        texts.append(f"{np.mean([r[key] for r in same]):.0f}" if key in same[0] else "")
    return texts


def gap(same, parent, best, key):
    """Share of what training on all of the laboratory's fields wins."""
    if not best or same[0] is parent:
        return ""
    whole = np.mean([r["other"][key] for r in best]) - parent["other"][key]
    return f"{(np.mean([r['other'][key] for r in same]) - parent['other'][key]) / whole:.0%}"


def spread(values):
    more = f" ± {np.std(values, ddof=1):.3f}" if len(values) > 1 else ""
    return f"{np.mean(values):.3f}{more}"


def line(texts):
    return "| " + " | ".join(texts) + " |"


if __name__ == "__main__":
    main()
