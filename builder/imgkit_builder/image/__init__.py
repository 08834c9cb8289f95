"""What an engine needs to build a recipe: layers, Dockerfile, wheel and build context.

Also the smoke test.
"""
