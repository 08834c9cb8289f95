"""Checks of this machine (`doctor`) and of a file (`verify`), and the facts about a file (`file_facts`)."""
