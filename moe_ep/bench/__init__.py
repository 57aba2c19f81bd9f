"""What every benchmark of the project shares: presets, timing, ceilings, and how results are written down."""
