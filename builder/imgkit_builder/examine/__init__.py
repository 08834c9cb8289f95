"""What imgkit says about a machine (`doctor`) and about a file (`verify`)."""
