"""Signatures: make them, and check who made them with a keyring that the user names."""
