"""The losslessness harness: exact enumeration in small worlds, and a total-variation test for any engine."""

from deepspark.audit.blocks import BlockAudit, CutView
from deepspark.audit.loops import LoopAudit, SchedulerPlanner
from deepspark.audit.sampling import AuditedEngine, EngineVerdict, Plan, audit_against_law, audit_engines, first_tokens
from deepspark.audit.table import Line, admissibility_table, noise_key_table
from deepspark.audit.world import World, target_law

__all__ = [
    "AuditedEngine",
    "BlockAudit",
    "CutView",
    "EngineVerdict",
    "Line",
    "LoopAudit",
    "Plan",
    "SchedulerPlanner",
    "World",
    "admissibility_table",
    "audit_against_law",
    "audit_engines",
    "first_tokens",
    "noise_key_table",
    "target_law",
]
