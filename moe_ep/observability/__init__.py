"""What a serving runtime tells of itself: metrics for Prometheus and Ray, and traces for Perfetto."""
