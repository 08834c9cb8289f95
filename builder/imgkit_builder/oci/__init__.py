"""Values of an OCI image that stand alone: its configuration, its manifest of imgkit, and its platform."""
