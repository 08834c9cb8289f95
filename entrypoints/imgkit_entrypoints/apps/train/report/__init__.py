"""Progress lines, metrics, curves and traces of a run. Uses only ``data``."""
