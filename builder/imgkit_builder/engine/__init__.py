"""Drive a Docker engine. This is the only package that imports docker, and only inside functions.

Read the modules in this order: ``address``, ``connection``, ``images``, ``image_source``, ``base_image``,
``builders``, ``building``.
"""

from imgkit_builder.engine.base_image import choose_platform, probe, resolve_base
from imgkit_builder.engine.builders import ChosenBuilder, choose
from imgkit_builder.engine.building import Built, build
from imgkit_builder.engine.connection import Engine, connect
from imgkit_builder.engine.containers import run, shell_argv
from imgkit_builder.engine.image_source import LocalImage, add_tag, local_image, push, read_file, save_stream
from imgkit_builder.engine.images import ImageInfo, check_name, image_facts, inspect

__all__ = [
    "Built",
    "ChosenBuilder",
    "Engine",
    "ImageInfo",
    "LocalImage",
    "add_tag",
    "build",
    "check_name",
    "choose",
    "choose_platform",
    "connect",
    "image_facts",
    "inspect",
    "local_image",
    "probe",
    "push",
    "read_file",
    "resolve_base",
    "run",
    "save_stream",
    "shell_argv",
]
