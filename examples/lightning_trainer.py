"""Lightning's Trainer, made to stop, save and resume. Copy the class, and lines with `run` or `saver`."""

from os import getenv
from signal import SIGTERM, getsignal, signal

import torch
from lightning import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torchdata.stateful_dataloader import StatefulDataLoader

from imgkit_entrypoints.run import LibraryCheckpoint, Run


class SaveAndResume(Callback):
    def __init__(self, run):
        self.run, self.checkpoint, self.on_sigterm = run, LibraryCheckpoint(run), getsignal(SIGTERM)
        self.due = False

    def on_train_start(self, trainer, module):
        signal(SIGTERM, self.on_sigterm)  # Lightning's own handler ends the program unsaved

    def on_train_batch_end(self, trainer, module, *_):
        self.due |= self.run.due(save_every=15)  # all ranks agree, also that one was asked to stop
        if self.due and not trainer.is_last_batch:  # from there, Lightning would not train the next epoch
            self.due = False
            trainer.save_checkpoint(self.checkpoint.next_path(), weights_only=False)
            self.run.save()  # now this checkpoint counts; after a request to stop, the program ends here


if __name__ == "__main__":
    with Run.start() as run:
        saver = SaveAndResume(run)
        local, nodes = (int(getenv(f"{of}_WORLD_SIZE", "1")) for of in ("LOCAL", "GROUP"))
        trainer = Trainer(devices=local, num_nodes=nodes, max_epochs=2, limit_val_batches=0, callbacks=saver)
        if trainer.world_size > 1:
            torch.distributed.init_process_group()  # run.restore needs it
        torch.manual_seed(0)
        sampler = torch.utils.data.DistributedSampler(range(480), trainer.world_size, trainer.global_rank)
        loader = StatefulDataLoader(torch.randn(480, 32), 4, sampler=sampler, generator=torch.Generator())
        model = BoringModel()
        run.restore()  # after all that draws random numbers
        sampler.set_epoch(saver.checkpoint.step // len(loader))
        trainer.fit(model, loader, ckpt_path=saver.checkpoint.path, weights_only=True)
