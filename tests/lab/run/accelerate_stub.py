"""A stub of accelerate for one process, because the stand-in lacks the package: what the example calls."""

import itertools
import sys
from pathlib import Path

import torch


class DataLoaderConfiguration:
    def __init__(self, **options):
        pass


class Loader:
    """A DataLoader whose order depends on the epoch alone."""

    def __init__(self, loader):
        self._loader = loader

    def __len__(self):
        return len(self._loader)

    def __iter__(self):
        return iter(self._loader)

    def set_epoch(self, epoch):
        self._loader.generator.manual_seed(epoch)


class Accelerator:
    def __init__(self, **options):
        self._parts = []

    def prepare(self, model, optimizer, loader):
        self._parts += model, optimizer
        return model, optimizer, Loader(loader)

    def register_for_checkpointing(self, part):
        self._parts.append(part)

    def backward(self, loss):
        loss.backward()

    def skip_first_batches(self, loader, count):
        return itertools.islice(loader, count, None)

    def save_state(self, folder):
        folder.mkdir(exist_ok=True)
        torch.save([part.state_dict() for part in self._parts], folder / "state.pt")

    def load_state(self, folder):
        states = torch.load(Path(folder, "state.pt"), weights_only=True)
        for part, state in zip(self._parts, states, strict=True):
            part.load_state_dict(state)


sys.modules["accelerate"] = sys.modules[__name__]
