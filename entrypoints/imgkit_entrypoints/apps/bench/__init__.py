"""dist-bench: collectives measured, verified and judged. No module here imports torch before it runs."""
