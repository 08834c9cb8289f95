"""``--export``: the weights alone, for use outside dist-train."""

from __future__ import annotations

import io
from collections.abc import Mapping

import torch
from torch import Tensor

from imgkit_entrypoints import files
from imgkit_entrypoints.apps.train.config import Config
from imgkit_entrypoints.run.ranks import Ranks


def export(config: Config, weights: Mapping[str, Tensor], here: Ranks) -> None:
    """Write the file of ``--export``, if given; torch.load(FILE, weights_only=True) reads it.

    Raises
    ------
    UsageError : the file cannot be written.
    """
    if config.export is None or here.rank != 0:
        return
    content = io.BytesIO()  # torch.save would turn an OSError of its file into a RuntimeError
    torch.save({key: tensor.detach().cpu() for key, tensor in weights.items()}, content)
    hint = "the run itself is complete: start it again with another --export to write the weights"
    with files.replacing(config.export, failed="cannot write the weights", hint=hint) as file:
        file.write(content.getbuffer())
