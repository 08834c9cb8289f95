"""The file that ``--save`` writes: its values, its writer, its reader, and its JSON Schema.

Uses ``judge`` and ``measure``. ``reader``, ``writer`` and ``json_schema`` use ``values``.
"""
