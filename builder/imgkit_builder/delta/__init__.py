"""Delta images: what a new image changes, as one squashfs that a runtime lays over an older .sif.

Read in this order: ``tree`` (layers become the visible tree; two trees become their difference), ``layers``
and ``read_squashfs`` (the kinds of layers), ``source`` (opens images, and chooses where to read), then
``write_squashfs`` (writes a tree to a file), ``descriptor`` (the description in a delta file), ``make``,
``code`` and ``apply``.
"""
