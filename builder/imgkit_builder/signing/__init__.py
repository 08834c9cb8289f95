"""Signatures of .sif files, deltas and archives, and statements of what they were made of."""
