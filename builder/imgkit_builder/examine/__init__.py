"""Checks of a machine (`doctor`) and of a file (`verify`)."""
