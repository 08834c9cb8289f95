"""``python3 -I -m imgkit_entrypoints dist-train ...``."""

from imgkit_entrypoints.cli.main import main

main()
