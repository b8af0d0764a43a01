"""The books of a pool balance, published blocks are found until they are needed, and the check notices faults."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.engine.block_pool import BlockPool, Cached


@given(size=st.integers(1, 12), data=st.data())
def test_any_order_of_calls_keeps_the_books(size: int, data: st.DataObject) -> None:
    """Against a plain model: who holds what, and which published blocks must still be there."""
    pool = BlockPool("blocks", size)
    holds: list[int] = []
    found: list[Cached] = []
    idle: list[Cached] = []
    for _ in range(data.draw(st.integers(0, 40))):
        action = data.draw(st.sampled_from(["take", "give", "publish", "share", "retire"]))
        if action == "take":
            count = data.draw(st.integers(0, pool.free))
            lost = max(count - (pool.free - pool.idle), 0)
            holds += pool.take(count)
            assert [cached.block for cached in idle[:lost]] == [-1] * lost, "the longest idle go first"
            found = [cached for cached in found if cached not in idle[:lost]]
            idle = idle[lost:]
        elif action == "give" and holds:
            block = holds.pop(data.draw(st.integers(0, len(holds) - 1)))
            pool.give([block])
            if block not in holds:
                idle += [cached for cached in found if cached.block == block]
        elif action == "publish" and (private := sorted(set(holds) - {cached.block for cached in found})):
            found.append(pool.publish(data.draw(st.sampled_from(private))))
        elif action in ("share", "retire") and found:
            cached = found[data.draw(st.integers(0, len(found) - 1))]
            idle = [other for other in idle if other is not cached]
            if action == "share":
                holds.append(pool.share(cached))
            else:
                pool.retire(cached)
                found.remove(cached)
        pool.check(holds)
        assert all(found)
        assert pool.idle == len(idle)
        assert pool.free == size - len(set(holds))


def _pool() -> tuple[BlockPool, int, int]:
    pool = BlockPool("window blocks", 4)
    (first,), (second,) = pool.take(1), pool.take(1)
    return pool, first, second


@pytest.mark.parametrize(
    ("held", "text"),
    [
        (lambda a, b: [a], "window blocks: blocks neither free nor held: [1]"),
        (lambda a, b: [a, a, b], "holders are counted wrongly (counted, found): {0: (1, 2)}"),
        (lambda a, b: [a, b, 3], "blocks held and free, free more than once, or unknown: {3: 1}"),
        (lambda a, b: [a, b, 9], "unknown: {9: 1}"),
    ],
)
def test_the_check_names_the_culprits(held: object, text: str) -> None:
    pool, first, second = _pool()
    with pytest.raises(AssertionError, match=re.escape(text)):
        pool.check(held(first, second))  # type: ignore[operator]


def test_what_cannot_be_done_is_refused() -> None:
    pool, first, second = _pool()
    cached = pool.publish(first)
    with pytest.raises(AssertionError, match="published already"):
        pool.publish(first)
    with pytest.raises(AssertionError, match="5 blocks taken"):
        pool.take(5)
    pool.give([first])
    pool.take(3)
    assert not cached
    with pytest.raises(AssertionError, match="another use"):
        pool.share(cached)
    pool.clear()
    assert pool.free == 4
    assert second in pool.take(4)
