"""The data of a project: folders that all of its runs read, outside of the image and the code."""
