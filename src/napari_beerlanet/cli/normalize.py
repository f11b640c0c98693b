"""The options of the command `normalize`, and the normalizer that they ask for."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from napari_beerlanet.cli.common import (
    UsageError,
    add_settings,
    echo,
    prepare_folder,
    raise_if_interrupted,
)

_SAVED_NAME = "normalizer.safetensors"
_STAINGAN_SETTINGS = ("steps", "filters", "blocks", "crop", "seed", "device")


def add_options(command: argparse.ArgumentParser) -> None:
    """Add what the fit of a normalizer needs."""
    from napari_beerlanet.core.normalization.methods import METHODS, TRAINED_METHODS
    from napari_beerlanet.core.training.settings import StainGanSettings

    add = command.add_argument
    add(
        "--method",
        required=True,
        choices=(*METHODS, *TRAINED_METHODS),
        help="how the images are normalized",
    )
    add(
        "--reference",
        nargs="+",
        default=[],
        metavar="FILE",
        help="the template: an image, several, or a normalizer that --save-normalizer has written; "
        "of staingan-generator a generator of your own, .onnx or .safetensors; with --train-from "
        "the folder of the laboratory whose looks are taken over",
    )
    trained = command.add_argument_group("training of a StainGAN (--method staingan)")
    trained.add_argument(
        "--train-from",
        type=Path,
        metavar="DIR",
        help="learn it first, without labels, from images in this folder to those of --reference; "
        "the folder OUT/staingan has the run, and the same command resumes it",
    )
    add_settings(trained, StainGanSettings, _STAINGAN_SETTINGS)
    add(
        "--save-normalizer",
        type=Path,
        metavar="FILE.safetensors",
        help="where the fitted normalizer is kept, to be used again as --reference "
        f"(default {_SAVED_NAME} in the folder of the results)",
    )


def fit(options: argparse.Namespace) -> Path:
    """The file of the fitted normalizer, which all images share."""
    from napari_beerlanet.core.normalization.methods import fitted_normalizer, save_normalizer

    given: list[str] = options.reference
    if options.train_from is not None:
        return _train(options)
    try:
        reference = None if not given else given[0] if len(given) == 1 else given
        normalizer = fitted_normalizer(options.method, reference)
        path: Path = options.save_normalizer or prepare_folder(options.out) / _SAVED_NAME
        save_normalizer(normalizer, path)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if options.save_normalizer and not options.quiet:
        echo(f"{options.save_normalizer}: the fitted normalizer", sys.stderr)
    return path


def _train(options: argparse.Namespace) -> Path:
    """The file of a StainGAN that is trained now, or was before."""
    from tqdm import tqdm

    from napari_beerlanet.core.common.progress import Progress
    from napari_beerlanet.core.training.staingan import train_staingan

    if options.method != "staingan" or len(options.reference) != 1:
        raise UsageError(
            "--train-from is for --method staingan, with one folder of images as --reference."
        )
    folder: Path = prepare_folder(options.out) / "staingan"
    given = {name: getattr(options, name) for name in _STAINGAN_SETTINGS if name in options}
    hidden = options.quiet or not sys.stderr.isatty()
    with tqdm(total=100, unit="%", disable=hidden, dynamic_ncols=True) as bar:

        def show(progress: Progress) -> None:
            raise_if_interrupted()
            bar.set_postfix_str(progress.message)
            bar.update(int(100 * progress.fraction) - bar.n)

        try:
            train_staingan(
                options.train_from, options.reference[0], folder, resume=True, report=show, **given
            )
        except ValueError as error:
            raise UsageError(str(error)) from error
    return folder / _SAVED_NAME
