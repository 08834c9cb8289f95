"""The data of a project: folders that all of its runs read, in neither image nor code."""
