"""``python3 -I -m imgkit_entrypoints dist-train ...``."""

from imgkit_entrypoints.main import main

main()
