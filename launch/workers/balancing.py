"""EPLB in a run: the steps before, while and after experts move, and what is said of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from moe_ep.checkpoint import CheckpointReader
from moe_ep.eplb.config import EplbConfig
from moe_ep.eplb.events import EplbTotals, Listener
from moe_ep.eplb.manager import EPLBManager
from moe_ep.eplb.placement_file import PlacementFile, model_checksum
from moe_ep.errors import ConfigError, EplbError
from moe_ep.launch.cli.run_config import RunConfig
from moe_ep.launch.gangs.rank_env import RankEnv
from moe_ep.layer.stack import MoEStack

_NEVER = 10**9


class Balancing:
    """The manager of a run's layers, which begin where --load-placement says.

    Raises:
        ConfigError: that placement is of another model, or for other ranks.
    """

    def __init__(
        self,
        config: RunConfig,
        rank_env: RankEnv,
        stack: MoEStack,
        reader: CheckpointReader,
        listener: Listener,
    ) -> None:
        self._config = config
        self._model = model_checksum(reader)
        layers = [block.moe for block in stack.layers()]
        self._ep_size = layers[0].parallel_config.ep_size
        file = config.placement()
        if file is not None and config.load_placement is not None:
            shape = (len(layers), layers[0].num_experts + layers[0].num_redundant_experts)
            try:
                file.check(config.load_placement, model=self._model, ep_size=self._ep_size, shape=shape)
            except EplbError as error:
                raise ConfigError(str(error)) from None
        hosts, rest = divmod(self._ep_size, rank_env.local_world_size)
        self.manager = EPLBManager(
            layers,
            EplbConfig(
                window_size=config.steps,
                first_plan=config.steps,
                interval=config.eplb_interval or _NEVER,
                rebalance_below=config.eplb_threshold,
                policy=config.eplb_policy,
                objective=config.eplb_objective,
                replica_rule=config.eplb_replicas,
                # A short run would wait longer for the process to start than for the plan.
                planner="thread",
                # Ranks that join may be on any host.
                num_nodes=1 if rest or config.elastic else hosts,
                asynchronous=not config.eplb_synchronous,
            ),
            placement=None if file is None else file.physical_to_logical,
            listener=listener,
        )
        # Moves to the first placement do not count as the run's.
        self._first, self.manager.totals = self.manager.placement.host, EplbTotals()

    def end_step(self) -> torch.Tensor:
        """Ends a step; the assignments of this rank's tokens to slots of each rank, int64 `[L, R]` on the device."""
        counts = self.manager.recorder.expert_load_pass.long()
        self.manager.step()
        return counts.unflatten(1, (self._ep_size, -1)).sum(dim=2)

    def phases(self) -> Iterator[str]:
        """The phase of each step to run: --steps before the first plan, those while experts move, and --steps after."""
        yield from ["before"] * self._config.steps
        while self.manager.busy:
            yield "moving"
        yield from ["after"] * self._config.steps

    def close(self) -> dict[str, Any]:
        """Ends what moves, and says what was done."""
        self.manager.finish()
        placement = self.manager.placement
        self.manager.close()
        totals = asdict(self.manager.totals)
        totals.pop("load")
        return {
            "num_redundant_experts": placement.num_slots - placement.num_experts,
            "policy": self._config.eplb_policy,
            "asynchronous": not self._config.eplb_synchronous,
            "layers_changed": int(np.any(self._first != placement.host, axis=1).sum()),
            **totals,
        }

    def placement(self) -> PlacementFile:
        """Where the experts are."""
        placement = self.manager.placement
        return PlacementFile(
            model=self._model,
            ep_size=self._ep_size,
            num_experts=placement.num_experts,
            physical_to_logical=placement.host,
        )
