"""dist-train: data-parallel training of a small model, on CPU or GPU by the same code.

From the top down; each module imports only from those below it:

* ``__main__``, the run itself, with ``watch`` (stop requests) and ``evaluation`` (held-out data);
* ``loop``, one training step;
* ``components``, the model, data and loss that the options name;
* ``state`` (snapshots) and ``report`` (progress, metrics, curves);
* ``data`` (samples, their order, batches);
* ``models``, ``options``, ``plugins``, ``config``, ``schedule``.
"""
