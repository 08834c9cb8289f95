"""Delta images: what a new image changes, as one squashfs that a runtime lays over an older .sif.

Read in this order: ``tree`` (layers become the visible tree; two trees become their difference), the kinds of
layers (``folders`` reads overlay2, ``tars`` a layer's tar, ``grafts`` a copied folder, ``read_squashfs`` a
.sif or delta), ``source`` (chooses among them), ``write_squashfs`` (writes a tree to a file), ``descriptor``
(the description in a delta file), ``make``, ``apply`` and ``flatten``.
"""
