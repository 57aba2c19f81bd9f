"""Policies that plan where the experts and their replicas go."""
