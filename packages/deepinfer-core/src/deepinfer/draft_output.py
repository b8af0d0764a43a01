"""What `deepinfer generate --draft` shows of drafts: how many tokens each step gave, while it runs, and a summary.

Texts and completions are written by `completion_output.py`.
"""

import dataclasses
import sys
from collections.abc import Iterator

import click

from deepinfer.engine.draft_report import DraftReport, DraftStep
from deepinfer.engine.request import Increment

COLOURS = ("cyan", "green", "yellow", "magenta", "red")
"""Of the text of a step with 1, 2, 3, 4, and more accepted drafts."""


def with_drafts(increments: Iterator[Increment], *, paint: bool) -> Iterator[Increment]:
    """Pass increments on and show their drafts on stderr: a digit a step, the tokens it gave, and then a summary.

    With `paint`, and where stdout is a terminal, the text of a step is coloured by its accepted drafts instead.
    """
    paint = paint and sys.stdout.isatty()
    steps: list[DraftStep | None] = []
    for increment in increments:
        accepted = 0 if increment.draft_step is None else increment.draft_step.accepted
        if increment.token_ids:
            steps.append(increment.draft_step)
            if not paint:
                click.echo(min(len(increment.token_ids), 9), nl=False, err=True)
        if paint and accepted and increment.text:
            colour = COLOURS[min(accepted, len(COLOURS)) - 1]
            increment = dataclasses.replace(increment, text=click.style(increment.text, fg=colour))
        yield increment
    if steps and not paint:
        click.echo("", err=True)
    click.echo(f"deepinfer: {summary(DraftReport.of(steps))}", err=True)


def summary(report: DraftReport) -> str:
    """Say in one line what drafts brought."""
    if not report.proposed:
        why = ": they would have cost more than they bring" if report.rested else ""
        return f"drafts: none in {report.steps} steps{why}"
    text = (
        f"drafts: {report.tokens_per_step:.2f} tokens a step over {report.steps} steps; {report.proposed} drawn, "
        f"{report.verified} verified, {report.accepted} accepted"
    )
    if report.verified:
        places = ", ".join(f"{share:.0%}" for share in report.survival)
        text += f"; accepted up to place {places}; {report.predicted:.2f} a step expected, {report.realised:.2f} came"
    if report.rested:
        text += f"; parked in {report.rested} steps, where drafts would have cost more than they bring"
    return text
