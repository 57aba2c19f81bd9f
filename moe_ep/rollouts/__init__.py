"""Support for reinforcement learning: recording and replaying routing, and updating weights in place."""
