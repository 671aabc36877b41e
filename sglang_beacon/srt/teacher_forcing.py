"""Makes a server say a given text, and tells how likely each token was: perplexity under eviction.

A server measures a text in one prefill, where nothing is evicted yet. To see what a policy costs,
the text has to be *generated*: this logit processor lets every token be the given one, computed one
by one from whatever cache is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

FORCED = "forced_tokens"
_SAID = "forced_tokens_said"
# Among the two best, what is not the token itself carries its likelihood.
_APART = 1.0


class TeacherForcing(CustomLogitProcessor):
    """Forces ``custom_params["forced_tokens"]``, then lets the request go on by itself.

    SGLang reports log-probabilities after logit processors, so a forced token would be certain. Its
    own log-probability is put into the runner-up's place; `forced_logprobs` reads it from a reply
    that was asked for with ``top_logprobs_num=2``.

    The server needs ``--enable-custom-logit-processor``, the request temperature 0, and its prompt
    must fit into one prefill chunk, since every chunk asks for a token.
    """

    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> torch.Tensor:
        for row, params in zip(logits, custom_param_list or [], strict=True):
            said = params[_SAID] = params.get(_SAID, -1) + 1
            if said < len(params[FORCED]):
                token = params[FORCED][said]
                logprob = row.float().log_softmax(-1)[token]
                row.fill_(-torch.inf)
                row[token] = 0.0
                row[1 if token == 0 else 0] = logprob - _APART
        return logits


def forced_request(
    prompt: Sequence[int], text: Sequence[int], free: int, custom_params: Mapping[str, Any]
) -> dict[str, Any]:
    """The body for ``/generate`` that says `text` after `prompt`, then `free` tokens of its own."""
    return {
        "input_ids": list(prompt),
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": len(text) + free,
            "ignore_eos": True,
            "custom_params": {**custom_params, FORCED: list(text)},
        },
        "custom_logit_processor": TeacherForcing.to_str(),
        "return_logprob": True,
        "top_logprobs_num": 2,
    }


def forced_logprobs(meta_info: Mapping[str, Any], count: int) -> list[float]:
    """The log-probability [nat] that each of the first `count` forced tokens had.

    Raises
    ------
    ValueError
        When the reply has fewer, or the wrong number of alternatives.
    """
    top: Sequence[Sequence[Sequence[float]]] = meta_info.get("output_top_logprobs") or ()
    if len(top) < count or any(len(pair) != 2 for pair in top[:count]):
        raise ValueError(f"the reply must hold two top logprobs for each of {count} tokens")
    return [pair[1][0] - pair[0][0] + _APART for pair in top[:count]]
