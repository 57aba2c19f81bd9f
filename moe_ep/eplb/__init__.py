"""Expert-parallel load balancing: where the load falls, and which replica takes it."""

from moe_ep.eplb.mapping import eplb_map_to_physical_and_record
from moe_ep.eplb.metrics import balancedness

__all__ = ["balancedness", "eplb_map_to_physical_and_record"]
