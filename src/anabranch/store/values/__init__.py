"""Values: bytes under a key, of any length, kept in DRAM, on SSD and in a backing store, shared by all clients.

    a client  →  names its keys (`scope`), asks its home node, then the directory; moves slices over lanes
    a node    →  `shelf` decides (what is where, who may have it, what goes), `live/` moves the bytes

A block of K/V of some layout is a value of that layout's size: equal sizes leave no holes in an arena of extents.
**See also** `store.node`: the slots that are an engine's pages.
"""
