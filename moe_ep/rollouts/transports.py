"""Brings a trainer's tensors to the ranks that generate: by torch.distributed, or as handles of memory on one GPU.

Both give (name, tensor) pairs for `moe_ep.update_weights`. Names and sizes go as JSON, and nothing is unpickled.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from moe_ep.arguments import check_tensors

# Tensors are sent together up to so many bytes; each begins at a multiple of the alignment.
BUCKET_BYTES = 64 << 20
_ALIGNMENT = 64
_Row = tuple[str, str, list[int]]


def send_weights(tensors: Iterable[tuple[str, torch.Tensor]], group: dist.ProcessGroup) -> None:
    """Sends tensors to all other ranks of a group, which call `receive_weights`.

    Args:
        tensors: on the devices that the group's backend sends from.
        group: this rank and those that generate.

    Raises:
        ValueError: no tensors.
    """
    named = list(tensors)
    if not named:
        raise ValueError("tensors is empty; send at least one")
    check_tensors(**dict(named))
    named = [(name, tensor.detach()) for name, tensor in named]
    table: list[_Row] = [(name, _name_of(tensor.dtype), list(tensor.shape)) for name, tensor in named]
    sender, device = dist.get_rank(group), named[0][1].device
    header = torch.frombuffer(bytearray(json.dumps(table).encode()), dtype=torch.uint8).to(device)
    dist.broadcast(torch.tensor([header.numel()], device=device), group=group, group_src=sender)
    dist.broadcast(header, group=group, group_src=sender)
    values = dict(named)
    for places, size in _buckets(table):
        bucket = torch.empty(size, dtype=torch.uint8, device=device)
        for (name, _, _), start, stop in places:
            bucket[start:stop].copy_(values[name].contiguous().reshape(-1).view(torch.uint8))
        dist.broadcast(bucket, group=group, group_src=sender)


def receive_weights(
    group: dist.ProcessGroup,
    sender: int,
    device: torch.device | str = "cpu",
    keep: Callable[[str], bool] = lambda name: True,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that a rank of the group sends with `send_weights`; each rank must take all of them.

    Args:
        sender: as a rank of the group.
        device: where they arrive.
        keep: of a name, whether this rank wants the tensor; others take no memory.
    """
    length = torch.zeros(1, dtype=torch.int64, device=device)
    dist.broadcast(length, group=group, group_src=sender)
    header = torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(header, group=group, group_src=sender)
    table: list[_Row] = json.loads(bytes(header.tolist()))
    for places, size in _buckets(table):
        bucket = torch.empty(size, dtype=torch.uint8, device=device)
        dist.broadcast(bucket, group=group, group_src=sender)
        wanted = [keep(name) for (name, _, _), _, _ in places]
        for is_wanted, ((name, dtype, shape), start, stop) in zip(wanted, places, strict=True):
            if is_wanted:
                part = bucket[start:stop] if all(wanted) else bucket[start:stop].clone()
                yield name, part.view(_dtype(dtype)).view(shape)


def _buckets(table: list[_Row]) -> Iterator[tuple[list[tuple[_Row, int, int]], int]]:
    """Tensors that are sent together, each with its place in a buffer, and the buffer's size."""
    places: list[tuple[_Row, int, int]] = []
    end = 0
    for row in table:
        size = math.prod(row[2]) * _dtype(row[1]).itemsize
        if places and end + size > BUCKET_BYTES:
            yield places, end
            places, end = [], 0
        places.append((row, end, end + size))
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    yield places, end


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"a tensor is said to be of dtype {name!r}, which torch does not have; send it as another")
    return found


def share_weights(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Handles of tensors on a GPU (CUDA IPC), as text that another process on that GPU gives to `open_weights`.

    The tensors must stay as they are until the other process has read them.

    Raises:
        ValueError: a tensor that is not on a GPU.
    """
    from torch.multiprocessing.reductions import reduce_tensor

    shared = []
    for name, tensor in tensors:
        check_tensors(**{name: tensor})
        if not tensor.is_cuda:
            raise ValueError(f"{name} is on {tensor.device}; processes share the memory of one GPU, so move it there")
        _, (_, shape, stride, offset, _, dtype, _, handle, *rest) = reduce_tensor(tensor.detach())
        size, start, _, counter, counter_offset, event, must_wait = rest
        shared.append(
            {
                "name": name,
                "dtype": _name_of(dtype),
                "shape": list(shape),
                "stride": list(stride),
                "numbers": [offset, size, start, counter_offset],
                "handles": [base64.b64encode(each).decode() for each in (handle, counter, event)],
                "must_wait": must_wait,
            }
        )
    return json.dumps(shared)


def open_weights(text: str, device: torch.device | str = "cuda") -> list[tuple[str, torch.Tensor]]:
    """The tensors that `share_weights` of another process gave handles of: its memory, not a copy of it.

    Args:
        device: the same GPU, as this process counts.

    Raises:
        ValueError: a text that is none of `share_weights`.
    """
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    index = torch.device(device).index or 0
    tensors = []
    try:
        shared: list[Any] = json.loads(text)
        for each in shared:
            offset, size, start, counter_offset = (int(number) for number in each["numbers"])
            handle, counter, event = (base64.b64decode(part, validate=True) for part in each["handles"])
            arguments = (
                *(torch.Tensor, torch.Size(each["shape"]), tuple(each["stride"]), offset, torch.storage.TypedStorage),
                *(_dtype(each["dtype"]), index, handle, size, start, False, counter, counter_offset, event),
                bool(each["must_wait"]),
            )
            tensors.append((str(each["name"]), arguments))
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"text holds no handles of share_weights: {error}; send what that returned") from None
    return [(name, rebuild_cuda_tensor(*arguments)) for name, arguments in tensors]
