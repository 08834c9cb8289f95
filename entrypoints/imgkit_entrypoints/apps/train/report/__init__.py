"""What a run shows and leaves: lines, metrics, curves, traces."""
