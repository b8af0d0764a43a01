"""The books of a pool balance, and the check notices when they do not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.engine.block_pool import BlockPool


@given(size=st.integers(1, 20), data=st.data())
def test_every_block_has_one_holder(size: int, data: st.DataObject) -> None:
    pool = BlockPool("blocks", size)
    held: list[list[int]] = []
    for _ in range(data.draw(st.integers(0, 30))):
        if held and data.draw(st.booleans()):
            pool.give(held.pop(data.draw(st.integers(0, len(held) - 1))))
        else:
            held.append(pool.take(data.draw(st.integers(0, pool.free))))
        pool.check(block for blocks in held for block in blocks)
        assert pool.free == size - sum(map(len, held))


def test_the_check_names_the_culprits() -> None:
    pool = BlockPool("window blocks", 4)
    first, second = pool.take(1), pool.take(1)
    with pytest.raises(
        AssertionError, match=rf"window blocks: blocks neither free nor held: \{second}".replace("]", "\\]")
    ):
        pool.check(first)
    with pytest.raises(AssertionError, match="more than once"):
        pool.check([*first, *first, *second])
    pool.give(first)
    pool.give(first)
    with pytest.raises(AssertionError, match="more than once"):
        pool.check(second)
    with pytest.raises(AssertionError, match="5 blocks taken"):
        BlockPool("blocks", 4).take(5)
