"""The command `info`: what a model is, what it was trained on, and how well it did."""

from __future__ import annotations

import argparse
from pathlib import Path

from napari_beerlanet.cli.common import UsageError, echo

HELP = "print what a model detects or classifies, and what it was trained on"
DESCRIPTION = (
    "Print a model's kind, classes, training, scores and limits, and the SHA-256 of its file, "
    "which reports and records name."
)


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    text = "a packaged model's name, or a checkpoint's path"
    command.add_argument("model", metavar="MODEL", help=text)


def run(options: argparse.Namespace) -> int:
    """Print the facts, one on each line."""
    from napari_beerlanet.core.checkpoints.checkpoint import (
        checkpoint_hash,
        load_checkpoint,
        model_kind,
        read_info,
    )
    from napari_beerlanet.core.checkpoints.model_card import model_facts

    try:
        if Path(options.model).suffix.lower() == ".pt":  # which does not describe itself
            info = load_checkpoint(options.model, "cpu").info
        else:
            info = read_info(options.model)
        facts = [("Kind", model_kind(info)), ("Classes", ", ".join(info["classes"]))]
        facts += [*model_facts(info), ("SHA-256", checkpoint_hash(options.model))]
    except ValueError as error:
        raise UsageError(str(error)) from error
    for name, value in facts:
        echo(f"{name}: {value}")
    return 0
