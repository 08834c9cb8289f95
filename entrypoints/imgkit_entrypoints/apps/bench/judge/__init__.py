"""The meaning of the measured figures, in plain sentences. Pure functions; uses only ``measure``.

``verdict`` puts together the sentences of all others.
"""
