"""What reinforcement learning asks of a runtime: routing recorded and replayed, and weights updated in place."""
