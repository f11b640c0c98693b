"""Classes and cell types: names, colours the colour-blind can tell apart, counts, parasitaemia.

Every colour of a class, an outcome or a change that the program draws comes from here.
"""

from __future__ import annotations

import colorsys
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.common.messages import count_of, name_list, shortened

if TYPE_CHECKING:
    from napari_beerlanet.core.boxes.detections import Detections

RGB = tuple[int, int, int]

# Okabe and Ito's colours, those first that differ most from each other and from the stains and the
# background of a smear, as the colour-blind see them, too.
_OKABE_ITO = (
    "#0072b2",
    "#d55e00",
    "#56b4e9",
    "#e69f00",
    "#009e73",
    "#f0e442",
    "#3c3c3c",
    "#cc79a7",
)
_GOLDEN_RATIO = 0.618034  # of the circle of hues: each new hue falls into one of the largest gaps

OUTCOME_COLOURS = {
    "true": "#0072b2",
    "false": "#d55e00",
    "missed": "#f0e442",
    "wrong class": "#cc79a7",
}
"""What a detection can be when it is compared with annotations; never red against green."""

DECISION_COLOURS = {"accepted": "#0072b2", "rejected": "#d55e00"}
"""What a reviewer has decided on a detection."""

CHANGE_COLOURS = {"gained": "#56b4e9", "lost": "#d55e00", "changed": "#f0e442"}
"""What became of a detection from one run to the next."""


def class_colours(count: int) -> list[str]:
    """As many colours as there are classes, the same ones every time."""
    return [*_OKABE_ITO[:count], *(_generated_colour(i) for i in range(count - len(_OKABE_ITO)))]


def assign_colours(
    names: Sequence[str],
    fixed: Mapping[str, str] | None = None,
    preferred: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """A colour "#rrggbb" for each class: its fixed one, its preferred one, or the next free one.

    A preferred colour that another of the classes has already is not used.
    """
    fixed, preferred = fixed or {}, preferred or {}
    unique = list(dict.fromkeys(names))
    colours = {name: fixed[name] for name in unique if name in fixed}
    taken = {colour.lower() for colour in colours.values()}
    for name in unique:
        wanted = preferred.get(name)
        if name not in colours and wanted is not None and wanted.lower() not in taken:
            colours[name] = wanted
            taken.add(wanted.lower())
    free = (colour for colour in class_colours(2 * len(unique)) if colour not in taken)
    return {name: colours[name] if name in colours else next(free) for name in unique}


def parse_colours(colours: Sequence[str] | None, count: int) -> list[RGB]:
    """Red, green and blue of each class; those of `class_colours` where none are given."""
    given = class_colours(count) if colours is None else list(colours)
    if len(given) != count:
        raise ValueError(f"{len(given)} colours for {count} classes; each class needs one.")
    return [parse_colour(colour) for colour in given]


def parse_colour(text: str) -> RGB:
    """Red, green and blue from 0 to 255 of a colour such as "#a03c50"."""
    if not isinstance(text, str) or not re.fullmatch(r"#[0-9a-fA-F]{6}", text):
        raise ValueError(f'A colour is written as "#a03c50", not {text!r:.40}.')
    return int(text[1:3], 16), int(text[3:5], 16), int(text[5:7], 16)


def _generated_colour(index: int) -> str:
    lightness = (0.45, 0.62, 0.32)[index % 3]
    red, green, blue = colorsys.hls_to_rgb(index * _GOLDEN_RATIO % 1, lightness, 0.9)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


_Z_95 = 1.959964  # of a normal distribution, 95 % within

# A name with one of these words is of cells that carry a parasite, …
_INFECTED = re.compile(
    r"\b(infected|parasit\w*|irbcs?|rings?|trophozoites?|tropho|schizonts?|gametocytes?|"
    r"merozoites?|plasmodium|falciparum|vivax|ovale|malariae|knowlesi|babesia)\b"
)
# … unless it has one of these, …
_NOT_INFECTED = re.compile(
    r"\b(uninfected|unparasit\w*|(non|not|no|without)[ -]?(infected|parasit\w*)|healthy|"
    r"negatives?|signet)\b"
)
# … and one with these is of red cells.
_RED_CELL = re.compile(
    r"\b(rbcs?|red (blood )?(cells?|corpuscles?)|erythrocytes?|normocytes?|discocytes?|"
    r"uninfected|(non|not|un)[ -]?infected)\b"
)
_WHITE_CELL = re.compile(
    r"\b(wbcs?|white (blood )?(cells?|corpuscles?)|leu[ck]ocytes?|neutrophils?|lymphocytes?|"
    r"monocytes?|eosinophils?|basophils?|granulocytes?)\b"
)
# Types that a classifier of red cells may have for what is neither infected nor healthy.
_NO_RED_CELL = re.compile(
    r"\b(artefacts?|artifacts?|debris|dirt|platelets?|thrombocytes?|other|unknown|unclear|"
    r"difficult)\b"
)

# Life stages of a parasite, in the order in which they follow each other.
_LIFE_CYCLE = (r"\brings?\b", r"\btropho", r"\bschizont", r"\bgametocyte")

MIN_RED_CELLS = 500
"""With fewer red cells, a parasitaemia is hardly more than a guess: laboratories count as many."""


def is_infected(name: str) -> bool:
    """Whether a class by its name is of infected red cells or the parasites in them."""
    words = _name_words(name)
    return bool(_INFECTED.search(words)) and not _NOT_INFECTED.search(words)


def is_red_cell(name: str) -> bool:
    """Whether a class by its name is of red cells without parasites."""
    return bool(_RED_CELL.search(_name_words(name))) and not is_infected(name)


def is_white_cell(name: str) -> bool:
    """Whether a class or a type by its name is of white cells."""
    return bool(_WHITE_CELL.search(_name_words(name)))


def match_class_names(names: Sequence[str], classes: Sequence[str]) -> npt.NDArray[np.int64]:
    """(n,) for each of a dataset's class names the model's label; unknown ones are refused."""
    known = {name.casefold(): k for k, name in reversed(list(enumerate(classes)))}
    known |= {name: k for k, name in enumerate(classes)}  # written alike goes before all else
    place = {name: known.get(name, known.get(name.casefold())) for name in names}
    unknown = [name for name in names if place[name] is None]
    if unknown:
        raise ValueError(
            f"The model does not know the class{'es' * (len(unknown) > 1)} {name_list(unknown)}; "
            f"it knows {name_list(classes)}: name them alike in the data."
        )
    return np.array([place[name] for name in names], dtype=np.int64)


def applicable_classes(applies_to: Sequence[str], names: Sequence[str]) -> list[str]:
    """Those of a detector's classes `names` that a classifier is meant for.

    All where `applies_to` is empty. Else those of the same name or, if there is none, of the same
    kind of cell: some write "red blood cell" for "RBC". Nothing may fit.
    """
    wanted = {name.casefold() for name in applies_to}
    kinds = [kind for kind in (_is_any_red_cell, is_white_cell) if any(map(kind, applies_to))]
    same = [name for name in names if not wanted or name.casefold() in wanted]
    return same or [name for name in names if any(kind(name) for kind in kinds)]


def classes_to_classify(
    classifier: Mapping[str, Any], names: Sequence[str], chosen: Sequence[str] = ()
) -> list[str]:
    """Which of a detector's classes `names` a classifier gets: those `chosen`, or that it is for.

    `classifier` is its `info`. Where there is no such class it is a `ValueError`.
    """
    for name in chosen:
        if name not in names:
            raise ValueError(
                f"There are no boxes of the class {shortened(name)}; the classes are "
                f"{name_list(names)}."
            )
    meant = [str(name) for name in classifier.get("applies_to") or ()]
    found = list(chosen) or applicable_classes(meant, names)
    if not found and names:
        raise ValueError(
            f"The classifier {shortened(classifier.get('name', ''))} is meant for "
            f"{name_list(meant)}, and the detector's classes are {name_list(names)}: "
            "say which of them to classify."
        )
    return found


def _is_any_red_cell(name: str) -> bool:
    return is_red_cell(name) or is_infected(name)


def _name_words(name: str) -> str:
    """ "Infected_RBC", "infectedRBC" → "infected rbc"."""
    apart = re.sub(r"([a-z]{2})([A-Z])", r"\1 \2", name)
    return re.sub(r"[_./\\-]+", " ", apart).lower()


def wilson_interval(part: int, whole: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share: sensible also for none, for all, and for small numbers."""
    if not 0 <= part <= whole or whole < 1:
        raise ValueError(f"A share needs 0 ≤ part ≤ whole and a whole above 0, not {part}/{whole}.")
    p, z2 = part / whole, _Z_95**2
    middle = (p + z2 / (2 * whole)) / (1 + z2 / whole)
    half = _Z_95 * math.sqrt(p * (1 - p) / whole + z2 / (4 * whole**2)) / (1 + z2 / whole)
    low = 0.0 if part == 0 else middle - half
    high = 1.0 if part == whole else middle + half
    return low, high


def poisson_interval(count: int) -> tuple[float, float]:
    """Garwood's exact 95 % interval of the mean of which a number of objects was counted.

    What one counts in a field, if objects lie at random: the interval of cells per area.
    """
    from scipy.special import gammaincinv

    low = float(gammaincinv(count, 0.025)) if count else 0.0
    return low, float(gammaincinv(count + 1, 0.975))


@dataclass(frozen=True)
class Proportion:
    """`part` of a `whole` above 0, and Wilson's 95 % interval of that share."""

    part: int
    whole: int

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return self.part / self.whole

    @property
    def interval(self) -> tuple[float, float]:
        """Low and high, from 0 to 1."""
        return wilson_interval(self.part, self.whole)

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"{_format_fraction(self.share)} ({_format_fraction(low)} to {_format_fraction(high)})"
        )


def proportions(counts: Mapping[str, int]) -> dict[str, Proportion]:
    """The share of each in all of them, by name; {} where nothing was counted."""
    whole = sum(counts.values())
    return {name: Proportion(count, whole) for name, count in counts.items()} if whole else {}


@dataclass(frozen=True)
class Parasitaemia:
    """`infected` of `cells` red cells, and the 95 % interval of that share.

    `stages`: infected cells by life stage. `white_cells` beside them, None where no class is of
    white cells. `unclassified` red cells do not count, as nobody has said what they are.
    """

    infected: int
    cells: int
    stages: Mapping[str, int] = field(default_factory=dict)
    white_cells: int | None = None
    unclassified: int = 0

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return self.infected / self.cells

    @property
    def interval(self) -> tuple[float, float]:
        """Low and high, from 0 to 1."""
        return wilson_interval(self.infected, self.cells)

    @property
    def per_100_white_cells(self) -> float | None:
        """Infected red cells per 100 white cells; None where there are no white cells."""
        return 100 * self.infected / self.white_cells if self.white_cells else None

    @property
    def per_100_white_cells_interval(self) -> tuple[float, float] | None:
        """The 95 % interval of that: of two counts, the share of one in both is binomial."""
        if not self.white_cells:
            return None
        low, high = wilson_interval(self.infected, self.infected + self.white_cells)
        return 100 * low / (1 - low), 100 * high / (1 - high)

    @property
    def warnings(self) -> list[str]:
        """What is to be said against the number, in a sentence each."""
        sentences = []
        if self.cells < MIN_RED_CELLS:
            sentences.append(
                f"Only {count_of(self.cells, 'red cell')} counted: a parasitaemia needs at least "
                f"{MIN_RED_CELLS}; count more fields."
            )
        if self.unclassified:
            one, many = (
                "red cell was not classified and does",
                "red cells were not classified and do",
            )
            sentences.append(f"{count_of(self.unclassified, one, many)} not count.")
        return sentences

    def rows(self) -> list[tuple[str, str]]:
        """Name and value of everything there is to report."""
        low, high = self.interval
        rows = [("infected red cells", f"{self.infected}")]
        if len(self.stages) > 1:
            rows += [(f"infected, {stage}", f"{count}") for stage, count in self.stages.items()]
        rows += [
            ("red cells", f"{self.cells}"),
            ("parasitaemia", f"{100 * self.share:.3f} %"),
            ("95 % interval, low", f"{100 * low:.3f} %"),
            ("95 % interval, high", f"{100 * high:.3f} %"),
        ]
        if self.white_cells is not None:
            rows.append(("white cells", f"{self.white_cells}"))
        per_100 = self.per_100_white_cells
        if per_100 is not None:
            rows.append(("parasites per 100 white cells", f"{per_100:.1f}"))
        return rows

    def __str__(self) -> str:
        return str(Proportion(self.infected, self.cells))


def parasitaemia(
    counts: Mapping[str, int], types: Mapping[str, int] | None = None
) -> Parasitaemia | None:
    """The share of infected red cells; None where nothing is named so, or nothing is there.

    By the cell types `types`, where these tell infected from uninfected red cells, and else by the
    classes `counts`. Every infected cell is a red cell, too, so the whole is both kinds together.
    """
    types = types or {}
    white = [count for name, count in counts.items() if is_white_cell(name)]
    white_cells = sum(white) if white else None
    healthy, unclassified = healthy_types(list(types)), 0
    if healthy:
        all_red = sum(count for name, count in counts.items() if _is_any_red_cell(name))
        unclassified = max(all_red - sum(types.values()), 0)
        stages = {n: c for n, c in types.items() if n not in healthy and _is_of_red_cells(n)}
        whole = sum(stages.values()) + sum(types[name] for name in healthy)
    else:
        stages = {name: count for name, count in counts.items() if is_infected(name)}
        red = [count for name, count in counts.items() if is_red_cell(name)]
        whole = sum(stages.values()) + sum(red) if stages and red else 0
    infected = sum(stages.values())
    if not healthy and sum(types.values()) == infected and all(map(is_infected, types)):
        stages = dict(types) or stages  # all of them were classified, by stage alone
    stages = {name: stages[name] for name in in_life_cycle_order(list(stages))}
    return Parasitaemia(infected, whole, stages, white_cells, unclassified) if whole else None


def healthy_types(types: Sequence[str]) -> list[str]:
    """Of cell types that tell infected from uninfected red cells, the uninfected ones; else none.

    "healthy" beside "tumour" is not about parasites.
    """
    without = [
        name for name in types if is_red_cell(name) or _NOT_INFECTED.search(_name_words(name))
    ]
    names_parasites = any(re.search("infect|parasit", name.lower()) for name in without)
    return without if names_parasites or any(map(is_infected, types)) else []


def infected_types(types: Sequence[str]) -> list[str]:
    """Of cell types that tell infected from uninfected red cells, the infected ones; else none."""
    healthy = healthy_types(types)
    return [n for n in types if healthy and n not in healthy and _is_of_red_cells(n)]


def in_life_cycle_order(types: Sequence[str]) -> list[str]:
    """Cell types with life stages in the order in which laboratories list them, ring first.

    The stages take each other's places; all other types stay in theirs.
    """

    def stage(name: str) -> int | None:
        words = _name_words(name)
        return next((k for k, one in enumerate(_LIFE_CYCLE) if re.search(one, words)), None)

    stages = {name: k for name in types if (k := stage(name)) is not None and is_infected(name)}
    ordered = iter(sorted((name for name in types if name in stages), key=stages.__getitem__))
    return [next(ordered) if name in stages else name for name in types]


def _is_of_red_cells(name: str) -> bool:
    return not is_white_cell(name) and not _NO_RED_CELL.search(_name_words(name))


@dataclass(frozen=True)
class ClassCounts:
    """Counts per class and per cell type, and where they come from (`facts`: image, model, …)."""

    counts: Mapping[str, int]
    facts: Mapping[str, str] = field(default_factory=dict)
    types: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, detections: Detections, facts: Mapping[str, str] | None = None) -> ClassCounts:
        """The counts of detections."""
        return cls(detections.counts(), facts or {}, detections.type_counts())

    @property
    def total(self) -> int:
        """Objects of all classes."""
        return sum(self.counts.values())

    @property
    def type_shares(self) -> dict[str, Proportion]:
        """The share of each type in all objects that have one; {} where none has.

        Life stages come in the order of the life cycle.
        """
        shares = proportions(self.types)
        return {name: shares[name] for name in in_life_cycle_order(list(shares))}

    @property
    def parasitaemia(self) -> Parasitaemia | None:
        """See `parasitaemia`."""
        return parasitaemia(self.counts, self.types)

    def rows(self) -> list[tuple[str, ...]]:
        """Name and value of everything there is to report; types also have shares, see `tsv`."""
        rows: list[tuple[str, ...]] = [*self.facts.items()]
        rows += [(name, str(n)) for name, n in self.counts.items()]
        rows.append(("total", str(self.total)))
        if self.type_shares:
            rows.append(("type", "count", "share", "95 % interval, low", "95 % interval, high"))
        for name, part in self.type_shares.items():
            numbers = (part.share, *part.interval)
            rows.append((name, str(part.part), *(f"{100 * value:.3f} %" for value in numbers)))
        infected = self.parasitaemia
        return rows if infected is None else [*rows, *infected.rows()]

    def tsv(self) -> str:
        """Lines of cells with tabulators: what a spreadsheet takes when it is pasted."""
        return "".join("\t".join(map(_tsv_cell, row)) + "\n" for row in self.rows())

    def text(self) -> str:
        """One sentence for a laboratory book."""
        parts = ", ".join(f"{n} {name}" for name, n in self.counts.items()) or "nothing"
        if self.type_shares:
            shares = (
                f"{p.part} {name} ({_format_fraction(p.share)})"
                for name, p in self.type_shares.items()
            )
            parts += f"; types: {', '.join(shares)}"
        share = self.parasitaemia
        if share is None:
            return f"{parts}."
        text = f"{parts}; infected: {share.infected} of {share.cells} red cells, {share}"
        per_100 = share.per_100_white_cells
        return f"{text}." if per_100 is None else f"{text}; {per_100:.1f} per 100 white cells."


def _format_fraction(share: float) -> str:
    value = 100 * share
    digits = 2 if value < 1 else 1 if value < 10 else 0
    return f"{value:.{digits}f} %"


def _tsv_cell(text: str) -> str:
    return re.sub(r"[\t\r\n]+", " ", text)
