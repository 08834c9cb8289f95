"""The ``dist-*`` command lines."""
