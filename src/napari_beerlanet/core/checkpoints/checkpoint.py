"""Load and save checkpoints: self-describing safetensors files; loading never runs code.

The header of a file holds the model's `info` as JSON. Weights of the network
are in half precision, as Ultralytics stores them; those of the stain front end stay float32, as a
λ near 1e-5 would not survive. A `.pt` of Ultralytics can be imported.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.checkpoints.info import CLASSIFIER, DETECTOR, read_header
from napari_beerlanet.core.common.device import pick_device
from napari_beerlanet.core.common.messages import system_reason
from napari_beerlanet.core.common.storage import FileError, atomic_path
from napari_beerlanet.core.stains.solver.spectra import check_spectra

if TYPE_CHECKING:
    import torch

    from napari_beerlanet.core.classification.classifier import Classifier
    from napari_beerlanet.core.detection.detector import Detector

SUFFIX = ".safetensors"
_MAX_FILE_BYTES = 1 << 32  # bytes


class CheckpointError(FileError):
    """A checkpoint that cannot be used; the message is a sentence with its name and the reason."""


def load_checkpoint(
    path_or_name: str | os.PathLike[str],
    device: str | torch.device = "auto",
    *,
    backbone: torch.nn.Module | None = None,
) -> Detector | Classifier:
    """The model in a file (`.safetensors`, or a `.pt` of Ultralytics) or one that is packaged.

    It is a `Detector` or a `Classifier`, as the file says. Nothing in the file is executed, and
    nothing is downloaded. A plain YOLO `.pt` gets a fresh, untrained front end; `info["notes"]`
    says so. Whatever is wrong with a file is a `CheckpointError` of one sentence. `backbone` is
    for a classifier with a backbone that is no network of torchvision: the same network, whose
    weights are replaced by those of the file.
    """
    path = _resolve(path_or_name)  # before torch is loaded: a name that is wrong is told at once
    chosen = pick_device(device)
    from napari_beerlanet.core.checkpoints.serialize import deserialize_checkpoint, import_pt
    from napari_beerlanet.core.classification.classifier import Classifier
    from napari_beerlanet.core.classification.network import ClassificationNetwork
    from napari_beerlanet.core.detection.detector import Detector

    with _as_checkpoint_error(path):
        network: Any
        if path.suffix.lower() == ".pt":
            network, info = import_pt(path)
        else:
            network, info = deserialize_checkpoint(path.read_bytes(), backbone)
    if isinstance(network, ClassificationNetwork):
        return Classifier(network, info, chosen)
    return Detector(network, info, chosen)


def load_detector(
    path_or_name: str | os.PathLike[str], device: str | torch.device = "auto"
) -> Detector:
    """`load_checkpoint` where only a detector will do; a classifier is a `CheckpointError`."""
    check_kind(path_or_name, DETECTOR)
    model: Any = load_checkpoint(path_or_name, device)
    return model  # type: ignore[no-any-return]


def load_classifier(
    path_or_name: str | os.PathLike[str],
    device: str | torch.device = "auto",
    *,
    backbone: torch.nn.Module | None = None,
) -> Classifier:
    """`load_checkpoint` where only a classifier will do; a detector is a `CheckpointError`."""
    check_kind(path_or_name, CLASSIFIER)
    model: Any = load_checkpoint(path_or_name, device, backbone=backbone)
    return model  # type: ignore[no-any-return]


def check_kind(path_or_name: str | os.PathLike[str], kind: str) -> None:
    """A `CheckpointError` where a model is of another kind than this.

    By the header alone, before the weights cost time; a `.pt` is always a detector.
    """
    path = _resolve(path_or_name)
    found = DETECTOR if path.suffix.lower() == ".pt" else model_kind(read_info(path))
    if found != kind:
        does = {
            DETECTOR: "it finds cells, and does not classify crops",
            CLASSIFIER: "it says what crops show, and detects nothing",
        }
        raise CheckpointError(f"{path}: a {found}, where a {kind} is needed: {does[found]}.")


def model_kind(info: Mapping[str, Any]) -> str:
    """ "detector" or "classifier"."""
    return str(info.get("kind", DETECTOR))


def save_checkpoint(model: Detector | Classifier, path: str | os.PathLike[str]) -> None:
    """Write a model to a `.safetensors` file, whole or not at all; same model, same bytes."""
    from napari_beerlanet.core.checkpoints.serialize import serialize_checkpoint

    path = Path(path)
    if path.suffix.lower() != SUFFIX:
        raise CheckpointError(f"{path}: the name of a checkpoint must end in {SUFFIX}.")
    if path.is_dir():
        raise CheckpointError(f"{path}: a folder of this name is there already.")
    with _as_checkpoint_error(path, "write"):
        data = serialize_checkpoint(model.network, model.info)
        with atomic_path(path) as unfinished:
            unfinished.write_bytes(data)


def read_info(path_or_name: str | os.PathLike[str]) -> dict[str, Any]:
    """The `info` of a checkpoint, from its header alone (and without torch)."""
    path = _resolve(path_or_name)
    if path.suffix.lower() == ".pt":
        raise CheckpointError(f"{path}: a .pt does not describe itself; load it instead.")
    with _as_checkpoint_error(path):
        status = path.stat()
        return copy.deepcopy(_read_info(path, status.st_size, status.st_mtime_ns, status.st_ino))


@lru_cache(maxsize=64)
def _read_info(path: Path, size: int, changed_ns: int, file_number: int) -> dict[str, Any]:
    """Once for every state of a file: lists of models ask again and again for what they have."""
    with path.open("rb") as file:
        return read_header(file, size).info


def learned_spectra(path_or_name: str | os.PathLike[str]) -> npt.NDArray[np.float64]:
    """The spectra (3, r) that a checkpoint's front end has learned (of our own without torch)."""
    path = _resolve(path_or_name)
    if path.suffix.lower() == ".pt":
        learned = load_detector(path, "cpu").network.stain.spectra
        return np.asarray(learned.detach().numpy(), dtype=np.float64)
    read_info(path)  # tells what is wrong with a file that is not ours
    from safetensors import SafetensorError, safe_open

    with _as_checkpoint_error(path):
        try:
            with safe_open(path, "numpy") as file:
                spectra = np.abs(np.asarray(file.get_tensor("stain.raw_spectra"), dtype=np.float64))
        except SafetensorError as error:
            raise ValueError("it has no spectra of a stain front end") from error
        return check_spectra(spectra, spectra.shape[-1] or 1)


def has_spectra(info: Mapping[str, Any]) -> bool:
    """Whether a model has learned spectra: it has where BeerLaNet is its front end."""
    return bool(info.get("front_end", "beerlanet") == "beerlanet")


_OF_ONE_DISEASE = ("malaria",)


def packaged_models(kind: str | None = None) -> list[str]:
    """Names of the models that come with the package, for `load_checkpoint`.

    All, or those of a kind: "detector" or "classifier". The first is what a panel opens with, so
    those for one disease come last.
    """
    folder = _models_folder()
    names = sorted(p.stem for p in folder.glob(f"*{SUFFIX}")) if folder.is_dir() else []
    names.sort(key=lambda name: name in _OF_ONE_DISEASE)
    return [name for name in names if kind is None or model_kind(read_info(name)) == kind]


def checkpoint_hash(path_or_name: str | os.PathLike[str]) -> str:
    """SHA-256 of a file in hexadecimal digits: how a training names the model it started from."""
    path = _resolve(path_or_name)
    with _as_checkpoint_error(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- finding files -------------------------------------------------------------------------------


def _models_folder() -> Path:
    return Path(str(files("napari_beerlanet").joinpath("models")))


def _resolve(path_or_name: str | os.PathLike[str]) -> Path:
    """The file of a packaged model's name, or a path that is there and may be a checkpoint."""
    text = os.fspath(path_or_name)
    if text in packaged_models():
        return _models_folder() / f"{text}{SUFFIX}"
    path = Path(text)
    with _as_checkpoint_error(path):
        if path.is_dir():
            inside = sorted(p.name for p in path.glob(f"*{SUFFIX}"))
            raise ValueError(f"a folder; name a file in it{_did_you_mean(inside[:3])}")
        if not path.exists():
            raise ValueError(f"there is no such file{_did_you_mean(_similar_names(path))}")
        if not path.is_file():  # reading from a pipe would wait for ever
            raise ValueError("not a regular file")
        if path.suffix.lower() not in (SUFFIX, ".pt"):
            raise ValueError(f"a model's name ends in {SUFFIX} or, to be imported, in .pt")
        if path.stat().st_size == 0:
            raise ValueError("the file is empty")
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ValueError("larger than any model")
    return path


def _similar_names(path: Path) -> list[str]:
    """Names of models, packaged or in the same folder, that may have been meant."""
    there = list(path.parent.iterdir()) if path.parent.is_dir() else []
    models = [p.name for p in there if p.suffix.lower() in (SUFFIX, ".pt")]
    candidates = [*packaged_models(), *models, *(Path(m).stem for m in models)]
    return difflib.get_close_matches(path.name, candidates, n=2) or packaged_models()


def _did_you_mean(names: list[str]) -> str:
    quoted = [f'"{name}"' for name in names]
    return f", did you mean {' or '.join(quoted)}?" if quoted else ""


@contextmanager
def _as_checkpoint_error(path: Path, what: str = "read") -> Iterator[None]:
    """Any failure over a file as one sentence."""
    try:
        yield
    except CheckpointError:
        raise
    except PermissionError as error:
        raise CheckpointError(f"{path}: no permission to {what} it.") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot {what} it ({system_reason(error)}).") from error
    except (MemoryError, RecursionError) as error:
        raise CheckpointError(f"{path}: it does not fit into memory.") from error
    except ValueError as error:
        reason = str(error)
        end = "" if reason.endswith(("?", ".")) else "."
        raise CheckpointError(f"{path}: {reason}{end}") from error
