"""What was counted: objects per class, and of red cells the share that is infected."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_Z = 1.959964  # of a normal distribution, 95 % within

# A class whose name has one of these words is of cells that carry a parasite, …
_INFECTED = re.compile(
    r"\b(infected|parasit\w*|irbcs?|rings?|trophozoites?|tropho|schizonts?|gametocytes?|"
    r"merozoites?|plasmodium|falciparum|vivax|ovale|malariae|knowlesi|babesia)\b"
)
# … unless it has one of these, …
_NOT = re.compile(
    r"\b(uninfected|unparasit\w*|(non|not|no|without)[ -]?(infected|parasit\w*)|healthy|signet)\b"
)
# … and one with these is of red cells.
_RED = re.compile(
    r"\b(rbcs?|red (blood )?(cells?|corpuscles?)|erythrocytes?|normocytes?|discocytes?|"
    r"uninfected|(non|not|un)[ -]?infected)\b"
)


def is_infected(name: str) -> bool:
    """Whether a class by its name is of infected red cells or the parasites in them."""
    words = _words(name)
    return bool(_INFECTED.search(words)) and not _NOT.search(words)


def is_red_cell(name: str) -> bool:
    """Whether a class by its name is of red cells without parasites."""
    return bool(_RED.search(_words(name))) and not is_infected(name)


def _words(name: str) -> str:
    """ "Infected_RBC", "infectedRBC" → "infected rbc"."""
    apart = re.sub(r"([a-z]{2})([A-Z])", r"\1 \2", name)
    return re.sub(r"[_./\\-]+", " ", apart).lower()


def wilson(part: int, whole: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share: sensible also for none, for all, and for small numbers."""
    if not 0 <= part <= whole or whole < 1:
        raise ValueError(f"A share needs 0 ≤ part ≤ whole and a whole above 0, not {part}/{whole}.")
    p, z2 = part / whole, _Z**2
    middle = (p + z2 / (2 * whole)) / (1 + z2 / whole)
    half = _Z * math.sqrt(p * (1 - p) / whole + z2 / (4 * whole**2)) / (1 + z2 / whole)
    low = 0.0 if part == 0 else middle - half
    high = 1.0 if part == whole else middle + half
    return low, high


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
        return wilson(self.infected, self.cells)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{_percent(self.share)} ({_percent(low)} to {_percent(high)})"


def parasitaemia(counts: Mapping[str, int]) -> Parasitaemia | None:
    """The share of infected red cells; None where classes are not named so, or nothing is there.

    Every infected cell is a red cell, too, so the whole is both kinds together.
    """
    infected = [n for name, n in counts.items() if is_infected(name)]
    healthy = [n for name, n in counts.items() if is_red_cell(name)]
    whole = sum(infected) + sum(healthy)
    return Parasitaemia(sum(infected), whole) if infected and healthy and whole else None


@dataclass(frozen=True)
class Tally:
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
        """Name and value of everything there is to tell."""
        told = [*self.facts.items(), *((name, str(n)) for name, n in self.counts.items())]
        told.append(("total", str(self.total)))
        found = self.parasitaemia
        if found is not None:
            low, high = found.interval
            told += [
                ("infected red cells", f"{found.infected}"),
                ("red cells", f"{found.cells}"),
                ("parasitaemia", f"{100 * found.share:.3f} %"),
                ("95 % interval, low", f"{100 * low:.3f} %"),
                ("95 % interval, high", f"{100 * high:.3f} %"),
            ]
        return told

    def tsv(self) -> str:
        """Lines of name, tabulator, value: what a spreadsheet takes when it is pasted."""
        return "".join(f"{_cell(name)}\t{_cell(value)}\n" for name, value in self.rows())

    def text(self) -> str:
        """One sentence for a laboratory book."""
        parts = ", ".join(f"{n} {name}" for name, n in self.counts.items()) or "nothing"
        found = self.parasitaemia
        if found is None:
            return f"{parts}."
        return f"{parts}; infected: {found.infected} of {found.cells} red cells, {found}."


def _percent(share: float) -> str:
    value = 100 * share
    digits = 2 if value < 1 else 1 if value < 10 else 0
    return f"{value:.{digits}f} %"


def _cell(text: str) -> str:
    return re.sub(r"[\t\r\n]+", " ", text)
