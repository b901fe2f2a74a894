"""Bodies of one line, over a value split by features and over a partial one: each is equal, or refused by a finding."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCH, SEQUENCE, WIDTH, HIDDEN, OUT = 3, 5, 14, 24, 10
# Sizes of which no part on two ranks is another size.

# `h` is (BATCH, SEQUENCE, n): n = HIDDEN where it is split, OUT where it is partial; `n` is that number.
LINES = """
h.cumsum(-1)
h.cumsum(2)
h.cumsum(1)
h.cumsum(-2)
h.sigmoid().cumprod(-1)
h.sigmoid().cumprod(2)
h.cumprod(1)
h.logcumsumexp(-1)
h.logcumsumexp(2)
h.logcumsumexp(-2)
h.cummax(-1).values
h.cummax(2).values
h.cummax(1).values
h.cummin(-1).values
h.cummin(2).values
h.sort(-1).values
h.sort(2).values
h.sort().values
h.sort(1).values
h.sort(stable=True, dim=-1).values
h.msort()
h.argsort(-1)
h.argsort()
h.argsort(1)
h.topk(2).values
h.topk(2, -1).values
h.topk(2, 2).values
h.topk(2, 1).values
h.topk(2, 1).indices
h.kthvalue(2).values
h.kthvalue(2, 2).values
h.kthvalue(2, 1).values
h.median()
h.median(-1).values
h.median(2).values
h.median(1).values
h.nanmedian(-1).values
h.mode(-1).values
h.mode(2).values
h.quantile(0.5)
h.quantile(0.5, -1)
h.quantile(0.5, 2)
h.quantile(0.5, 1)
h.max()
h.min()
h.max(-1).values
h.max(2).indices
h.max(1).values
h.max(1).indices
h.amax(-1)
h.amax(2, keepdim=True)
h.amin(-1)
h.aminmax(dim=-1).max
h.aminmax(dim=1).max
h.argmax()
h.argmax(-1)
h.argmax(2)
h.argmin(1)
h.sum()
h.sum(-1)
h.sum(2, keepdim=True)
h.sum(1)
h.sum((1, 2))
h.sum((-1, -2))
h.sum((0, 1))
h.mean()
h.mean(-1)
h.mean(2, keepdim=True)
h.mean(1)
h.mean((1, -1))
h.nansum(-1)
h.nanmean(-1)
h.prod(-1)
h.prod(2)
h.prod(1)
h.prod()
h.std()
h.std(-1)
h.std(2)
h.std(1)
h.var(-1)
h.var(1)
torch.var_mean(h, -1)[0]
torch.var_mean(h, 1)[1]
torch.std_mean(h, 2)[0]
h.logsumexp(-1)
h.logsumexp(2)
h.logsumexp(1)
h.norm()
h.norm(dim=-1)
h.norm(dim=1)
h.norm(p=1, dim=-1)
h.norm(p=float("inf"), dim=2)
torch.linalg.vector_norm(h)
torch.linalg.vector_norm(h, dim=-1)
torch.linalg.vector_norm(h, dim=1)
torch.linalg.matrix_norm(h)
torch.dist(h, h * 2)
h.renorm(2, 0, 1.0)
h.renorm(2, -1, 1.0)
h.count_nonzero(-1)
h.count_nonzero()
h.all(-1)
h.any(2)
(h > 0).any()
(h > 0).all(1)
(h > 0).sum(-1)
(h > 0).sum()
(h > 0).float().mean(-1)
h.softmax(-1)
h.softmax(2)
h.softmax(1)
h.softmax(-2)
h.log_softmax(-1)
h.log_softmax(1)
F.softmin(h, -1)
F.softmin(h, 1)
F.gumbel_softmax(h.detach() * 0, hard=False).sum() * 0
F.normalize(h)
F.normalize(h, dim=-1)
F.normalize(h, dim=1)
F.layer_norm(h, (n,))
F.layer_norm(h, h.shape[-1:])
F.rms_norm(h, (n,))
F.rms_norm(h, h.shape[-1:])
F.group_norm(h, SEQUENCE)
F.group_norm(h.transpose(1, 2), 2)
F.group_norm(h.transpose(1, 2), n)
F.instance_norm(h)
F.instance_norm(h.transpose(1, 2))
F.local_response_norm(h, 2)
F.local_response_norm(h.transpose(1, 2), 2)
F.batch_norm(h.transpose(1, 2), None, None, training=True)
F.batch_norm(h, None, None, training=True)
F.glu(h)
F.glu(h, 2)
F.relu(h)
F.gelu(h)
F.silu(h)
F.elu(h)
F.celu(h)
F.selu(h)
F.mish(h)
F.softplus(h)
F.softsign(h)
F.tanhshrink(h)
F.hardtanh(h)
F.hardswish(h)
F.hardsigmoid(h)
F.hardshrink(h)
F.softshrink(h)
F.leaky_relu(h)
F.logsigmoid(h)
F.threshold(h, 0.1, 2.0)
F.relu6(h)
F.mse_loss(h, h.detach() * 2)
F.mse_loss(h, h.detach() * 2, reduction="none")
F.mse_loss(h, h.detach() * 2, reduction="sum")
F.l1_loss(h, h.detach() * 2)
F.l1_loss(h, h.detach() * 2, reduction="sum")
F.smooth_l1_loss(h, h.detach() * 2)
F.smooth_l1_loss(h, h.detach() * 2, reduction="none")
F.huber_loss(h, h.detach() * 2)
F.huber_loss(h, h.detach() * 2, reduction="none")
F.kl_div(h.log_softmax(1), (h * 2).softmax(1).detach(), reduction="batchmean")
F.kl_div(h.log_softmax(-1), (h * 2).softmax(-1).detach(), reduction="batchmean")
(h > 0).any(-1).float()
(h > 0).any().float() * h
(h > 0).all(-1).float()
(h > 0).long().sum(-1).float()
F.kl_div(h, h.sigmoid().detach())
F.kl_div(h, h.sigmoid().detach(), reduction="sum")
F.kl_div(h, h.sigmoid().detach(), reduction="none")
F.kl_div(h, h.detach(), log_target=True, reduction="mean")
F.binary_cross_entropy(h.sigmoid(), h.sigmoid().detach())
F.binary_cross_entropy(h.sigmoid(), h.sigmoid().detach(), reduction="none")
F.binary_cross_entropy_with_logits(h, h.sigmoid().detach())
F.binary_cross_entropy_with_logits(h, h.sigmoid().detach(), reduction="none")
F.cross_entropy(h.flatten(0, 1), torch.zeros(15, dtype=torch.long))
F.cross_entropy(h, torch.zeros(3, n, dtype=torch.long))
F.cross_entropy(h.transpose(1, 2), torch.zeros(3, 5, dtype=torch.long))
F.nll_loss(h.flatten(0, 1), torch.zeros(15, dtype=torch.long))
F.nll_loss(h, torch.zeros(3, n, dtype=torch.long))
F.poisson_nll_loss(h, h.detach().abs())
F.gaussian_nll_loss(h, h.detach(), h.detach().abs() + 1)
F.hinge_embedding_loss(h, h.detach().sign())
F.soft_margin_loss(h, h.detach().sign())
F.multilabel_soft_margin_loss(h.flatten(0, 1), h.flatten(0, 1).sigmoid().detach())
F.margin_ranking_loss(h, h * 2, h.detach().sign())
F.cosine_embedding_loss(h.flatten(0, 1), h.flatten(0, 1) * 2, torch.ones(15))
F.triplet_margin_loss(h, h * 2, h * 3)
F.cosine_similarity(h, h.detach() + 1, dim=-1)
F.cosine_similarity(h, h.detach() + 1, dim=1)
F.pairwise_distance(h, h.detach() + 1)
torch.cdist(h, h.detach() + 1)
torch.einsum("bsf,bsf->bs", h, h)
torch.einsum("bsf,btf->bst", h, h)
torch.einsum("bsf,bsg->bfg", h, h)
torch.einsum("bsf->bf", h)
torch.einsum("bsf->bs", h)
torch.einsum("bsf->fsb", h)
torch.einsum("bsf,bs->bf", h, h.detach().sum(-1))
torch.tensordot(h, h, dims=([2], [2]))
torch.tensordot(h, h, dims=([1], [1]))
h @ h.transpose(1, 2)
h.transpose(1, 2) @ h
h.flatten(0, 1).t() @ h.flatten(0, 1)
torch.outer(h.flatten(), h.flatten()[:3])
torch.baddbmm(h @ h.transpose(1, 2), h, h.transpose(1, 2))
torch.addcmul(h, h, h, value=0.5)
torch.addcdiv(h, h, h.detach().abs() + 1)
torch.lerp(h, h * 2, 0.3)
torch.lerp(h, h * 2, h.detach().sigmoid())
torch.dot(h.flatten(), h.flatten())
torch.kron(h[0], h[0])
torch.cross(h[..., :3], h[..., 3:6], dim=-1)
h.masked_fill(h > 0, 0.0)
h.masked_fill(h > 0, 2.0)
h.masked_fill(torch.ones(5, 1, dtype=torch.bool), 0.0)
h.masked_fill(torch.ones(n, dtype=torch.bool), 0.0)
h.masked_select(h > 0)
h.masked_scatter(h > 0, h * 2)
h[h > 0].sum()
torch.where(h > 0, h, 0.0)
torch.where(h > 0, h, h * 0.1)
torch.where(h > 0, 1.0, 0.0)
torch.where(h.isnan(), 0.0, h)
torch.where(torch.arange(n) > 3, h, 0.0)
torch.where(torch.arange(h.shape[-1]) > 3, h, 0.0)
torch.where(torch.arange(5)[:, None] > 3, h, 0.0)
h.gather(-1, torch.zeros(3, 5, 1, dtype=torch.long))
h.gather(2, torch.zeros(3, 5, 1, dtype=torch.long))
h.gather(1, torch.zeros(3, 1, n, dtype=torch.long))
h.gather(-1, h.argsort(-1))
h.gather(1, h.argsort(1))
h.take_along_dim(h.argmax(-1, keepdim=True), -1)
h.take(torch.tensor([0, 3]))
h.index_select(-1, torch.tensor([0, 3]))
h.index_select(2, torch.tensor([0, 3]))
h.index_select(1, torch.tensor([0, 3]))
h[..., torch.tensor([0, 3])]
h[:, torch.tensor([0, 3])]
h[:, [1, 0]]
h[..., [1, 0]]
h.scatter(-1, torch.zeros(3, 5, 1, dtype=torch.long), 1.0)
h.scatter(2, torch.zeros(3, 5, 1, dtype=torch.long), 1.0)
h.scatter(1, torch.zeros(3, 1, n, dtype=torch.long), 1.0)
h.scatter_add(-1, torch.zeros(3, 5, n, dtype=torch.long), h)
h.scatter_add(1, torch.zeros(3, 5, n, dtype=torch.long), h)
h.scatter_reduce(1, torch.zeros(3, 5, n, dtype=torch.long), h, "amax")
h.scatter_reduce(-1, torch.zeros(3, 5, n, dtype=torch.long), h, "sum")
h.index_add(-1, torch.tensor([0]), h[..., :1])
h.index_add(1, torch.tensor([0]), h[:, :1])
h.index_copy(-1, torch.tensor([0]), h[..., :1])
h.index_copy(1, torch.tensor([0]), h[:, :1])
h.index_fill(-1, torch.tensor([0]), 0.0)
h.index_fill(1, torch.tensor([0]), 0.0)
h.index_put((torch.tensor([0]),), h[:1])
h.select_scatter(h[..., 0] * 2, -1, 0)
h.select_scatter(h[:, 0] * 2, 1, 0)
h.slice_scatter(h[:, :2] * 2, 1, 0, 2)
h.diagonal(dim1=1, dim2=2)
h.diagonal(dim1=0, dim2=1)
torch.diag_embed(h)
h.tril()
h.triu()
h.transpose(1, 2).tril()
h.flip(-1)
h.flip(2)
h.flip(1)
h.fliplr()
h.roll(1, -1)
h.roll(1, 2)
h.roll(1, 1)
h.roll(1)
h.rot90(1, (1, 2))
torch.trapezoid(h)
torch.trapezoid(h, dim=1)
torch.cumulative_trapezoid(h, dim=1)
torch.diff(h)
torch.diff(h, dim=2)
torch.diff(h, dim=1)
torch.gradient(h, dim=1)[0]
torch.gradient(h, dim=-1)[0]
F.pad(h, (1, 0))
F.pad(h, (0, 0, 1, 0))
F.pad(h, (0, 0, 1, 0), value=2.0)
F.pad(h, (1, 1), mode="reflect")
F.pad(h.transpose(1, 2), (1, 1), mode="reflect")
F.pad(h.transpose(1, 2), (1, 1), mode="circular")
F.pad(h, (1, 1), mode="replicate")
h.unfold(-1, 2, 2)
h.unfold(1, 2, 1)
F.avg_pool1d(h, 2)
F.avg_pool1d(h.transpose(1, 2), 2)
F.max_pool1d(h, 2)
F.max_pool1d(h.transpose(1, 2), 2)
F.adaptive_avg_pool1d(h, 2)
F.adaptive_avg_pool1d(h.transpose(1, 2), 2)
F.adaptive_max_pool1d(h.transpose(1, 2), 2)
F.interpolate(h, scale_factor=2.0)
F.interpolate(h.transpose(1, 2), scale_factor=2.0)
F.interpolate(h.transpose(1, 2), size=7, mode="linear")
F.pixel_shuffle(h[:, None, :4, :4].expand(3, 4, 4, 4), 2)
F.one_hot(h.argmax(-1), n)
F.one_hot((h > 0).long(), 2)
F.conv1d(h.transpose(1, 2), torch.ones(n, 1, 2), groups=n)
F.conv1d(h.transpose(1, 2), torch.ones(2, n, 2))
F.conv1d(h, torch.ones(5, 1, 2), groups=5)
h.view(3, 5, 2, -1).sum(2)
h.view(3, 5, -1, 2).sum(-1)
h.view(3, 5, 2, -1).transpose(2, 3).reshape(3, 5, -1)
h.reshape(15, -1)
h.reshape(-1)
h.unflatten(-1, (2, -1)).flatten(2)
h.flatten(1)
h.chunk(2, -1)[0]
h.chunk(2, -1)[0] * h.chunk(2, -1)[1]
h.split(5, -1)[0]
h.tensor_split(3, -1)[0]
h.unbind(-1)[0]
h.unbind(1)[0]
h.select(-1, 0)
h.select(2, -1)
h.select(1, 0)
h.narrow(-1, 0, 2)
h.narrow(1, 0, 2)
h[..., 0]
h[..., -1]
h[..., 1:]
h[..., ::2]
h[..., 1::2]
h[:, ::2]
h[:, -1]
h[..., :n // 2]
h[..., : h.shape[-1] // 2]
h[..., None]
h.repeat(1, 1, 2)
h.repeat(1, 2, 1)
h.repeat_interleave(2, -1)
h.repeat_interleave(2, 1)
h.expand(2, 3, 5, n)
h.expand(2, -1, -1, -1)
h.tile(2)
torch.cat([h, h], -1)
torch.cat([h, h], 2)
torch.cat([h, h], 1)
torch.cat([h, torch.zeros(3, 5, 1)], -1)
torch.cat([h, torch.zeros(3, 1, n)], 1)
torch.stack([h, h], -1)
torch.stack([h, h], 2)
torch.stack([h, h], -2)
torch.stack([h, h])
torch.stack([h, h * 2]).sum(0)
torch.stack([h, h * 2]).amax(0)
torch.maximum(h, h * 2)
torch.minimum(h, h.detach() + 1)
torch.fmax(h, h * 2)
torch.hypot(h, h * 2)
torch.atan2(h, h * 2)
torch.logaddexp(h, h * 2)
torch.copysign(h, h.detach() * 2)
torch.fmod(h, 0.3)
torch.remainder(h, 0.3)
h + 1
h - 1
1 - h
h * 2
h / 2
2 / (h.abs() + 1)
h.detach() // 0.5
h ** 2
2 ** h
h.abs() ** h.detach().abs()
h * h
h + h
h - h * 0.5
h - h.shape[-1]
h / h.shape[-1]
h * h.size(2)
h / h.numel()
h.sum(-1) / h.shape[-1]
h.sum(-1, keepdim=True) / n
h - h.mean(-1, keepdim=True)
h - h.mean(1, keepdim=True)
h / h.sum(-1, keepdim=True)
h / h.norm(dim=-1, keepdim=True)
h * h.mean(-1, keepdim=True).sigmoid()
h + h.sum(-1, keepdim=True)
h + h.sum(1, keepdim=True)
h + torch.arange(n)
h + torch.arange(h.shape[-1])
h * torch.arange(5)[:, None]
h * torch.linspace(0, 1, n)
h * torch.ones(n)
h + torch.eye(n)[0]
h + torch.zeros_like(h)
h * torch.ones_like(h)
h + torch.full_like(h, 0.5)
h + h.new_ones(n)
h + h.new_ones(h.shape)
h + h.new_zeros(3, 5, n)
h.clamp(min=0)
h.clamp(-0.5, 0.5)
h.clamp_min(0.1)
h.clamp(h.detach() - 1, h.detach() + 1)
h.abs()
h.neg()
-h
h.sign()
h.exp()
h.exp2()
h.expm1()
h.abs().log1p()
h.abs().sqrt()
(h.abs() + 1).rsqrt()
(h.abs() + 1).reciprocal()
(h.abs() + 1).log()
h.sin()
h.cos()
h.tan()
h.sinh()
h.cosh()
h.asinh()
h.atan()
h.erf()
h.erfc()
h.sigmoid().logit()
h.tanh().atanh()
h.sigmoid().erfinv()
h.tanh()
h.sigmoid()
h.sinc()
h.frac()
h.floor()
h.ceil()
h.round()
h.trunc()
h.square()
h.pow(3)
h.digamma()
(h.abs() + 1).lgamma()
h.nan_to_num()
h.deg2rad()
torch.special.entr(h.sigmoid())
torch.special.i0e(h)
torch.special.ndtr(h)
torch.special.log_ndtr(h)
torch.special.expit(h)
torch.xlogy(h.abs() + 1, h.abs() + 1)
torch.heaviside(h.detach(), torch.ones(()))
torch.polar(h.abs(), h).real
torch.complex(h, h * 2).abs()
torch.view_as_complex(h.unflatten(-1, (-1, 2))).abs()
torch.view_as_real(torch.complex(h, h * 2)).flatten(2)
h.float().double()
h.half().float()
h.int()
h.long().float()
h.bool()
h.to(torch.float32).to(h.dtype)
h.type_as(torch.zeros((), dtype=torch.float32))
h > 0
h >= 0.5
h == 0
h != h
h.eq(h * 2)
h.isnan()
h.isinf()
h.isfinite()
h.signbit()
(h > 0) & (h < 1)
(h > 0) | (h < -1)
~(h > 0)
(h > 0).float() * h
h.detach()
h.detach() * 2 + h
h.clone()
h.contiguous()
h.transpose(1, 2).contiguous()
h.permute(2, 0, 1)
h.movedim(-1, 0)
h.mT
h.unsqueeze(-1).squeeze(-1)
h.unsqueeze(1).squeeze()
h.squeeze(0)
h.clone().add_(1)
h.clone().mul_(2)
h.clone().mul_(h)
h.clone().sub_(h * 0.5)
h.clone().div_(2)
h.clone().relu_()
h.clone().clamp_(0)
h.clone().zero_() + h
h.clone().fill_(2.0) + h
h.clone().copy_(h * 2)
h.clone().masked_fill_(h > 0, 0.0)
h.clone().cumsum_(-1)
h.clone().cumsum_(1)
h.clone().exp_()
h.clone().sigmoid_()
h.clone().floor_()
h.clone().neg_()
h.clone().pow_(2)
h.clone().add_(h, alpha=0.5)
h.clone().addcmul_(h, h)
h.clone().index_add_(1, torch.tensor([0]), h[:, :1])
h.clone().scatter_(1, torch.zeros(3, 1, n, dtype=torch.long), 1.0)
h.clone().fill_diagonal_(0.0) if h.dim() == 2 else h.flatten(0, 1).clone().fill_diagonal_(0.0)
torch.bucketize(h, torch.tensor([0.0, 0.5]))
torch.searchsorted(torch.tensor([0.0, 0.5]), h)
torch.histc(h)
torch.bincount((h > 0).flatten().long())
torch.unique(h)
torch.corrcoef(h[0])
torch.cov(h[0])
torch.nn.functional.scaled_dot_product_attention(h, h, h)
F.scaled_dot_product_attention(h.transpose(1, 2), h.transpose(1, 2), h.transpose(1, 2))
F.scaled_dot_product_attention(h, h, h, is_causal=True)
F.linear(h, torch.ones(4, n))
F.linear(h, torch.ones(4, h.shape[-1]))
F.bilinear(h, h, torch.ones(2, n, n))
F.embedding(torch.tensor([0, 1]), h[0])
F.dropout(h, 0.5, training=False)
F.alpha_dropout(h, 0.5, training=False)
F.channel_shuffle(h.transpose(1, 2)[..., None], 2)
F.prelu(h, torch.full((1,), 0.3))
F.prelu(h.transpose(1, 2), torch.full((n,), 0.3))
F.rrelu(h)
torch.addmm(torch.ones(15, 15), h.flatten(0, 1), h.flatten(0, 1).t(), beta=0.5, alpha=2)
torch.bmm(h, h.transpose(1, 2)).softmax(-1)
torch.linalg.norm(h, dim=-1)
torch.linalg.matrix_power(h @ h.transpose(1, 2), 2)
torch.linalg.inv(h @ h.transpose(1, 2) + torch.eye(5) * 9)
torch.linalg.cross(h[..., :3], h[..., :3] * 2 + 1)
torch.fft.rfft(h).abs()
torch.fft.rfft(h, dim=1).abs()
torch.combinations(h[0, 0])
torch.cartesian_prod(h[0, 0, :2], h[0, 0, 2:4])
torch.meshgrid(h[0, 0], h[0, 1], indexing="ij")[0]
torch.broadcast_to(h, (2, 3, 5, n))
torch.hstack([h, h])
torch.vstack([h, h])
torch.dstack([h, h])
torch.block_diag(h[0], h[1])
torch.nanquantile(h, 0.5, dim=-1)
torch.logdet(h @ h.transpose(1, 2) + torch.eye(5) * 9)
torch.clip(h, -1, 1)
torch.ldexp(h, torch.ones((), dtype=torch.int))
torch.float_power(h.abs() + 1, 2)
torch.nextafter(h.detach(), h.detach() * 2)
torch.rsub(h, h * 2, alpha=3)
torch.sub(h, h * 0.5, alpha=2)
torch.true_divide(h, h.detach().abs() + 1)
torch.floor_divide(h.detach(), 0.3)
torch.positive(h)
torch.absolute(h)
torch.gcd((h * 9).int(), (h * 6).int())
torch.bitwise_and((h * 9).int(), 3)
torch.logical_xor(h > 0, h > 1)
"""

# Of several statements: `h` is written to, and is the result.
STATEMENTS = (
    "h[..., 0] = 0",
    "h[..., -1] = 0",
    "h[:, 0] = 0",
    "h[:, 1:] = h[:, :-1].clone()",
    "h[..., 1:] = h[..., :-1].clone()",
    "h[h > 0] = 0",
    "h[:, [0, 2]] = 1.0",
    "h[..., :3] *= 2",
    "h[:, :3] *= 2",
    "h += 1",
    "h *= 2",
    "h -= h.mean(-1, keepdim=True)",
    "h[..., n // 2 :] = 0",
    "h[..., h.shape[-1] // 2 :] = 0",
    "a, b = h.chunk(2, -1); h = a - b",
    "a, b = h.chunk(2, -1); h = (b - a) if h.shape[-1] == n else (a - b)",
    "a = h * 2; b = h * 3; a, b = (a, b) if h.shape[-1] > 13 else (b, a); h = a - b",
    "a = h.sin(); b = h.cos(); a, b = (a, b) if h.shape[-1] == n else (b, a); h = a / (b + 2)",
    "h = h * 2 if h.shape[-1] > 13 else h * 3",
    "h = h.sum(1) if h.shape[-1] == n else h.sum(1) * 1",
)


def _function(source: str) -> Callable[[Tensor, int], Tensor]:
    scope = {"torch": torch, "F": F, "SEQUENCE": SEQUENCE}
    exec(source, scope)
    return scope["body"]  # type: ignore


def body(line: str) -> Callable[[Tensor, int], Tensor]:
    """The function that a line is."""
    if line in STATEMENTS:
        indented = "\n".join(f"    {part.strip()}" for part in line.split(";"))
        return _function(f"def body(h, n):\n    h = h.clone()\n{indented}\n    return h")
    return _function(f"def body(h, n):\n    return {line}")


class Split(nn.Module):
    """A body over features that the same module has split, so that nothing can be resharded before it."""

    def __init__(self, line: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Parameter(torch.randn(HIDDEN, WIDTH) / 4)
        self.body = body(line)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x @ self.up.t(), HIDDEN)


class Summed(nn.Module):
    """A body over a product that is partial, in the module that makes it."""

    def __init__(self, line: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Parameter(torch.randn(HIDDEN, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(OUT, HIDDEN) / 4)
        self.body = body(line)

    def forward(self, x: Tensor) -> Tensor:
        return self.body((x @ self.up.t()) @ self.down.t(), OUT)


class Between(nn.Module):
    """A body between two layers."""

    def __init__(self, line: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, OUT)
        self.body = body(line)
        made = self.body(torch.randn(BATCH, SEQUENCE, HIDDEN), HIDDEN)
        self.fits = made.is_floating_point() and made.dim() > 0 and made.shape[-1] == HIDDEN

    def forward(self, x: Tensor) -> Tensor:
        made = self.body(self.up(x), HIDDEN)
        return self.down(made) if self.fits else made


MODELS: tuple[type[nn.Module], ...] = (Split, Summed, Between)
ALL = (*(line for line in LINES.strip().splitlines() if line), *STATEMENTS)
