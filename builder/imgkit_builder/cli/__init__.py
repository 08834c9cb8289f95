"""The command line: one file per verb group, each with plain functions that ``app`` registers."""
