"""Hugging Face's Trainer, started by dist-run: it finds the ranks by itself and wraps the model in DDP.

    singularity exec --nv mn5-llm.sif dist-run hf_trainer.py

A small model with random weights and random text, so that nothing is downloaded.
"""

from __future__ import annotations

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class RandomText(Dataset):
    """512 sequences of 64 tokens, the same on every rank; Trainer gives each rank its share."""

    def __init__(self) -> None:
        self.tokens = torch.randint(0, 256, (512, 64), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main() -> None:
    """Train for 20 steps."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=2))
    arguments = TrainingArguments(
        output_dir="hf-run",
        max_steps=20,
        per_device_train_batch_size=8,
        logging_steps=5,
        save_steps=20,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    Trainer(model=model, args=arguments, train_dataset=RandomText()).train()


if __name__ == "__main__":
    main()
