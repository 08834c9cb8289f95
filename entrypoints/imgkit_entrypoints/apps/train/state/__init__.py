"""State that outlives a run: snapshots, random numbers and exported weights. Uses only ``data``."""
