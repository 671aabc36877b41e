"""Synthetic attention traces of long reasoning: what a cache is asked for, without a model.

One KV head's keys, values and queries: attention sinks, a local window, topics that drift, and
premises. A premise is a short span whose content is of the same kind as everybody's. It is looked
at again when a phase of the reasoning ends, then perhaps not for thousands of tokens, and once more
at the end, when it decides the answer. Where the premises are is for the judge alone: no method may
read `Trace.premises`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional as F  # noqa: N812


@dataclass(frozen=True)
class TraceConfig:
    """What a trace is made of; lengths in tokens, gains in natural-log units of attention.

    Attributes
    ----------
    shortest, longest
        Lengths, drawn log-uniformly.
    prompt_share
        Of the tokens; the rest is generated, a query each.
    sinks, sink_gain
        First tokens that every query looks at.
    window, local_gain
        Width and height of the attention to neighbours.
    topic_tokens, topic_gain, topic_share
        Tokens until the topic has drifted to another one; the share of its tokens that carry it.
    phases, premises, premise_tokens
        Parts of the reasoning; premises in each but the last; tokens of one.
    revisit_share
        Of the earlier premises that the end of a phase looks back at, besides its own.
    burst, premise_gain
        Queries that look at a premise in a row, and how strongly: more than at a neighbour that
        carries the topic.
    noise
        Standard deviation of a logit that nothing explains.
    """

    shortest: int = 4096
    longest: int = 32_768
    prompt_share: float = 0.25
    sinks: int = 4
    sink_gain: float = 10.5
    window: int = 48
    local_gain: float = 8.0
    topic_tokens: int = 768
    topic_gain: float = 6.5
    topic_share: float = 0.05
    phases: int = 4
    premises: int = 4
    premise_tokens: int = 6
    revisit_share: float = 0.3
    burst: int = 12
    premise_gain: float = 15.0
    noise: float = 0.4


# Dimensions of a key: one for sinks, and a block for each other part.
LOCAL, TOPIC, CONTENT = 31, 24, 40
DIM = 1 + LOCAL + TOPIC + CONTENT


class Trace(NamedTuple):
    """One trace.

    Attributes
    ----------
    keys, values : Tensor [N, DIM]
    queries : Tensor [N - prompt, DIM]
        Of the generated tokens, scaled so that ``query . key`` is a logit.
    prompt : int
        Tokens that were there before the first query.
    premises : Tensor [number, premise_tokens] int64
        Their positions.
    needed : Tensor [number] int64
        Position of the first query of each premise's last burst.
    """

    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor
    prompt: int
    premises: torch.Tensor
    needed: torch.Tensor


def reasoning_trace(config: TraceConfig, seed: int, length: int | None = None) -> Trace:
    """Draw one trace; the same seed gives the same trace, of its own length or another."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=generator))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    drawn = round(math.exp(uniform(math.log(config.shortest), math.log(config.longest))))
    length = length or drawn
    prompt = round(length * config.prompt_share)
    position = torch.arange(length)

    # Neighbours have like features: random Fourier features of a Gaussian window.
    frequency = normal(LOCAL) / (config.window / 2)
    offset = torch.rand(LOCAL, generator=generator) * 2 * math.pi
    local = (position[:, None] * frequency + offset).cos() * math.sqrt(2 / LOCAL)

    # The topic turns from one direction to the next; few of its tokens carry it.
    corners = F.normalize(normal(length // config.topic_tokens + 2, TOPIC), dim=-1)
    corner, progress = position // config.topic_tokens, position % config.topic_tokens
    turn = (progress / config.topic_tokens)[:, None]
    topic = F.normalize((1 - turn) * corners[corner] + turn * corners[corner + 1], dim=-1)
    carries = torch.rand(length, generator=generator) < config.topic_share
    content = F.normalize(normal(length, CONTENT), dim=-1)

    premises, bursts = _premises(config, length, prompt, generator)
    for span in premises:
        # One thing is said in several tokens.
        content[span] = F.normalize(content[span[:1]] + 0.3 * content[span], dim=-1)

    sink = torch.zeros(length, 1)
    sink[: config.sinks] = 1
    keys = torch.cat((sink, local, topic * carries[:, None], content), dim=-1)

    asked = torch.zeros(length, CONTENT)
    needed = torch.zeros(len(premises), dtype=torch.int64)
    for index, start in bursts:
        asked[start : start + config.burst] += content[premises[index][0]]
        needed[index] = max(int(needed[index]), start)
    noise = normal(length, CONTENT) * config.noise
    queries = torch.cat(
        (
            torch.full((length, 1), config.sink_gain),
            config.local_gain * local,
            config.topic_gain * topic,
            config.premise_gain * asked + noise,
        ),
        dim=-1,
    )
    values = F.normalize(normal(length, DIM), dim=-1)
    # What is said within a topic is alike.
    values[:, :TOPIC] += topic
    return Trace(keys, values, queries[prompt:], prompt, premises, needed)


def _premises(
    config: TraceConfig, length: int, prompt: int, generator: torch.Generator
) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """Positions of the premises, and the bursts: which premise, and where its queries begin."""
    phase = length // config.phases
    spans, bursts = [], []
    # The queries that end a phase come after all that is said in it.
    asking = 2 * config.window + config.burst * (1 + config.premises * (config.phases - 1))
    for number in range(config.phases - 1):
        begin = number * phase + 2 * config.sinks
        room = phase - asking - config.premises * config.premise_tokens
        starts = torch.randperm(room // config.premise_tokens, generator=generator)
        for start in starts[: config.premises].sort().values.tolist():
            first = begin + start * config.premise_tokens
            spans.append(torch.arange(first, first + config.premise_tokens))
    for number in range(1, config.phases + 1):
        last = number == config.phases
        end = max(min(number * phase, length) - 2 * config.window, prompt)
        for index in range(len(spans)):
            age = number - 1 - index // config.premises
            chance = float(torch.rand((), generator=generator))
            if last or age == 0 or (age > 0 and chance < config.revisit_share):
                at = end - config.burst * (1 + index) * (2 if last else 1)
                # A phase may have ended within the prompt, whose queries nobody sees.
                bursts.append((index, at if at >= prompt else prompt + config.burst * index))
    return torch.stack(spans), bursts
