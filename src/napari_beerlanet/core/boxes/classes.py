"""Classes: colours that the colour-blind can tell apart, counts per class, and parasitaemia.

Every colour of a class, an outcome or a change that the program draws comes from here.
"""

from __future__ import annotations

import colorsys
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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

# A class whose name has one of these words is of cells that carry a parasite, …
_INFECTED = re.compile(
    r"\b(infected|parasit\w*|irbcs?|rings?|trophozoites?|tropho|schizonts?|gametocytes?|"
    r"merozoites?|plasmodium|falciparum|vivax|ovale|malariae|knowlesi|babesia)\b"
)
# … unless it has one of these, …
_NOT_INFECTED = re.compile(
    r"\b(uninfected|unparasit\w*|(non|not|no|without)[ -]?(infected|parasit\w*)|healthy|signet)\b"
)
# … and one with these is of red cells.
_RED_CELL = re.compile(
    r"\b(rbcs?|red (blood )?(cells?|corpuscles?)|erythrocytes?|normocytes?|discocytes?|"
    r"uninfected|(non|not|un)[ -]?infected)\b"
)


def is_infected(name: str) -> bool:
    """Whether a class by its name is of infected red cells or the parasites in them."""
    words = _name_words(name)
    return bool(_INFECTED.search(words)) and not _NOT_INFECTED.search(words)


def is_red_cell(name: str) -> bool:
    """Whether a class by its name is of red cells without parasites."""
    return bool(_RED_CELL.search(_name_words(name))) and not is_infected(name)


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
class Parasitaemia:
    """`infected` of `cells` red cells, and the 95 % interval of that share."""

    infected: int
    cells: int

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return self.infected / self.cells

    @property
    def interval(self) -> tuple[float, float]:
        """Low and high, from 0 to 1."""
        return wilson_interval(self.infected, self.cells)

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"{_format_fraction(self.share)} ({_format_fraction(low)} to {_format_fraction(high)})"
        )


def parasitaemia(counts: Mapping[str, int]) -> Parasitaemia | None:
    """The share of infected red cells; None where classes are not named so, or nothing is there.

    Every infected cell is a red cell, too, so the whole is both kinds together.
    """
    infected = [n for name, n in counts.items() if is_infected(name)]
    healthy = [n for name, n in counts.items() if is_red_cell(name)]
    whole = sum(infected) + sum(healthy)
    return Parasitaemia(sum(infected), whole) if infected and healthy and whole else None


@dataclass(frozen=True)
class ClassCounts:
    """Counts per class, and where they come from (`facts`, for instance image and model)."""

    counts: Mapping[str, int]
    facts: Mapping[str, str] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Objects of all classes."""
        return sum(self.counts.values())

    @property
    def parasitaemia(self) -> Parasitaemia | None:
        """See `parasitaemia`."""
        return parasitaemia(self.counts)

    def rows(self) -> list[tuple[str, str]]:
        """Name and value of everything there is to report."""
        rows = [*self.facts.items(), *((name, str(n)) for name, n in self.counts.items())]
        rows.append(("total", str(self.total)))
        infected = self.parasitaemia
        if infected is not None:
            low, high = infected.interval
            rows += [
                ("infected red cells", f"{infected.infected}"),
                ("red cells", f"{infected.cells}"),
                ("parasitaemia", f"{100 * infected.share:.3f} %"),
                ("95 % interval, low", f"{100 * low:.3f} %"),
                ("95 % interval, high", f"{100 * high:.3f} %"),
            ]
        return rows

    def tsv(self) -> str:
        """Lines of name, tabulator, value: what a spreadsheet takes when it is pasted."""
        return "".join(f"{_tsv_cell(name)}\t{_tsv_cell(value)}\n" for name, value in self.rows())

    def text(self) -> str:
        """One sentence for a laboratory book."""
        parts = ", ".join(f"{n} {name}" for name, n in self.counts.items()) or "nothing"
        share = self.parasitaemia
        if share is None:
            return f"{parts}."
        return f"{parts}; infected: {share.infected} of {share.cells} red cells, {share}."


def _format_fraction(share: float) -> str:
    value = 100 * share
    digits = 2 if value < 1 else 1 if value < 10 else 0
    return f"{value:.{digits}f} %"


def _tsv_cell(text: str) -> str:
    return re.sub(r"[\t\r\n]+", " ", text)
