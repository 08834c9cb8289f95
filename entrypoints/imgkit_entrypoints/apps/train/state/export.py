"""The weights alone, for whatever uses the model afterwards."""

from __future__ import annotations

import io
from collections.abc import Mapping

import torch
from torch import Tensor

from imgkit_entrypoints import files
from imgkit_entrypoints.apps.ranks import Ranks
from imgkit_entrypoints.apps.train.config import Config


def export(config: Config, weights: Mapping[str, Tensor], here: Ranks) -> None:
    """Write what ``--export`` names, if anything: read it with torch.load(FILE, weights_only=True).

    Raises
    ------
    UsageError : it cannot be written.
    """
    if config.export is None or here.rank != 0:
        return
    content = io.BytesIO()  # torch.save turns an OSError of its file into something else
    torch.save({key: tensor.detach().cpu() for key, tensor in weights.items()}, content)
    hint = "the run is whole: start it again with another --export, and it is written"
    with files.replacing(config.export, failed="the weights cannot be written", hint=hint) as file:
        file.write(content.getbuffer())
