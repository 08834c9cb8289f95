"""The image half of imgkit: runs inside the container, standard library only outside ``apps``."""

__version__ = "0.3.0"
