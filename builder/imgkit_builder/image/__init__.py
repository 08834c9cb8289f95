"""What the engine builds from a recipe: layers, Dockerfile, wheel and context; and the smoke test."""
