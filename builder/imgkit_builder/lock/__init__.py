"""Lock the packages of a recipe: find their versions in the base image, with the base's own pip and apt.

Read the modules in this order. ``resolve`` builds an image that asks pip and apt, and writes the lock.
``inside`` is the program that runs in that image. ``answers`` reads what it found, and ``changes`` compares
two locks.
"""
