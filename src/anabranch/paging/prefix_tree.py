"""Names of blocks as a forest, and the order in which they may be evicted.

**Covers** key → slot, parent links (also to blocks that are not resident), children-first LRU order.
**Does not cover** reference counts (`paging.pool`): here a slot is held or not.

The order needs no clock and no heap. A block is *pinned* while it is held or has a pinned child, and joins the end of
the idle queue when its last pin goes. So a parent always joins after all its children, and the queue's front is
always a leaf: first in, first out *is* children-first, least recently used (use ends when the last hold in the
block's subtree ends). Holding a block takes it and its ancestors out of the queue.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from anabranch.core.errors import InvalidInput, InvariantBroken

ABSENT = -1


class Node:
    """One name. `slot` is ABSENT for a ghost: a block that is not resident but has resident children."""

    __slots__ = ("children", "held", "key", "parent", "parent_key", "pins", "slot")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.slot = ABSENT
        self.parent_key = b""
        self.parent: Node | None = None
        self.children = 0
        self.held = False
        self.pins = 0


class PrefixTree:
    """O(1) amortised per operation when prefixes are held from their first block on; holding a block whose ancestors
    nobody holds costs one step for each of those ancestors."""

    def __init__(self) -> None:
        self._nodes: dict[bytes, Node] = {}
        self._idle: OrderedDict[bytes, Node] = OrderedDict()
        self._resident = 0
        self.steps = 0
        """Link steps taken so far: the cost of all operations, counted for tests and benchmarks."""

    def __len__(self) -> int:
        """Resident blocks."""
        return self._resident

    @property
    def evictable(self) -> int:
        """Blocks that `pop_idle` would yield if called until empty."""
        return len(self._idle)

    def find(self, key: bytes) -> int | None:
        node = self._nodes.get(key)
        return None if node is None or node.slot == ABSENT else node.slot

    def insert(self, key: bytes, parent_key: bytes, slot: int) -> None:
        """Add a resident block, held. `parent_key` b"" starts a chain; it need not be resident.

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
            if node.pins:
                self._pin(node.parent)
        self.hold(key)

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

    def pop_idle(self) -> tuple[int, bytes, bytes]:
        """Remove the least recently used block that neither is held nor has resident children: slot, key, parent key.
        Raises InvariantBroken if `evictable` is 0."""
        if not self._idle:
            raise InvariantBroken("evicted from a tree in which every block is held")
        node = self._idle[next(iter(self._idle))]
        if node.children:
            raise InvariantBroken(f"block {node.key.hex()} precedes its children in eviction order")
        slot = node.slot
        self._detach(node)
        return slot, node.key, node.parent_key

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
            self._idle.pop(node.key, None)
            node = node.parent

    def _unpin(self, node: Node | None) -> None:
        while node is not None:
            self.steps += 1
            node.pins -= 1
            if node.pins > 0:
                return
            if node.slot != ABSENT:
                self._idle[node.key] = node
            node = node.parent

    def _detach(self, node: Node) -> None:
        """Make a node that is not held a ghost, or drop it; a ghost without children is dropped too."""
        self.steps += 1
        self._idle.pop(node.key, None)
        self._resident -= 1
        parent, node.parent, node.slot = node.parent, None, ABSENT
        if not node.children:
            del self._nodes[node.key]
        if parent is None:
            return
        if node.pins:
            self._unpin(parent)
        parent.children -= 1
        if parent.slot == ABSENT and not parent.children:
            del self._nodes[parent.key]

    def check(self) -> None:
        """Raise InvariantBroken if links, pins or the idle queue do not add up. O(blocks)."""
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
                and (node.key in self._idle) == (resident and node.pins == 0)
                and (resident or (node.children > 0 and node.parent is None and not node.held))
                and (not resident or (node.parent is None) == (node.parent_key == b""))
            )
            if not sound:
                raise InvariantBroken(f"block {node.key.hex()}: children {node.children}, pins {node.pins} are wrong")
        if self._resident != sum(1 for _ in self.residents()) or len(self._idle) > self._resident:
            raise InvariantBroken("the number of resident blocks is wrong")
        seen: set[bytes] = set()
        for node in self._idle.values():
            if node.parent is not None and node.parent_key in seen:
                raise InvariantBroken(f"block {node.key.hex()} follows its parent in eviction order")
            seen.add(node.key)
