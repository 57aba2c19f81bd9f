"""What each rank of a gang runs for a command."""
