"""The command line. Each module defines related verbs as plain functions, and ``app`` registers them."""
