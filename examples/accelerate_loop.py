"""A loop with accelerate, made to stop, save and resume. Copy the lines with `run` or `checkpoint`."""

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader, TensorDataset

from imgkit_entrypoints.run import LibraryCheckpoint, Run


def main(run):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(800, 20), torch.randint(10, (800,)))
    # Its own generator, so that a resumed pass draws as many random numbers as an undisturbed one.
    loader = DataLoader(data, batch_size=10, shuffle=True, generator=torch.Generator())
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)  # of epochs
    by_epoch = DataLoaderConfiguration(use_seedable_sampler=True)  # the order depends on the epoch alone
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), dataloader_config=by_epoch)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(scheduler)
    checkpoint = LibraryCheckpoint(run)
    if run.restore() and checkpoint.path:
        accelerator.load_state(checkpoint.path)
    for epoch in range(max(0, checkpoint.step - 1) // len(loader), 3):  # its end comes after its last step
        loader.set_epoch(epoch)
        done = max(0, checkpoint.step - epoch * len(loader))
        for batch, target in accelerator.skip_first_batches(loader, done):
            accelerator.backward(torch.nn.functional.cross_entropy(model(batch), target))
            optimizer.step()
            optimizer.zero_grad()
            if run.due(save_every=15):  # all ranks agree, also that one was asked to stop
                accelerator.save_state(checkpoint.next_path())
                run.save()  # now this checkpoint counts; after a request to stop, the program ends here
        scheduler.step()


if __name__ == "__main__":
    with Run.start() as run:
        main(run)
