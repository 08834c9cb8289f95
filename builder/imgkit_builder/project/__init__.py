"""A folder of one's own: its ``imgkit.toml``, what was run from it, and how the runs compare."""
