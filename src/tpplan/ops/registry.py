"""Registry: what operators are, the one place that knows them by name.

in:  an operator of a trace, by name
out: its `Operator`, or None: it may run on replicated operands alone (TP127); and its roles, which passes ask for

    aten.cumsum.default   ->   along a dim; linear in its operand
    aten.mul_.Tensor      ->   entry by entry; linear in one operand at a time
    aten.reshape.default  ->   a view; has the role "reshape"
    aten.mvlgamma.default ->   None

What a row says narrows what DTensor's rule may say; neither is believed by itself. `tests/rules/test_audit.py` runs
each operator of the table, forward and backward, for every choice of layouts that the compiler accepts, on the samples
of torch's own operator database. An operator enters the table with its audit.

A role tells passes what an operator is for them, such as "reshape" or "product". Which dim of a result is which of an
operand is for `ops/dim_map.py` to say.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

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
     "bitwise_left_shift.Tensor* bitwise_left_shift.Tensor_Scalar* bitwise_left_shift.Scalar_Tensor "
     "bitwise_right_shift.Tensor* bitwise_right_shift.Tensor_Scalar* bitwise_right_shift.Scalar_Tensor "
     "__lshift__.Scalar __lshift__.Tensor __rshift__.Scalar __rshift__.Tensor ldexp.Tensor ldexp_.default "
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
    (Operator("product", "one"), "mm.default bmm.default _grouped_mm.default dot.default mv.default _int_mm.default"),
    (Operator("product"), "linalg_solve_triangular.default"),
    (Operator("product", "mixed"), "addmm.default baddbmm.default convolution.default _scaled_mm.default "
     "_scaled_mm_v2.default"),
    (Operator("view", "first"),
     "view.default _unsafe_view.default reshape.default _reshape_alias.default expand.default transpose.int "
     "permute.default squeeze.default squeeze.dim squeeze.dims t.default view_as_complex.default "
     "view_as_real.default select.int slice.Tensor split.Tensor split_with_sizes.default unbind.int "
     "unsafe_split.Tensor diagonal.default unfold.default"),
    (Operator("view", "first", new_dim=True), "unsqueeze.default"),
    (Operator("arrangement", "first"), "flip.default roll.default repeat.default constant_pad_nd.default"),
    (Operator("arrangement"), "pixel_shuffle.default pixel_unshuffle.default im2col.default col2im.default "
     "view.dtype"),
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
# What passes ask for. An operator may have several roles, and one that isn't in the table above may have some, too.
_ROLES: Mapping[str, str] = {
    # -- the same entries: under another shape, in another order, again
    "reshape": "view.default _unsafe_view.default reshape.default",
    "strided reshape": "_reshape_alias.default",
    "strided": "as_strided.default",
    "alias": "alias.default",
    "copy": "clone.default contiguous.default lift_fresh.default",
    "detach": "detach.default",
    "cast": "_to_copy.default",
    "transposition": "transpose.int permute.default t.default mT.default",
    "transposition in place": "transpose_.default",
    "unsqueeze": "unsqueeze.default",
    "squeeze": "squeeze.default squeeze.dim squeeze.dims",
    "expand": "expand.default",
    "repeat": "repeat.default",
    "other dtype": "view.dtype",
    "pairs": "view_as_complex.default view_as_real.default",
    "to complex": "view_as_complex.default",
    "reorder": "flip.default roll.default",
    "copy into": "copy_.default",
    "part taken": "slice_copy.Tensor alias_copy.default as_strided_copy.default",  # which no model calls, see `issued`
    "slice copy": "slice_copy.Tensor",
    # -- parts of a dim, and dims of parts
    "split": "split.Tensor split_with_sizes.default unsafe_split.Tensor",
    "split by sizes": "split_with_sizes.default",
    "equal split": "split.Tensor",
    "unbind": "unbind.int",
    "select": "select.int",
    "slice": "slice.Tensor",
    "pad": "constant_pad_nd.default",
    "join": "cat.default",
    "stack": "stack.default",
    # -- entries by number
    "index": "index.Tensor",
    "indexing": "index.Tensor index_put.default* _index_put_impl_.default",
    "pick": "index.Tensor index_select.default",
    "gather": "gather.default",
    "take": "take.default",
    "row look-up": "embedding.default",
    "table": "embedding.default _embedding_bag.default",
    "bag": "_embedding_bag.default",
    "write": "index_add.default* index_copy.default* index_put.default* scatter.src* scatter.value* "
    "scatter_add.default*",
    "places": "nonzero.default",
    "choice": "argmax.default max.dim topk.default",
    # -- products
    "product": "mm.default bmm.default addmm.default baddbmm.default _int_mm.default _scaled_mm.default "
    "_scaled_mm_v2.default",
    "plain product": "mm.default addmm.default",
    "two factors": "mm.default _int_mm.default",
    "scaled product": "_scaled_mm.default _scaled_mm_v2.default",
    "sum and product": "addmm.default",
    "batched product": "bmm.default",
    "grouped product": "_grouped_mm.default",
    "product and sum": "addmm.default baddbmm.default",
    "vector product": "mv.default addmv.default dot.default",
    "convolution": "convolution.default",
    "gradients of convolution": "convolution_backward.default",
    # -- arithmetic
    "addition": "add.Tensor add_.Tensor",
    "plus": "add.Tensor",
    "times": "mul.Tensor",
    "scaling": "mul.Tensor mul.Scalar",
    "times number": "mul.Scalar",
    "quotient in place": "div_.Scalar",
    "quotient": "div.Tensor",
    "arithmetic of two": "mul.Tensor div.Tensor add.Tensor sub.Tensor",
    "plain arithmetic": "add.Tensor sub.Tensor rsub.Scalar neg.default",
    "arithmetic": "add.Tensor* sub.Tensor* mul.Tensor* div.Tensor* add.Scalar* sub.Scalar* mul.Scalar* div.Scalar* "
    "rsub.Scalar neg.default*",
    "power": "pow.Tensor_Scalar",
    # What the formulas of norms and of activations consist of; both have the first.
    "formula": "add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Scalar rsub.Tensor mul.Tensor mul.Scalar div.Tensor "
    "div.Scalar neg.default square.default sqrt.default rsqrt.default reciprocal.default pow.Tensor_Scalar "
    "silu.default sigmoid.default",
    "formula in place": "add_.Tensor add_.Scalar mul_.Tensor mul_.Scalar div_.Tensor",
    "curve": "tanh.default erf.default exp.default gelu.default",
    "silu": "silu.default",
    "gelu": "gelu.default",
    "choice of two": "where.self",
    "clamp": "clamp.default",
    "bits": "bitwise_and.Scalar bitwise_left_shift.Tensor_Scalar bitwise_or.Tensor bitwise_or_.Tensor "
    "bitwise_right_shift.Tensor_Scalar __and__.Scalar __lshift__.Scalar __or__.Tensor __rshift__.Scalar",
    # -- reductions, norms, and what else reads a dim
    "mean": "mean.dim mean.default",
    "sum": "sum.dim_IntList sum.default",
    "sum of exponentials": "logsumexp.default",
    "statistic": "mean.dim mean.default sum.dim_IntList var.correction var_mean.correction native_layer_norm.default "
    "_fused_rms_norm.default linalg_vector_norm.default",
    "moment": "mean.dim sum.dim_IntList linalg_vector_norm.default",
    "vector norm": "linalg_vector_norm.default",
    "norm": "native_layer_norm.default _fused_rms_norm.default",
    "group norm": "native_group_norm.default",
    "batch norm": "native_batch_norm.default",
    "largest": "amax.default max.default max.dim",
    "smallest": "amin.default min.default min.dim",
    "softmax": "_softmax.default",
    "safe softmax": "_safe_softmax.default",
    "gate": "glu.default",
    # Reads the dims that its arguments name, and keeps the others; what it adds comes last.
    "along": "_fft_c2c.default _fft_r2c.default _fft_c2r.default unfold.default",
    "fourier": "_fft_c2c.default _fft_r2c.default _fft_c2r.default",
    "triangle": "tril.default",
    "matrices": "tril.default triu.default",  # in the last two dims, each by itself
    "sampling": "grid_sampler_2d.default grid_sampler_3d.default",
    "accumulation": "mm.default bmm.default addmm.default baddbmm.default _grouped_mm.default mv.default addmv.default "
    "dot.default sum.default sum.dim_IntList mean.default mean.dim logsumexp.default convolution.default "
    "convolution_backward.default _softmax.default _softmax_backward_data.default native_layer_norm.default "
    "native_layer_norm_backward.default",
    # -- made anew
    "new": "new_empty.default new_zeros.default new_ones.default new_full.default",
    "fill": "empty.memory_format zeros.default ones.default full.default",
    "like": "zeros_like.default ones_like.default full_like.default empty_like.default",
    "zeros": "zeros.default new_zeros.default zeros_like.default",
    "blank": "zeros.default new_zeros.default zeros_like.default new_empty.default empty_like.default "
    "empty.memory_format",  # zeros, or what is read nowhere before it is written to
    "ones": "ones.default",
    "number": "scalar_tensor.default",
    "empty like": "empty_like.default",
    # -- random
    "dropout": "native_dropout.default bernoulli_.float",
    "coin in place": "bernoulli_.float",
}  # fmt: skip
# Operators on images, by how many dims follow that of the channels in the operand.
_IMAGES: Mapping[str, tuple[str, ...]] = {
    "pool": (
        "",
        "upsample_nearest1d _upsample_nearest_exact1d upsample_linear1d reflection_pad1d replication_pad1d",
        "max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d upsample_nearest2d "
        "_upsample_nearest_exact2d upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa "
        "_upsample_bicubic2d_aa reflection_pad2d replication_pad2d",
        "max_pool3d_with_indices avg_pool3d _adaptive_avg_pool3d adaptive_max_pool3d upsample_nearest3d "
        "_upsample_nearest_exact3d upsample_trilinear3d reflection_pad3d replication_pad3d",
    ),
    "fold": ("", "col2im", "pixel_shuffle pixel_unshuffle im2col"),
}
DRAWN_BY_SHAPE = ("aten::rand", "aten::normal_", "aten::uniform_", "aten::exponential_", "aten::bernoulli")
"""How operators begin that take one number of the stream for each entry, whatever their operands' numbers are."""
UNSET = ("aten::empty", "aten::new_empty", "aten::set_", "aten::resize_")
"""How operators begin whose results have numbers that nobody wrote."""
WITHOUT_GRADIENT = frozenset(
    f"aten::{name}" for name in ("detach", "detach_", "new_empty", "new_full", "new_ones", "new_zeros")
)
"""Operators that cut the gradient off, or read no number of what they are given."""
FUSED_ATTENTION = "_scaled_dot_product"
"""How the names of torch's fused operators of attention begin, without their namespace."""
_PACKAGE = "tpplan."


def _full_names(names: str) -> Iterator[str]:
    for name in names.split():
        base, overload = name.removesuffix("*").split(".")
        yield f"aten.{base}.{overload}"
        if name.endswith("*"):
            yield f"aten.{base}_.{overload}"


def _table() -> dict[str, Operator]:
    return {name: operator for operator, names in _ROWS for name in _full_names(names)}


TABLE: dict[str, Operator] = _table()
_KERNEL = Operator("kernel")
_DECLARED = Operator("declared", "mixed")


def lookup(name: str) -> Operator | None:
    """What the table says of an operator, by its full name; None if it isn't there.

    The kernels of tpplan have rules of their own beside them (`tpplan.kernels`), audited there.
    """
    known = TABLE.get(name) or (_KERNEL if name.startswith(_PACKAGE) else None)
    return _DECLARED if known is None and has_rule(name) else known


def _roles() -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for role, names in _ROLES.items():
        for name in _full_names(names):
            found[name].add(role)
    for role, by_dims in _IMAGES.items():
        for name in " ".join(by_dims).split():
            found[f"aten.{name}.default"].add(role)
    return {name: frozenset(roles) for name, roles in found.items()}


ROLES: dict[str, frozenset[str]] = _roles()
_NONE: frozenset[str] = frozenset()
_IMAGE_DIMS = {
    f"aten.{name}.default": n for held in _IMAGES.values() for n, names in enumerate(held) for name in names.split()
}


def has_role(name: str, *roles: str) -> bool:
    """Whether an operator, by its full name, has one of these roles."""
    return not ROLES.get(name, _NONE).isdisjoint(roles)


def is_entrywise(name: str) -> bool:
    """Whether an operator works on each entry of its operands by itself."""
    operator = lookup(name)
    return operator is not None and operator.kind == "entrywise"


def image_dims(name: str) -> int:
    """How many dims follow that of the channels in the operand of a pool or a fold."""
    return _IMAGE_DIMS[name]


def first_factor(name: str) -> int | None:
    """The argument that is the first of a product's two factors, (…, m, k) and (…, k, n); None for no product."""
    return int(has_role(name, "product and sum")) if has_role(name, "product", "grouped product") else None


def base_name(name: str) -> str:
    """An operator's name without its namespace and overload: `add` of `aten.add.Tensor`."""
    return name.split(".")[1]


__all__ = [
    "DRAWN_BY_SHAPE", "FUSED_ATTENTION", "ROLES", "TABLE", "UNSET", "WITHOUT_GRADIENT", "Operator", "base_name",
    "first_factor", "has_role", "image_dims", "is_entrywise", "lookup",
]  # fmt: skip
