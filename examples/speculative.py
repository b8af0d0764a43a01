"""Decode with the model's own draft stages and without, and see how many tokens a step gives.

Run as `python examples/speculative.py`.  Drafts change no text at temperature 0, up to the last bit of a logit
(docs/drafts.md says when not even that).
"""

from deepinfer import LLM, SamplingParams
from deepinfer.environment import read_environment

QUESTIONS = (
    "What is 17 + 25?",
    "pears: 12\nplums: 7\nfigs: 31\nHow many plums?",
    "Ben is 31 and lives in Oslo. Write this as JSON.",
    "What can you do?",
)


def main() -> None:
    """Answer the same questions both ways."""
    environment = read_environment()
    name = environment.model or "demo"
    plain = LLM(name, accelerator=environment.accelerator)
    drafting = LLM(name, accelerator=environment.accelerator, draft="on", draft_rule="greedy")
    params = SamplingParams(temperature=0, max_tokens=60)

    tokens = steps = 0
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        answer = plain.chat(messages, None, params, thinking=False)
        stream = drafting.chat(messages, None, params, stream=True, thinking=False).read()
        same = "same" if stream.message.content == answer.content else "other"
        report = stream.completion.drafts
        assert report is not None
        made = len(stream.completion.token_ids)
        tokens, steps = tokens + made, steps + report.steps
        print(f"{answer.content}  [{same} text, {made} tokens in {report.steps} steps]")
    print(f"{tokens / steps:.1f} tokens a step")


if __name__ == "__main__":
    main()
