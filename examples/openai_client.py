"""The official client of OpenAI with `lmkit serve` or `lmkit proxy`: python openai_client.py [URL]"""

import os
import sys

from openai import OpenAI  # pip install openai

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("LMKIT_API_KEY", "none"))

model = client.models.list().data[0].id
question = {"role": "user", "content": "Write a Python function `size`: Return the number of items."}
whole = client.chat.completions.create(model=model, messages=[question], max_tokens=24, temperature=0)
print(model, "answers", repr(whole.choices[0].message.content), "in", whole.usage.completion_tokens, "tokens")

stream = client.chat.completions.create(
    model=model, messages=[question], max_tokens=24, stream=True, extra_body={"session_id": "reader-1", "priority": -1}
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
