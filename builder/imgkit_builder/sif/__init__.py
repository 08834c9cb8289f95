"""Docker and OCI images to .sif files: the conversions, their checks, and a reader of the format."""
