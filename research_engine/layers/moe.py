"""Mixture of experts: every token through its few best experts, as a grouped product over tokens sorted by expert.

    router      [T, H] -> [T, E]; softmax in float32; the k largest shares of each token, made to sum to 1 or not
    sort        the T k (token, expert) pairs by expert, so that an expert's rows lie together
    products    gate and up as one, then down: one GEMM an expert on the CPU, one grouped GEMM on a GPU
    combine     back to [T, k, H], times the shares, summed over k in float32: the same bits whatever the order

(Shazeer et al. 2017, 1701.06538; Jiang et al. 2024, 2401.04088.)
"""

from __future__ import annotations

import torch

from research_engine.layers.activation import activate_and_mul
from research_engine.layers.linear import GateUpLinear, Linear


class MixtureOfExperts:
    """Router and experts of one layer.

    Args:
        router: ``[E, H]``.
        gate_up: ``[E, 2I, H]``; down: ``[E, H, I]``. On the CPU each expert is a matrix of its own, so that packing one
            frees it.
        experts_per_token: k.
        normalize: whether the k shares are made to sum to 1.
    """

    def __init__(
        self,
        router: Linear,
        gate_up: list[GateUpLinear],
        down: list[Linear],
        *,
        experts_per_token: int,
        normalize: bool,
        activation: str,
        stacked: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        self.router, self.gate_up, self.down = router, gate_up, down
        self.experts_per_token, self.normalize, self.activation = experts_per_token, normalize, activation
        self.stacked = stacked  # the experts' weights, [E, 2I, H] and [E, H, I], where they lie in one tensor each

    def __call__(self, x: torch.Tensor, gated_TI: torch.Tensor) -> torch.Tensor:
        """``[T, H] -> [T, H]``. The memory for dense layers' gated products stays unused."""
        num_tokens, k = x.shape[0], self.experts_per_token
        shares_TE = torch.softmax(self.router(x).float(), dim=-1)
        shares_Tk, experts_Tk = torch.topk(shares_TE, k, dim=-1)
        if self.normalize:
            shares_Tk = shares_Tk / shares_Tk.sum(-1, keepdim=True)
        experts, order = experts_Tk.flatten().sort(stable=True)
        # where each expert's rows end; a search, since counting would wait for the device
        ends = torch.searchsorted(experts, torch.arange(len(self.gate_up), device=x.device), right=True)
        rows = x[order // k]
        products = self._grouped(rows, ends) if self.stacked is not None else self._one_by_one(rows, ends)
        out_TkH = torch.empty_like(products)
        out_TkH[order] = products
        return torch.bmm(shares_Tk.unsqueeze(1), out_TkH.view(num_tokens, k, x.shape[1]).float()).squeeze(1).to(x.dtype)

    def _one_by_one(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """One product an expert that has rows."""
        outs = []
        for expert, part in enumerate(rows.tensor_split(ends[:-1].tolist())):
            if len(part):
                product = self.gate_up[expert](part)
                gated = product.new_empty(len(part), product.shape[1] // 2)
                outs.append(self.down[expert](activate_and_mul(self.activation, product, gated)))
        return torch.cat(outs) if outs else rows

    def _grouped(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """All experts in one launch a product; never waits for the device."""
        assert self.stacked is not None
        gate_up, down = self.stacked
        ends = ends.to(torch.int32)
        product = torch._grouped_mm(rows, gate_up.transpose(1, 2), offs=ends)
        gated = product.new_empty(len(product), product.shape[1] // 2)
        activate_and_mul(self.activation, product, gated)
        return torch._grouped_mm(gated, down.transpose(1, 2), offs=ends)

    def parts(self) -> dict[str, dict[str, torch.Tensor]]:
        """Views for the loader: the router's. Those of experts are `expert_parts`."""
        return {"router": self.router.parameters()}

    def expert_parts(self) -> list[dict[str, dict[str, torch.Tensor]]]:
        """Views for the loader, one entry an expert."""
        return [
            {**{f"expert_{name}": views for name, views in gate_up.parts().items()}, "expert_down": down.parameters()}
            for gate_up, down in zip(self.gate_up, self.down, strict=True)
        ]

    def matrices(self) -> list[tuple[Linear, tuple[str, ...], int | None]]:
        """Linear layers with the parts that their rows are, in order, and the expert's number, if it is one's. The
        router is none of them: it stays in floats."""
        found: list[tuple[Linear, tuple[str, ...], int | None]] = []
        for number, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            found += [(gate_up, ("expert_gate", "expert_up"), number), (down, ("expert_down",), number)]
        return found

    def linears(self) -> list[Linear]:
        """What ``pack()`` is to be called on."""
        return [self.router, *self.gate_up, *self.down]


def can_group(device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...]) -> bool:
    """Whether torch's grouped product takes matrices of these row lengths there: bfloat16 rows of 16-byte multiples."""
    aligned = all(size * dtype.itemsize % 16 == 0 for size in sizes)
    return device.type == "cuda" and dtype == torch.bfloat16 and aligned and hasattr(torch, "_grouped_mm")
