"""Programs, files, progress and checks: what every other room builds on."""
