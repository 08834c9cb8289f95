"""Values that describe an image: its OCI configuration, imgkit's manifest in it, and its platform."""
