"""The work behind the verbs for images: build, convert, test, open a shell, and list the packages.

The functions take and return frozen values, print nothing, and report their progress to a `Reporter`.
"""
