"""dist-bench: measure, verify and judge collectives. The command line, saved files and reports need no torch.

The sub-rooms, from the top down; each imports only from those below it:

* the app itself: ``sweep`` (one run) with ``setup`` and ``outcome``, ``soak`` (``--for``), ``compare``
  (``--compare``), ``baseline`` (``--baseline``), ``table`` (the printed lines), ``options``;
* ``report``: saved runs as a page;
* ``record``: the saved file;
* ``judge``: the meaning of the figures, in sentences;
* ``measure``: run, time and verify; read the node's counters and NCCL's log.

``arms``, ``requirement``, ``sizes`` and ``sighup`` import no sub-room.
"""
