"""Many questions at once, without blocking the event loop: python async_pipeline.py [MODEL]"""

import asyncio
import sys

from lmkit import AsyncPipeline, GenerationConfig

QUESTIONS = ["import os\n", "class Queue:\n", "def is_empty(self):\n"]


async def main(model: str) -> None:
    config = GenerationConfig(max_new_tokens=16)
    async with AsyncPipeline(model) as pipe:
        answers = await asyncio.gather(*(pipe(question, config) for question in QUESTIONS))
        for question, answer in zip(QUESTIONS, answers, strict=True):
            print(repr(question), "->", repr(answer.text), answer.finish_reason)
        async for part in pipe.stream_infer("import sys\n", config):
            print(part.text, end="", flush=True)
        print()
        try:
            async with asyncio.timeout(0.2):
                await pipe("hi", GenerationConfig(max_new_tokens=4000, ignore_eos=True))
        except TimeoutError:
            print("took too long: its request is aborted")


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "demo"))
