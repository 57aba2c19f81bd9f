"""Expert-parallel load balancing: where the load falls, which replica takes it, and where the experts should be."""

from moe_ep.eplb.batch_plan import BatchPlan, plan_batch
from moe_ep.eplb.config import EplbConfig
from moe_ep.eplb.manager import EPLBManager
from moe_ep.eplb.mapping import eplb_map_to_physical_and_record
from moe_ep.eplb.rebalance import Placement, rebalance_experts
from moe_ep.eplb.recorder import balancedness
from moe_ep.eplb.transfer import rearrange_expert_weights

__all__ = [
    "BatchPlan",
    "EPLBManager",
    "EplbConfig",
    "Placement",
    "balancedness",
    "eplb_map_to_physical_and_record",
    "plan_batch",
    "rearrange_expert_weights",
    "rebalance_experts",
]
