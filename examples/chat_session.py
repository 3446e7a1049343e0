"""A conversation with two ends: python chat_session.py [MODEL]"""

import sys

from lmkit import GenerationConfig, Session, pipeline


def show(name: str, session: Session) -> None:
    answer = session.response
    assert answer is not None
    print(f"{name}: {answer.input_token_len} tokens in, {answer.cached_token_len} of them from the cache")
    print(f"    {answer.text!r}")


config = GenerationConfig(max_new_tokens=24)
with pipeline(sys.argv[1] if len(sys.argv) > 1 else "demo") as pipe:
    session = pipe.chat("Write a Python function `size`: Return the number of items.", gen_config=config)
    show("first turn", session)

    other = session.fork()  # the common beginning is computed and kept once
    show("second turn", pipe.chat("Write a Python function `empty`: Return True if there is none.", session, config))
    show("another second turn", pipe.chat("Write a docstring for it.", other, config))
    print(len(session.history), "messages:", *(message["role"] for message in session.history))
