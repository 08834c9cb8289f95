"""Hugging Face's Trainer, made to stop, save and resume. Copy the class, and lines with `run` or `saver`.

imgkit run mn5-llm -A bsc98 --qos acc_debug --time 2h -- dist-run hf_trainer.py
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from imgkit_entrypoints.run import LibraryCheckpoint, Run


class SaveAndResume(TrainerCallback):
    def __init__(self, run):
        self.run, self.checkpoint = run, LibraryCheckpoint(run)

    def on_step_end(self, args, state, control, **_):
        control.should_save |= self.run.due()  # all ranks agree that one was asked to stop

    def on_save(self, args, state, control, **_):
        self.checkpoint.next_path(f"{args.output_dir}/checkpoint-{state.global_step}")
        self.run.save()  # from now on this checkpoint counts; after a request to stop, the program ends here


if __name__ == "__main__":
    with Run.start() as run:
        saver = SaveAndResume(run)
        torch.manual_seed(0)
        text = torch.randint(256, (480, 64))
        config = GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=2)
        arguments = TrainingArguments(
            output_dir=f"{run.folder}/trainer",  # in the run's folder
            save_steps=20,
            save_total_limit=3,  # at least 3
            num_train_epochs=3,
            use_cpu=not torch.cuda.is_available(),
        )
        data = [{"input_ids": row, "labels": row} for row in text]
        trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=data, callbacks=[saver])
        run.restore()
        trainer.train(resume_from_checkpoint=saver.checkpoint.path)
