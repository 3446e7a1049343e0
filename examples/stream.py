"""An answer printed as it is generated: python stream.py [MODEL]"""

import sys

from lmkit import GenerationConfig, pipeline

QUESTION = "Write a Python function `size`: Return the number of items."

with pipeline(sys.argv[1] if len(sys.argv) > 1 else "demo") as pipe:
    for part in pipe.stream_infer(QUESTION, GenerationConfig(max_new_tokens=32)):
        print(part.text, end="", flush=True)
    print(f"\n{part.generate_token_len} tokens, {part.finish_reason}")
