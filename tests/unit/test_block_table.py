"""Page references and block tables of an engine."""

from __future__ import annotations

import pytest

from anabranch.core.errors import ConfigError, InvalidInput, InvariantBroken
from anabranch.paging.block_table import CopyOrder, PageRefs, PageTable
from anabranch.paging.watermark import Watermark


def table_of(refs: PageRefs, slots: list[int], *, sealed: int = 0) -> PageTable:
    refs.grant(slots)
    table = PageTable(refs, 4)
    table.append(slots[:sealed], sealed=True)
    table.append(slots[sealed:])
    return table


def test_node_references_fall_due_when_the_last_holder_drops() -> None:
    refs = PageRefs()
    refs.grant([7, 8])
    refs.grant([7])
    refs.share(7)
    assert (refs.holders(7), refs.granted, len(refs), sorted(refs.held())) == (3, 3, 2, [7, 8])
    assert [refs.drop(7), refs.drop(7), refs.drop(7)] == [0, 0, 2]
    assert refs.drop(8) == 1
    assert (len(refs), refs.granted) == (0, 0)
    for call in (refs.drop, refs.share, refs.holders):
        with pytest.raises(InvariantBroken, match="not held"):
            call(7)


def test_missing_counts_pages_up_to_a_number_of_tokens() -> None:
    table = table_of(PageRefs(), [1, 2])
    assert [table.missing(tokens) for tokens in (0, 1, 8, 9, 12, 13)] == [0, 0, 0, 1, 1, 2]


def test_choices_share_until_one_writes_and_the_last_writes_in_place() -> None:
    refs = PageRefs()
    first = table_of(refs, [10, 11])  # 6 tokens of prompt: page 11 is partial
    second, third = first.fork(), first.fork()
    assert second.pages == [10, 11]
    assert refs.granted == 2
    refs.grant([20])
    assert first.needs_copy(6)
    assert first.replace(6, 20) == (CopyOrder(11, 20, 2), [])
    refs.grant([21])
    assert second.replace(6, 21) == (CopyOrder(11, 21, 2), [])
    assert not third.needs_copy(6)
    assert (first.pages, second.pages, third.pages) == ([10, 20], [10, 21], [10, 11])
    assert first.release() == [20]
    assert second.release() == [21]
    assert third.release() == [11, 10]
    assert (len(refs), refs.granted) == (0, 0)


def test_a_sealed_page_is_never_written_even_by_its_only_holder() -> None:
    refs = PageRefs()
    table = table_of(refs, [10, 11], sealed=2)
    assert table.needs_copy(7)
    refs.grant([20])
    order, freed = table.replace(7, 20)
    assert order == CopyOrder(11, 20, 3)
    assert freed == [11]  # to be freed after the copy
    assert table.sealed == 1
    assert not table.needs_copy(7)
    table.seal(2)
    assert table.needs_copy(4)
    with pytest.raises(InvariantBroken, match="sealed"):
        table.replace(3, 20)


def test_a_forks_pages_stay_sealed_when_it_is_left_alone_with_them() -> None:
    refs = PageRefs()
    table = table_of(refs, [10, 11], sealed=2)
    twin = table.fork()
    assert table.release() == []
    assert twin.needs_copy(7)
    assert twin.release() == [11, 10]


def test_truncate_and_release_name_each_node_reference() -> None:
    refs = PageRefs()
    one = table_of(refs, [1, 2, 3], sealed=2)
    other = table_of(refs, [1, 2], sealed=2)
    assert one.truncate(1) == [3]
    assert (one.pages, one.sealed) == ([1], 1)
    assert other.release() == [2, 2]
    assert one.release() == [1, 1]
    assert one.release() == []


def test_a_table_refuses_what_would_corrupt_it() -> None:
    refs = PageRefs()
    table = table_of(refs, [1, 2], sealed=1)
    with pytest.raises(InvariantBroken, match="not held"):
        table.append([9])
    refs.grant([3])
    with pytest.raises(InvariantBroken, match="behind"):
        table.append([3], sealed=True)
    for pages in (0, 3):
        with pytest.raises(InvariantBroken, match="seal"):
            table.seal(pages)
    for position in (-1, 8):
        with pytest.raises(InvariantBroken, match="outside"):
            table.needs_copy(position)
    with pytest.raises(InvalidInput, match="block_tokens"):
        PageTable(refs, 0)


def test_the_watermark_keeps_pages_for_growth_but_never_stalls() -> None:
    watermark = Watermark(3)
    assert watermark.admits(5, free=8, running=1)
    assert not watermark.admits(6, free=8, running=1)
    assert watermark.admits(8, free=8, running=0)
    assert not watermark.admits(9, free=8, running=0)
    assert watermark.fits(10, total=10)
    assert not watermark.fits(11, total=10)
    with pytest.raises(ConfigError, match="-1"):
        Watermark(-1)
