"""Routing: which experts each token uses, and with what weights."""

from moe_ep.routing.router import PrecomputedRouter, Routed, Router, TopKRouter
from moe_ep.routing.select import INDICES_TYPES, select_experts

__all__ = ["INDICES_TYPES", "PrecomputedRouter", "Routed", "Router", "TopKRouter", "select_experts"]
