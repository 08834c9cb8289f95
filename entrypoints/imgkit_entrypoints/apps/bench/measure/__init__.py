"""Collectives run, timed and verified."""
