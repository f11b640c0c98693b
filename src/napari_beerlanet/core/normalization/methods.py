"""All methods by name; a normalizer fitted, saved and loaded; one image normalized.

A saved normalizer is a safetensors file: arrays, and a JSON header that says which method they are
of. Loading it runs no code.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from napari_beerlanet._version import __version__
from napari_beerlanet.core.common.messages import quoted, system_reason
from napari_beerlanet.core.common.storage import FileError, atomic_path
from napari_beerlanet.core.images.files import read_image
from napari_beerlanet.core.images.rgb import check_rgb, to_uint8
from napari_beerlanet.core.normalization.normalizer import Normalizer, NormalizerError, Target

SUFFIX = ".safetensors"
"""How the name of a saved normalizer ends."""
_METADATA_KEY, _KIND, _VERSION = "napari-beerlanet", "normalizer", 1
_MAX_FILE_BYTES = 1 << 30
_MIT = "torchstain, MIT"
_OURS = "AGPL-3.0-or-later"
_TRAIN_IT = (
    "{} is trained on images of two laboratories and takes no template; use train_staingan, or "
    "napari-beerlanet normalize --method staingan --train-from DIR --reference DIR."
)

_log = logging.getLogger("napari_beerlanet")


@dataclass(frozen=True)
class NormalizationMethod:
    """A method as lists and forms need it; `home`: module of this room and class of its targets.

    `colour_only`: a pixel's result depends on its colour alone, given the image's statistics, so
    the method runs on palettes, and lazily on slides.
    """

    name: str
    label: str
    description: str
    home: tuple[str, str]
    needs_template: bool = True
    colour_only: bool = True
    licence: str = _OURS

    def load(self) -> type[Target]:
        """The class of its targets."""
        module, name = self.home
        here = __name__.rpartition(".")[0]
        found: type[Target] = getattr(importlib.import_module(f"{here}.{module}"), name)
        return found

    def restore(
        self, arrays: Mapping[str, npt.NDArray[Any]], settings: Mapping[str, Any]
    ) -> Normalizer:
        """A normalizer from its `state`; a `ValueError` has what is wrong with it."""
        return Normalizer(self.name, self.load().from_state(arrays, settings))


_ALL = (
    NormalizationMethod(
        "none",
        "None",
        "The image as it is.",
        ("classical", "Unchanged"),
        needs_template=False,
    ),
    NormalizationMethod(
        "grey",
        "Grey",
        "Brightness without colour.",
        ("classical", "Grey"),
        needs_template=False,
    ),
    NormalizationMethod(
        "reinhard",
        "Reinhard",
        "Mean and standard deviation of each LAB channel become the template's.",
        ("classical", "LabStatistics"),
        licence=_MIT,
    ),
    NormalizationMethod(
        "macenko",
        "Macenko",
        "Two stain vectors by principal components of the optical density; their densities are "
        "shown with the template's vectors and strengths.",
        ("classical", "StainVectors"),
        licence=_MIT,
    ),
    NormalizationMethod(
        "macenko-multi",
        "Macenko, several templates",
        "Macenko with the mean of the vectors and strengths of several templates.",
        ("classical", "MeanStainVectors"),
        licence=_MIT,
    ),
    NormalizationMethod(
        "vahadane",
        "Vahadane",
        "Two stains by sparse non-negative factorisation of the optical density; their densities "
        "are shown with the template's stains and background.",
        ("vahadane", "SparseStains"),
    ),
    NormalizationMethod(
        "beerlanet",
        "BeerLaNet",
        "The stains of a decomposition, matched to the template's by spectral angle; their "
        "densities are shown with the template's spectra and background.",
        ("beerlanet", "TemplateStains"),
    ),
)
_TRAINED = (
    NormalizationMethod(
        "staingan",
        "StainGAN",
        "What a CycleGAN has learned from the images of two laboratories, distilled into three 1×1 "
        "convolutions.",
        ("staingan", "ColourNetwork"),
    ),
    NormalizationMethod(
        "staingan-generator",
        "StainGAN's generator",
        "The CycleGAN's generator itself, or a generator of your own, in tiles.",
        ("staingan", "Generator"),
        colour_only=False,
    ),
)
METHODS: dict[str, NormalizationMethod] = {method.name: method for method in _ALL}
"""Those that are fitted on templates, or need nothing."""
TRAINED_METHODS: dict[str, NormalizationMethod] = {method.name: method for method in _TRAINED}
"""Those that are trained on the images of two laboratories, see `core.training.staingan`; their
reference is the file of a trained one."""


def find_method(name: str) -> NormalizationMethod:
    """The method of a name; a `NormalizerError` lists those that there are."""
    known = METHODS | TRAINED_METHODS
    if name not in known:
        raise NormalizerError(
            f"No normalization method {quoted(name)}; there are {', '.join(known)}."
        )
    return known[name]


def normalize(rgb: Any, method: str, reference: Any = None) -> npt.NDArray[Any]:
    """Normalize an image (H, W, 3 or 4), uint8, uint16 or float in [0, 1].

    Parameters
    ----------
    method
        A name in `METHODS`: "reinhard", "macenko", "macenko-multi", "vahadane", "beerlanet", …
    reference
        What the image shall look like: a template as an RGB array or as the path of an image file,
        a list of several, a `Normalizer`, or the path of a saved one.

    Returns
    -------
    (H, W, 3 or 4) in the dtype given, alpha kept. Where a method can do nothing, as with an image
    of background alone, the image comes back unchanged, and the log says why; for the notes
    themselves use ``fitted_normalizer(method, reference).apply(rgb)``.
    """
    done = fitted_normalizer(method, reference).apply(rgb)
    for note in done.notes:
        _log.warning("%s: %s", method, note)
    return done.rgb


def fitted_normalizer(method: str, reference: Any = None) -> Normalizer:
    """A normalizer that is ready to apply; `reference` as for `normalize`."""
    chosen = find_method(method)
    if isinstance(reference, (str, os.PathLike)):
        if method == "staingan-generator":
            reference = _load_generator(reference)
        elif _is_saved(reference):
            reference = load_normalizer(reference)
    if isinstance(reference, Normalizer):
        if reference.method != method:
            raise NormalizerError(
                f"The reference is of the method {reference.method}, not {method}."
            )
        return reference
    if reference is None and chosen.needs_template:
        raise NormalizerError(f"{method} needs a reference: an image, or a saved normalizer.")
    if method in TRAINED_METHODS:
        raise NormalizerError(_TRAIN_IT.format(method))
    images = [] if reference is None else read_templates(reference)
    if chosen.needs_template and not images:
        raise NormalizerError("A template is needed: an image whose colours shall be taken over.")
    return Normalizer(method, chosen.load().fit([to_uint8(check_rgb(t).pixels) for t in images]))


def _load_generator(path: str | os.PathLike[str]) -> Normalizer:
    """One that was saved here, or a user's own."""
    from napari_beerlanet.core.normalization.staingan import load_generator

    if _is_saved(path):
        with suppress(FileError):
            return load_normalizer(path)
    return load_generator(path)


def read_templates(reference: Any) -> list[npt.NDArray[Any]]:
    """Template images as arrays, from an array or a path, or a list of them."""
    if isinstance(reference, (str, os.PathLike)):
        return [read_image(reference).pixels]
    if isinstance(reference, np.ndarray) or not isinstance(reference, Sequence):
        return [reference]
    return [image for one in reference for image in read_templates(one)]


def _is_saved(path: str | os.PathLike[str]) -> bool:
    return Path(path).suffix.lower() == SUFFIX


# --- files ---------------------------------------------------------------------------------------


def save_normalizer(normalizer: Normalizer, path: str | os.PathLike[str]) -> None:
    """Write a normalizer to a `.safetensors` file, whole or not at all."""
    from safetensors.numpy import save

    path = Path(path)
    if not _is_saved(path):
        raise NormalizerError(f"{path}: the name of a saved normalizer must end in {SUFFIX}.")
    if path.is_dir():
        raise NormalizerError(f"{path}: a folder of this name is there already.")
    arrays, settings = normalizer.state()
    header = {
        "kind": _KIND,
        "version": _VERSION,
        "method": normalizer.method,
        "settings": settings,
        "software": f"napari-beerlanet {__version__}",
    }
    # The format has no empty files: `none` and `grey` have nothing but their name.
    data = save(
        {name: np.ascontiguousarray(array) for name, array in arrays.items()},
        {_METADATA_KEY: json.dumps(header, allow_nan=False, sort_keys=True)},
    )
    try:
        with atomic_path(path) as unfinished:
            unfinished.write_bytes(data)
    except OSError as error:
        raise NormalizerError(f"{path}: cannot write it ({system_reason(error)}).") from error


def load_normalizer(path: str | os.PathLike[str]) -> Normalizer:
    """The normalizer in a file of `save_normalizer`; whatever is wrong is a `FileError`."""
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    try:
        if not path.exists():
            raise ValueError("there is no such file")
        if not path.is_file():
            raise ValueError("not a file")
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ValueError("larger than any normalizer")
        with safe_open(path, "numpy") as file:
            header = _read_header(file.metadata())
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return find_method(header["method"]).restore(arrays, header["settings"])
    except OSError as error:
        raise FileError(f"{path}: cannot read it ({system_reason(error)}).") from error
    except (SafetensorError, AttributeError) as error:  # the latter for types that NumPy has not
        raise FileError(f"{path}: not a saved normalizer, or cut short.") from error
    except (ValueError, TypeError, KeyError, RecursionError, MemoryError) as error:
        reason = str(error).rstrip(".") or type(error).__name__
        raise FileError(f"{path}: not a normalizer that can be used: {reason}.") from error


def _read_header(metadata: dict[str, str] | None) -> dict[str, Any]:
    text = (metadata or {}).get(_METADATA_KEY)
    header = json.loads(text) if text else None
    if not isinstance(header, dict) or header.get("kind") != _KIND:
        raise ValueError("it is another safetensors file, such as a model's")
    if header.get("version") != _VERSION:
        raise ValueError(
            f"it is of version {quoted(header.get('version'))}, where version {_VERSION} is known"
        )
    if not isinstance(header.get("method"), str) or not isinstance(header.get("settings"), dict):
        raise ValueError("its description is damaged")
    return header
