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
        TensorInfo, name=st.just("weight"), dtype=st.sampled_from(sorted(ITEM_BYTES)),
        shape=st.lists(st.integers(0, 50), max_size=3),
    )
)  # fmt: skip


@given(tensors)
def test_tensors_lie_aligned_in_order_and_close_together(tensors: list[TensorInfo]) -> None:
    offsets, size_bytes = layout(tensors)
    assert all(offset % ALIGNMENT_BYTES == 0 for offset in offsets)
    for offset, tensor, following in zip(offsets, tensors, [*offsets, size_bytes][1:], strict=True):
        assert 0 <= following - offset - math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype] < ALIGNMENT_BYTES


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
