"""Chooses the kernels that compute the experts' two GEMMs and the activation between them.

Hopper has its own kernels (hopper.py; e4m3.py where rows may be rounded). Other GPUs from sm_80 on, and Hopper for
cases that its own kernels do not support, run those of ampere.py. All read the same packed layout.
"""

from __future__ import annotations

import torch

from moe_ep.errors import BackendUnavailableError
from moe_ep.kernels import jit
from moe_ep.kernels.marlin import ampere, e4m3, hopper
from moe_ep.kernels.marlin.pair import WeightPair
from moe_ep.kernels.marlin.params import Rows, experts_params

_HOPPER = (9, 0)
_OLDEST = (8, 0)
_ALIGNMENT = 16  # bytes that kernels read at once


def partials_numel(max_rows: int, device: torch.device) -> int:
    """The f32 numbers of scratch that a launch needs in addition to the activation's output."""
    kernels = hopper if jit.capability(device.index or 0) == _HOPPER else ampere
    return kernels.partials_numel(max_rows, device)


def takes_e4m3(pair: WeightPair, rows: Rows) -> bool:
    """Whether the experts multiply rows rounded to e4m3, for which `partials` has e4m3.scratch_bytes."""
    return rows.is_sorted and rows.expected_m is not None and e4m3.pays(pair, rows.expected_m)


def run_experts(
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    pair: WeightPair,
    rows: Rows,
    hidden: torch.Tensor,
    partials: torch.Tensor,
    ampere_only: bool = False,
) -> None:
    """Computes every expert's rows. The caller has checked all arguments, and all are on one GPU.

    Args:
        output: `[E, max_rows, K]`, or `[num_ids, K]` if rows are sorted.
        hidden_states: rows of K numbers; may be `output`.
        hidden: scratch for the activation's output, N numbers per row.
        partials: f32 scratch of partials_numel numbers.
        ampere_only: do not use Hopper's own kernels, so that tests can run those of other GPUs on it.

    Raises:
        BackendUnavailableError: the GPU is older than sm_80.
        ValueError: a tensor that does not begin at a multiple of 16 bytes.
    """
    pair.once(_check_starts)
    _check_start("intermediate_cache13", partials)
    _check_start("intermediate_cache2", hidden)
    _check_start("hidden_states", hidden_states)
    _check_start("output", output)
    if not ampere_only and takes_e4m3(pair, rows):
        e4m3.run(output, hidden_states, pair, rows, partials)
        return
    if ampere_only or not pair.once(_hopper_serves):
        ampere.launch(output, hidden_states, pair, rows, hidden, partials)
        return
    hidden_states, rows = ampere.in_packed_order(output, hidden_states, pair.w13, rows)
    hopper.launch(experts_params(hidden_states, hidden, output, pair, rows), pair, partials, rows)


def _check_starts(pair: WeightPair) -> None:
    for which, weights in enumerate((pair.w13, pair.w2), start=1):
        for name, tensor in (("", weights.qweight), ("_scale", weights.scales), ("_zeros", weights.zeros)):
            if tensor is not None:
                _check_start(f"w{which}{name}", tensor)


def _check_start(name: str, tensor: torch.Tensor) -> None:
    if tensor.data_ptr() % _ALIGNMENT:
        raise ValueError(f"{name} does not begin at a multiple of {_ALIGNMENT} bytes; pass a copy of it")


def _hopper_serves(pair: WeightPair) -> bool:
    """Whether Hopper's own kernels can compute this: groups in order and with one spacing, w2's columns in the order of
    w13's rows, and not too many experts. BackendUnavailableError on GPUs for which there are no kernels."""
    capability, w13, w2 = torch.cuda.get_device_capability(pair.device), pair.w13, pair.w2
    if capability < _OLDEST:
        raise BackendUnavailableError(
            f"{torch.cuda.get_device_name(pair.device)} has compute capability {capability[0]}.{capability[1]}; packed "
            f"experts need 8.0 (A100) or newer, choose experts='reference' on this GPU"
        )
    if capability != _HOPPER or w2.sort_indices is not None or pair.num_experts > hopper.MOST_EXPERTS:
        return False
    return w13.has_regular_groups and w2.has_regular_groups and hopper.have_one_spacing(w13, w2)
