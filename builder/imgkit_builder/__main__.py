"""``python -m imgkit_builder`` is ``imgkit``."""

from imgkit_builder.cli.app import main

if __name__ == "__main__":
    main()
