"""The file that a run saves: written, read, described by a schema."""
