"""dist-train: data-parallel training of a small model. The same code runs on CPUs and GPUs.

The modules, from the top down. Each module imports only from modules below it:

* ``__main__`` is the run itself. It loads the model, the data and the loss that the options select.
* ``main_loop`` takes the steps of a run, and defines what a checkpoint contains.
* ``trainer`` has one training step, the evaluation, and the sums over all ranks.
* ``run_log`` prints and saves the progress, with ``curves``, ``loggers`` and ``stragglers``.
* ``batches`` moves samples to the device. ``datasets`` has the built-in data, ``order`` decides which rank
  computes which samples, and ``models`` has the built-in models.
* ``profiling``, ``options``, ``plugins`` and ``config`` are used by all of them.
"""
