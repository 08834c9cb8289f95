"""Image archives: written in one pass, read in one place, with two files beside each."""
