"""A prompt that branches: two remarks at the same time, then a verdict."""

import asyncio
import sys

from lmkit import pipeline
from lmkit.program import Branch, Trace, run

MODEL = sys.argv[1] if len(sys.argv) > 1 else "demo"


async def review(branch: Branch, code: str) -> str:
    branch += f"# Review of this code:\n{code}\n"

    async def remark(part: Branch, topic: str) -> str:
        part += f"# {topic}:"
        return await part.gen(topic, max_new_tokens=16, stop="\n")

    topics = ["Style", "Errors"]
    remarks = await asyncio.gather(*map(remark, branch.fork(2), topics))
    branch += "".join(f"# {topic}:{text}\n" for topic, text in zip(topics, remarks, strict=True)) + "# Verdict:"
    return await branch.select([" good", " bad"], "verdict")


with pipeline(MODEL) as pipe:
    trace = Trace()
    verdict = run(pipe, review, "def size(items):\n    return len(items)", trace=trace)
    totals = trace.totals()
    print(f"verdict: {verdict}; {totals['reused']} tokens reused, {totals['computed']} computed")
