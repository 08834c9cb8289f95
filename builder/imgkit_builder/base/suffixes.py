"""How the names of the files end that a person passes to a verb."""

ARCHIVE_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.zst")
RECIPE_SUFFIXES = (".yaml", ".yml")
