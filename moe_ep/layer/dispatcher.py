"""How one layer's tokens reach the ranks of their experts: process groups, backend, capacity and the last reduction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from moe_ep.config import DispatchConfig, FusedMoEParallelConfig
from moe_ep.distributed.exchange import finish_step, values_over_ranks
from moe_ep.distributed.passes import most_tokens
from moe_ep.distributed.process_groups import LayerGroups, is_initialized, layer_groups
from moe_ep.errors import rank_list
from moe_ep.layer.methods.base import FusedMoEMethodBase
from moe_ep.modular_kernel import FusedMoEPrepareAndFinalize


class LayerDispatcher:
    """Makes a layer's dispatch backend: at once if the process groups exist already, otherwise in the first pass.

    Args:
        method: the quantization method, which makes the backend (`maybe_make_prepare_finalize`).
        process_group: the layer's ranks; None for the default group.
    """

    def __init__(
        self,
        layer_name: str,
        config: DispatchConfig,
        method: FusedMoEMethodBase,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        self.layer_name, self.config, self.method = layer_name, config, method
        self.parallel: FusedMoEParallelConfig = method.moe_config.moe_parallel_config
        self.groups: LayerGroups = layer_groups(self.parallel, process_group)
        self._backend: FusedMoEPrepareAndFinalize | None = None
        if is_initialized() or not self.parallel.spans_ranks:
            self._backend = self._make()

    def regroup(self, process_group: dist.ProcessGroup | None) -> None:
        """Moves to the ranks of the method's configuration; their backend is made in the first pass."""
        self.parallel = self.method.moe_config.moe_parallel_config
        self.groups = layer_groups(self.parallel, process_group)
        self._backend = None

    @property
    def prepare_finalize(self) -> FusedMoEPrepareAndFinalize:
        """The backend of the current pass."""
        if self._backend is None:
            try:
                self._backend = self._make()
            except AttributeError as error:
                # nn.Module would report it as a missing attribute of the layer.
                raise RuntimeError(f"the backend of {self.layer_name} cannot be made: {error}") from error
        return self._backend

    def _make(self) -> FusedMoEPrepareAndFinalize:
        if self.parallel.spans_ranks and not is_initialized():
            raise RuntimeError(
                f"the layer {self.layer_name} is one of {self.parallel.tp_size * self.parallel.dp_size} ranks and "
                f"torch.distributed is not initialised; call init_process_group before making the layer"
            )
        if self.groups.are_none:  # also where the layer was made before its ranks met
            self.groups = layer_groups(self.parallel)
        with torch.device("cpu"):  # Its tables need values even if the layer is created on the meta device.
            return self.method.maybe_make_prepare_finalize(self.groups.ep, self.config.dispatch_dtype)

    def backends(self) -> Iterator[FusedMoEPrepareAndFinalize]:
        """The backends that have been made."""
        if self._backend is not None:
            yield self._backend

    def most_tokens_of_pass(self, num_tokens: int, is_captured: bool) -> int | None:
        """Returns the most tokens that any rank has in this pass; None if the backend takes any number, or if the
        ranks cannot be asked because a CUDA graph is being captured.

        Raises:
            ValueError: more tokens than the capacity under CUDA-graph capture.
        """
        capacity = self.prepare_finalize.max_num_tokens_per_rank()
        if capacity is None:
            return None
        if is_captured:
            if num_tokens > capacity:
                raise ValueError(
                    f"hidden_states has {num_tokens} tokens under CUDA-graph capture and the capacity is {capacity}; "
                    f"capture at most {capacity}, or make the layer with a larger max_num_tokens"
                )
            return None
        return self.most_tokens(num_tokens)

    def most_tokens(self, num_tokens: int) -> int:
        """Returns the most tokens that any rank has in this pass."""
        return most_tokens(num_tokens, self.groups.ep)

    @property
    def asks_for_tokens(self) -> bool:
        """Whether the ranks must know each other's number of tokens."""
        return self.groups.ep is not None and self.prepare_finalize.max_num_tokens_per_rank() is not None

    @property
    def takes_complete_terms(self) -> bool:
        """Whether this rank adds a term that every rank holds in full. All ranks add it to complete outputs; only the
        first TP rank adds it to partial sums."""
        return self.parallel.tp_rank == 0 or self.prepare_finalize.output_is_reduced()

    def adds_up_over(self, backend: FusedMoEPrepareAndFinalize) -> bool:
        """Whether that backend's outputs are partial sums of several TP ranks, which `all_reduce` adds up."""
        return not backend.output_is_reduced() and self.groups.tp is not None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sums `x` over the TP ranks, in place, if the layer's outputs are partial sums; otherwise returns `x`.

        A batch-invariant layer sums in rank order and in f32, because a transport may choose its order by the size.

        Raises:
            ValueError: the ranks have different numbers of rows; on the CPU only, on every rank.
            DispatchTimeoutError: a rank failed, or did not join before the deadline; on the CPU only.
        """
        group = self.groups.tp
        if group is None or not self.adds_up_over(self.prepare_finalize):
            return x
        if not self.method.moe_config.batch_invariant:
            self._run(dist.all_reduce, group, x)
            return x
        parts = [torch.empty_like(x) for _ in range(self.parallel.tp_size)]
        self._run(dist.all_gather, group, parts, x.contiguous())
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        return x.copy_(total)

    @staticmethod
    def _run(collective: Callable[..., Any], group: dist.ProcessGroup, *args: Any) -> None:
        if args[-1].is_cuda or torch.compiler.is_compiling():
            collective(*args, group=group)
            return
        # gloo would end the processes.
        num_rows = values_over_ranks(args[-1].shape[:-1].numel(), group)
        if len(set(num_rows)) > 1:
            raise ValueError(
                f"the outputs of TP {rank_list(range(len(num_rows)))} have {', '.join(map(str, num_rows))} tokens, and "
                f"are parts of one sum; give all TP ranks the same tokens, or divide them with dp_size"
            )
        finish_step(lambda: collective(*args, group=group, async_op=True), group, "the parts of their outputs")
