"""The prefix tree returns the longest known prefix with the right pages, whatever was split, extended, evicted or cut."""

from __future__ import annotations

import random
from array import array

import pytest
from paddock_runner.cache.pages import PageFault, PagePool
from paddock_runner.cache.prefix import Node, PrefixTree

B = 4


def ids(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


def run(first: int, n: int) -> bytes:
    return ids(*range(first, first + n))


def grown(pool: PagePool, tree: PrefixTree, tokens: bytes, salt: int = 0) -> tuple[Node, list[int]]:
    """Matches and extends as a request that computes all of `tokens` does; returns the locked node and its own pages."""
    n_pages = len(tokens) // 4 // B
    node, pages = tree.match(tokens, salt, n_pages)
    fresh = pool.take(n_pages - len(pages))
    node, known = tree.extend(node, tokens[len(pages) * 4 * B : n_pages * 4 * B], fresh)
    return node, fresh[:known]


@pytest.fixture
def pool() -> PagePool:
    return PagePool(200)


@pytest.fixture
def tree(pool: PagePool) -> PrefixTree:
    return PrefixTree(B, pool)


def check(pool: PagePool, tree: PrefixTree, *owned: list[int]) -> None:
    tree.check()
    pool.check([*(node.pages for node in tree.nodes()), *owned])


def test_a_known_prefix_is_found_in_whole_pages(pool: PagePool, tree: PrefixTree) -> None:
    node, _ = grown(pool, tree, run(0, 12))
    tree.unlock(node)
    for tokens, expected in [(run(0, 12), 3), (run(0, 11), 2), (run(0, 40), 3), (run(0, 3), 0), (run(1, 12), 0), (run(0, 6) + ids(9, 9), 1)]:
        n_pages = len(tokens) // 4 // B
        assert tree.peek(tokens, 0, n_pages) == expected
        node, pages = tree.match(tokens, 0, n_pages)
        assert pages == [1, 2, 3][:expected]
        tree.unlock(node)
        check(pool, tree)
    assert tree.peek(run(0, 12), 0, 2) == 2
    assert tree.n_pages == tree.n_evictable == 3


def test_prefixes_of_another_salt_are_not_seen(pool: PagePool, tree: PrefixTree) -> None:
    node, _ = grown(pool, tree, run(0, 8), salt=1)
    assert tree.peek(run(0, 8), 2, 2) == 0
    other, pages = tree.match(run(0, 8), 2, 2)
    assert pages == []
    tree.unlock(node), tree.unlock(other)
    check(pool, tree)


def test_two_that_computed_the_same_keep_one_copy_and_the_others_pages_stay_theirs(pool: PagePool, tree: PrefixTree) -> None:
    a, _ = tree.match(run(0, 8), 0, 2)
    b, _ = tree.match(run(0, 8), 0, 2)
    pages_a, pages_b = pool.take(2), pool.take(2)
    a, known_a = tree.extend(a, run(0, 8), pages_a)
    b, known_b = tree.extend(b, run(0, 8), pages_b)
    assert (known_a, known_b) == (0, 2) and a is b and a.locks == 2
    check(pool, tree, pages_b)
    tree.unlock(a), tree.unlock(b)
    assert tree.n_evictable == 2


def test_chunks_of_one_request_grow_one_node(pool: PagePool, tree: PrefixTree) -> None:
    node, _ = tree.match(run(0, 40), 0, 10)
    for chunk in range(5):
        node, known = tree.extend(node, run(chunk * 8, 8), pool.take(2))
        assert known == 0
    assert tree.n_nodes == 1 and len(node.pages) == 10
    tree.unlock(node)
    check(pool, tree)


def test_a_node_that_two_hold_is_not_extended_in_place(pool: PagePool, tree: PrefixTree) -> None:
    node, _ = grown(pool, tree, run(0, 8))
    tree.unlock(node)
    a, _ = tree.match(run(0, 8), 0, 2)
    b, _ = tree.match(run(0, 8), 0, 2)
    a, _ = tree.extend(a, run(50, 4), pool.take(1))
    b, _ = tree.extend(b, run(60, 4), pool.take(1))
    tree.unlock(a), tree.unlock(b)
    assert [tree.peek(run(0, 8) + tail, 0, 3) for tail in (run(50, 4), run(60, 4))] == [3, 3]
    check(pool, tree)


def test_locked_paths_survive_eviction_and_splits_keep_locks(pool: PagePool, tree: PrefixTree) -> None:
    long, _ = grown(pool, tree, run(0, 24))
    short, pages = tree.match(run(0, 12), 0, 3)
    assert pages == [1, 2, 3] and short.locks == 2 and long.locks == 1
    assert tree.evict(100) == 0
    tree.unlock(long)
    assert tree.n_evictable == 3 and tree.evict(100) == 3
    assert tree.peek(run(0, 24), 0, 6) == 3
    tree.unlock(short)
    assert tree.evict(100) == 3 and tree.n_nodes == 0 and pool.n_free == 199
    assert not list(tree.nodes())


def test_the_least_recently_used_leaf_goes_first_from_its_end(pool: PagePool, tree: PrefixTree) -> None:
    for first in (0, 100, 200):
        node, _ = grown(pool, tree, run(first, 16))
        tree.unlock(node)
    node, _ = tree.match(run(0, 16), 0, 4)
    tree.unlock(node)
    assert tree.evict(5) == 5
    assert [tree.peek(run(first, 16), 0, 4) for first in (0, 100, 200)] == [4, 0, 3]
    check(pool, tree)
    assert tree.evict(3) == 3
    assert [tree.peek(run(first, 16), 0, 4) for first in (0, 100, 200)] == [4, 0, 0]


def test_a_parent_becomes_evictable_when_its_last_child_went(pool: PagePool, tree: PrefixTree) -> None:
    for tail in (100, 200):
        node, _ = grown(pool, tree, run(0, 8) + run(tail, 8))
        tree.unlock(node)
    assert tree.n_nodes == 3 and tree.n_pages == 6
    assert tree.evict(6) == 6 and tree.n_pages == 0 and pool.n_free == 199


def test_cut_pages_are_never_found_again_and_freed_with_the_last_lock(pool: PagePool, tree: PrefixTree) -> None:
    bad, _ = grown(pool, tree, run(0, 16))
    sharer, _ = grown(pool, tree, run(0, 16) + run(50, 8))
    idle, _ = grown(pool, tree, run(0, 12) + run(90, 8))
    tree.unlock(idle)
    tree.cut(bad, 2)
    assert tree.peek(run(0, 40), 0, 10) == 2
    tree.check()
    node, known = tree.extend(sharer, run(58, 4), pages := pool.take(1))
    assert node is sharer and known == 1
    tree.cut(sharer, 2)
    tree.unlock(bad)
    tree.unlock(sharer)
    check(pool, tree, pages)
    assert tree.n_pages == 2 == tree.n_evictable
    again, _ = grown(pool, tree, run(0, 16))
    tree.unlock(again)
    assert tree.peek(run(0, 16), 0, 4) == 4
    assert tree.evict(10) == 4


def test_the_check_notices_a_wrong_count_a_wrong_key_and_a_wrong_edge(pool: PagePool, tree: PrefixTree) -> None:
    node, _ = grown(pool, tree, run(0, 8))
    tree.unlock(node)
    tree.check()
    tree.n_evictable += 1
    with pytest.raises(PageFault):
        tree.check()
    tree.n_evictable -= 1
    node.edge = node.edge[:-4]
    with pytest.raises(PageFault):
        tree.check()
    node.edge = run(5, 8)
    with pytest.raises(PageFault):
        tree.check()


@pytest.mark.parametrize("seed", range(8))
def test_random_use_keeps_every_page_accounted_and_every_match_longest_and_right(seed: int) -> None:
    """The model: what each page holds. Few token values and short pages make splits and duplicates common."""
    rng = random.Random(seed)
    pool = PagePool(60)
    tree = PrefixTree(2, pool)
    holds: dict[int, tuple[int, bytes]] = {}
    active: list[tuple[Node, bytes, int, int, list[int], int]] = []  # node, tokens, salt, settled, own pages, cached
    for _ in range(1500):
        act = rng.random()
        if act < 0.4 and len(active) < 6:
            salt = rng.randrange(2)
            tokens = ids(*(rng.randrange(2) for _ in range(2 * rng.randrange(1, 12))))
            n = len(tokens) // 8
            known = {(node.salt, b) for node in tree.nodes() for b in path(node)}
            longest = max((k for k in range(n + 1) if k == 0 or (salt, tokens[: k * 8]) in known), default=0)
            assert tree.peek(tokens, salt, n) == longest
            node, pages = tree.match(tokens, salt, n)
            assert len(pages) == longest
            for i, page in enumerate(pages):
                assert holds[page] == (salt, tokens[: (i + 1) * 8])
            active.append((node, tokens, salt, len(pages), [], len(pages)))
        elif act < 0.7 and active:
            i = rng.randrange(len(active))
            node, tokens, salt, settled, own, cached = active[i]
            n = rng.randrange(0, len(tokens) // 8 - settled + 1)
            if pool.n_free < n:
                tree.evict(n - pool.n_free)
            if pool.n_free < n:
                continue
            pages = pool.take(n)
            for k, page in enumerate(pages):
                holds[page] = (salt, tokens[: (settled + k + 1) * 8])
            node, known_pages = tree.extend(node, tokens[settled * 8 : (settled + n) * 8], pages)
            active[i] = (node, tokens, salt, settled + n, own + pages[:known_pages], cached)
        elif act < 0.9 and active:
            node, _, _, _, own, cached = active.pop(rng.randrange(len(active)))
            if rng.random() < 0.1:
                tree.cut(node, cached)
            tree.unlock(node)
            pool.give(own)
        else:
            tree.evict(rng.randrange(8))
        tree.check()
        dead = [n.pages for n in {id(n): n for a in active for n in up(a[0])}.values() if n.is_dead]
        pool.check([*(n.pages for n in tree.nodes()), *dead, *(a[4] for a in active)])
    for node, _, _, _, own, _ in active:
        tree.unlock(node)
        pool.give(own)
    tree.evict(1000)
    assert pool.n_free == 59 and tree.n_pages == tree.n_nodes == tree.n_evictable == 0
    pool.check([])


def up(node: Node | None) -> list[Node]:
    nodes = []
    while node is not None:
        nodes.append(node)
        node = node.parent
    return nodes


def path(node: Node) -> list[bytes]:
    """Every page-long prefix that ends in this node."""
    above = b"".join(n.edge for n in reversed(up(node.parent)))
    return [above + node.edge[: (i + 1) * 8] for i in range(len(node.pages))]
