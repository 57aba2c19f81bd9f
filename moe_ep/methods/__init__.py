"""One module a quantization: its parameters, how they are loaded, and which experts run them."""

from moe_ep.methods.base import FusedMoEMethodBase, make_method, relative_error, tolerance
from moe_ep.methods.online import OnlineIntConfig

__all__ = ["FusedMoEMethodBase", "OnlineIntConfig", "make_method", "relative_error", "tolerance"]
