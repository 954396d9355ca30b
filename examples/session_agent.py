"""An agent that knows nothing of the service: OpenAI's own client, an address, a key, and a loop that calls a tool.

It is not async, so each run of it is a process of its own, which ends with its sample.
"""

import json
from typing import Any

from calculator import calculate  # beside this file
from openai import OpenAI

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Work out an arithmetic expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


def run(base_url: str, api_key: str, prompt: list[Any]) -> None:
    """Answer one prompt: what the model says on the way is what is trained on."""
    messages = list(prompt)
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        while True:
            answer = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
            said = answer.choices[0].message
            if not said.tool_calls:
                return
            messages.append(said)
            for call in said.tool_calls:
                result = calculate(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
