"""Names of blocks as a forest, and which of them may be evicted.

**Covers** key → slot, parent links (also to blocks that are not resident), children before parents.
**Does not cover** reference counts (`paging.pool`): here a slot is held or not; which leaf goes first
(`policy.eviction`).

A block is *pinned* while it is held or has a pinned child; its use ends when its last pin goes. A *leaf* is a resident
block that is not pinned and has no resident child. The policy hears of leaves only and names one of them: it cannot
evict a block that is in use or that others are built on. As long as any block is not pinned there is a leaf.
"""

from __future__ import annotations

from collections.abc import Iterator

from anabranch.core.errors import InvalidInput, InvariantBroken
from anabranch.policy.eviction.contract import EvictionPolicy

ABSENT = -1


class Node:
    """One name. `slot` is ABSENT for a ghost: a block that is not resident but has resident children.

    A `policy.eviction.contract.Block`: `tag` and `mark` belong to the policy."""

    __slots__ = (
        "children",
        "depth",
        "held",
        "idle",
        "key",
        "mark",
        "offered",
        "parent",
        "parent_key",
        "pins",
        "slot",
        "tag",
        "used",
    )

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.slot = ABSENT
        self.parent_key = b""
        self.parent: Node | None = None
        self.children = 0
        self.held = False
        self.pins = 0
        self.idle = False
        self.offered = False
        self.depth = 0
        self.used = 0
        self.tag = 0
        self.mark = 0


class PrefixTree:
    """O(1) amortised per operation when prefixes are held from their first block on; holding a block whose ancestors
    nobody holds costs one step for each of those ancestors."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._nodes: dict[bytes, Node] = {}
        self._resident = 0
        self._idle = 0
        self._uses = 0
        self._now = 0
        self.steps = 0
        """Link steps taken so far: the cost of all operations, counted for tests and benchmarks."""

    def __len__(self) -> int:
        """Resident blocks."""
        return self._resident

    @property
    def evictable(self) -> int:
        """Blocks that `pop_victim` would yield if called until empty."""
        return self._idle

    def find(self, key: bytes) -> int | None:
        node = self._nodes.get(key)
        return None if node is None or node.slot == ABSENT else node.slot

    def insert(self, key: bytes, parent_key: bytes, slot: int, *, held: bool = True) -> None:
        """Add a resident block, held or unused. `parent_key` b"" starts a chain; it need not be resident.

        Raises InvalidInput if the block would be its own ancestor, InvariantBroken if the key is resident."""
        node = self._nodes.get(key)
        if node is not None and node.slot != ABSENT:
            raise InvariantBroken(f"block {key.hex()} is resident twice")
        if not key or key == parent_key or (node is not None and self._descends(parent_key, key)):
            raise InvalidInput(f"block {key.hex()!r} cannot have parent {parent_key.hex()!r}")
        if node is None:
            node = self._nodes[key] = Node(key)
        node.slot = slot
        node.parent_key = parent_key
        self._resident += 1
        if parent_key:
            node.parent = self._nodes.get(parent_key) or self._ghost(parent_key)
            node.parent.children += 1
            node.depth = node.parent.depth + 1
            if node.pins:
                self._pin(node.parent)
        self._now += 1
        self._policy.inserted(node, node.parent if node.parent and node.parent.slot != ABSENT else None, self._now)
        if held:
            self.hold(key)
        else:
            self._insert_idle(node)

    def hold(self, key: bytes) -> None:
        node = self._resident_node(key)
        if not node.held:
            node.held = True
            self._pin(node)

    def release(self, key: bytes) -> None:
        node = self._resident_node(key)
        if node.held:
            node.held = False
            self._unpin(node)

    def reuse(self, key: bytes) -> None:
        """Tell the policy that the block was asked for again."""
        self._policy.reused(self._resident_node(key), self._now)

    def favour(self, key: bytes, strength: int) -> None:
        """Tell the policy of a soft pin."""
        self._policy.favoured(self._resident_node(key), strength, self._now)

    def pop_victim(self) -> tuple[int, bytes, bytes]:
        """Remove the leaf that the policy names: slot, key, parent key. Raises InvariantBroken if `evictable` is 0, or
        if the policy names another block."""
        if not self._idle:
            raise InvariantBroken("evicted from a tree in which every block is held")
        victim = self._policy.victim(self._now)
        node = self._nodes.get(victim.key)
        if node is None or not node.offered:
            raise InvariantBroken(f"the policy named block {victim.key.hex()}, which is no leaf")
        slot = node.slot
        self._detach(node, evicted=True)
        return slot, node.key, node.parent_key

    def evict(self, key: bytes) -> bool:
        """Evict this very block, whatever the policy would choose (a tenant's quota is used up); False, and nothing
        changed, if it is no leaf."""
        node = self._nodes.get(key)
        if node is None or not node.offered:
            return False
        self._detach(node, evicted=True)
        return True

    def remove(self, key: bytes) -> int | None:
        """Forget a name, held or not, whatever its children; they stay, as orphans. Returns its slot."""
        node = self._nodes.get(key)
        if node is None or node.slot == ABSENT:
            return None
        slot = node.slot
        if node.held:
            node.held = False
            self._unpin(node)
        self._detach(node)
        return slot

    def parent_of(self, key: bytes) -> bytes:
        return self._resident_node(key).parent_key

    def residents(self) -> Iterator[Node]:
        return (node for node in self._nodes.values() if node.slot != ABSENT)

    def _resident_node(self, key: bytes) -> Node:
        node = self._nodes.get(key)
        if node is None or node.slot == ABSENT:
            raise InvariantBroken(f"block {key.hex()} is not resident")
        return node

    def _insert_idle(self, node: Node) -> None:
        """Nobody holds the new block; its parent is no leaf any more."""
        parent = node.parent
        if parent is not None and parent.offered:
            parent.offered = False
            self._policy.withdraw(parent)
        if not node.pins:
            node.idle = True
            self._idle += 1
            self._uses += 1
            node.used = self._uses
            if not node.children:
                self._offer(node)

    def _ghost(self, key: bytes) -> Node:
        ghost = self._nodes[key] = Node(key)
        return ghost

    def _descends(self, key: bytes, ancestor: bytes) -> bool:
        """Only asked when a ghost becomes resident: nothing else can close a ring."""
        node = self._nodes.get(key)
        while node is not None:
            self.steps += 1
            if node.key == ancestor:
                return True
            node = node.parent
        return False

    def _pin(self, node: Node | None) -> None:
        while node is not None:
            self.steps += 1
            node.pins += 1
            if node.pins > 1:
                return
            if node.idle:
                node.idle = False
                self._idle -= 1
                if node.offered:
                    node.offered = False
                    self._policy.withdraw(node)
            node = node.parent

    def _unpin(self, node: Node | None) -> None:
        while node is not None:
            self.steps += 1
            node.pins -= 1
            if node.pins > 0:
                return
            if node.slot != ABSENT:
                node.idle = True
                self._idle += 1
                self._uses += 1
                node.used = self._uses
                if not node.children:
                    self._offer(node)
            node = node.parent

    def _offer(self, node: Node) -> None:
        node.offered = True
        self._policy.offer(node, self._now)

    def _detach(self, node: Node, *, evicted: bool = False) -> None:
        """Make a node that is not held a ghost, or drop it; a ghost without children is dropped too."""
        self.steps += 1
        if node.idle:
            node.idle = False
            self._idle -= 1
        if node.offered:
            node.offered = False
            self._policy.withdraw(node)
        self._policy.gone(node, evicted=evicted, now=self._now)
        self._resident -= 1
        parent, node.parent, node.slot = node.parent, None, ABSENT
        if not node.children:
            del self._nodes[node.key]
        if parent is None:
            return
        if node.pins:
            self._unpin(parent)
        parent.children -= 1
        if parent.children:
            return
        if parent.slot == ABSENT:
            del self._nodes[parent.key]
        elif parent.idle:
            self._offer(parent)

    def check(self) -> None:
        """Raise InvariantBroken if links, pins or leaves do not add up. O(blocks)."""
        children: dict[bytes, int] = {}
        pins = {node.key: int(node.held) for node in self._nodes.values()}
        for node in self._nodes.values():
            if node.parent is not None:
                if self._nodes.get(node.parent_key) is not node.parent:
                    raise InvariantBroken(f"block {node.key.hex()} has a lost parent")
                children[node.parent_key] = children.get(node.parent_key, 0) + 1
                pins[node.parent_key] += node.pins > 0
        for node in self._nodes.values():
            resident = node.slot != ABSENT
            sound = (
                node.children == children.get(node.key, 0)
                and node.pins == pins[node.key]
                and node.idle == (resident and node.pins == 0)
                and node.offered == (node.idle and node.children == 0)
                and (resident or (node.children > 0 and node.parent is None and not node.held))
                and (not resident or (node.parent is None) == (node.parent_key == b""))
            )
            if not sound:
                raise InvariantBroken(f"block {node.key.hex()}: children {node.children}, pins {node.pins} are wrong")
        idle = [node for node in self._nodes.values() if node.idle]
        if self._resident != sum(1 for _ in self.residents()) or self._idle != len(idle):
            raise InvariantBroken("the number of resident blocks is wrong")
        if idle and not any(node.offered for node in idle):
            raise InvariantBroken("blocks may be evicted, but none of them is a leaf")
