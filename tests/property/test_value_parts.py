"""Parts, slices and groups: arithmetic that must hold for all sizes."""

from __future__ import annotations

import array
import ctypes
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.core.errors import InvalidInput
from anabranch.store.values.grouping import WAVE_BYTES, group
from anabranch.store.values.messages import INLINE_BYTES
from anabranch.store.values.parts import Parts, parts_of, sum_of
from anabranch.store.values.slices import SLICE_BYTES, slice_count, slice_sums
from anabranch.store.values.spread import SliceQueue

SIZES = st.lists(st.integers(0, 3 * SLICE_BYTES // 2), max_size=8)


def test_a_record_may_have_any_names_but_no_pointers() -> None:
    record = np.zeros(2, dtype=[("OPX", "i4")])
    assert parts_of(record).size == 8
    for pointers in (np.zeros(2, dtype=[("a", "i4"), ("b", "O")]), (ctypes.c_void_p * 2)()):
        with pytest.raises(InvalidInput, match="references to objects"):
            parts_of(pointers)


@given(SIZES, st.randoms(use_true_random=False))
def test_parts_cut_like_one_buffer(sizes: list[int], chance: random.Random) -> None:
    whole = chance.randbytes(64) * (sum(sizes) // 64 + 1)
    whole = whole[: sum(sizes)]
    at, views = 0, []
    for size in sizes:
        views.append(memoryview(whole)[at : at + size])
        at += size
    parts = Parts(views)
    assert parts.size == len(whole)
    assert parts.sums() == slice_sums(whole)
    for index in range(slice_count(parts.size)):
        cut = parts.slice(index, parts.size)
        assert b"".join(cut) == whole[index * SLICE_BYTES : (index + 1) * SLICE_BYTES]
        assert all(view.nbytes for view in cut)
    if whole:
        start = chance.randrange(len(whole))
        end = chance.randint(start, len(whole))
        assert b"".join(parts.cut(start, end)) == whole[start:end]
        assert sum_of(parts.cut(start, len(whole))) == sum_of([memoryview(whole)[start:]])


@given(
    st.lists(st.one_of(st.none(), st.sampled_from([0, 1, 65536, INLINE_BYTES, INLINE_BYTES + 1, 1 << 27])), max_size=60)
)
def test_groups_cover_all_items_in_order_and_stay_within_their_bounds(sizes: list[int | None]) -> None:
    groups = group(sizes)
    assert [i for one in groups for i in one.items] == list(range(len(sizes)))
    for one in groups:
        known = [size for i in one.items if (size := sizes[i]) is not None]
        if one.inline:
            assert sum(known) <= INLINE_BYTES
        else:
            assert len(known) == one.count
            assert one.count == 1 or sum(known) <= WAVE_BYTES


@given(st.lists(st.tuples(st.sampled_from(["take", "done", "lost", "drop"]), st.integers(0, 3)), max_size=60))
def test_no_slice_is_forgotten_or_given_to_two_lanes(steps: list[tuple[str, int]]) -> None:
    queue = SliceQueue()
    left = {(item, index) for item in range(4) for index in range(5)}
    queue.add(sorted(left))
    held: dict[int, set[tuple[int, int]]] = {lane: set() for lane in range(4)}
    for what, n in steps:
        if what == "take" and (piece := queue.next_slice(n)) is not None:
            assert piece in left
            assert not any(piece in pieces for pieces in held.values())
            held[n].add(piece)
        elif what == "done" and held[n]:
            piece = held[n].pop()
            assert queue.done(n, piece) == (piece in left)
            left.discard(piece)
        elif what == "lost":
            queue.lost(n)
            held[n].clear()
        elif what == "drop":
            queue.drop(n)
            left = {piece for piece in left if piece[0] != n}
            held = {lane: {p for p in pieces if p[0] != n} for lane, pieces in held.items()}
    for lane in held:
        queue.lost(lane)
    rest = set()
    while (piece := queue.next_slice(0)) is not None:
        rest.add(piece)
    assert rest == left


def test_what_is_a_value_and_what_is_not() -> None:
    assert bytes(parts_of(array.array("d", [1.0, 2.0])).views[0]) == array.array("d", [1.0, 2.0]).tobytes()
    assert parts_of([b"ab", bytearray(b"c"), b""]).size == 3
    assert parts_of(b"").size == 0
    assert parts_of(memoryview(bytes(12)).cast("I", [3])).size == 12
    into = bytearray(4)
    parts_of(into, writable=True).views[0][:] = b"abcd"
    assert into == b"abcd"
    for wrong, message in [
        (memoryview(bytearray(8))[::2], "strides"),
        ("text", "buffer"),
        (None, "buffer"),
        ([b"a", 5], "buffer"),
    ]:
        with pytest.raises(InvalidInput, match=message):
            parts_of(wrong)
    with pytest.raises(InvalidInput, match="read-only"):
        parts_of(b"abc", writable=True)


def test_numpy_and_torch_of_any_dtype() -> None:
    numpy = pytest.importorskip("numpy")
    torch = pytest.importorskip("torch")
    for dtype in ("<f4", ">f4", "complex64", "bool", "float16"):
        made = numpy.ones((3, 5), dtype=dtype)
        assert bytes(parts_of(made).views[0]) == made.tobytes()
        into = numpy.zeros((3, 5), dtype=dtype)
        parts_of(into, writable=True).views[0][:] = made.tobytes()
        assert (into == made).all()
    with pytest.raises(InvalidInput, match="strides"):
        parts_of(numpy.ones((4, 4)).T)
    tensor = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    again = torch.zeros(2, 3, dtype=torch.bfloat16)
    parts_of(again, writable=True).views[0][:] = parts_of(tensor).views[0]
    assert torch.equal(tensor, again)
    assert parts_of([tensor[0], tensor[1]]).size == 12
    with pytest.raises(InvalidInput, match="contiguous"):
        parts_of(tensor.T)
    assert parts_of(torch.empty(0)).size == 0
    with pytest.raises(InvalidInput, match="copy it to the CPU"):
        parts_of(torch.empty(2, device="meta"))
