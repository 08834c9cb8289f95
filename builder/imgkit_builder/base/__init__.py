"""Programs, files, progress, checks and command-line flags. Every other package builds on these modules."""
