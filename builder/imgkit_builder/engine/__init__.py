"""The Docker engine: the only importer of docker, and only inside functions.

Read in this order: ``connection``, ``platforms``, ``identity``, ``images``, ``base_image``, ``probing``,
``builders``, ``building``, ``streams``, ``transfer``, ``storage``, ``copies``, ``local_image``,
``squash_helper``.
"""

from imgkit_builder.engine.base_image import choose_platform, resolve_base
from imgkit_builder.engine.builders import Builder, choose
from imgkit_builder.engine.building import Built, build, default_tag
from imgkit_builder.engine.connection import Engine, connect
from imgkit_builder.engine.containers import run
from imgkit_builder.engine.images import ImageInfo, check_name, find, inspect
from imgkit_builder.engine.local_image import LocalImage, local_image
from imgkit_builder.engine.probing import probe
from imgkit_builder.engine.shell import shell_argv
from imgkit_builder.engine.show import ImageFacts, image_facts
from imgkit_builder.engine.squash_helper import EngineHelper, squash_helper
from imgkit_builder.engine.streams import export_stream, read_file, save_stream
from imgkit_builder.engine.transfer import add_tag, load, pull, push

__all__ = [
    "Builder",
    "Built",
    "Engine",
    "EngineHelper",
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
    "load",
    "local_image",
    "probe",
    "pull",
    "push",
    "read_file",
    "resolve_base",
    "run",
    "save_stream",
    "shell_argv",
    "squash_helper",
]
