"""Where tensors lie in the byte buffer that a version travels in."""

import math
from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from slipstream.buffer.wire.weights.layout import ALIGNMENT_BYTES, layout, tensor_buckets
from slipstream.buffer.wire.weights.protocol import TensorInfo

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

tensors = st.lists(
    st.builds(
        TensorInfo,
        name=st.just("weight"),
        dtype=st.sampled_from(sorted(ITEM_BYTES)),
        shape=st.lists(st.integers(0, 50), max_size=3),
    )
)


@given(tensors)
def test_tensors_lie_aligned_disjoint_and_in_order(tensors: list[TensorInfo]) -> None:
    offsets, size_bytes = layout(tensors)
    ends = [
        offset + math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
        for offset, tensor in zip(offsets, tensors, strict=True)
    ]
    assert all(offset % ALIGNMENT_BYTES == 0 for offset in offsets)
    assert all(end <= start for end, start in zip(ends, [*offsets, size_bytes][1:], strict=True))


@given(tensors)
def test_no_gap_is_larger_than_the_alignment_asks_for(tensors: list[TensorInfo]) -> None:
    offsets, size_bytes = layout(tensors)
    sizes = [math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype] for tensor in tensors]
    gaps = [
        start - offset - size for start, offset, size in zip([*offsets, size_bytes][1:], offsets, sizes, strict=True)
    ]
    assert all(gap < ALIGNMENT_BYTES for gap in gaps)


def test_a_version_without_tensors_takes_no_room() -> None:
    assert layout([]) == ([], 0)


@given(tensors, st.integers(1, 20_000))
def test_buckets_hold_all_tensors_in_order_and_aligned(tensors: list[TensorInfo], bucket_bytes: int) -> None:
    buckets = tensor_buckets(tensors, bucket_bytes)
    assert [tensor for bucket in buckets for tensor in bucket] == tensors
    for bucket in buckets:
        places = list(accumulate((tensor.size_bytes for tensor in bucket), initial=0))
        assert places[-1] <= bucket_bytes or len(bucket) == 1
        assert all(place % ITEM_BYTES[tensor.dtype] == 0 for place, tensor in zip(places, bucket, strict=False))


@given(tensors, st.integers(1, 20_000))
def test_a_bucket_ends_only_where_the_next_tensor_does_not_fit(tensors: list[TensorInfo], bucket_bytes: int) -> None:
    for bucket, (following, *_) in pairwise(tensor_buckets(tensors, bucket_bytes)):
        end = sum(tensor.size_bytes for tensor in bucket)
        assert end + following.size_bytes > bucket_bytes or end % ITEM_BYTES[following.dtype]
