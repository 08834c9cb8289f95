"""Build a recipe without a container engine: Singularity or Apptainer runs a definition and writes a .sif."""
