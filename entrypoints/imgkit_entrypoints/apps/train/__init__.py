"""dist-train: data-parallel training of a small model, on CPU or GPU by the same code."""
