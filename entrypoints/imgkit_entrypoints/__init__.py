"""The half of imgkit that runs inside the container. Outside ``apps`` it needs only the standard library."""

__version__ = "0.3.0"
