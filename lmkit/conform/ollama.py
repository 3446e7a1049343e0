"""Ollama's API."""

from __future__ import annotations

from lmkit.conform.case import Server, case, need
from lmkit.conform.openai import HI, SCHEMA, check_arguments

LIMIT = {"num_predict": 24, "temperature": 0}


@case("ollama", "version and models")
def version(server: Server) -> None:
    need(isinstance(server.get("/api/version")["version"], str), "no version")
    names = [model["name"] for model in server.get("/api/tags")["models"]]
    need(any(name.removesuffix(":latest") == server.model for name in names), f"no {server.model} in /api/tags")


@case("ollama", "a whole chat")
def chat(server: Server) -> None:
    answer = server.post("/api/chat", {"messages": [HI], "stream": False, "options": LIMIT})
    need(answer["done"] is True and isinstance(answer["message"]["content"], str), "no message that is done")
    need(0 < answer["eval_count"] <= 24 and answer["prompt_eval_count"] > 0, "no counts of tokens")


@case("ollama", "a streamed chat")
def streamed(server: Server) -> None:
    lines = server.lines("/api/chat", {"messages": [HI], "options": LIMIT})
    need([line["done"] for line in lines] == [False] * (len(lines) - 1) + [True], "only the last line is done")
    need(all("content" in line["message"] for line in lines), "a line without a message")


@case("ollama", "generate, whole and streamed")
def generate(server: Server) -> None:
    body = {"prompt": "One, two,", "options": LIMIT}
    whole = server.post("/api/generate", body | {"stream": False})
    text = "".join(line["response"] for line in server.lines("/api/generate", body))
    need(text == whole["response"], "the stream has another text at temperature 0")


@case("ollama", "an answer of a JSON schema")
def schema(server: Server) -> None:
    body = {"messages": [HI], "stream": False, "format": SCHEMA, "options": {"num_predict": 128}}
    check_arguments(server.post("/api/chat", body)["message"]["content"])


@case("ollama", "what a model is, and which are awake")
def shown(server: Server) -> None:
    model = server.post("/api/show", {})
    need(isinstance(model["details"], dict) and "completion" in model["capabilities"], "no details and capabilities")
    need(isinstance(model["model_info"], dict), "no model_info")
    need(isinstance(server.get("/api/ps")["models"], list), "no list of models that are awake")


@case("ollama", "a request without messages loads the model")
def loaded(server: Server) -> None:
    answer = server.post("/api/chat", {"messages": [], "stream": False})
    need(answer["done"] is True and answer["done_reason"] == "load", f"done_reason is {answer['done_reason']}")


@case("ollama", "errors have Ollama's form")
def errors(server: Server) -> None:
    error = server.refusal("/api/chat", {"model": "no-such", "messages": [HI]}, 404)["error"]
    need(isinstance(error, str), "the error is no text")
