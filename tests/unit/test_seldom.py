"""What would be said many times a second is said now and then."""

from __future__ import annotations

from anabranch.core.live.seldom import Seldom


def test_each_subject_once_until_its_time_has_come() -> None:
    seldom = Seldom(3600.0, most=2)
    assert [seldom.due(about) for about in ("a", "a", "b", "a")] == [True, False, True, False]
    assert seldom.due("c")
    assert seldom.due("a"), "forgotten for those that came later"
    assert all(Seldom(0.0).due() for _ in range(3))
