"""Ask several questions about one long text: what was computed for the first is found by the others.

Run as `python examples/prefix_cache.py`.  docs/prefix-cache.md tells what is shared, and how long it is kept.
"""

from deepinfer import LLM, SamplingParams
from deepinfer.environment import read_environment

PEOPLE = ("Anna", "Ben", "Cora", "David", "Emma", "Felix", "Greta", "Henry", "Iris", "Jack", "Kate", "Leo")


def main() -> None:
    """Show how many tokens of each prompt ran."""
    environment = read_environment()
    llm = LLM(environment.model or "demo", accelerator=environment.accelerator)
    text = ", ".join(f"{name} is {20 + 3 * number}" for number, name in enumerate(PEOPLE * 6))
    params = SamplingParams(temperature=0, max_tokens=8)
    for question in ("How old is Ben?", "How old is Kate?", "How old is Leo?"):
        completion = llm.generate(f"{text}. {question}", params)[0]
        use = completion.cache
        assert use is not None
        print(f"{question:<18}{len(completion.prompt_token_ids)} prompt tokens, {use.hit} found, {use.computed} ran")


if __name__ == "__main__":
    main()
