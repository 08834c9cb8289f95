"""The data of a project: folders that its runs read, and that are neither in the image nor in the code."""
