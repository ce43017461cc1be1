"""Promises with an end time."""

from __future__ import annotations

import pytest

from anabranch.core.errors import InvariantBroken
from anabranch.store.leases import Leases


def test_a_lease_expires_once_in_order_of_its_end() -> None:
    leases: Leases[str] = Leases()
    leases.grant("b", 2.0)
    leases.grant("a", 1.0)
    leases.grant("c", 3.0)
    assert leases.next_end() == 1.0
    assert leases.expired(2.0) == ["a", "b"]
    assert leases.expired(2.0) == []
    assert "c" in leases
    assert len(leases) == 1


def test_an_ended_lease_does_not_expire_and_its_name_can_be_used_again() -> None:
    leases: Leases[str] = Leases()
    leases.grant("a", 1.0)
    assert leases.end("a")
    assert not leases.end("a")
    leases.grant("a", 5.0)
    assert leases.expired(1.0) == []
    assert leases.expired(5.0) == ["a"]


def test_an_extended_lease_ends_later_and_a_dead_one_cannot_be_revived() -> None:
    leases: Leases[str] = Leases()
    leases.grant("a", 1.0)
    assert leases.extend("a", 4.0)
    assert leases.extend("a", 2.0)
    assert leases.expired(3.9) == []
    assert leases.next_end() == 4.0
    assert leases.expired(4.0) == ["a"]
    assert not leases.extend("a", 9.0)
    assert leases.next_end() is None


def test_a_name_cannot_have_two_leases() -> None:
    leases: Leases[str] = Leases()
    leases.grant("a", 1.0)
    with pytest.raises(InvariantBroken):
        leases.grant("a", 2.0)
