"""How well a served model foretells a fixed text: perplexity, to tell what a KV format or a quantization costs.

The text is ours and never changes, so figures of different days can be compared: plain prose, a list of numbers, and code.
"""

from __future__ import annotations

import http.client
import json
import math
from dataclasses import dataclass
from typing import Any

from paddock_runner.errors import PackError

from paddock_manager.fleet.client import Unreachable, connect, error_of
from paddock_manager.fleet.state import Server

TEXT = """The ferry leaves the island at half past six, when the fog still lies on the water and the gulls have not begun to quarrel. Marta, who has
sold bread on the quay for thirty years, knows every passenger by the sound of his boots. The teacher walks quickly, because he is always late; the
doctor walks slowly, because nobody dares to leave without her. On Mondays there is also a boy with a crate of eggs, and on Fridays the same boy
with an empty crate and a book about engines. When the captain sounds the horn, Marta packs what is left into a basket, counts the coins, and carries
the basket up the hill to the school, where the bread is eaten before the first lesson.

One winter the ferry did not come for nine days. The island ate potatoes, then turnips, then what the cellars still held from the year before. On the
fourth day the doctor made a list of everything that everybody had, and read it aloud in the church: twelve sacks of flour, forty jars of plums, three
hams, one cow. After that nobody was hungry, although some were surprised to learn what their neighbours had been keeping. When the ferry came back, the
captain found the whole island on the quay, and nobody wanted to board. They had come, they said, to see whether he was well.

Measured depth at the pier, in metres: January 4.1, February 4.0, March 4.3, April 4.6, May 4.8, June 4.9, July 4.9, August 4.8, September 4.6, October
4.4, November 4.2, December 4.1. The mean of the twelve months is 4.5 metres, and the difference between the deepest and the shallowest month is 0.9 metres.

def tide_table(depths):
    \"\"\"Months with their depths, deepest first.\"\"\"
    months = ["January", "February", "March", "April", "May", "June"]
    pairs = list(zip(months, depths))
    pairs.sort(key=lambda pair: pair[1], reverse=True)
    return [f"{month}: {depth:.1f} m" for month, depth in pairs]

for line in tide_table([4.1, 4.0, 4.3, 4.6, 4.8, 4.9]):
    print(line)
"""
LIMIT = 0.01
"""A KV format that makes the perplexity this much larger than the baseline's is not as good."""


@dataclass(frozen=True, slots=True)
class Quality:
    """perplexity: e to the mean negative log-probability of the text's tokens, the first left out."""

    perplexity: float
    tokens: int


def measure(server: Server, key: str) -> Quality:
    """One request. Raises: PaddockError."""
    body = {"model": server.model, "prompt": TEXT, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    connection = connect(server.host, server.port, None, server.tls_cert)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    try:
        connection.request("POST", "/v1/completions", json.dumps(body).encode(), headers)
        response = connection.getresponse()
        raw = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(f"{server.name} does not answer at {server.url}: {error}", url=server.url) from None
    finally:
        connection.close()
    if response.status != 200:
        raise error_of(response.status, raw)
    return of(json.loads(raw)["choices"][0]["prompt_logprobs"])


def of(entries: list[dict[str, dict[str, Any]] | None]) -> Quality:
    """From prompt_logprobs with nothing but the prompt's own tokens. Raises: PackError for a value that is no number."""
    values = [next(iter(entry.values()))["logprob"] for entry in entries if entry]
    if not values or not all(isinstance(v, int | float) and math.isfinite(v) for v in values):
        raise PackError("the model gave no log-probabilities of the text", "it may be damaged: paddock verify")
    return Quality(math.exp(-sum(values) / len(values)), len(values))
