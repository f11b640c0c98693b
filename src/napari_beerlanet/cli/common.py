"""What the commands share: options from settings, messages, signals and the output folder."""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
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


def add_settings(
    options: Options,
    settings: type[Settings],
    names: Iterable[str],
    preset: Mapping[str, Any] | None = None,
    flags: Mapping[str, str] | None = None,
) -> None:
    """Add options for settings: spellings, types, bounds and help are those of the settings class.

    A parser gets them under their headings. What is not given does not appear among the parsed
    options; a `preset` that is used then may have defaults of its own, which the help states.
    `flags` are spelt in another way here.
    """
    groups: dict[str, Options] = {"": options}
    for name in names:
        spec = settings.spec(name)
        if spec.option.in_files_only:
            continue
        heading = spec.option.group if isinstance(options, argparse.ArgumentParser) else ""
        if heading not in groups:
            groups[heading] = options.add_argument_group(heading)
        shared: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS}
        if bool in spec.types:
            shared["action"] = "store_false" if spec.default else "store_true"
        elif spec.choices and not spec.types:
            shared["choices"] = spec.choices
        else:
            usual = "TEXT" if str in spec.types else "N"
            shared |= {"type": _value_parser(spec), "metavar": spec.option.value or usual}
        if isinstance(spec.default, tuple):
            shared |= {"action": "extend", "nargs": "*"}
        default = (preset or {}).get(name, spec.default)
        flag = (flags or {}).get(name, spec.flag)
        groups[heading].add_argument(flag, help=_help(spec, default), **shared)


def given_settings(options: argparse.Namespace, settings: type[Settings]) -> dict[str, Any]:
    """The settings that were given on the command line."""
    return {name: v for name, v in vars(options).items() if name in settings.model_fields}


def _help(spec: FieldSpec, default: Any) -> str:
    text = spec.description.rstrip(".").replace("%", "%%")
    text = text[:1].lower() + text[1:]
    if bool in spec.types:
        return f"do not {text}" if spec.default else text
    shown = " ".join(default) if isinstance(default, tuple) else default
    return text if shown in (None, "") else f"{text} (default {shown})"


def _value_parser(spec: FieldSpec) -> Callable[[str], Any]:
    """A parser of a number or a word such as "auto", within the setting's bounds."""

    def parse(text: str) -> Any:
        if text in spec.choices or str in spec.types or isinstance(spec.default, tuple):
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


def load_model(model: str, device: str) -> Detector | Classifier:
    """A model of either kind."""
    from napari_beerlanet.core.checkpoints.checkpoint import load_checkpoint
    from napari_beerlanet.core.checkpoints.info import model_notes

    try:
        loaded = load_checkpoint(model, device)
    except ValueError as error:
        raise UsageError(str(error)) from error
    for note in model_notes(loaded.info):
        print_message(note)
    return loaded
