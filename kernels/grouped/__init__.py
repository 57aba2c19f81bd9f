"""Experts with plain (unquantized) weights: grouped products in Triton and in torch."""
