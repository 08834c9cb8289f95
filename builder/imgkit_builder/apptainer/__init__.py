"""Build a recipe without an engine. Singularity or Apptainer runs its definition and writes a .sif."""
