"""Observability of a serving runtime: metrics for Prometheus and Ray, and traces for Perfetto."""
