"""Programs, files, progress, checks and the platform: every other room builds on these."""
