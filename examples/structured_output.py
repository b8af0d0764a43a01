"""Hold outputs to a JSON schema, a regular expression and a choice: whatever the model would like to say, they match.

Run as `python examples/structured_output.py`.
"""

import json

from deepinfer import LLM, Constraint, SamplingParams
from deepinfer.environment import read_environment

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,9}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"type": "string", "pattern": "^[A-Z][a-z]{1,9}$"},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}


def main() -> None:
    """Ask three questions, each with a form for its answer."""
    environment = read_environment()
    llm = LLM(environment.model or "demo", accelerator=environment.accelerator)

    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    question = [{"role": "user", "content": "Ben, 31, Oslo. Write this as JSON."}]
    params = SamplingParams(temperature=0, max_tokens=80)
    answer = llm.chat(question, None, params, thinking=False, response_format=form, constrain=True)
    print("schema:", json.dumps(json.loads(answer.content)))

    for name, constraint in (
        ("regex", Constraint(regex=r"[0-9]{1,2} \+ [0-9]{1,2} = [0-9]{1,3}\.")),
        ("choice", Constraint(choice=("yes", "no", "perhaps"))),
    ):
        params = SamplingParams(temperature=1, seed=2, max_tokens=40, structured=constraint)
        print(f"{name}:", llm.generate("Say something.", params)[0].text)


if __name__ == "__main__":
    main()
