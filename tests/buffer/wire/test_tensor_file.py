"""A version as a safetensors file: other programs can read it, and a file of something else is refused."""

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from slipstream.buffer.wire.weights.delta import Bytes
from slipstream.buffer.wire.weights.layout import TensorFileError, layout, read_tensors, tensor_pieces
from slipstream.buffer.wire.weights.protocol import TensorInfo
from slipstream.configs.runtime.files import write_atomically

TENSORS = [TensorInfo(name="b", dtype="float32", shape=[3, 5]), TensorInfo(name="a", dtype="float16", shape=[7])]


@pytest.fixture
def data() -> Bytes:
    return np.random.default_rng(0).integers(0, 64, layout(TENSORS)[1], dtype=np.uint8)


def written(folder: Path, data: Bytes) -> Path:
    path = folder / "v00000004.safetensors"
    assert write_atomically(path, tensor_pieces(4, TENSORS, data.data)) == path.stat().st_size
    return path


def test_it_is_a_safetensors_file(tmp_path: Path, data: Bytes) -> None:
    with safe_open(written(tmp_path, data), framework="numpy") as file:
        assert file.metadata() == {"version": "4"}
        assert np.array_equal(file.get_tensor("b"), data[:60].view("<f4").reshape(3, 5))
        assert np.array_equal(file.get_tensor("a"), data[64:78].view("<f2"))
    assert [path.name for path in tmp_path.iterdir()] == ["v00000004.safetensors"]


def test_what_was_written_is_read(tmp_path: Path, data: Bytes) -> None:
    found = np.zeros_like(data)
    read_tensors(written(tmp_path, data), 4, TENSORS, found.data)
    assert np.array_equal(found[:60], data[:60])
    assert np.array_equal(found[64:78], data[64:78])


def test_another_version_or_other_tensors_are_refused(tmp_path: Path, data: Bytes) -> None:
    path = written(tmp_path, data)
    with pytest.raises(TensorFileError, match="version 5"):
        read_tensors(path, 5, TENSORS, data.data)
    with pytest.raises(TensorFileError, match="version 4"):
        read_tensors(path, 4, TENSORS[::-1], data.data)


def test_a_file_that_is_cut_off_or_goes_on_is_refused(tmp_path: Path, data: Bytes) -> None:
    path = written(tmp_path, data)
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(TensorFileError):
        read_tensors(path, 4, TENSORS, data.data)
    path.write_bytes(content + b"x")
    with pytest.raises(TensorFileError):
        read_tensors(path, 4, TENSORS, data.data)
