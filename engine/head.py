"""Final norm and LM head at the scored positions, with the gradient worked out in the forward pass.

Shapes: P scored positions, C positions of a chunk, D hidden size, V vocabulary.

A scored position's log-probability depends on its own hidden state only, so d(logp)/d(hidden) is one vector per
position. It is computed while the chunk's logits are alive; backward scales it by the incoming gradient and never
needs the head again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine import kernels


def _logits(normed_CD: Tensor, weight_VD: Tensor) -> Tensor:
    """Logits in float32 straight from the matmul's accumulator where PyTorch offers it (float64 for float64)."""
    normed_CD = normed_CD.to(weight_VD.dtype)
    if normed_CD.is_cuda and normed_CD.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(normed_CD, weight_VD.t(), out_dtype=torch.float32)
    return kernels.wide(normed_CD @ weight_VD.t())


def head_logprobs(
    hidden_PD: Tensor, norm: Any, weight_VD: Tensor, targets_P: Tensor, *, chunk_positions: int, with_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """(logp_P in nats, d logp_p / d hidden_p as [P, D] or None); hidden states are those before the final norm."""
    eps = float(norm.variance_epsilon)
    logp_P = torch.empty(hidden_PD.shape[0], dtype=kernels.wide(hidden_PD[:0]).dtype, device=hidden_PD.device)
    grad_PD = torch.zeros_like(hidden_PD) if with_grad else None
    for start in range(0, hidden_PD.shape[0], chunk_positions):
        chunk = slice(start, start + chunk_positions)
        hidden_CD, target_C1 = hidden_PD[chunk], targets_P[chunk, None]
        normed_CD = torch.empty_like(hidden_CD)
        kernels.rms_norm(hidden_CD, norm.weight, eps, normed_CD)
        logits_CV = _logits(normed_CD, weight_VD)
        lse_C1 = logits_CV.logsumexp(1, keepdim=True)
        logp_P[chunk] = (logits_CV.gather(1, target_C1) - lse_C1).squeeze(1)
        if grad_PD is not None:
            grad_logits_CV = logits_CV.sub_(lse_C1).exp_().neg_()  # d logp / d logits = onehot - softmax
            grad_logits_CV.scatter_add_(1, target_C1, torch.ones_like(lse_C1))
            grad_normed_CD = grad_logits_CV.to(weight_VD.dtype) @ weight_VD
            kernels.rms_norm_backward_add(grad_normed_CD, hidden_CD, norm.weight, eps, grad_PD[chunk])
    return logp_P, grad_PD
