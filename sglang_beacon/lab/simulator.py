"""The reference: policies on a plain Hugging Face model, by masks over a cache that keeps it all.

Nothing is moved or freed here. Per layer and KV head a list of positions says which tokens are
still visible, and attention is computed over those; queries are taken before RoPE from the model
itself. When and how much is evicted follows the same planner as in the server, and what stays is
chosen by the same policy objects, so a server whose slots, lengths, rotations and captures are
right produces the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from sglang_beacon import policies
from sglang_beacon.config import KVPolicyConfig
from sglang_beacon.lab.simulated_run import Run, Simulation
from sglang_beacon.ops.rope import RopeTable
from sglang_beacon.runtime.beacon_store import Beacons


class Simulator:
    """Runs a policy on a Hugging Face decoder of the Llama or Qwen kind.

    Parameters
    ----------
    model : PreTrainedModel
        In eval mode; float32 where the result is compared with a server.
    config : KVPolicyConfig
    page_size : int
        Of the server to agree with.
    """

    # Of an experiment that looks into the steps.
    run_class: type[Run] = Run

    def __init__(self, model: PreTrainedModel, config: KVPolicyConfig, page_size: int = 1) -> None:
        self.model = model
        self.config = config
        self.page_size = page_size
        self.policy = policies.create(config, page_size)
        self.layers = list(model.get_decoder().layers)
        self.table = _rope_table(model)

    @torch.no_grad()
    def generate(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        chunk_size: int | None = None,
        cached: int = 0,
        seed: Beacons | None = None,
        prompt_in_tree: bool = True,
        retract_after: Sequence[int] = (),
    ) -> Simulation:
        """Generate greedily.

        Parameters
        ----------
        prompt : sequence of int
        max_new_tokens : int
        chunk_size : int or None
            Prompt tokens per prefill chunk; None: all at once.
        cached : int
            Leading prompt tokens that a server would find in its prefix tree: their queries are
            not seen.
        seed : Beacons or None
            What is remembered of those.
        prompt_in_tree : bool
            Whether the tree takes the prompt, so that its whole pages are pinned.
        retract_after : sequence of int
            Numbers of generated tokens after which the cache is lost and computed again, all but
            what the tree still has: the prompt and, once the request has left the tree, what it
            had said before.
        """
        run = self.run_class(self, len(prompt), prompt_in_tree)
        with run.attending():
            logits = run.compute(prompt, cached, seed, chunk_size)
            while True:
                run.take(logits)
                count = len(run.result.tokens)
                if count == max_new_tokens:
                    return run.result
                if count in retract_after:
                    # A scheduler that overlaps has launched this token, and planned what follows.
                    run.decode()
                    run.lose_cache()
                    seen = [*prompt, *run.result.tokens]
                    beacons = run.result.beacons
                    if beacons is not None:
                        # Stored with the prompt's whole pages.
                        beacons = beacons.within(run.in_tree)
                    logits = run.compute(seen, run.tree_holds, beacons, chunk_size)
                else:
                    logits = run.decode()


def _rope_table(model: PreTrainedModel) -> RopeTable:
    """The model's rotary table, as SGLang lays it out: cosines, then sines."""
    rotary = model.get_decoder().rotary_emb
    positions = torch.arange(model.config.max_position_embeddings)[None]
    cos, sin = rotary(torch.zeros(1), positions)
    half = cos.shape[-1] // 2
    return RopeTable(torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1), neox=True)
