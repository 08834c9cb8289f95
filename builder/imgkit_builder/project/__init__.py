"""The user's project folder: ``imgkit.toml``, the files of ``imgkit init``, and where values come from."""
