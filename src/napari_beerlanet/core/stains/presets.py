"""Known dyes and stain presets: names for stains, and named spectra to decompose with.

RGB spectra of one dye differ between laboratories and cameras by about ten degrees, and spectra of
different dyes can coincide: the red cells of a Wright-stained smear lie within 3° of AEC. So a name
is suggested, with its angle, and never given.

    preset = nb.load_preset("H&E")                 # or the path of a preset's file
    nb.decompose(rgb, spectra=preset, fixed_spectra=True)

A `StainLibrary` is a folder of presets, and of the names that stains of images were given. A
project has one, and the user has one for images of no project.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from napari_beerlanet._version import __version__
from napari_beerlanet.core.common.locking import FolderLock, LockedError
from napari_beerlanet.core.common.messages import shortened, slug
from napari_beerlanet.core.common.storage import (
    FileError,
    read_json,
    read_json_of_kind,
    read_json_or_empty,
    write_json,
)
from napari_beerlanet.core.images import Domain
from napari_beerlanet.core.images.rgb import check_rgb, to_columns
from napari_beerlanet.core.stains.solver import MAX_COMPONENTS

Spectrum = tuple[float, float, float]
"""Absorption in red, green and blue, of any length."""

_RUIFROK = (
    "A. C. Ruifrok and D. A. Johnston, Quantification of histochemical staining by color "
    "deconvolution, Anal. Quant. Cytol. Histol. 23 (2001) 291-299"
)
_LANDINI = (
    "G. Landini, G. Martinelli and F. Piccinini, Colour deconvolution: stain unmixing in "
    "histological imaging, Bioinformatics 37 (2021) 1485-1487, and its ImageJ plugin"
)
_PRAHL = (
    "molar extinction of oxyhaemoglobin compiled by S. Prahl (omlc.org), mean over 590-670, "
    "500-570 and 430-490 nm"
)

MAX_SUGGESTION_ANGLE = 8.0
"""Degrees up to which a name is suggested: half of what haematoxylin and methylene blue differ by,
the closest two of the common dyes, so that no other of them is nearer."""

MAX_SAME_STAIN_ANGLE = 15.0
"""Degrees up to which a stain of another fit, or of another image, may be the same one."""


class NamedSpectrum(NamedTuple):
    """A stain by name: `spectrum` is its absorption in red, green and blue."""

    name: str
    spectrum: Spectrum


@dataclass(frozen=True)
class KnownDye:
    """A dye with the `source` of its spectrum; only `common` ones are suggested unasked."""

    name: str
    spectrum: Spectrum
    source: str
    common: bool = False


KNOWN_DYES: tuple[KnownDye, ...] = (
    KnownDye("haematoxylin", (0.650, 0.704, 0.286), _RUIFROK, common=True),
    KnownDye("eosin", (0.072, 0.990, 0.105), _RUIFROK, common=True),
    KnownDye("eosin", (0.092789, 0.954111, 0.283111), _LANDINI, common=True),
    KnownDye("DAB", (0.268, 0.570, 0.776), _RUIFROK, common=True),
    KnownDye("methylene blue / azure", (0.834750, 0.513556, 0.196330), _LANDINI, common=True),
    KnownDye("haemoglobin", (0.029, 0.411, 0.911), _PRAHL, common=True),
    KnownDye("AEC", (0.2743, 0.6796, 0.6803), _LANDINI),
    KnownDye("Fast Red", (0.213939, 0.851127, 0.477940), _LANDINI),
    KnownDye("Fast Blue", (0.748903, 0.606242, 0.267311), _LANDINI),
    KnownDye("PAS", (0.175411, 0.972178, 0.154589), _LANDINI),
    KnownDye("Alcian blue", (0.874622, 0.457711, 0.158256), _LANDINI),
    KnownDye("methyl green", (0.98003, 0.144316, 0.133146), _LANDINI),
    KnownDye("Feulgen", (0.464209, 0.830083, 0.308272), _LANDINI),
    KnownDye("light green", (0.947055, 0.253738, 0.196508), _LANDINI),
    KnownDye("aniline blue", (0.853033, 0.508733, 0.112656), _LANDINI),
    KnownDye("azocarmine", (0.092899, 0.866201, 0.490985), _LANDINI),
    KnownDye("orange G", (0.107328, 0.367654, 0.923748), _LANDINI),
    KnownDye("Ponceau-fuchsin", (0.099972, 0.737386, 0.668033), _LANDINI),
)


class StainSuggestion(NamedTuple):
    """A name for a stain: `angle` in degrees to a spectrum of that name, and whose that is."""

    name: str
    angle: float
    source: str


def spectral_angle(a: npt.ArrayLike, b: npt.ArrayLike) -> float:
    """Degrees between two spectra (3,), whatever their lengths; 90 where one of them is zero."""
    return float(_angles(np.asarray(a, float)[:, None], [b])[0, 0])


def suggest_names(
    spectra: npt.NDArray[np.float64], own: Sequence[NamedSpectrum] = ()
) -> list[StainSuggestion | None]:
    """A name for each of the columns of `spectra` (3, r), None where nothing is near enough.

    From the common dyes and from `own`, spectra that the user has named before. No name is given
    to two stains: the nearest has it.
    """
    references = _references(own, common=True)
    suggested: list[StainSuggestion | None] = [None] * spectra.shape[1]
    angles = _angles(spectra, [one.spectrum for one in references])
    taken: set[str] = set()
    for flat in np.argsort(angles, axis=None, kind="stable"):
        i, k = divmod(int(flat), len(references))
        if angles[i, k] > MAX_SUGGESTION_ANGLE:
            break
        one = references[k]
        if suggested[i] is None and one.name not in taken:
            suggested[i] = StainSuggestion(one.name, float(angles[i, k]), one.source)
            taken.add(one.name)
    return suggested


def nearest_dyes(
    spectrum: npt.ArrayLike, own: Sequence[NamedSpectrum] = ()
) -> list[StainSuggestion]:
    """All names, each once, the nearest to a spectrum (3,) first."""
    references = _references(own)
    angles = _angles(
        np.asarray(spectrum, float)[:, None], [one.spectrum for one in references]
    ).ravel()
    found: dict[str, StainSuggestion] = {}
    for k in np.argsort(angles, kind="stable"):
        one = references[k]
        found.setdefault(one.name, StainSuggestion(one.name, float(angles[k]), one.source))
    return list(found.values())


def match_names(
    named: Sequence[NamedSpectrum],
    spectra: npt.NDArray[np.float64],
    active: npt.NDArray[np.bool_] | None = None,
    max_angle: float = MAX_SAME_STAIN_ANGLE,
) -> tuple[str, ...]:
    """The names of columns of `spectra` (3, r) by their likeness to named ones, "" where none is.

    The most alike are paired first; what is more than `max_angle` degrees apart is not the same.
    """
    names = [""] * spectra.shape[1]
    if not named:
        return tuple(names)
    angles = _angles(spectra, [one.spectrum for one in named])
    if active is not None:
        angles[~active] = np.inf
    for _ in named:
        i, k = divmod(int(np.argmin(angles)), len(named))
        if not angles[i, k] <= max_angle:
            break
        names[i] = named[k].name
        angles[i, :] = angles[:, k] = np.inf
    return tuple(names)


def _references(own: Iterable[NamedSpectrum], common: bool = False) -> list[KnownDye]:
    mine = [KnownDye(one.name, one.spectrum, "named by you", common=True) for one in own]
    return mine + [dye for dye in KNOWN_DYES if dye.common or not common]


def _angles(
    spectra: npt.NDArray[np.float64], references: Sequence[npt.ArrayLike]
) -> npt.NDArray[np.float64]:
    """(r, k) degrees between columns of spectra (3, r) and k references (3,)."""
    a, b = np.asarray(spectra, float), np.asarray(references, float).T
    length = np.linalg.norm(a, axis=0)[:, None] * np.linalg.norm(b, axis=0)
    cosine = np.divide(a.T @ b, length, out=np.zeros_like(length), where=length > 0)
    # The sine keeps its digits where the cosine is nearly 1.
    cross = np.linalg.norm(np.cross(a.T[:, None], b.T[None]), axis=-1)
    sine = np.divide(cross, length, out=np.ones_like(length), where=length > 0)
    return np.asarray(np.degrees(np.arctan2(sine, cosine)))


# --- presets --------------------------------------------------------------------------------------

SPECTRA_KIND = "napari-beerlanet spectra"
"""What a file by `files.write_spectra` says that it is."""

FILE_VERSION = 1
_KIND, _NAMES_KIND = "napari-beerlanet stain preset", "napari-beerlanet stain names"
_NAMES_FILE, _LOCK_FILE = "names.json", "names.lock"
_LOCK_POLL_S, _LOCK_TIMEOUT_S = 0.02, 10.0
_MAX_IMAGES = 1000  # whose names are kept
_MIN_REGION_OD = 0.02  # of the mean, below which a region shows no stain


@dataclass(frozen=True)
class StainPreset:
    """Named stains. `source`: where their spectra come from, in a few words."""

    name: str
    stains: tuple[NamedSpectrum, ...]
    source: str = ""

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise ValueError("A preset needs a name.")
        if not self.stains:
            raise ValueError(f"The preset “{shortened(self.name)}” needs at least one stain.")
        if len(self.stains) > MAX_COMPONENTS:
            raise ValueError(
                f"The preset “{shortened(self.name)}” has {len(self.stains):,} stains; up to "
                f"{MAX_COMPONENTS} are possible."
            )
        checked = tuple(NamedSpectrum(one.name, check_spectrum(one)) for one in self.stains)
        names = [one.name for one in checked]
        double = next((name for name in names if names.count(name) > 1), None)
        if double is not None:
            raise ValueError(
                f"The preset “{shortened(self.name)}” has two stains called “{shortened(double)}”."
            )
        object.__setattr__(self, "stains", checked)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the stains."""
        return tuple(one.name for one in self.stains)

    @property
    def spectra(self) -> npt.NDArray[np.float64]:
        """(3, r), one unit column for each stain."""
        columns = np.array([one.spectrum for one in self.stains], float).T
        return np.asarray(columns / np.linalg.norm(columns, axis=0))


def check_spectrum(stain: NamedSpectrum) -> Spectrum:
    """The spectrum of a named stain as three floats, or a `ValueError` of one sentence."""
    if not stain.name.strip():
        raise ValueError("A stain of a preset needs a name.")
    try:
        values = np.asarray(stain.spectrum, float)
    except (TypeError, ValueError, OverflowError):
        values = np.empty(0)
    if values.shape != (3,) or not np.isfinite(values).all() or (values < 0).any():
        raise ValueError(
            f"“{shortened(stain.name)}” needs 3 numbers of at least 0: red, green and blue."
        )
    if not values.any():
        raise ValueError(
            f"“{shortened(stain.name)}” absorbs nothing: one of its numbers must be above 0."
        )
    red, green, blue = values.tolist()
    return red, green, blue


def _built_in(name: str, *stains: tuple[str, str]) -> StainPreset:
    """A preset of known dyes, each by its name and the beginning of its source."""
    chosen = [
        next(d for d in KNOWN_DYES if d.name == dye and d.source.startswith(source))
        for dye, source in stains
    ]
    sources = "; ".join(dict.fromkeys(dye.source for dye in chosen))
    return StainPreset(name, tuple(NamedSpectrum(d.name, d.spectrum) for d in chosen), sources)


BUILT_IN_PRESETS: tuple[StainPreset, ...] = (
    _built_in("H&E", ("haematoxylin", "A. C. Ruifrok"), ("eosin", "A. C. Ruifrok")),
    _built_in("H-DAB", ("haematoxylin", "A. C. Ruifrok"), ("DAB", "A. C. Ruifrok")),
    _built_in(
        "H&E-DAB",
        ("haematoxylin", "A. C. Ruifrok"),
        ("eosin", "A. C. Ruifrok"),
        ("DAB", "A. C. Ruifrok"),
    ),
    _built_in("Giemsa", ("methylene blue / azure", "G. Landini"), ("eosin", "G. Landini")),
)
"""Published spectra; those of another laboratory and camera are likely some degrees off."""


def load_preset(preset: str | os.PathLike[str]) -> StainPreset:
    """A built-in preset by its name (H&E, H-DAB, H&E-DAB, Giemsa), or one of a file."""
    for one in BUILT_IN_PRESETS:
        if str(preset).casefold() == one.name.casefold():
            return one
    if not Path(preset).suffix and not Path(preset).exists():
        known = ", ".join(one.name for one in BUILT_IN_PRESETS)
        raise FileError(
            f"{shortened(preset)}: no such preset; there are {known}, or give the path of a file."
        )
    return read_preset(preset)


def write_preset(path: str | os.PathLike[str], preset: StainPreset) -> None:
    """Write a preset as JSON, whole or not at all."""
    write_json(Path(path), _preset_content(preset))


def _preset_content(preset: StainPreset) -> dict[str, Any]:
    return {
        "kind": _KIND,
        "version": FILE_VERSION,
        "software": f"napari-beerlanet {__version__}",
        "name": preset.name,
        "source": preset.source,
        "stains": _named_content(preset.stains),
    }


def _named_content(stains: Sequence[NamedSpectrum]) -> list[dict[str, Any]]:
    return [{"name": one.name, "spectrum": list(one.spectrum)} for one in stains]


def read_preset(path: str | os.PathLike[str]) -> StainPreset:
    """The preset of a file by `write_preset`, or the active stains of a file by `write_spectra`."""
    kinds = [_KIND, SPECTRA_KIND]
    content = read_json_of_kind(path, kinds, FILE_VERSION, "a preset or spectra file")
    try:
        if content["kind"] == _KIND:
            stains = [NamedSpectrum(str(s["name"]), s["spectrum"]) for s in content["stains"]]
            return StainPreset(str(content["name"]), tuple(stains), str(content.get("source", "")))
        parts = sorted(
            (part for part in content["components"] if part["active"]), key=lambda p: -p["share"]
        )
        named = [part.get("stain") or f"Stain {k + 1}" for k, part in enumerate(parts)]
        stains = [
            NamedSpectrum(name, part["spectrum"]) for name, part in zip(named, parts, strict=True)
        ]
        name = Path(path).name.removesuffix(".json").removesuffix(".spectra")
        return StainPreset(name, tuple(stains), f"the stains of {content.get('image') or name}")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        reason = str(error) if type(error) is ValueError else "its stains are damaged."
        raise FileError(f"{path}: {reason}") from error


def read_named_spectra(
    path: str | os.PathLike[str],
) -> tuple[npt.NDArray[np.float64], tuple[str, ...]]:
    """Spectra (3, r) of a file by `files.write_spectra`, and names (r,), () where none has one."""
    from napari_beerlanet.core.stains.solver.spectra import check_spectra

    content = read_json_of_kind(path, [SPECTRA_KIND], FILE_VERSION, "a spectra file")
    try:
        columns = [component["spectrum"] for component in content["components"]]
        spectra = check_spectra(np.array(columns, dtype=np.float64).T, len(columns) or 1)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise FileError(
            f"{path}: every one of its components needs a spectrum of 3 numbers of at least 0."
        ) from error
    if not spectra.any():
        raise FileError(f"{path}: all its spectra are zero, so nothing can start from them.")
    names = tuple(str(component.get("stain") or "") for component in content["components"])
    return spectra, names if any(names) else ()


def read_start(
    path: str | os.PathLike[str],
) -> tuple[npt.NDArray[np.float64], tuple[str, ...]]:
    """Spectra (3, r) and their names, () for none, of a spectra file or a preset's file."""
    if read_json(path).get("kind") == _KIND:
        preset = read_preset(path)
        return preset.spectra, preset.names
    return read_named_spectra(path)


class StainLibrary:
    """A folder of presets, and of the names of stains by image. The folder is made when needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def presets(self) -> list[StainPreset]:
        """By name; files that are damaged are left out."""
        found = []
        for path in sorted(self.folder.glob("*.json")) if self.folder.is_dir() else ():
            if path.name != _NAMES_FILE:
                with suppress(FileError):
                    found.append(read_preset(path))
        return sorted(found, key=lambda preset: preset.name.casefold())

    def save(self, preset: StainPreset) -> Path:
        """Save a preset in place of one of that name; the path of its file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path_of(preset.name)
        write_preset(path, preset)
        return path

    def remove(self, name: str) -> None:
        """Remove the preset of this name; no matter if there is none."""
        path = self._path_of(name)
        if read_json_or_empty(path).get("name") == name:
            path.unlink(missing_ok=True)

    def _path_of(self, name: str) -> Path:
        """The file of the preset of this name, or a free one for it."""
        plain = slug(name) or "preset"
        plain = f"{plain}-preset" if f"{plain}.json" == _NAMES_FILE else plain
        for k in range(1, 10_000):
            path = self.folder / (f"{plain}.json" if k == 1 else f"{plain}-{k}.json")
            if not path.exists() or read_json_or_empty(path).get("name") == name:
                return path
        raise FileError(f"{self.folder}: too many presets are called like “{shortened(name)}”.")

    def names_of(self, image: str) -> list[NamedSpectrum]:
        """Stains of an image that were named, and the spectra that they had."""
        return self._all_names().get(image, [])

    def set_names(self, image: str, stains: Sequence[NamedSpectrum]) -> None:
        """Save the named stains of an image; none removes it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._names_lock():
            images = self._all_names()
            images.pop(image, None)
            if stains:
                images[image] = list(stains)
            kept = list(images.items())[-_MAX_IMAGES:]
            content = {key: _named_content(named) for key, named in kept}
            write_json(
                self.folder / _NAMES_FILE,
                {"kind": _NAMES_KIND, "version": FILE_VERSION, "images": content},
            )

    @contextmanager
    def _names_lock(self) -> Iterator[None]:
        """Have other windows wait with their names, which are in the same file."""
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            try:
                lock = FolderLock(
                    self.folder / _LOCK_FILE,
                    busy="another window is saving names of stains there",
                    advice="name the stain again",
                )
                break
            except LockedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_LOCK_POLL_S)
        try:
            yield
        finally:
            lock.release()

    def named_spectra(self) -> list[NamedSpectrum]:
        """Every stain that was ever named: of presets, and of images, the latest first."""
        named = [one for preset in self.presets() for one in preset.stains]
        for stains in reversed(self._all_names().values()):
            named += stains
        return named

    def _all_names(self) -> dict[str, list[NamedSpectrum]]:
        """By image, the latest last; entries that are damaged are left out."""
        images = read_json_or_empty(self.folder / _NAMES_FILE).get("images")
        found: dict[str, list[NamedSpectrum]] = {}
        for image, stains in images.items() if isinstance(images, dict) else ():
            with suppress(KeyError, TypeError, ValueError):
                named = [NamedSpectrum(str(one["name"]), one["spectrum"]) for one in stains]
                found[image] = [NamedSpectrum(one.name, check_spectrum(one)) for one in named]
        return found


@dataclass(frozen=True)
class RegionStain:
    """A stain measured in a region of `pixels` pixels.

    `spectrum` is of unit length, `density` the mean optical density along it, `unexplained` the
    fraction of the region's OD (root mean square) that is in other directions: near 0 in a region
    of one stain.
    """

    spectrum: Spectrum
    density: float
    unexplained: float
    pixels: int


def stain_of_region(
    pixels: npt.NDArray[Any], background: npt.ArrayLike, domain: Domain = "log"
) -> RegionStain:
    """The dominant stain of pixels (n, 3 or 4), uint8, uint16 or float in [0, 1].

    `background` (3,) is x₀ of the image in the domain. The spectrum is that of the best fit by one
    stain, the leading singular vector of the pixels' OD: strongly stained pixels decide, and gaps
    in the region hardly matter. A `ValueError` where the region is no darker than the background.
    """
    image = check_rgb(np.asarray(pixels)[None])
    shown = image.flat if image.flat.shape[1] == 3 else image.flat[image.flat[:, 3] > 0]
    if not len(shown):
        raise ValueError("There are no pixels in the region: draw it on the image.")
    x0 = np.asarray(background, float)
    density = np.maximum(x0[:, None] - to_columns(shown, domain), 0.0)
    if density.mean() < _MIN_REGION_OD:
        raise ValueError(
            "The region is as bright as the background: draw it where the stain is, and only there."
        )
    square = density @ density.T
    _, vectors = np.linalg.eigh(square)
    spectrum = np.abs(vectors[:, -1])  # nonnegative anyway (Perron and Frobenius), but for its sign
    along = float(spectrum @ square @ spectrum)
    rest = max(float(np.trace(square)) - along, 0.0) / float(np.trace(square))
    red, green, blue = spectrum.tolist()
    mean = float((spectrum @ density).mean())
    return RegionStain((red, green, blue), mean, float(np.sqrt(rest)), len(shown))
