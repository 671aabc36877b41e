"""RECAS's active sets in a real model: the true error of each layer against the bound reported.

SmolLM2-135M continues a text, or the RevisitChain model a chain, in the simulator, whose tokens are
the server's. At every step and layer the output of attention over the active set is compared with
that over all that is retained, and with the bound that the active set gives for itself::

    python -m benchmarks.recas_model
    python -m benchmarks.recas_model --model revisit_chain --epsilon 1.5
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.conditions import RESULTS, store
from sglang_beacon.config import KVPolicyConfig
from sglang_beacon.lab.active_errors import ErrorSimulator
from sglang_beacon.lab.demo_model import ensure
from sglang_beacon.lab.revisit_chain import RevisitChain

BUDGET = 384
SELECTORS = ("exact", "pages", "sketch")
# [steps, layers] of each selector.
Errors = dict[str, torch.Tensor]


def measure(model: Any, tokens: list[int], selector: str, epsilon: float, steps: int) -> Any:
    """True errors and bounds [steps, layers], and the report of the request."""
    options = {
        "selector": selector,
        "epsilon": epsilon,
        "max_budget": BUDGET,
        "ladder": [32, 64, 96, 128, 192, 256],
    }
    config = KVPolicyConfig(policy="recas", budget=BUDGET, options=options)
    simulator = ErrorSimulator(model, config)
    result = simulator.generate(tokens, steps)
    true, bound = (
        torch.tensor(simulator.errors).view(-1, model.config.num_hidden_layers, 2).unbind(2)
    )
    assert result.memory is not None
    return true, bound, result.memory.report()


def draw(true: Errors, bound: Errors, epsilon: float, path: Path) -> None:
    """Per layer: the median and largest true error, and the largest bound."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(true), figsize=(11, 3.6), sharey=True, layout="constrained")
    for panel, selector in zip(axes, true, strict=True):
        layers = range(1, true[selector].shape[1] + 1)
        floor = 1e-6
        largest = bound[selector].amax(0).clamp(min=floor)
        panel.plot(layers, largest, "k^--", markersize=4, label="bound, largest")
        errors = true[selector].clamp(min=floor)
        panel.plot(
            layers, errors.amax(0), "s-", color="#d55e00", markersize=4, label="true, largest"
        )
        panel.plot(
            layers,
            errors.median(0).values,
            "o-",
            color="#0072b2",
            markersize=4,
            label="true, median",
        )
        panel.axhline(epsilon, color="grey", linewidth=1, label="target")
        panel.set_yscale("log")
        panel.set_title(selector)
        panel.set_xlabel("layer")
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.grid(alpha=0.3)
    axes[0].set_ylabel("relative error of the attention output")
    axes[-1].legend(fontsize=8)
    figure.savefig(path, dpi=150)


def smollm2(prompt: int) -> tuple[Path, list[int]]:
    """The demo model, and the first tokens of a text."""
    directory = ensure()
    text = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text()
    return directory, AutoTokenizer.from_pretrained(directory)(text)["input_ids"][:prompt]


def revisit_chain(prompt: int) -> tuple[Path, list[int]]:
    """The model that looks up its own thoughts, and the first tokens of a chain."""
    return RevisitChain.checkpoint, list(RevisitChain().sample(random.Random(0)).tokens[:prompt])


MODELS = {"smollm2": smollm2, "revisit_chain": revisit_chain}


def main() -> None:
    """Measure every selector, print a table, keep it and draw it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="smollm2")
    parser.add_argument("--epsilon", type=float, default=0.1)
    parser.add_argument("--prompt", type=int, default=300, help="tokens of the text")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    directory, tokens = MODELS[args.model](args.prompt)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    true, bound, reports = {}, {}, {}
    for selector in SELECTORS:
        true[selector], bound[selector], reports[selector] = measure(
            model, tokens, selector, args.epsilon, args.steps
        )
        held = (true[selector] <= bound[selector] + 1e-5).float().mean()
        print(
            f"{selector:8s} true error: median {true[selector].median():.4f}, largest "
            f"{true[selector].max():.4f}; bound: median {bound[selector].median():.4f}, largest "
            f"{bound[selector].max():.4f}; held in {held:.1%}; read "
            f"{reports[selector]['active']['ratio']:.1%} of what is retained"
        )
    rows = {
        selector: {
            "true_median": true[selector].median(0).values.tolist(),
            "true_largest": true[selector].amax(0).tolist(),
            "bound_largest": bound[selector].amax(0).tolist(),
            "report": reports[selector],
        }
        for selector in SELECTORS
    }
    store("recas_model", {"study": "recas_model", **vars(args), "budget": BUDGET, "rows": rows})
    draw(true, bound, args.epsilon, RESULTS / f"recas_{args.model}.png")


if __name__ == "__main__":
    main()
