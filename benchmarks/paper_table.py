"""The paper's table on the data of ../shared: all methods, three tasks, other laboratories.

    python benchmarks/paper_table.py --out paper-table [--budget quick] [--seeds 0 1] [--estimate]
    python benchmarks/paper_table.py --out paper-table --docs docs/benchmark.md

Detection: trained on BCCD, tested on another laboratory's smears, with YOLOv8n. Classification:
white-cell types of `pbc`, tested on `bccd` and `cellavision`; tumour patches of `turin`, tested on
`lc25000`; with ResNet-18, which starts at random, as no ImageNet weights are in ../shared. Writes
OUT/benchmark.yaml and what it needs, then runs `napari-beerlanet benchmark` on it into OUT/results.
Killed, the same command resumes it.

`--budget` is the size of images and networks: "quick" is what one CPU core trains in hours, "small"
in days, "paper" (or `--full`) what the paper has: 640 pixels for 50 epochs, crops of 224 pixels for
20, batches of 128, and StainGAN of its size.

`--docs FILE` trains nothing: it adds the values of OUT/results to those of earlier runs with the
same budget, which are kept in benchmarks/results, and puts the table of all of them into FILE,
between the two comments that mark the place, with BeerLaNet's place in each column and the paper's
own table.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml
from classify import LABORATORIES
from smears import write_bccd, write_other_lab

from napari_beerlanet.cli.main import main as command
from napari_beerlanet.core.benchmark.page import spread_text
from napari_beerlanet.core.benchmark.settings import METHODS, BenchmarkSettings
from napari_beerlanet.core.benchmark.table import (
    VALUES_FILE,
    ResultTable,
    columns_of,
    paper_table,
    read_values,
)
from napari_beerlanet.core.common.messages import count_of

KEPT = Path(__file__).with_name("results")
SHARED = Path(__file__).resolve().parents[2] / "shared"
# From scratch on a thousand crops, the paper's rate and batch would not converge in 12 epochs.
SCRATCH = {"learning_rate": 1e-3, "cosine": True, "warm_up": 15, "averaging": 0.97}
MARKS = "<!-- paper_table.py: begin -->", "<!-- paper_table.py: end -->"
OURS = "beerlanet"


@dataclass(frozen=True)
class Budget:
    """Pixels, epochs and batch of detectors and of classifiers; the StainGAN; further settings."""

    detect: tuple[int, int, int]
    classify: tuple[int, int, int]
    staingan: dict[str, int]
    options: dict[str, object]


BUDGETS = {
    "quick": Budget(
        (224, 6, 8), (64, 6, 32), {"filters": 16, "blocks": 6, "crop": 64, "steps": 200}, SCRATCH
    ),
    "small": Budget(
        (320, 15, 8), (96, 12, 32), {"filters": 16, "blocks": 6, "crop": 128, "steps": 600}, SCRATCH
    ),
    "paper": Budget(
        (640, 50, 8), (224, 20, 128), {"filters": 64, "blocks": 9, "crop": 256, "steps": 20_000}, {}
    ),
}


def main():
    options = parsed()
    if options.docs is not None:
        return write_section(options)
    file = write_settings(options)
    words = ["benchmark", str(file), "--out", str(options.out / "results"), "--paper"]
    words += ["--workers", str(options.workers), *(["--estimate"] if options.estimate else [])]
    return command(words)


def parsed(words=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("paper-table"))
    parser.add_argument("--budget", choices=BUDGETS, default="small")
    parser.add_argument("--full", action="store_const", const="paper", dest="budget")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--threads", type=int, help="of each job")
    parser.add_argument("--estimate", action="store_true", help="only say how long it will take")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="put the table into this page")
    parser.add_argument("--shared", type=Path, default=SHARED)
    return parser.parse_args(words)


def write_settings(options):
    """The data sets and OUT/benchmark.yaml; returns its path."""
    out, shared = options.out.resolve(), options.shared.resolve()
    bccd, other = out / "data" / "bccd", out / "data" / "other-lab"
    for folder, write in ((bccd, write_bccd), (other, write_other_lab)):
        if not (folder / "data.yaml").exists():
            write(shared, folder)
    places = argparse.Namespace(shared=shared, out=out / "classify")
    white, tumour = (LABORATORIES[task](places) for task in ("white cells", "tumour"))
    budget = BUDGETS[options.budget]
    content = {
        "methods": options.methods,
        "seeds": options.seeds,
        "tasks": [
            {
                "name": "blood cells",
                "kind": "detect",
                "train": str(bccd / "data.yaml"),
                "tests": {"other lab": {"data": str(other / "data.yaml"), "split": "val"}},
                "weights": str(shared / "weights" / "yolov8n.pt"),
                **sized(budget.detect),
            },
            classification("white cells", white, budget, {"fill": 0.8}),
            classification("tumour", tumour, budget, {}),
        ],
        "staingan": budget.staingan,
        **({"threads": options.threads} if options.threads else {}),
    }
    file = out / "benchmark.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    return file


def classification(name, laboratories, budget, more):
    """Trained on the first of the laboratories, tested on the others."""
    home, *others = laboratories
    return {
        "name": name,
        "kind": "classify",
        "train": str(laboratories[home]),
        "tests": {lab: {"data": str(laboratories[lab]), "split": "val"} for lab in others},
        "backbone": "resnet18",
        **sized(budget.classify),
        "options": {**budget.options, **more},
    }


def sized(numbers):
    return dict(zip(("image_size", "epochs", "batch"), numbers, strict=True))


# --- the section of the docs ----------------------------------------------------------------------


def write_section(options):
    """Put the table of all values so far between the marks of a page; 0 if that could be done."""
    results, page = options.out / "results", options.docs
    kept = KEPT / f"paper_table_{options.budget}.csv"
    values = read_values(kept) if kept.is_file() else {}
    if (results / VALUES_FILE).is_file():
        for key, by_seed in read_values(results / VALUES_FILE).items():
            values.setdefault(key, {}).update(by_seed)
    if not values:
        print(f"{results}: there is no table yet.", file=sys.stderr)
        return 1
    text = page.read_text(encoding="utf-8")
    if not all(mark in text for mark in MARKS):
        print(f"{page}: the comments {' and '.join(MARKS)} mark no place.", file=sys.stderr)
        return 1
    seeds = tuple(sorted({seed for by_seed in values.values() for seed in by_seed}))
    settings = BenchmarkSettings.read(options.out / "benchmark.yaml")
    table = ResultTable(columns_of(settings), settings.methods, values, seeds)
    before, rest = text.split(MARKS[0], 1)
    after = rest.split(MARKS[1], 1)[1]
    body = section(table, settings)
    page.write_text(f"{before}{MARKS[0]}\n\n{body}\n{MARKS[1]}{after}", encoding="utf-8")
    kept.parent.mkdir(exist_ok=True)
    kept.write_text(table.values_csv(), encoding="utf-8")
    return 0


def section(table, settings):
    """Set-up, the table, BeerLaNet's place in each column, the paper's table; as Markdown."""
    parts = [set_up(table, settings), table.markdown(), *table.notes()]
    parts += ["Where BeerLaNet stands in each column:", places(table)]
    parts += ["The paper's own table (means of three seeds):", paper_table().markdown()]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def set_up(table, settings):
    """A sentence on what was trained."""
    said = []
    for task in settings.tasks:
        what = "smears" if task.kind == "detect" else "crops"
        said.append(
            f"{task.name}: {what} of {task.image_size} pixels, {count_of(task.epochs, 'epoch')}, "
            f"batches of {task.batch}"
        )
    gan = settings.staingan
    said.append(
        f"StainGAN: {gan['filters']} filters, {gan['blocks']} blocks, crops of {gan['crop']}, "
        f"{gan['steps']} steps"
    )
    jobs = {
        (method, column.task, seed) for (method, column), by in table.values.items() for seed in by
    }
    return (
        f"{'; '.join(said)}. {count_of(len(jobs), 'job')}. "
        f"{spread_text(len(table.seeds))}, in percent; the best is bold, the second best starred."
    )


def places(table):
    """A table: of each column the best method, BeerLaNet, the difference, and its place."""
    lines = ["| | best | | BeerLaNet | behind | place |", "|---|---|---:|---:|---:|---:|"]
    rows = {row.method: row for row in table.rows}
    for number, column in enumerate(table.columns):
        means = {m: row.cells[number].mean for m, row in rows.items()}
        known = {m: mean for m, mean in means.items() if mean is not None}
        if OURS not in known:
            continue
        best = max(known, key=known.__getitem__)
        behind = known[best] - known[OURS]
        place = 1 + sum(mean > known[OURS] for mean in known.values())
        lines.append(
            f"| {column.dataset} {column.metric_title} | {rows[best].title} | {known[best]:.2f} "
            f"| {known[OURS]:.2f} | {behind:.2f} | {place} of {len(known)} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
