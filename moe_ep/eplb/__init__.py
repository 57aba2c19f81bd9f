"""Expert-parallel load balancing: where the load falls, which replica takes it, and where the experts should be."""

from moe_ep.eplb.mapping import eplb_map_to_physical_and_record
from moe_ep.eplb.metrics import balancedness
from moe_ep.eplb.rebalance import Placement, rebalance_experts

__all__ = ["Placement", "balancedness", "eplb_map_to_physical_and_record", "rebalance_experts"]
