"""What coding agents must be told to talk to a server: variables and arguments, and no file of the user's."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from typing import NamedTuple

TIMEOUT_MS = 30 * 60 * 1000  # of a request: a CPU may compute a long prompt for minutes
KEY_VARIABLE = "LMKIT_API_KEY"
NO_KEY = "lmkit"  # for clients that want some key


class Target(NamedTuple):
    """The model that a client is to use."""

    url: str  # of the server, without /v1
    model: str
    context: int  # tokens of prompt and answer together
    api_key: str | None = None

    @property
    def most_output(self) -> int:
        """Tokens of one answer. The rest of the context is for the conversation."""
        return min(32_000, self.context // 4)


class Settings(NamedTuple):
    variables: Mapping[str, str]
    arguments: tuple[str, ...] = ()

    def shown(self, command: str, extra: tuple[str, ...] = ()) -> str:
        """The command for a shell, an option a line."""
        lines = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        lines.append(command)
        for word in self.arguments:
            lines += [shlex.quote(word)] if word.startswith("-") else [f"{lines.pop()} {shlex.quote(word)}"]
        return " \\\n  ".join([*lines, *([shlex.join(extra)] if extra else [])])


class Agent(NamedTuple):
    title: str
    command: str
    package: str  # of npm
    min_context: int  # tokens: its own prompt, and room for some work
    settings: Callable[[Target], Settings]


def _codex(target: Target) -> Settings:
    provider = {
        "name": "lmkit",
        "base_url": f"{target.url}/v1",
        "wire_api": "responses",
        "stream_idle_timeout_ms": TIMEOUT_MS,
    }
    if target.api_key:
        provider["env_key"] = KEY_VARIABLE
    config = {
        "model_provider": "lmkit",
        "model": target.model,
        "model_context_window": target.context,
        "web_search": "disabled",  # its own servers would run it
        **{f"model_providers.lmkit.{name}": value for name, value in provider.items()},
    }
    arguments = [word for name, value in config.items() for word in ("-c", f"{name}={json.dumps(value)}")]
    return Settings({KEY_VARIABLE: target.api_key} if target.api_key else {}, tuple(arguments))


def _claude(target: Target) -> Settings:
    models = ("MODEL", "DEFAULT_OPUS_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_HAIKU_MODEL")
    return Settings({
        "ANTHROPIC_BASE_URL": target.url,
        "ANTHROPIC_AUTH_TOKEN": target.api_key or NO_KEY,
        "ANTHROPIC_API_KEY": "",  # it would be sent beside the token
        **{f"ANTHROPIC_{name}": target.model for name in models},
        "CLAUDE_CODE_SUBAGENT_MODEL": target.model,
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(target.most_output),
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(target.context),
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # a line before the prompt that may change, and end the prefix cache
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "API_TIMEOUT_MS": str(TIMEOUT_MS),
    })  # fmt: skip


def _opencode(target: Target) -> Settings:
    model = {"name": target.model, "limit": {"context": target.context, "output": target.most_output}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "lmkit",
        "options": {"baseURL": f"{target.url}/v1", "apiKey": target.api_key or NO_KEY, "timeout": TIMEOUT_MS},
        "models": {target.model: model},
    }
    name = f"lmkit/{target.model}"
    config = {"model": name, "small_model": name, "provider": {"lmkit": provider}}
    return Settings({"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


def _qwen(target: Target) -> Settings:
    variables = {
        "OPENAI_BASE_URL": f"{target.url}/v1",
        "OPENAI_API_KEY": target.api_key or NO_KEY,
        "OPENAI_MODEL": target.model,
        "QWEN_CODE_MAX_OUTPUT_TOKENS": str(target.most_output),
        "QWEN_CODE_API_TIMEOUT_MS": str(TIMEOUT_MS),
    }
    return Settings(variables, ("--auth-type", "openai", "--model", target.model))


AGENTS: Mapping[str, Agent] = {
    "codex": Agent("Codex", "codex", "@openai/codex", 16_384, _codex),
    "claude": Agent("Claude Code", "claude", "@anthropic-ai/claude-code", 49_152, _claude),
    "opencode": Agent("opencode", "opencode", "opencode-ai", 16_384, _opencode),
    "qwen": Agent("Qwen Code", "qwen", "@qwen-code/qwen-code", 32_768, _qwen),
}
