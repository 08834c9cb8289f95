"""What every training loop needs to stop, save and resume: snapshots, random states, values of all ranks."""
