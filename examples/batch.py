"""Answers to many prompts: python batch.py [MODEL]"""

import sys

from lmkit import GenerationConfig, pipeline

PROMPTS = [
    "Write a Python function `size`: Return the number of items.",
    [{"role": "user", "content": "Write a Python function `is_empty`: Return True if the queue is empty."}],
    "Write a Python function `add`: Return the sum of two numbers.",
]

with pipeline(sys.argv[1] if len(sys.argv) > 1 else "demo") as pipe:
    answers = pipe(PROMPTS, GenerationConfig(max_new_tokens=32), progress=True)

for answer in answers:
    if answer.finish_reason == "error":
        print(f"prompt {answer.index}: {answer.error_message}")
    else:
        print(f"prompt {answer.index}: {answer.generate_token_len} tokens, {answer.finish_reason}: {answer.text!r}")
