"""dist-train: data-parallel training of a small model, on CPU or GPU by the same code.

From the top down; each module imports only from those below it:

* ``__main__``, the run itself, which loads the model, data and loss that the options name;
* ``main_loop``, its steps on the run library, and what a checkpoint keeps of them;
* ``trainer``, one training step, the evaluation, and what the ranks add up;
* ``run_log`` with ``curves``, ``loggers`` and ``stragglers`` (all that it prints and draws);
* ``batches`` (samples on the device), ``datasets``, ``order`` (which samples, on which rank), ``models``;
* ``profiling``, ``options``, ``plugins``, ``config``.
"""
