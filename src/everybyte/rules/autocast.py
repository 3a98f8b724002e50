"""Autocast: which ops run in half precision, which in single, and whose casts are kept.

PyTorch's own autocast passes meta tensors by. It is a layer of its dispatcher above autograd, so that what is saved for
backward is the cast; and it reaches into functions that are composed in C++, and into backward where that runs inside
the `with` block. So the same layer is used here: while a trace runs, its kernels for the traced device are replaced by
ones that cast traced tensors, and whether the layer is on stays PyTorch's affair.

Followed are `ATen/autocast_mode.h` (the lists of the GPU and what each policy does) and `ATen/autocast_mode.cpp` (those
of the CPU, and the cache) of PyTorch 2.13.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

import torch
from torch.library import Library
from torch.utils._pytree import tree_map_only

from ..attribution import user_line

aten: Final = torch.ops.aten

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""An op and its arguments."""

Policy = Callable[["Autocast", Any, tuple[Any, ...], dict[str, Any]], Call]
"""What autocast does with a call."""


# -- policies ----------------------------------------------------------------------------------------------------------


def lower_precision(autocast: Autocast, op: Any, args: Any, kwargs: Any) -> Call:
    """Runs in the region's dtype."""
    return op, *autocast.cast(autocast.dtype, args, kwargs)


def single(autocast: Autocast, op: Any, args: Any, kwargs: Any) -> Call:
    """Runs in single precision."""
    return op, *autocast.cast(torch.float32, args, kwargs)


def single_by_dtype(autocast: Autocast, op: Any, args: Any, kwargs: Any) -> Call:
    """Casts by its own `dtype` argument, inside the kernel where that can: to single precision, unless one is given."""
    given = kwargs.get("dtype") is not None or any(isinstance(arg, torch.dtype) for arg in args)
    if given or not autocast.takes(args[0] if args else kwargs.get("input")):
        return op, args, kwargs
    return op, args, {**kwargs, "dtype": torch.float32}


def single_by_overload(autocast: Autocast, op: Any, args: Any, kwargs: Any) -> Call:
    """Has no `dtype` argument, but an overload that does."""
    tensor, p, *rest = args if len(args) > 1 else (*args, 2)
    dtype = torch.float32 if autocast.takes(tensor) else tensor.dtype
    return _WITH_DTYPE[op], (tensor, p, *rest), {**kwargs, "dtype": dtype}


_WITH_DTYPE: Final = {
    aten.norm.Scalar: aten.norm.ScalarOpt_dtype,
    aten.norm.ScalarOpt_dim: aten.norm.ScalarOpt_dim_dtype,
}


def widest(autocast: Autocast, op: Any, args: Any, kwargs: Any) -> Call:
    """Runs in the region's dtype, or in single precision if one of its tensors has that (`prioritize`)."""
    dtypes = {tensor.dtype for tensor in _tensors((*args, *kwargs.values())) if autocast.takes(tensor)}
    if foreign := dtypes - {torch.float32, autocast.dtype}:
        raise RuntimeError(
            f"{user_line()}: {op}: Unexpected floating ScalarType in at::autocast::prioritize: "
            f"{', '.join(map(str, foreign))} where autocast runs in {autocast.dtype}; cast it before"
        )
    return op, *autocast.cast(torch.float32 if torch.float32 in dtypes else autocast.dtype, args, kwargs)


def banned(autocast: Autocast, op: Any, args: Any, kwargs: Any) -> Call:
    """Refused, as in a real run."""
    if any(autocast.takes(arg) for arg in args):
        raise RuntimeError(
            f"{user_line()}: torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast; use "
            "binary_cross_entropy_with_logits or BCEWithLogitsLoss, without the sigmoid before it"
        )
    return op, args, kwargs


def flattened(autocast: Autocast, op: Any, args: Any, kwargs: Any) -> Call:
    """Recurrent layers by cuDNN run in half precision, whatever the region's dtype, on a flat copy of their weights.

    `ATen/cudnn/AutocastRNN.cpp`. The copy is made at every call, and its history leads back to the weights.
    """
    input, weights, stride, buffer, hx, cx, *rest = args
    if autocast.takes(weights[0]) and weights[0].dtype != torch.float16:
        sizes = [weight.numel() for weight in weights]
        buffer = weights[0].new_zeros(sum(sizes), dtype=torch.float16)
        parts = [part.view_as(weight).detach() for part, weight in zip(buffer.split(sizes), weights, strict=True)]
        weights = [part.copy_(weight) for part, weight in zip(parts, weights, strict=True)]
    (input, hx, cx), _ = autocast.cast(torch.float16, (input, hx, cx), {})
    return op, (input, weights, stride, buffer, hx, cx, *rest), kwargs


# -- lists -------------------------------------------------------------------------------------------------------------


def _table(device: str, lists: Mapping[Policy, str]) -> dict[str, Policy]:
    """Op -> policy, of those ops that this version's autocast knows: they come and go.

    Builds without cuDNN do not know its recurrent layers. Ops of named tensors, which 2.13 gave up, are not traced.
    """
    named = {name: policy for policy, names in lists.items() for name in names.split()}
    known = {name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names() if _has(name, device)}
    return {name: policy for name, policy in named.items() if name in known | {"_cudnn_rnn"}}


def _has(name: str, device: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, f"Autocast{device}")


CUDA: Final = _table(
    "CUDA",
    {
        lower_precision: """
            _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
            conv_transpose3d.input convolution cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr
            matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
            _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
            _scaled_dot_product_flash_attention scaled_dot_product_attention
        """,
        single: """
            acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
            pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim
            nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
            hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
            multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
            binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
            _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
            _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
            upsample_bicubic2d _upsample_bicubic2d_aa linalg_matrix_sqrth
        """,
        single_by_dtype: """
            prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
            linalg_matrix_norm.str_ord sum sum.dim_IntList
        """,
        single_by_overload: "norm.Scalar norm.ScalarOpt_dim",
        widest: "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add",
        banned: "binary_cross_entropy",
        flattened: "_cudnn_rnn",
    },
)
"""Op -> policy on a GPU; an op that is not here runs in the dtypes that it is given."""

CPU: Final = _table(
    "CPU",
    {
        lower_precision: """
            conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding bmm mm linalg_vecdot baddbmm addmm
            _addmm_activation addbmm linear _convolution.deprecated matmul conv_tbc mkldnn_rnn_layer conv_transpose1d
            conv_transpose2d.input conv_transpose3d.input prelu scaled_dot_product_attention
            _native_multi_head_attention
        """,
        single: """
            avg_pool3d binary_cross_entropy grid_sampler polar prod prod.dim_int quantile quantile.scalar nanquantile
            nanquantile.scalar stft stft.center cdist grid_sampler_2d _grid_sampler_2d_cpu_fallback grid_sampler_3d
            trace view_as_complex cholesky cholesky_inverse cholesky_solve inverse lu_solve orgqr ormqr pinverse
            max_pool3d max_unpool2d max_unpool3d adaptive_avg_pool3d reflection_pad1d reflection_pad2d
            replication_pad1d replication_pad2d replication_pad3d mse_loss cosine_embedding_loss nll_loss nll_loss2d
            hinge_embedding_loss poisson_nll_loss smooth_l1_loss cross_entropy_loss l1_loss huber_loss
            margin_ranking_loss soft_margin_loss triplet_margin_loss multi_margin_loss ctc_loss.IntList ctc_loss.Tensor
            kl_div multilabel_margin_loss binary_cross_entropy_with_logits fft_fft fft_ifft fft_fft2 fft_ifft2 fft_fftn
            fft_ifftn fft_rfft fft_irfft fft_rfft2 fft_irfft2 fft_rfftn fft_irfftn fft_hfft fft_ihfft linalg_cond
            linalg_cond.p_str linalg_matrix_rank linalg_matrix_rank.tol_tensor linalg_matrix_rank.atol_rtol_tensor
            linalg_matrix_rank.atol_rtol_float linalg_solve linalg_cholesky linalg_svdvals linalg_eigvals
            linalg_eigvalsh linalg_inv linalg_householder_product linalg_tensorinv linalg_tensorsolve
            fake_quantize_per_tensor_affine geqrf _lu_with_info qr svd triangular_solve fractional_max_pool2d
            fractional_max_pool3d adaptive_max_pool3d multilabel_margin_loss_forward linalg_qr linalg_cholesky_ex
            linalg_svd linalg_eig linalg_eigh linalg_lstsq linalg_inv_ex linalg_matrix_sqrth
        """,
        widest: "stack cat index_copy",
    },
)
"""Op -> policy on the host."""


# -- the layer ---------------------------------------------------------------------------------------------------------


CACHED: Final = "_to_copy (autocast's cache of weights)"
"""What a timeline calls the op that casts a weight, whose result stays until the outermost region ends."""


class Autocast:
    """PyTorch's autocast for the traced device, in force inside `with autocast.acting(): ...`.

    Attributes:
        device: Type of the traced device, "cuda" or "cpu".
    """

    def __init__(
        self,
        device: str,
        policies: Mapping[str, Policy],
        made: Callable[[], list[int]] = list,
        on_casts: Callable[[list[int]], None] = lambda made: None,
        rename: Callable[[int, str], None] = lambda made, name: None,
    ) -> None:
        """Args:
        device, policies: Whose autocast it is.
        made: What the op that ran last has made.
        on_casts: Called with the casts that were made for a single kernel, when it has run.
        rename: Called with each weight's cast, which is kept, and a name for it.
        """
        self.device = device
        self._policies = policies
        self._made, self._on_casts, self._rename = made, on_casts, rename
        self._casts: list[int] = []  # for the op that runs now
        self._by_function = {name.split(".")[0]: policy for name, policy in policies.items()}
        self._key = getattr(torch._C.DispatchKey, f"Autocast{device.upper()}")
        self._weights: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the region that runs now."""
        return torch.get_autocast_dtype(self.device)

    @contextmanager
    def acting(self) -> Iterator[None]:
        """Lets traced tensors pass through the layer; its kernels are put in place when it is first switched on."""
        switch, clear = torch.set_autocast_enabled, torch.clear_autocast_cache
        include = torch._C._dispatch_tls_set_dispatch_key_included
        with ExitStack() as stack:
            replaced = False

            def switched(*args: Any) -> None:
                nonlocal replaced
                switch(*args)
                if not replaced and torch.is_autocast_enabled(self.device):
                    stack.callback(self._replace_kernels()._destroy)
                    replaced = True

            def cleared() -> None:
                clear()
                self._weights.clear()

            stack.enter_context(mock.patch.object(torch, "set_autocast_enabled", switched))
            stack.enter_context(mock.patch.object(torch, "clear_autocast_cache", cleared))
            include(self._key, True)
            stack.callback(include, self._key, False)
            switched(self.device, torch.is_autocast_enabled(self.device))
            yield

    def run(self, function: Any, args: Any, kwargs: Any, rule: Callable[..., Any]) -> Any:
        """Runs a rule in the place of a function of torch's Python face, and casts as for the op behind that."""
        policy = self._by_function.get(function.__name__)
        if policy is None or not torch.is_autocast_enabled(self.device):
            return rule(*args, **kwargs)
        return self._run(policy, function, args, kwargs, rule)

    def takes(self, value: Any) -> bool:
        """Whether a value is a traced tensor that autocast may cast (`is_eligible`)."""
        is_traced = isinstance(value, torch.Tensor) and value.is_meta
        return is_traced and value.is_floating_point() and value.dtype != torch.float64

    def cast(self, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Casts arguments from the last to the first, the order that the compiler of PyTorch's builds chose."""

        def cast(value: Any) -> Any:  # a list of tensors in its own order
            return tree_map_only(torch.Tensor, lambda tensor: self._cast(dtype, tensor), value)

        kwargs = {name: cast(value) for name, value in reversed(kwargs.items())}
        return tuple([cast(value) for value in reversed(args)][::-1]), kwargs

    def _cast(self, dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in another dtype: weights once a region, or more exactly until the outermost one ends.

        `cached_cast`: leaves in single precision that require a gradient, cast with their history even where gradients
        are off, but not in inference mode.
        """
        if not self.takes(tensor) or tensor.dtype == dtype:
            return tensor
        is_weight = tensor.dtype == torch.float32 and tensor.requires_grad and tensor.is_leaf and not tensor._is_view()
        cached = torch.is_autocast_cache_enabled() and not torch.is_inference_mode_enabled()
        if not (is_weight and cached and dtype == self.dtype):
            made = tensor.to(dtype)
            self._casts += self._made()
            return made
        weight, made = self._weights.get(id(tensor), (lambda: None, tensor))
        if weight() is not tensor:
            with torch.enable_grad():
                made = tensor.to(dtype)
            for storage in self._made():
                self._rename(storage, CACHED)
            self._weights[id(tensor)] = (weakref.ref(tensor), made)
        return made

    def _replace_kernels(self) -> Library:
        library = Library("aten", "IMPL", f"Autocast{self.device.upper()}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is what we want, that kernels are replaced
            for name, policy in self._policies.items():
                library.impl(name, self._kernel(name, policy), allow_override=True)
        return library

    def _kernel(self, name: str, policy: Policy) -> Callable[..., Any]:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(aten, packet), overload or "default")
        is_composite = op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)

        def kernel(*args: Any, **kwargs: Any) -> Any:
            with torch._C.DisableTorchFunction():
                casts, self._casts = self._casts, []
                try:
                    return self._run(policy, op, args, kwargs)
                finally:
                    if not is_composite:
                        self._on_casts(self._casts)
                    self._casts = casts

        return kernel

    def _run(self, policy: Policy, op: Any, args: Any, kwargs: Any, rule: Callable[..., Any] | None = None) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(self._key)):  # not again inside the op
            op, args, kwargs = policy(self, op, args, kwargs)
            return (rule or op)(*args, **kwargs)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
