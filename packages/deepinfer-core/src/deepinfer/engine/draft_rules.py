"""Penalties, bias, banned tokens and masks behind draft tokens: each row is ruled by what would stand before it.

What a rule says is `token_rules.py`'s, what a grammar allows `constraint.py`'s; other rows are the `Sampler`'s.
"""

from collections.abc import Sequence as Items

import numpy as np
from torch import Tensor

from deepinfer.engine.sampler import Sampler
from deepinfer.engine.sequence import Integers, Sequence, SequenceTable
from deepinfer.engine.token_rules import Entries, lay


class DraftRules:
    """Rules the rows of drafts of one table of sequences.

    reads_laws: whether drafts are judged by laws.  Then a forbidden draft must be judged, so that what it was drawn
    from is made up for; else it is known to be wrong, and left out.
    """

    def __init__(self, sampler: Sampler, table: SequenceTable, *, reads_laws: bool) -> None:
        self._sampler = sampler
        self._table = table
        self._judged_forbidden = 1 if reads_laws else 0

    def apply(self, logits: Tensor, rows: Integers, counts: Integers) -> Tensor:
        """Return ruled logits [N, V] of the sequences in table `rows` [R], counts + 1 rows of each, flat."""
        if not self._table.host_bound[rows].any():
            return logits
        starts = np.cumsum(counts + 1) - counts - 1
        along = [
            (start, self._table[row], self._table.draft_tokens[row, :count].tolist())
            for row, start, count in zip(rows.tolist(), starts.tolist(), counts.tolist(), strict=True)
        ]
        matchings = [
            (start, one.matching, _open_part(one, drafts)) for start, one, drafts in along if one.matching is not None
        ]
        grammars = matchings[0][1].grammars if matchings else None
        words = None if grammars is None else grammars.fill_along(matchings, logits.shape[0])
        entries: list[tuple[int, Entries]] = []
        for start, one, drafts in along:
            if one.rules is not None:
                mine = range(start, start + len(drafts) + 1)
                endings = [
                    one.matching is not None and words is not None and one.matching.grammars.is_end(words[place])
                    for place in mine
                ]
                entries += zip(mine, one.rules.entries_along(one.generated, drafts, endings), strict=True)
        return self._sampler.apply(logits, lay(entries) if entries else None, words)

    def cut(self, rows: Integers, gained: Items[list[int]], drafts: Integers, counts: Integers) -> Integers:
        """Return how many [R] of `drafts` [R, W] are worth a row: of `counts`, none behind one that cannot come.

        `gained` are the tokens of this step, which the sequences in table `rows` do not know yet.  That a draft is left
        out follows from those before it, so that the text keeps its law (DSpark, admissible cuts).
        """
        counts = counts.copy()
        for i in np.flatnonzero(self._table.host_bound[rows] & (counts > 0)).tolist():
            one = self._table[int(rows[i])]
            if one.matching is None:
                continue
            proposed = drafts[i, : counts[i]].tolist()
            text = _open_part(one, proposed)
            allowed = one.matching.count_allowed([*gained[i], *text]) - len(gained[i])
            # A token that ends the output is allowed or not, which its own row tells; behind it nothing comes.
            worth = allowed + (1 if allowed == len(text) else self._judged_forbidden)
            counts[i] = min(int(counts[i]), max(worth, 0))
        return counts


def _open_part(sequence: Sequence, drafts: list[int]) -> list[int]:
    """The drafts before the first one that ends the output."""
    ends = (place for place, token in enumerate(drafts) if token in sequence.stop_ids)
    return drafts[: next(ends, len(drafts))]
