"""Samples: built in or read from disk, their order, and the batches made from them. Imports no sub-room."""
