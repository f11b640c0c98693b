"""What the commands share: options from settings, messages, signals and the output folder."""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from napari_beerlanet.core.classification.classifier import Classifier
    from napari_beerlanet.core.common.settings import FieldSpec, Settings
    from napari_beerlanet.core.detection.detector import Detector

from napari_beerlanet.core.common.messages import quoted

PROGRAM = "napari-beerlanet"
DEFAULT_MODEL = "blood-cells"

Options = argparse._ActionsContainer
"""A parser, or a group of its options."""


class Stopped(BaseException):
    """A signal, its number the argument, has come; raised where nothing is half-done."""


received_signals: list[int] = []


def raise_if_interrupted() -> None:
    """Raise `Stopped` if a signal has come."""
    if received_signals:
        raise Stopped(received_signals[0])


class UsageError(Exception):
    """The command cannot be carried out as given; the message is one sentence."""


def echo(line: str, file: TextIO | None = None) -> None:
    """Print one line, whatever is in it: names come from files, and may hold terminal escapes."""
    from napari_beerlanet.core.common.messages import printable

    print(printable(line), file=file, flush=True)


def print_message(message: str) -> None:
    """One line to the person at the terminal, not into a pipe."""
    echo(f"{PROGRAM}: {message}", sys.stderr)


def prepare_folder(folder: Path) -> Path:
    """The folder, there and writable, before the first image costs time."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder}: not a folder, so no results can be written into it.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        reason = f"no results can be written into this folder ({error.strerror})"
        raise OSError(error.errno, reason, str(folder)) from error


# --- options -------------------------------------------------------------------------------------


def add_setting(
    options: Options,
    settings: type[Settings],
    name: str,
    *flags: str,
    preset: Mapping[str, Any] | None = None,
    **more: Any,
) -> None:
    """Add an option for a setting: its type, bounds and help are those of the settings class.

    `flags` are its spellings, by default --name.
    What is not given does not appear among the parsed options. A `preset` that is used then may
    have defaults of its own, which the help states.
    """
    spec = settings.spec(name)
    flags = flags or (f"--{name.replace('_', '-')}",)
    shared: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS}
    if bool in spec.types:
        shared |= {"action": "store_false" if spec.default else "store_true"}
    elif spec.choices and not spec.types:
        shared |= {"choices": spec.choices}
    else:
        shared |= {"type": _value_parser(spec), "metavar": "TEXT" if str in spec.types else "N"}
    shared |= more
    default = (preset or {}).get(name, spec.default)
    options.add_argument(*flags, **{"help": _help(spec, default), **shared})


def given_settings(options: argparse.Namespace, settings: type[Settings]) -> dict[str, Any]:
    """The settings that were given on the command line."""
    return {name: v for name, v in vars(options).items() if name in settings.model_fields}


def _help(spec: FieldSpec, default: Any) -> str:
    text = spec.description.rstrip(".").replace("%", "%%")
    text = text[:1].lower() + text[1:]
    if default in (None, "") or bool in spec.types:
        return text
    return f"{text} (default {default})"


def _value_parser(spec: FieldSpec) -> Callable[[str], Any]:
    """A parser of a number or a word such as "auto", within the setting's bounds."""

    def parse(text: str) -> Any:
        if text in spec.choices or str in spec.types:
            return text
        if tuple in spec.types and "," in text:
            return tuple(parse(part) for part in text.split(","))
        try:
            value = float(text) if float in spec.types else int(text)
        except ValueError:
            value = math.nan
        low = -math.inf if spec.minimum is None else spec.minimum
        above = -math.inf if spec.above is None else spec.above
        high = math.inf if spec.maximum is None else spec.maximum
        if not (math.isfinite(value) and low <= value <= high and value > above):
            allowed = spec.allowed().replace('"', "")
            raise argparse.ArgumentTypeError(f"{allowed} is needed, not {quoted(text)}")
        return value

    return parse


def whole_number(text: str) -> int:
    """A whole number of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"a whole number is needed, not {quoted(text)}")
    return int(text)


def add_input_options(options: Options) -> None:
    """Add the arguments that say which images, where results go, and what is left as it is."""
    add = options.add_argument
    add("images", nargs="+", metavar="IMAGE", help="files, folders, or patterns such as '*.tif'")
    add("--out", required=True, type=Path, metavar="DIR", help="folder for the results")
    add("--recursive", action="store_true", help="include subfolders")
    add("--overwrite", action="store_true", help="process images again that are done")
    add("--quiet", action="store_true", help="print nothing but errors and the summary")


def add_model_options(options: Options) -> None:
    """Add the arguments that say which model, for what size of objects, on which device."""
    from napari_beerlanet.core.detection.settings import DetectSettings

    options.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help=f"a packaged model's name (default {DEFAULT_MODEL}), or a checkpoint's path",
    )
    add_setting(options, DetectSettings, "object_size", metavar="PIXELS")
    add_device_option(options)
    add_setting(options, DetectSettings, "openvino")


def add_classifier_options(options: Options) -> None:
    """Add the arguments that say which classifier, and of what classes the cells are."""
    from napari_beerlanet.core.batch.settings import StudySettings

    add_setting(options, StudySettings, "classifier", "--classify", metavar="MODEL")
    add_setting(
        options,
        StudySettings,
        "classify_only",
        action="extend",
        nargs="+",
        type=str,
        metavar="CLASS",
    )


def classifier_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The settings of `add_classifier_options`, as a study takes them."""
    given = {name: v for name, v in vars(options).items() if name in _CLASSIFIER_SETTINGS}
    if "classify_only" in given and "classifier" not in given:
        raise UsageError("--classify-only is for a classifier; give --classify, too.")
    return given | ({"classify_only": tuple(given["classify_only"])} if len(given) > 1 else {})


_CLASSIFIER_SETTINGS = ("classifier", "classify_only")


def add_device_option(options: Options) -> None:
    """Add the argument that says where to compute."""
    options.add_argument(
        "--device", default="auto", help="where to compute: auto (default), cpu, cuda:0, mps"
    )


def load_model(options: argparse.Namespace) -> Detector | Classifier:
    """The chosen model, of either kind, on the chosen device."""
    from napari_beerlanet.core.checkpoints.checkpoint import load_checkpoint
    from napari_beerlanet.core.checkpoints.info import model_notes

    try:
        model = load_checkpoint(options.model, options.device)
    except ValueError as error:
        raise UsageError(str(error)) from error
    for note in model_notes(model.info):
        print_message(note)
    return model
