"""Delta images: what a new image changes, as one squashfs that a runtime lays over an older .sif.

``descriptor`` is what a delta file says of itself, ``changes`` compares a stream of files with the file
manifest of a .sif, ``make`` writes a delta and ``apply`` puts one into a .sif. ``code`` is a folder of code
that a job mounts.
"""
