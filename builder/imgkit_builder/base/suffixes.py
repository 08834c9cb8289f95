"""The suffixes of file names that users pass to verbs."""

ARCHIVE_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.zst")
RECIPE_SUFFIXES = (".yaml", ".yml")
