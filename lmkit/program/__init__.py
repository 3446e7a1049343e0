"""Structured programs: prompts that branch, in plain Python. See docs/programs.md.

from lmkit import pipeline
from lmkit.program import Branch, run

async def capital(branch: Branch, country: str) -> str:
    branch += f"The capital of {country} is"
    return await branch.gen(max_new_tokens=4, stop=".")

with pipeline("demo") as pipe:
    print(run(pipe, capital, "France"))
"""

from __future__ import annotations

from lmkit.program.branch import Branch
from lmkit.program.remote import Server
from lmkit.program.run import run, run_batch, start
from lmkit.program.trace import Part, Trace

__all__ = ["Branch", "Part", "Server", "Trace", "run", "run_batch", "start"]
