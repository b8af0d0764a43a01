"""A sequence that gains several tokens at once is the sequence that gains them one by one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.engine.detokenizer import Detokenizer, TextStream
from deepinfer.engine.request import Request, SamplingParams
from deepinfer.engine.sequence import Gained, Integers, Sequence, SequenceTable
from deepinfer.model.tiny_tokenizer import make_tokenizer

TEXTS = Detokenizer(make_tokenizer())


def sequence(stops: tuple[str, ...], stop_ids: frozenset[int], limit: int) -> Sequence:
    return Sequence(
        id=0,
        request=Request([3], SamplingParams()),
        seed=0,
        tokens=np.array([3]),
        decoder_start=0,
        limit=limit,
        stop_ids=stop_ids,
        text=TextStream(TEXTS, stops),
        prompt_rows=None,
    )


def joined(parts: list[Gained]) -> Gained:
    tokens = tuple(token for part in parts for token in part.tokens)
    return Gained(tokens, "".join(part.text for part in parts), parts[-1].reason, parts[-1].stop)


@given(
    tokens=st.lists(st.integers(30, 60), min_size=1, max_size=30),
    stops=st.lists(st.text("=>?@ABC", min_size=1, max_size=3), max_size=2),
    stop_ids=st.frozensets(st.integers(30, 60), max_size=1),
    limit=st.integers(1, 35),
    data=st.data(),
)
def test_tokens_together_are_tokens_one_by_one(
    tokens: list[int], stops: list[str], stop_ids: frozenset[int], limit: int, data: st.DataObject
) -> None:
    single = sequence(tuple(stops), stop_ids, limit)
    expected = []
    for token in tokens:
        expected.append(single.take([token]))
        if expected[-1].reason is not None:
            break
    grouped, found, left = sequence(tuple(stops), stop_ids, limit), [], tokens
    while left:
        count = data.draw(st.integers(1, len(left)))
        found.append(grouped.take(left[:count]))
        left = left[count:]
        if found[-1].reason is not None:
            break
    assert joined(found) == joined(expected)
    assert grouped.generated == single.generated == list(joined(expected).tokens)


@given(
    prompts=st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=6), min_size=1, max_size=4),
    steps=st.lists(st.lists(st.integers(1, 7), min_size=4, max_size=4), max_size=5),
)
def test_the_table_knows_the_last_tokens_however_they_came(prompts: list[list[int]], steps: list[list[int]]) -> None:
    table = SequenceTable(4, history=3, blocks=1, windows=1)
    rows: Integers = np.array([table.seat(_of(prompt)) for prompt in prompts])
    texts = [list(prompt) for prompt in prompts]
    token = 100
    for step in steps:
        counts = np.array(step[: len(rows)])
        gained = [list(range(token + 10 * i, token + 10 * i + count)) for i, count in enumerate(counts.tolist())]
        token += 50
        table.advance(rows, np.zeros_like(rows), rows)
        table.append(rows, np.array([one for part in gained for one in part]), counts)
        for text, part in zip(texts, gained, strict=True):
            text += part
    for row, text in zip(rows.tolist(), texts, strict=True):
        assert table.lengths[row] == len(text)
        assert table.recent[row].tolist() == [*text[::-1], *[-1] * 4][:4]


def _of(prompt: list[int]) -> Sequence:
    made = sequence((), frozenset(), 100)
    made.tokens = np.array(prompt)
    return made
