"""From a recipe to what the engine builds: layers, Dockerfile, wheel and context; and the look inside."""
