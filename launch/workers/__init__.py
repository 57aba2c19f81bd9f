"""The part of each command that every rank of a gang runs."""
