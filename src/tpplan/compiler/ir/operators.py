"""Operators: the one table of those that may run on sharded or partial operands, each held against numbers.

in:  an operator of a trace
out: its `Operator`, or None: it may run on replicated operands alone (TP127)

    aten.cumsum.default   ->   along a dim; linear in its operand; dims: argument 1
    aten.mul_.Tensor      ->   entry by entry; linear in one operand at a time
    aten.mvlgamma.default ->   None

What a row says narrows what DTensor's rule may say; neither is believed by itself. `tests/rules/test_audit.py` runs
each operator of the table, forward and backward, for every choice of layouts that the compiler accepts, on the samples
of torch's own operator database. An operator enters the table with its audit.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

from tpplan.compat import OpOverload, schema_defaults, schema_keywords
from tpplan.ops.shardings import has_rule

Kind = Literal[
    "entrywise", "along", "reduction", "product", "view", "arrangement", "picking", "random", "new", "kernel",
    "declared",
]  # fmt: skip
Linear = Literal["", "first", "one", "all", "mixed"]


@dataclass(frozen=True, slots=True)
class Operator:
    """What the compiler knows of an operator.

    Attributes:
        kind: "entrywise"; "along" a dim, whose entries it reads together; a "reduction"; a "product"; a "view" (the
            same entries under another shape or order); an "arrangement" (entries copied to other places); "picking" or
            writing entries by number; "random"; "new" (made beside another tensor); one of our own "kernel"s; or
            "declared" by the user, with a rule.
        linear: in which operands it is linear, so that partial ones make a partial result: none, the "first" alone,
            "one" at a time, "all" together, or "mixed" (by DTensor's rule, or our own, for that operator).
        new_dim: whether its dims count in the result's dims, as of `unsqueeze` and `stack`.
    """

    kind: Kind
    linear: Linear = ""
    new_dim: bool = False

    @property
    def random(self) -> bool:
        """Whether it draws random numbers."""
        return self.kind == "random"

    def takes_partial(self, operands: tuple[bool, ...]) -> bool:
        """Whether it may meet partial operands; for each operand, in order, whether it is one."""
        if not any(operands) or self.linear == "mixed":
            return True
        if self.linear == "all":
            return all(operands)
        if self.linear == "one":
            return sum(operands) == 1
        return self.linear == "first" and operands[0] and not any(operands[1:])


# The overloads of a line are all of one kind. A name that ends in `*` stands for its in-place form as well.
_ROWS: tuple[tuple[Operator, str], ...] = (
    (Operator("entrywise", "all"), "add.Tensor* sub.Tensor*"),
    (Operator("entrywise", "one"), "mul.Tensor*"),
    (Operator("entrywise", "first"),
     "mul.Scalar* div.Tensor* div.Scalar* neg.default* clone.default _to_copy.default detach.default alias.default "
     "lift_fresh.default contiguous.default masked_fill.Scalar* conj_physical.default* _conj.default "
     "positive.default tril.default triu.default"),
    (Operator("entrywise", "mixed"), "where.self copy_.default lerp.Scalar* lerp.Tensor*"),
    (Operator("entrywise"),
     "abs.default* acos.default* acosh.default* add.Scalar* addcdiv.default* addcmul.default* angle.default "
     "asin.default* asinh.default* atan.default* atan2.default* atanh.default* bitwise_and.Tensor* "
     "bitwise_and.Scalar* bitwise_not.default* bitwise_or.Tensor* bitwise_or.Scalar* bitwise_xor.Tensor* "
     "bitwise_xor.Scalar* ceil.default* celu.default* clamp.default* clamp.Tensor* clamp_max.default* "
     "clamp_max.Tensor* clamp_min.default* clamp_min.Tensor* copysign.Tensor* copysign.Scalar* cos.default* "
     "cosh.default* deg2rad.default* digamma.default* div.Tensor_mode* div.Scalar_mode* elu.default* eq.Scalar* "
     "eq.Tensor* erf.default* erfc.default* erfinv.default* exp.default* exp2.default* expm1.default* "
     "float_power.Tensor_Scalar float_power.Tensor_Tensor floor.default* fmax.default fmin.default fmod.Scalar* "
     "fmod.Tensor* frac.default* ge.Scalar* ge.Tensor* gelu.default* gt.Scalar* gt.Tensor* hardsigmoid.default* "
     "hardswish.default* hardtanh.default* heaviside.default* hypot.default* i0.default* igamma.default* "
     "igammac.default* isfinite.default isinf.default isnan.default isneginf.default isposinf.default "
     "_prelu_kernel.default "
     "leaky_relu.default* le.Scalar* le.Tensor* lgamma.default* log.default* log10.default* log1p.default* "
     "log2.default* log_sigmoid_forward.default logaddexp.default logaddexp2.default logical_and.default* "
     "logical_not.default* logical_or.default* logical_xor.default* logit.default* lt.Scalar* lt.Tensor* "
     "masked_fill.Tensor* maximum.default minimum.default mish.default* nan_to_num.default* ne.Scalar* ne.Tensor* "
     "nextafter.default* "
     "pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor pow_.Scalar pow_.Tensor rad2deg.default* reciprocal.default* "
     "relu.default* relu6.default* remainder.Scalar* remainder.Tensor* round.default* round.decimals* rsqrt.default* "
     "rsub.Scalar selu.default* sgn.default* sigmoid.default* sign.default* signbit.default silu.default* "
     "sin.default* sinc.default* sinh.default* softplus.default softshrink.default sqrt.default* square.default* "
     "sub.Scalar* tan.default* tanh.default* threshold.default* trunc.default* xlogy.Tensor* xlogy.Scalar_Other* "
     "xlogy.Scalar_Self special_entr.default special_erfcx.default special_i0e.default special_i1.default "
     "special_i1e.default special_log_ndtr.default special_xlog1py.default special_zeta.default "
     "gelu_backward.default sigmoid_backward.default silu_backward.default tanh_backward.default "
     "threshold_backward.default ones_like.default full_like.default empty_like.default zeros_like.default "
     "fill_.Scalar zero_.default"),
    (Operator("along"),
     "_softmax.default _log_softmax.default _safe_softmax.default cummax.default cummin.default cumprod.default* "
     "logcumsumexp.default sort.default sort.stable topk.default kthvalue.default mode.default "
     "native_layer_norm.default _fused_rms_norm.default native_group_norm.default native_batch_norm.default "
     "glu.default "
     "max_pool2d_with_indices.default max_pool3d_with_indices.default avg_pool2d.default avg_pool3d.default "
     "_adaptive_avg_pool2d.default _adaptive_avg_pool3d.default adaptive_max_pool2d.default "
     "adaptive_max_pool3d.default upsample_nearest1d.default upsample_nearest2d.default upsample_nearest3d.default "
     "_upsample_nearest_exact1d.default _upsample_nearest_exact2d.default _upsample_nearest_exact3d.default "
     "upsample_linear1d.default upsample_bilinear2d.default upsample_bicubic2d.default upsample_trilinear3d.default "
     "_upsample_bilinear2d_aa.default _upsample_bicubic2d_aa.default reflection_pad1d.default "
     "reflection_pad2d.default reflection_pad3d.default replication_pad1d.default replication_pad2d.default "
     "replication_pad3d.default grid_sampler_2d.default grid_sampler_3d.default"),
    (Operator("along", "first"),
     "cumsum.default* _softmax_backward_data.default _log_softmax_backward_data.default "
     "_fft_c2c.default _fft_r2c.default _fft_c2r.default"),
    (Operator("reduction", "first"), "sum.default sum.dim_IntList mean.default mean.dim"),
    (Operator("reduction"),
     "all.default all.dim all.dims amax.default amin.default any.default any.dim any.dims argmax.default "
     "argmin.default linalg_vector_norm.default logsumexp.default max.default max.dim min.default min.dim "
     "mse_loss.default prod.default prod.dim_int std.correction var.correction var_mean.correction median.dim "
     "nll_loss_forward.default nll_loss2d_forward.default"),
    (Operator("product", "one"), "mm.default bmm.default _grouped_mm.default dot.default mv.default"),
    (Operator("product"), "linalg_solve_triangular.default"),
    (Operator("product", "mixed"), "addmm.default baddbmm.default convolution.default"),
    (Operator("view", "first"),
     "view.default _unsafe_view.default reshape.default _reshape_alias.default expand.default transpose.int "
     "permute.default squeeze.default squeeze.dim squeeze.dims t.default view_as_complex.default "
     "view_as_real.default select.int slice.Tensor split.Tensor split_with_sizes.default unbind.int "
     "unsafe_split.Tensor diagonal.default"),
    (Operator("view", "first", new_dim=True), "unsqueeze.default"),
    (Operator("arrangement", "first"), "flip.default roll.default repeat.default constant_pad_nd.default"),
    (Operator("arrangement"), "pixel_shuffle.default pixel_unshuffle.default im2col.default col2im.default"),
    (Operator("arrangement", "all"), "cat.default"),
    (Operator("arrangement", "all", new_dim=True), "stack.default"),
    (Operator("picking", "first"), "gather.default index.Tensor index_select.default"),
    (Operator("picking", "mixed"),
     "embedding.default _embedding_bag.default index_add.default* "
     "index_copy.default* index_put.default* scatter_add.default* scatter.src* scatter.value*"),
    (Operator("random"),
     "bernoulli.default bernoulli_.float native_dropout.default rand_like.default randn_like.default normal_.default "
     "uniform_.default"),
    (Operator("new"), "new_empty.default new_zeros.default new_ones.default new_full.default"),
)  # fmt: skip
_PACKAGE = "tpplan."
DIMS = frozenset(("dim", "dims", "dim0", "dim1", "dim2", "dimension"))


def _table() -> dict[str, Operator]:
    found: dict[str, Operator] = {}
    for operator, names in _ROWS:
        for name in names.split():
            found[f"aten.{name.removesuffix('*')}"] = operator
            if name.endswith("*"):
                base, overload = name[:-1].split(".")
                found[f"aten.{base}_.{overload}"] = operator
    return found


TABLE: dict[str, Operator] = _table()
_KERNEL = Operator("kernel")
_DECLARED = Operator("declared", "mixed")


def lookup(name: str) -> Operator | None:
    """What the table says of an operator, by its full name; None if it isn't there.

    The kernels of tpplan have rules of their own beside them (`tpplan.kernels`), audited there.
    """
    known = TABLE.get(name) or (_KERNEL if name.startswith(_PACKAGE) else None)
    return _DECLARED if known is None and has_rule(name) else known


@functools.cache
def _dims_of(target: OpOverload) -> tuple[tuple[int, str, Any], ...]:
    """The arguments that are dims: their places (-1 if passed by name), names and defaults."""
    arguments, keywords = enumerate(schema_defaults(target)), schema_keywords(target)
    return tuple((-1 if name in keywords else i, name, default) for i, (name, default) in arguments if name in DIMS)


def with_dims_from_the_front(
    target: OpOverload, arguments: tuple[Any, ...], keywords: tuple[tuple[str, Any], ...], rank: int
) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]:
    """A call's arguments with each dim, the ones left out too, counted from the front of `rank` dims."""
    for position, name, default in _dims_of(target):
        if position < 0:
            dim = dict(keywords).get(name, default)
            if _is_negative(dim):
                keywords = (*(k for k in keywords if k[0] != name), (name, _from_the_front(dim, rank)))
            continue
        if position >= len(arguments):
            if not _is_negative(default):
                continue
            missing = schema_defaults(target)[len(arguments) : position + 1]
            arguments = (*arguments, *(value for _, value in missing))
        if _is_negative(arguments[position]):
            arguments = (*arguments[:position], _from_the_front(arguments[position], rank), *arguments[position + 1 :])
    return arguments, keywords


def _is_negative(dim: Any) -> bool:
    if isinstance(dim, (tuple, list)):
        return any(map(_is_negative, dim))  # pyright: ignore[reportUnknownArgumentType]
    return type(dim) is int and dim < 0


def _from_the_front(dim: Any, rank: int) -> Any:
    return tuple(d % max(rank, 1) for d in dim) if isinstance(dim, (tuple, list)) else dim % max(rank, 1)  # pyright: ignore


__all__ = ["DIMS", "TABLE", "Operator", "lookup", "with_dims_from_the_front"]
