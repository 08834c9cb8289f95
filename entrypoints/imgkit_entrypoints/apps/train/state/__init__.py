"""What outlives a run: snapshots and exported weights."""
