"""Run a command of the package, as in ``python3 -I -m imgkit_entrypoints dist-train ...``."""

from imgkit_entrypoints.cli.main import main

main()
