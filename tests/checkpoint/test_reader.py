"""Reading by byte ranges: values, ranges, counts; and files that are not what the index says."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_ep.checkpoint import reader as reader_module
from moe_ep.checkpoint.reader import DTYPES, CheckpointReader
from moe_ep.errors import CheckpointError
from tests.checkpoint.checkpoints import entry, make_checkpoint, write_raw


def directory_with(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    (tmp_path / "config.json").write_text("{}")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


def shards_of(directory: Path) -> list[Path]:
    return sorted(directory.glob("model-*.safetensors"))


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and torch.equal(left.flatten().view(torch.uint8), right.flatten().view(torch.uint8))
    )


def test_every_dtype_and_shape_reads_back_bit_for_bit(tmp_path: Path) -> None:
    tensors = {}
    for name, dtype in DTYPES.items():
        octets = torch.randint(0, 2, (6 * dtype.itemsize,), dtype=torch.uint8)
        tensors[name] = octets.view(dtype).view(2, 3).clone()
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "odd": torch.arange(3, dtype=torch.int8)}
    reader = CheckpointReader(directory_with(tmp_path, tensors), allow_nonfinite=True)
    assert sorted(tensors) == reader.names()
    for name, tensor in tensors.items():
        assert same_bytes(reader.read(name), tensor), name
        assert reader.info(name).shape == tuple(tensor.shape)
    assert {name for name, tensor in reader.read_many(tensors) if same_bytes(tensor, tensors[name])} == set(tensors)


def test_sharded_checkpoint_equals_what_safetensors_reads(tmp_path: Path) -> None:
    tensors = make_checkpoint(tmp_path)
    shards = shards_of(tmp_path)
    assert len(shards) >= 3
    with CheckpointReader(tmp_path) as reader:
        for shard in shards:
            for name, expected in load_file(shard).items():
                assert same_bytes(reader.read(name), expected)
                assert reader.info(name).file == shard
        assert reader.bytes_read == sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def test_a_single_file_comes_before_an_index_as_in_transformers(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    directory_with(tmp_path, {"only": torch.ones(2)})
    for shard in shards_of(tmp_path):  # the file has replaced them, and left their index
        shard.unlink()
    reader = CheckpointReader(tmp_path)
    assert reader.names() == ["only"]
    assert reader.index_file.name == "model.safetensors"


@pytest.mark.parametrize("rows", [slice(2, 5), slice(None, 3), slice(-2, None), slice(4, 4), slice(5, 2), slice(0, 99)])
def test_rows_read_only_their_bytes(tmp_path: Path, rows: slice) -> None:
    tensor = torch.randn(7, 5)
    reader = CheckpointReader(directory_with(tmp_path, {"x": tensor, "y": torch.ones(3)}))
    assert torch.equal(reader.read("x", rows), tensor[rows])
    assert reader.bytes_read == tensor[rows].numel() * 4


def test_read_rows_reads_each_distinct_row_once(tmp_path: Path) -> None:
    tensor = torch.randn(50, 6)
    reader = CheckpointReader(directory_with(tmp_path, {"x": tensor}))
    row_ids = torch.tensor([7, 3, 4, 4, 49, 7, 5])
    assert torch.equal(reader.read_rows("x", row_ids), tensor[row_ids])
    assert reader.bytes_read == 5 * 6 * 4
    assert reader.read_rows("x", torch.empty(0, dtype=torch.int64)).shape == (0, 6)
    with pytest.raises(ValueError, match="below 50"):
        reader.read_rows("x", torch.tensor([50]))


@pytest.mark.parametrize("rows", [slice(0, 4, 2), slice(None, None, -1)])
def test_rows_must_be_a_range(tmp_path: Path, rows: slice) -> None:
    reader = CheckpointReader(directory_with(tmp_path, {"x": torch.ones(4)}))
    with pytest.raises(ValueError, match="step 1"):
        reader.read("x", rows)


def test_read_many_reads_neighbours_at_once_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"t{i:02}": torch.full((8,), float(i)) for i in range(20)}
    # The compiled loop that looks for NaN would read past os.preadv.
    reader = CheckpointReader(directory_with(tmp_path, tensors), allow_nonfinite=True)
    reads = []
    preadv = os.preadv

    def recording(fd: int, buffers: list[memoryview], offset: int) -> int:
        reads.append(len(buffers[0]))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", recording)
    wanted = [f"t{i:02}" for i in (9, 2, 3, 4, 15, 16, 2)]
    read = list(reader.read_many(wanted))
    assert [name for name, _ in read] == ["t02", "t03", "t04", "t09", "t15", "t16"]
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in read)
    assert sorted(reads) == [32, 64, 96]
    assert reader.bytes_read == 6 * 32


def test_read_many_in_small_batches_over_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "BATCH_BYTES", 5000)
    monkeypatch.setattr(reader_module, "FEW_BYTES", 0)
    tensors = make_checkpoint(tmp_path)
    reader = CheckpointReader(tmp_path)
    read = list(reader.read_many(tensors))
    assert {name for name, tensor in read if same_bytes(tensor, tensors[name])} == set(tensors)
    positions = [(reader.info(name).file, reader.info(name).offset) for name, _ in read]
    assert positions == sorted(positions)


def test_read_many_with_reused_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "BATCH_BYTES", 5000)
    monkeypatch.setattr(reader_module, "FEW_BYTES", 0)
    tensors = make_checkpoint(tmp_path)
    reader = CheckpointReader(tmp_path)
    for _ in range(2):
        read = {
            name for name, tensor in reader.read_many(tensors, reuse_buffers=True) if same_bytes(tensor, tensors[name])
        }
        assert read == set(tensors)
    buffers = {tensor.untyped_storage().data_ptr() for _, tensor in reader.read_many(tensors, reuse_buffers=True)}
    assert len(buffers) <= 2 * reader_module.READ_THREADS


def test_the_smallest_spare_buffer_that_fits_is_used_again() -> None:
    spare = reader_module.SpareBuffers(torch.empty(size, dtype=torch.uint8) for size in (300, 100, 200))
    assert spare.take(150).numel() == 200
    assert spare.take(101).numel() == 300
    # In place of the one that is too small.
    assert spare.take(101).numel() >= 101 and not spare


def test_read_many_can_be_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "BATCH_BYTES", 5000)
    monkeypatch.setattr(reader_module, "FEW_BYTES", 0)
    make_checkpoint(tmp_path)
    reader = CheckpointReader(tmp_path)
    for _ in reader.read_many(reader.names()):
        break
    assert reader.read("model.layers.0.mlp.gate.weight").shape == (4, 64)


def test_unaligned_tensors_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    value = torch.randn(3)
    header = {"flag": entry("BOOL", [1], 0, 1), "x": entry("F32", [3], 1, 13)}
    write_raw(tmp_path / "model.safetensors", header, b"\x01" + value.numpy().tobytes())
    reader = CheckpointReader(tmp_path)
    assert torch.equal(reader.read("x"), value)
    assert torch.equal(dict(reader.read_many(["x", "flag"]))["x"], value)


def edit_index(directory: Path, **changes: str | None) -> None:
    file = directory / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"] |= changes
    file.write_text(json.dumps(index))


NORM = "model.layers.1.post_attention_layernorm.weight"


def test_truncated_shard_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    shard = shards_of(tmp_path)[1]
    os.truncate(shard, shard.stat().st_size - 100)
    with pytest.raises(CheckpointError, match=r"model-00002.*tensor .*expected data up to byte .*truncated"):
        CheckpointReader(tmp_path)


def test_shard_truncated_after_the_check_is_noticed(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    reader = CheckpointReader(tmp_path)
    last = max(reader.names(), key=lambda name: (reader.info(name).file, reader.info(name).offset))
    file = reader.info(last).file
    os.truncate(file, file.stat().st_size - 2)
    with pytest.raises(CheckpointError, match="became shorter"):
        reader.read(last)
    with pytest.raises(CheckpointError, match="became shorter"):
        list(reader.read_many([last]))


def test_a_disk_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*where: object) -> int:
        raise OSError(errno.ESTALE, "Stale file handle")

    make_checkpoint(tmp_path)
    reader = CheckpointReader(tmp_path, allow_nonfinite=True)
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CheckpointError, match=r"model-0000.-of-.*: expected 512 bytes .* found Stale file handle"):
        reader.read("model.layers.0.mlp.gate.weight")


def test_index_that_names_a_missing_file_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    shards_of(tmp_path)[2].unlink()
    with pytest.raises(CheckpointError, match=r"index\.json: tensor .*expected in model-00003.*found no such file"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize(("name", "found"), [("lost", "a link that leads nowhere"), ("n" * 300, "no such file")])
def test_index_that_names_what_is_no_file(tmp_path: Path, name: str, found: str) -> None:
    make_checkpoint(tmp_path)
    (tmp_path / "lost").symlink_to("blobs/gone")
    edit_index(tmp_path, **{NORM: name})
    with pytest.raises(CheckpointError, match=f"tensor {NORM}: expected in {name}, found {found}; fetch it again"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_a_checkpoint_whose_files_are_none(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=rf"{name}: expected .* found no plain file"):
        CheckpointReader(tmp_path)


def test_a_file_that_is_gone_when_it_is_read(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    reader = CheckpointReader(tmp_path)
    reader.info(NORM).file.unlink()
    with pytest.raises(CheckpointError, match="expected the file whose header was read, found No such file"):
        reader.read(NORM)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", 3])
def test_index_cannot_point_outside(tmp_path: Path, name: str) -> None:
    make_checkpoint(tmp_path)
    edit_index(tmp_path, **{NORM: name})
    with pytest.raises(CheckpointError, match=f"tensor {NORM}: expected the name of a file beside it"):
        CheckpointReader(tmp_path)


def test_tensor_in_another_shard_than_the_index_says_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    edit_index(tmp_path, **{NORM: shards_of(tmp_path)[0].name})
    with pytest.raises(
        CheckpointError, match=rf"model-00001.*tensor {NORM}: expected here by the index, found in model"
    ):
        CheckpointReader(tmp_path)


def test_tensor_of_the_index_in_no_shard_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    edit_index(tmp_path, extra=shards_of(tmp_path)[0].name)
    with pytest.raises(CheckpointError, match="tensor extra: expected here by the index, found in no shard"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize("stale", ["aaa.safetensors", "zzz.safetensors"])
def test_the_index_says_which_copy_of_a_tensor_counts(tmp_path: Path, stale: str) -> None:
    tensors = make_checkpoint(tmp_path)
    save_file({NORM: torch.full((64,), 7.0), "of_this_file": torch.ones(1)}, tmp_path / stale)
    edit_index(tmp_path, of_this_file=stale)
    with CheckpointReader(tmp_path) as reader:
        assert torch.equal(reader.read(NORM), tensors[NORM])
        assert reader.info(NORM).file.name != stale
    edit_index(tmp_path, **{NORM: stale})
    with CheckpointReader(tmp_path) as reader:
        assert torch.equal(reader.read(NORM), torch.full((64,), 7.0))


def test_tensors_of_shards_that_the_index_leaves_out_are_there_as_in_transformers(tmp_path: Path) -> None:
    """transformers reads all tensors of all shards that the index names, in the order of file names."""
    make_checkpoint(tmp_path)
    for value, name in ((1.0, "zz1.safetensors"), (2.0, "zz2.safetensors")):
        save_file({"extra": torch.tensor([value]), name: torch.ones(1)}, tmp_path / name)
        edit_index(tmp_path, **{name: name})
    save_file({"stray": torch.ones(1), NORM: torch.zeros(64)}, tmp_path / "consolidated.safetensors")
    with CheckpointReader(tmp_path) as reader:
        assert reader.read("extra").item() == 2.0
        assert "stray" not in reader
        assert reader.read(NORM).any()


def test_an_index_that_counts_the_single_file_among_its_shards(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    directory_with(tmp_path, {"only": torch.ones(2), NORM: torch.full((64,), 3.0)})
    edit_index(tmp_path, only="model.safetensors")
    with CheckpointReader(tmp_path) as reader:
        assert reader.read(NORM)[0] == 3.0  # the single file's, as in transformers
        assert "model.layers.0.mlp.gate.weight" in reader


def _rewritten(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.seek(-8, os.SEEK_END)
        stream.write(bytes(8))


def _replaced(file: Path) -> None:
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content)


def _grown(file: Path) -> None:
    with file.open("ab") as stream:
        stream.write(b"x")


@pytest.mark.parametrize("change", [_rewritten, _replaced, _grown, Path.unlink])
@pytest.mark.parametrize("closed", [False, True])
def test_a_file_that_changes_after_its_header_was_read(
    tmp_path: Path, change: Callable[[Path], None], closed: bool
) -> None:
    make_checkpoint(tmp_path)
    reader = CheckpointReader(tmp_path)
    reader.check_unchanged()
    if closed:
        reader.close()
    time.sleep(0.02)  # mtime has the resolution of a tick
    change(reader.info(NORM).file)
    for read in (
        lambda: reader.read(NORM),
        lambda: reader.read_rows(NORM, torch.tensor([3])),
        lambda: list(reader.read_many([NORM])),
        reader.check_unchanged,
    ):
        with pytest.raises(CheckpointError, match=reader.info(NORM).file.name):
            read()
    reader.read(next(name for name in reader.names() if reader.info(name).file != reader.info(NORM).file))


@pytest.mark.parametrize("name", ["config.json", "quant_config.json", "model.safetensors.index.json"])
def test_json_that_is_larger_than_any_model_has_is_not_read(tmp_path: Path, name: str) -> None:
    make_checkpoint(tmp_path)
    with (tmp_path / name).open("ab") as stream:
        stream.truncate(3 << 30)  # sparse
    with pytest.raises(CheckpointError, match=f"{name}.*{3 << 30}"):
        CheckpointReader(tmp_path)


def test_missing_directory_config_and_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected a checkpoint directory, found none"):
        CheckpointReader(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"config\.json: expected the checkpoint's config\.json"):
        CheckpointReader(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="expected model.safetensors or .* found neither"):
        CheckpointReader(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match="found pytorch_model.bin"):
        CheckpointReader(tmp_path)
    (tmp_path / "gptq_model-4bit-128g.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="found gptq_model"):
        CheckpointReader(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": []}')
    with pytest.raises(CheckpointError, match="expected a weight_map"):
        CheckpointReader(tmp_path)


def test_unknown_tensor_names_the_index(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    reader = CheckpointReader(tmp_path)
    assert "nothing" not in reader
    with pytest.raises(CheckpointError, match=r"index\.json: expected tensor nothing, found none"):
        reader.read("nothing")
    (tmp_path / "single").mkdir()
    with pytest.raises(CheckpointError, match=r"single/model\.safetensors: expected tensor nothing, found none"):
        CheckpointReader(directory_with(tmp_path / "single", {"something": torch.zeros(1)})).read("nothing")


def test_files_are_open_between_reads_and_closed_at_the_end(tmp_path: Path) -> None:
    def opened() -> int:
        return sum(os.path.realpath(link).startswith(str(tmp_path)) for link in Path("/proc/self/fd").iterdir())

    make_checkpoint(tmp_path)
    with CheckpointReader(tmp_path) as reader:
        for _ in range(2):
            reader.read("model.layers.0.mlp.gate.weight")
            assert opened() == len(shards_of(tmp_path))
    assert opened() == 0
    reader.read("model.layers.0.mlp.gate.weight")
    del reader
    assert opened() == 0


def test_names_by_prefix(tmp_path: Path) -> None:
    tensors = make_checkpoint(tmp_path)
    reader = CheckpointReader(tmp_path)
    prefix = "model.layers.1.mlp.experts.3."
    assert reader.names(prefix) == sorted(name for name in tensors if name.startswith(prefix))
    assert reader.names("zzz") == []


@pytest.mark.parametrize("directory", [None, 5, b"x"])
def test_a_directory_is_a_path(directory: Any) -> None:
    with pytest.raises(TypeError, match=f"^directory is {directory!r}; it must be the path of a checkpoint's folder$"):
        CheckpointReader(directory)


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        ("read", ("w", 5), r"rows is 5; it must be a slice, as slice\(0, 4\), or None"),
        ("read", ("w", slice("a", 2)), r"rows.start is 'a'; it must be a whole number"),
        ("read", ([],), r"name is \[\]; it must be a tensor's name"),
        ("info", (None,), "name is None; it must be a tensor's name"),
        ("names", (5,), "prefix is 5; it must be the beginning of a tensor's name, or empty"),
        ("read_rows", ("w", None), "row_ids is None; it must be a tensor"),
        ("read_rows", ("w", [0, 1]), "row_ids is a list; it must be a tensor"),
        ("read_rows", ("w", torch.zeros(2)), "row_ids is torch.float32; it must be uint8, int8,"),
        (
            "read_rows",
            ("scalar", torch.tensor([0])),
            r"scalar has no dimensions and thus no rows; use read\('scalar'\)",
        ),
        ("read_many", ([None],), "names has None; each must be a tensor's name, or what"),
        ("read_many", ([["w"]],), r"names has \['w'\]; each must be"),
        ("read_many", (None,), "names is None; it must be a list of tensors' names"),
        ("read_many", ("w",), "names is 'w'; it must be a list of tensors' names"),
    ],
)
def test_arguments_of_other_types_are_named(tmp_path: Path, method: str, arguments: tuple, message: str) -> None:
    tensors = {"w": torch.ones(4, 2), "scalar": torch.tensor(3.5)}
    reader = CheckpointReader(directory_with(tmp_path, tensors))
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        list(getattr(reader, method)(*arguments))
