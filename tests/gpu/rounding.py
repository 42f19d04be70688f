"""How far 16-bit results may be off: a model of transformers, its rounded twin on the GPU, and what both compute.

The exact model is in float32, its weights those of the rounded one, so that errors are those of computing alone.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from research_engine import LLM, SamplingParams
from tests.models.tiny_models import prompts


class Twins:
    """A float32 model on the CPU and the same in a dtype on a device.

    Args:
        reference: of transformers; mutated where `round_weights`: its weights become numbers of the dtype.
        round_weights: leave it out for weights that the dtype does not hold, such as dequantised ones.
    """

    def __init__(self, reference: Any, dtype: torch.dtype, device: str, *, round_weights: bool = True) -> None:
        self.exact = reference
        if round_weights:
            with torch.no_grad():
                for parameter in reference.parameters():
                    parameter.copy_(parameter.to(dtype).float())
        self.rounded = copy.deepcopy(reference).to(device, dtype)
        self.device = device

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Float32 [T, V] of the exact model and of the rounded one."""
        exact = self.exact(torch.tensor([ids])).logits[0].float()
        return exact, self.rounded(torch.tensor([ids], device=self.device)).logits[0].float().cpu()


def position_errors(logits: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Of each row the root mean square of its errors."""
    return (logits.float().cpu() - exact).square().mean(-1).sqrt()


def assert_no_worse(ours: torch.Tensor, theirs: torch.Tensor, *, quantile: float = 1.0) -> None:
    """At most twice the error of the other, by the largest of the rows' or another quantile.

    Where rounding may turn a choice, of an expert, a row's error says nothing: there a quantile leaves those rows out.
    """
    assert bool(ours.isfinite().all())
    mine, other = float(ours.quantile(quantile)), float(theirs.quantile(quantile))
    assert mine <= 2 * other, f"off by {mine:.4g}, transformers in the same dtype by {other:.4g}"


def assert_engine_within_rounding(llm: LLM, twins: Twins, *, quantile: float = 1.0) -> None:
    """The engine's log-probabilities of the tokens it chose are as near to the exact ones as the rounded model's."""
    given = prompts([1, 33, 50, 90], seed=9)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in given], params, use_tqdm=False)
    ours, theirs = [], []
    for ids, output in zip(given, outputs, strict=True):
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        assert completion.logprobs is not None
        got = [entry[token].logprob for entry, token in zip(completion.logprobs, tokens, strict=True)]
        rows = slice(len(ids) - 1, len(ids) + len(tokens) - 1)
        exact, rounded = (logits[rows].log_softmax(-1) for logits in twins.logits(ids + tokens))
        chosen = exact.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        ours.append((torch.tensor(got) - chosen).abs())
        theirs.append((rounded - exact).abs().amax(-1))
    assert_no_worse(torch.cat(ours), torch.cat(theirs), quantile=quantile)
