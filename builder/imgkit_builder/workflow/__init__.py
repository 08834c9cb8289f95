"""What the verbs do, for programs: build, convert, look into an image, run on a cluster.

Each function takes and returns frozen values, prints nothing, and reports progress to a `Reporter`.
"""
