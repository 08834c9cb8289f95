"""Drive a Docker engine: the only importer of docker, and only inside functions.

Read in this order: ``address``, ``connection``, ``images``, ``base_image``, ``builders``, ``building``,
``transfer``, ``image_source``.
"""

from imgkit_builder.engine.base_image import choose_platform, probe, resolve_base
from imgkit_builder.engine.builders import Builder, choose
from imgkit_builder.engine.building import Built, build, default_tag
from imgkit_builder.engine.connection import Engine, connect
from imgkit_builder.engine.containers import run, shell_argv
from imgkit_builder.engine.image_source import LocalImage, export_stream, local_image, read_file, save_stream
from imgkit_builder.engine.images import (
    ImageFacts,
    ImageInfo,
    check_name,
    find,
    image_facts,
    inspect,
)
from imgkit_builder.engine.transfer import add_tag, pull, push

__all__ = [
    "Builder",
    "Built",
    "Engine",
    "ImageFacts",
    "ImageInfo",
    "LocalImage",
    "add_tag",
    "build",
    "check_name",
    "choose",
    "choose_platform",
    "connect",
    "default_tag",
    "export_stream",
    "find",
    "image_facts",
    "inspect",
    "local_image",
    "probe",
    "pull",
    "push",
    "read_file",
    "resolve_base",
    "run",
    "save_stream",
    "shell_argv",
]
