"""Saved runs as a page, a drawing or text."""
