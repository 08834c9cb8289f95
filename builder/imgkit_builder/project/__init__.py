"""A project folder of the user: its ``imgkit.toml``, the files of ``imgkit init``, and sources of values."""
