"""Exact KV of prompt prefixes, in memory once for all requests (ChunkAttention §3.1).

A forest: the prompts of each family (for example, of one tenant) have a tree over token ids. A node is a run
of blocks, which its children continue. Nodes begin at multiples of 64 tokens and only leaves end between
them, so each block belongs to one node. Prompts that part within a block each have that block.

A request joins with the longest beginning of its prompt that is there, and leaves by closing its reader. What
no request uses is evicted, least recently used first.

Layers with a running state (:mod:`blendrag.model.continuation`) have no KV that a prompt could begin with: a
tree with states keeps a copy of them at the end of what is inserted, and a prompt joins at the longest of its
beginnings with a state. There the least recently used state is evicted, and nodes that lead to none.

Only what a plain prefill from position 0, or decoding after it, computed may be inserted.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import NamedTuple, Protocol

import torch

from blendrag.model.continuation import State
from blendrag.serving.block_pool import BLOCK_TOKENS, BlockPool, Run, blocks_of
from blendrag.serving.shared_attention import SharedChunk
from blendrag.text.matches import common_prefix

Ids = tuple[int, ...]


class LayerKVRows(Protocol):
    """``rows[:, :, start:end]`` is KV of a layer ``[2, Hkv, n, D]``."""

    def __getitem__(self, at: tuple[slice, slice, slice], /) -> torch.Tensor: ...


#: Numbers of nodes in all trees: a running request may still hold a node from before the weights changed.
_numbers = count()


class KeptState(NamedTuple):
    """What layers without KV hold after the tokens up to a place in a node."""

    state: State
    used_at: int


@dataclass(eq=False)
class Node:
    """Tokens that follow those of ``parent``, and their KV. The root of a tree has none."""

    parent: Node | None
    ids: Ids
    start: int
    """Position of its first token."""
    run: Run | None
    number: int
    users: int = 0
    """Readers that end in it or below it."""
    used_at: int = 0
    children: dict[Ids, Node] = field(default_factory=dict)
    """By the ids of their first block."""
    states: dict[int, KeptState] = field(default_factory=dict)
    """By the number of tokens that they continue."""

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    @property
    def key(self) -> Ids:
        return self.ids[:BLOCK_TOKENS]

    @cached_property
    def chunk(self) -> SharedChunk:
        """Its KV as a chunk at the same position of every prompt: views of the pool."""
        assert self.run is not None
        layers = range(len(self.run.slab.layers))
        return SharedChunk([self.run.view(i, 0, len(self.ids)) for i in layers], self.start)

    def become(self, ids: Ids, start: int, run: Run | None) -> None:
        self.ids, self.start, self.run = ids, start, run
        self.__dict__.pop("chunk", None)

    def path(self) -> Iterator[Node]:
        """This node and those above it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def below(self) -> Iterator[Node]:
        """All nodes below this one, each after its parent."""
        nodes = [self]
        for node in nodes:
            nodes += node.children.values()
        yield from nodes[1:]


class PrefixReader:
    """The KV of the first ``tokens`` of a prompt; stays in the tree until it is closed."""

    tier = "memory"

    def __init__(self, tree: PrefixTree, node: Node, tokens: int) -> None:
        kept = node.states.get(tokens)
        self.state = None if kept is None else kept.state
        """What layers without KV hold after these tokens, in a tree with states."""
        self.key = f"{node.number:064x}"
        self.tokens = tokens
        self._tree = tree
        self._node: Node | None = node

    def parts(self) -> list[tuple[str, SharedChunk]]:
        """The nodes that hold it, in order, by names that change when a node does. The last may hold more."""
        assert self._node is not None, "the reader is closed"
        path = [node for node in self._node.path() if node.start < self.tokens]
        return [(f"{n.number}:{n.start}-{n.end}", n.chunk) for n in reversed(path)]

    def copy_layer(self, layer: int, out: torch.Tensor) -> None:
        """Copy K and V of the first tokens to ``out`` ``[2, Hkv, n, D]``."""
        tokens = min(self.tokens, out.shape[2])
        for chunk in (chunk for _, chunk in self.parts() if chunk.start < tokens):
            end = min(tokens, chunk.start + chunk.tokens)
            out[:, :, chunk.start : end] = chunk.layers[layer][:, :, : end - chunk.start]

    read_layer = copy_layer

    def is_cached(self) -> bool:
        return True

    def close(self) -> None:
        """Leave the tree. Idempotent."""
        node, self._node = self._node, None
        if node is not None:
            self._tree.leave(node)


class PrefixTree:
    """Exact prefixes of one model's prompts. Used on one thread."""

    def __init__(self, pool: BlockPool, has_states: bool = False) -> None:
        self.pool = pool
        self.has_states = has_states
        self.roots: dict[Hashable, Node] = {}
        self._clock = count(1)

    @property
    def size_bytes(self) -> int:
        return self.pool.size_bytes + self.pool.other_bytes

    def match(self, family: Hashable, ids: Ids) -> int:
        """With how many tokens of ``ids`` a request would join."""
        return self._joinable(self._root(family), ids)[1]

    def known(self, family: Hashable, ids: Ids) -> int:
        """How many tokens at the beginning of ``ids`` are there, whether or not a state ends them."""
        return self._found(self._root(family), ids)[1]

    def join(self, family: Hashable, ids: Ids) -> PrefixReader | None:
        """The KV of the longest beginning of ``ids`` that is there; ``None`` if it has no token."""
        node, tokens = self._joinable(self._root(family), ids)
        if not tokens:
            return None
        self._use(node, tokens)
        self._hold(node)
        return PrefixReader(self, node, tokens)

    def leave(self, node: Node) -> None:
        for each in node.path():
            each.users -= 1

    def insert(
        self, family: Hashable, ids: Ids, layers: Sequence[LayerKVRows], state: State | None = None
    ) -> int:
        """Keep the KV of ``ids``, ``[2, Hkv, N, D]`` per layer, and the ``state`` after them.

        Returns how many of the tokens are there now: fewer if there is no room, because what requests use is
        not evicted."""
        root = self._root(family)
        node, at = self._found(root, ids)
        if at < len(ids):
            node, at = self._fork(node, at)
            at = self._append(node, ids, at, layers)
        while at < len(ids) and (child := self._grown(node, ids, at, layers)) is not None:
            node, at = child, child.end
        if state is not None and at == len(ids):
            self._keep_state(node, at, state)
        self._use(node, at)
        if root.children:
            self.roots[family] = root
        if self.has_states:
            self._drop_if_useless(family, node)
        return self._joinable(root, ids)[1]

    def shrink(self, size_bytes: int) -> None:
        """Drop what no request uses until at most ``size_bytes`` are kept."""
        while self.size_bytes > size_bytes and self._evict_one():
            pass

    def nodes(self) -> Iterator[tuple[Hashable, Node]]:
        """All nodes, and the families of their prompts."""
        for family, root in self.roots.items():
            yield from ((family, node) for node in root.below())

    # -- finding --------------------------------------------------------------------------------------

    def _root(self, family: Hashable) -> Node:
        """Without any node below it if no prompt of ``family`` is there."""
        return self.roots.get(family) or Node(None, (), 0, None, -1)

    def _found(self, root: Node, ids: Ids) -> tuple[Node, int]:
        """The node in which the longest match of ``ids`` ends, and its length."""
        node, at = root, 0
        while True:
            block = ids[at : at + BLOCK_TOKENS]
            child, shared = node.children.get(block), len(block)
            if child is None:
                for other in node.children.values():
                    if (n := common_prefix(other.key, block)) and (child is None or n > shared):
                        child, shared = other, n
            if child is None or not block:
                return node, at
            if shared == len(child.key):
                shared = common_prefix(child.ids, ids[at:])
            node, at = child, at + shared
            if shared < len(child.ids):
                return node, at

    def _joinable(self, root: Node, ids: Ids) -> tuple[Node, int]:
        """The node in which the longest beginning ends that a request can join with, and its length."""
        if not self.has_states:
            return self._found(root, ids)
        best, node, at, goes_on = (root, 0), root, 0, True
        while goes_on:
            block, goes_on, above = ids[at : at + BLOCK_TOKENS], False, node
            for child in above.children.values():  # several may begin with the same part of a block
                shared = common_prefix(child.key, block)
                if shared == len(child.key):
                    shared = common_prefix(child.ids, ids[at : at + len(child.ids)])
                end = max((n for n in child.states if n <= child.start + shared), default=0)
                best = max(best, (child, end), key=lambda found: found[1])
                if shared == len(child.ids):
                    node, goes_on = child, True
            at = node.end
        return best

    def _hold(self, node: Node) -> None:
        for each in node.path():
            each.users += 1

    def _use(self, node: Node, tokens: int) -> None:
        now = next(self._clock)
        for each in node.path():
            each.used_at = now
        if tokens in node.states:
            node.states[tokens] = node.states[tokens]._replace(used_at=now)

    # -- changing -------------------------------------------------------------------------------------

    def _new_node(self, parent: Node, ids: Ids, start: int, run: Run) -> Node:
        node = Node(parent, ids, start, run, next(_numbers))
        parent.children[node.key] = node
        return node

    def _fork(self, node: Node, at: int) -> tuple[Node, int]:
        """A node whose children can begin at ``at`` or less than a block before, and where they begin."""
        if at == node.end:
            return node, at
        assert node.parent is not None
        assert node.run is not None
        blocks = (at - node.start) // BLOCK_TOKENS
        if not blocks:
            return node.parent, node.start
        tokens = blocks * BLOCK_TOKENS
        first, rest = node.run.split(blocks)
        head = self._new_node(node.parent, node.ids[:tokens], node.start, first)
        head.users, head.used_at = node.users, node.used_at
        head.states = {at: kept for at, kept in node.states.items() if at <= head.end}
        node.states = {at: kept for at, kept in node.states.items() if at > head.end}
        node.become(node.ids[tokens:], node.start + tokens, rest)
        node.parent, head.children[node.key] = head, node
        return head, head.end

    def _append(self, node: Node, ids: Ids, at: int, layers: Sequence[LayerKVRows]) -> int:
        """Fill the last block of a leaf, where ``ids`` go on at ``at``; returns how far."""
        if node.run is None or node.parent is None or not len(node.ids) % BLOCK_TOKENS:
            return at
        end = min(len(ids), node.start + node.run.blocks * BLOCK_TOKENS)
        self._write(node.run, at - node.start, layers, at, end)
        del node.parent.children[node.key]
        node.become(node.ids + ids[at:end], node.start, node.run)
        node.parent.children[node.key] = node
        return end

    def _grown(self, parent: Node, ids: Ids, at: int, layers: Sequence[LayerKVRows]) -> Node | None:
        """A new child for as many of ``ids`` from ``at`` on as a run has room for."""
        blocks = blocks_of(len(ids) - at)
        self._hold(parent)
        while self.pool.free < blocks and self._evict_one():
            pass
        self.leave(parent)
        run = self.pool.take(blocks)
        if run is None:
            return None
        end = min(len(ids), at + run.blocks * BLOCK_TOKENS)
        self._write(run, 0, layers, at, end)
        return self._new_node(parent, ids[at:end], at, run)

    def _write(
        self, run: Run, to: int, layers: Sequence[LayerKVRows], start: int, end: int
    ) -> None:
        for i, layer in enumerate(layers):
            run.view(i, to, to + end - start).copy_(layer[:, :, start:end])

    def _keep_state(self, node: Node, at: int, state: State) -> None:
        """Keep ``state`` after the first ``at`` tokens, which end in ``node``, if there is room for it."""
        self._forget_state(node, at)
        most_bytes = self.pool.limit_bytes - state.size_bytes
        self._hold(node)
        self.shrink(most_bytes)
        self.leave(node)
        if self.size_bytes <= most_bytes:
            self.pool.other_bytes += state.size_bytes
            node.states[at] = KeptState(state, next(self._clock))

    def _forget_state(self, node: Node, at: int) -> None:
        if (kept := node.states.pop(at, None)) is not None:
            self.pool.other_bytes -= kept.state.size_bytes

    def _evict_one(self) -> bool:
        """Drop the leaf, or state, that was unused for longest; whether there was one."""
        unused = [(family, node) for family, node in self.nodes() if not node.users]
        candidates: list[tuple[int, int | None, Hashable, Node]]
        if self.has_states:
            candidates = [
                (kept.used_at, at, family, node)
                for family, node in unused
                for at, kept in node.states.items()
            ]
        else:
            candidates = [(n.used_at, None, family, n) for family, n in unused if not n.children]
        if not candidates:
            return False
        _, at, family, node = min(candidates, key=lambda each: each[0])
        if at is None:
            self._drop(family, node)
        else:
            self._forget_state(node, at)
            self._drop_if_useless(family, node)
        return True

    def _drop_if_useless(self, family: Hashable, node: Node) -> None:
        """Drop ``node``, and those above it, if no state is at its end or behind it."""
        while node.parent is not None and not (node.states or node.children or node.users):
            above = node.parent
            self._drop(family, node)
            node = above

    def _drop(self, family: Hashable, leaf: Node) -> None:
        assert leaf.parent is not None
        assert leaf.run is not None
        del leaf.parent.children[leaf.key]
        self.pool.give(leaf.run)
        if not self._root(family).children:
            self.roots.pop(family, None)
