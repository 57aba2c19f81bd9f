"""moe_ep: an expert-parallel runtime for mixture-of-experts layers."""

from moe_ep._version import __version__

__all__ = ["__version__"]
