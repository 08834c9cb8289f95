"""Delta images: what a new image changes, as one squashfs that a runtime lays over an older .sif.

Read in this order: ``tree`` (layers to the tree that shows, two trees to their difference), the kinds of
layers (``folders`` overlay2, ``tars`` the engine's save stream, ``grafts`` a copied folder, ``squashfs`` a
.sif or a delta), ``source`` (which of them), ``squash`` (a tree to a file), ``descriptor`` (what a delta file
says of itself), ``make``, ``apply`` and ``flatten``.
"""
