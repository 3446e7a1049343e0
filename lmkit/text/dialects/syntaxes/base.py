"""What a syntax of arguments can do, and that of most dialects: a JSON object."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lmkit.text.dialects.reader import Reader, Steps
from lmkit.text.dialects.rules import Rules
from lmkit.text.dialects.schemas import Schema


class Syntax:
    """How the arguments of a call are written: here as JSON."""

    def read(self, reader: Reader, schema: Any) -> Steps:
        """Read arguments, and emit them as JSON. Whether they are whole.

        `schema` is that of the function, or something else where it has none.
        """
        return (yield from reader.json(reader.argue))

    def rules(self, rules: Rules, schema: Schema, name: str) -> str:
        """The grammar of arguments that fit a schema. Names of rules begin with `name`."""
        return rules.json(schema)

    def text(self, arguments: Mapping[str, Any]) -> str:
        """The arguments as a model writes them."""
        return json.dumps(arguments, ensure_ascii=False)


JSON = Syntax()
