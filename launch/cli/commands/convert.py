"""moe-ep convert: writes a checkpoint with quantized experts."""

from __future__ import annotations

import argparse
import sys

from moe_ep.env import one_of
from moe_ep.launch.cli.options import Parser, add_command, checkpoint_folder, new_folder, parsed
from moe_ep.launch.cli.outputs import show

KINDS = ("int4", "int8", "fp8")


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    parser = add_command(
        subparsers, "convert", main, None, "quantize the experts of a checkpoint",
        "Quantizes the experts of a plain checkpoint (round to nearest) and writes a new checkpoint in "
        "compressed-tensors format, one tensor for each linear layer of each expert; the rest is copied.",
    )  # fmt: skip
    parser.add_argument("input", metavar="IN", help="checkpoint folder with plain experts")
    parser.add_argument("output", metavar="OUT", help="folder to write, new or empty")
    parser.add_argument("--quantize", metavar="KIND", required=True, help=f"{', '.join(KINDS)} (required)")


def main(args: argparse.Namespace) -> int:
    parsed("--quantize", args.quantize, one_of(*KINDS))
    source, target = parsed("IN", args.input, checkpoint_folder), parsed("OUT", args.output, new_folder)
    from tqdm import tqdm

    from moe_ep.checkpoint.convert import convert_checkpoint

    with tqdm(desc="convert", unit="B", unit_scale=True, leave=False, disable=not sys.stderr.isatty()) as bar:

        def count(done: int, total: int) -> None:
            bar.total, bar.n = total, done
            bar.update(0)

        fused = convert_checkpoint(source, target, args.quantize, count)
    sizes = (sum(file.stat().st_size for file in path.glob("*.safetensors")) for path in (source, target))
    before, after = (tqdm.format_sizeof(size, "B") for size in sizes)
    show(f"{target}: experts in {args.quantize}, {after} of weights in place of {before}")
    if fused:
        show(
            "The fused experts were split into one tensor each, which compressed-tensors and moe_ep read. transformers "
            "5 reads experts of such families only fused, and would initialize them at random."
        )
    return 0
