"""Admissibility: owns what a decision to verify may have seen, and which verification rule stays exact under it.

How lengths are chosen is `schedule`'s; that the classes here are right is shown by `deepspark.audit`, which enumerates.

Let F_j be everything known before draft j is drawn: earlier steps, the prompt, drafts 1..j-1, hence confidences 1..j.
Chain and block emit the target's law for every p and q if "draft j is verified" is F_j-measurable for all j, and for
generic p and q only then (DSpark specification, section 3.3).
"""

from enum import IntEnum
from typing import Protocol

from deepspark.errors import ConfigError
from deepspark.verify import Rule

__all__ = ["Cutting", "Sees", "check_admissible", "tolerates"]


class Sees(IntEnum):
    """The latest thing that the decision to verify draft j may depend on; a larger class may see more."""

    PAST = 0
    """F_j: nothing of draft j itself.  Fixed lengths, old confidences, c_1..c_j, Algorithm 1."""
    DRAFT = 1
    """F_{j+1}: draft j too, for example its own probability, a grammar, or c_{j+1}."""
    BLOCK = 2
    """Any draft of the block, for example the best length over all current confidences."""


class Cutting(Protocol):
    """Anything that decides lengths: a policy, or an engine's own cut."""

    @property
    def sees(self) -> Sees:
        """The class of the decision."""


def tolerates(rule: Rule, *, one_hot: bool = False) -> Sees:
    """Return the largest class under which `rule` emits exactly the target's law.

    one_hot: every draft was certain (greedy or retrieval drafts), so a draft is a function of the past and any cut is
    admissible.  Greedy and match emit plain decoding's own tokens, whatever was cut.
    """
    if one_hot or rule in ("greedy", "match"):
        return Sees.BLOCK
    return Sees.DRAFT if rule == "coupled" else Sees.PAST


def check_admissible(cutting: Cutting, rule: Rule, *, one_hot: bool = False) -> None:
    """Raise ConfigError where `cutting` may see more than `rule` tolerates: such an engine would change the text's
    law.
    """
    allowed = tolerates(rule, one_hot=one_hot)
    if cutting.sees <= allowed:
        return
    remedy = "use rule 'coupled'" if cutting.sees == Sees.DRAFT else "use rule 'match', or decide from old confidences"
    raise ConfigError(
        f"{type(cutting).__name__} decides with sight of {cutting.sees.name} (see deepspark.admissibility.Sees), but "
        f"rule {rule!r} keeps the target's law only up to {allowed.name}; {remedy}"
    )
