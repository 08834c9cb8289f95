"""dist-train: data-parallel training of a small model, on CPU or GPU by the same code.

From the top down; each module imports only from those below it:

* ``__main__``, the run itself, and ``main_loop``, its steps on the run library;
* ``evaluation`` (held-out data) and ``step_sums`` (what the ranks add up);
* ``loop``, one training step;
* ``components``, the model, data and loss that the options name;
* ``state`` (what a snapshot keeps) and ``report`` (progress, metrics, curves);
* ``data`` (samples, their order, batches);
* ``models``, ``options``, ``plugins``, ``config``, ``schedule``.
"""
