"""Routing: which experts each token uses, and with what weights."""

from moe_ep.routing.select import INDICES_TYPES, select_experts

__all__ = ["INDICES_TYPES", "select_experts"]
