"""The copies of earlier versions that differences are worked out from."""

import numpy as np
import pytest
import torch

from slipstream.buffer.wire.weights import delta
from slipstream.buffer.wire.weights.protocol import Manifest, Part, TensorInfo
from slipstream.learner.weights.snapshot import Snapshot
from slipstream.learner.weights.transports.fetch import Differences, following

TENSORS = [TensorInfo(name="a", dtype="bfloat16", shape=[64])]


def snapshot(version: int) -> Snapshot:
    data = torch.full((128,), version, dtype=torch.uint8)
    return Snapshot(Manifest(version=version, evaluate=False, tensors=TENSORS, bucket_bytes=64), data).sealed()


@pytest.mark.parametrize("kept", [1, 2])
def test_a_difference_leads_from_the_last_version_to_the_next(kept: int) -> None:
    differences = Differences(kept=kept)
    for version in range(4):
        differences.keep(snapshot(version))
    data = snapshot(3).data.numpy()
    delta.apply(differences.to(snapshot(4)), data, TENSORS, held=3)
    assert data.tolist() == snapshot(4).data.tolist()


@pytest.mark.parametrize("kept", [1, 2])
def test_differences_keep_bounded_copies(kept: int) -> None:
    differences = Differences(kept=kept)
    seen = []
    for version in range(6):
        differences.keep(snapshot(version))
        seen.append(differences.newest)
        assert [int(each[0]) for each in seen[-kept:]] == list(range(max(0, version + 1 - kept), version + 1))
    assert all(np.shares_memory(seen[version], seen[version + kept]) for version in range(6 - kept))


@pytest.mark.parametrize(("staged", "versions"), [(0, None), (1, [2, 3]), (2, [3]), (3, []), (4, None)])
def test_lagging_member_gets_differences_from_its_version(staged: int, versions: list[int] | None) -> None:
    row = [Part(name=str(base), version=base + 1, size_bytes=1, base=base) for base in (1, 2)]
    parts = following(row, staged)
    assert (None if parts is None else [part.version for part in parts]) == versions
    assert following([], staged) is None
