"""Continue a few prompts in one batch, then one as a stream: the shortest use of DeepInfer from Python.

Run as `python examples/offline_inference.py`.  Without settings it uses the embedded demo model, whose text is old
English without much sense.  `DEEPINFER_HF_MODEL_DIR` names a checkpoint folder or a model of the Hugging Face Hub, and
`DEEPINFER_ACCELERATOR` an accelerator (`deepinfer accelerators` lists them).
"""

from deepinfer import LLM, SamplingParams
from deepinfer.environment import read_environment

PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):",
]


def main() -> None:
    """Print a completion of each prompt."""
    environment = read_environment()
    llm = LLM(environment.model or "demo", accelerator=environment.accelerator)

    params = SamplingParams(temperature=0.6, top_p=0.95, max_tokens=48, seed=1)
    for prompt, completion in zip(PROMPTS, llm.generate(PROMPTS, params), strict=True):
        print(f"{prompt!r} -> {completion.text!r} ({completion.finish_reason})")

    print("\nstreamed:", PROMPTS[1], end="", flush=True)
    for increment in llm.generate(PROMPTS[1], params, stream=True):
        print(increment.text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
