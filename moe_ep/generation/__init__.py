"""The continuous-batching engine behind `moe-ep generate`."""
