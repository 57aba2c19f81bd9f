"""Gangs of workers: local processes, torchrun, Ray; how ranks meet, and how a gang ends."""
