"""Topology files: what is in them, what is refused and how it is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.core.errors import ConfigError
from anabranch.transfer.classes import MINIMUM_SHARES, TrafficClass
from anabranch.transfer.live.marks import MARKS
from anabranch.transfer.topology import Nic, Topology, host_of, parse_topology, split_addresses

TWO = """
[[nic]]
name = "left"
address = "10.0.1.5"
device = "eth1"
speed_gbit = 100
rate_gbit = 8
numa = 0
reaches = ["10.0.1.0/24", "cache-1"]
use = "storage"

[[nic]]
name = "right"
address = "10.0.2.5"
speed_gbit = 25
reaches = ["10.0.2.0/24"]
"""


def test_a_host_with_two_nics() -> None:
    topology = parse_topology(TWO, "nics.toml")
    left, right = topology.nics
    assert left == Nic(
        name="left",
        address="10.0.1.5",
        device="eth1",
        speed_gbit=100,
        rate_gbit=8,
        numa=0,
        reaches=("10.0.1.0/24", "cache-1"),
        use="storage",
    )
    assert left.bandwidth == 12.5e9
    assert (left.rate_bytes, right.rate_bytes) == (1_000_000_000, 0)
    assert (right.numa, right.use, right.device) == (-1, "any", "")


def test_peers_are_reached_by_network_name_and_use() -> None:
    topology = parse_topology(TWO, "nics.toml")
    left, right = topology.nics
    assert topology.towards("10.0.1.77") == (left,)
    assert topology.towards("10.0.2.77") == (right,)
    assert topology.towards("cache-1", "storage") == (left,)
    assert topology.towards("10.0.2.77", "compute") == (right,)
    with pytest.raises(ConfigError, match=r"no NIC .* reaches 10\.0\.1\.77 for compute .*left, right"):
        topology.towards("10.0.1.77", "compute")
    with pytest.raises(ConfigError, match=r"reaches 192\.168\.0\.1"):
        topology.towards("192.168.0.1")


def test_without_a_file_there_is_one_nic_that_reaches_everything() -> None:
    assert Topology().towards("10.0.1.77") == (Nic(),)
    assert Topology().towards("somewhere", "compute") == (Nic(),)


def test_a_nic_reaches_only_its_own_family_of_addresses() -> None:
    topology = parse_topology('[[nic]]\nname="a"\naddress="10.0.0.1"\n[[nic]]\nname="b"\naddress="fd00::1"', "t")
    assert [nic.name for nic in topology.towards("10.0.0.9")] == ["a"]
    assert [nic.name for nic in topology.towards("fd00::9")] == ["b"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[nic]", r"t\.toml is not TOML"),
        ("", r"t\.toml lists no NIC"),
        ("nic = 3", "lists no NIC"),
        ("nic = [3]", "nic 1 is not a table"),
        ("nics = []\n[[nic]]\nname='a'", "unknown key 'nics'"),
        ("[[nic]]\naddress = '10.0.0.1'", "nic 1: no name"),
        ("[[nic]]\nname = 'a'\nspeed = 4", r"nic 1 \(a\): .*unknown field `speed`; keys are name, address"),
        ("[[nic]]\nname = 'a'\nuse = 'both'", r"nic 1 \(a\): Invalid enum value 'both'"),
        ("[[nic]]\nname = 'a'\nspeed_gbit = -1", "speed_gbit = -1.0 must be"),
        ("[[nic]]\nname = 'a'\nspeed_gbit = nan", "speed_gbit = nan must be"),
        ("[[nic]]\nname = 'a'\nrate_gbit = inf", "rate_gbit = inf must be"),
        ("[[nic]]\nname = 'a'\naddress = 'eth0'", "address = 'eth0' is not an IP address"),
        ("[[nic]]\nname = 'a'\nreaches = ['10.0.0/33']", "is not a network"),
        ("[[nic]]\nname = 'a'\n[[nic]]\nname = 'a'", "two NICs have the name 'a'"),
        ("[[nic]]\nname='a'\naddress='::1'\n[[nic]]\nname='b'\naddress='::1'", "two NICs have the address"),
    ],
)
def test_what_is_wrong_is_named(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        parse_topology(text, "t.toml")
    assert "t.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_addresses_of_a_peer_with_several_nics() -> None:
    assert split_addresses("10.0.1.1:7070 + 10.0.2.1:7070") == ("10.0.1.1:7070", "10.0.2.1:7070")
    assert split_addresses("host:1") == ("host:1",)
    assert host_of("[fd00::1]:7070") == "fd00::1"
    assert host_of("10.0.0.1:7070") == "10.0.0.1"


def test_the_page_for_operators_says_what_the_code_does() -> None:
    page = (Path(__file__).parents[2] / "docs" / "links.md").read_text()
    example = page.split("```toml\n")[1].split("```")[0]
    left, right = parse_topology(example, "links.md").nics
    assert (left.name, left.rate_bytes, right.device) == ("left", 10_000_000_000, "eth2")
    cells = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in page.splitlines() if line[:1] == "|"]
    rows = {row[0]: row[2:] for row in cells}
    for traffic in TrafficClass:
        share, priority, dscp = rows[traffic.name.lower()]
        assert (int(priority), int(dscp.split()[0])) == (MARKS[traffic].priority, MARKS[traffic].dscp)
        assert (0 if share == "–" else int(share.split()[0])) == round(100 * MINIMUM_SHARES[traffic])
