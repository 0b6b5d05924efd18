"""`tw.flash_attention` as an attention implementation of Hugging Face Transformers.

>>> import trainwright as tw
>>> tw.compat.transformers.register()                                            # doctest: +SKIP
>>> AutoModelForCausalLM.from_pretrained(name, attn_implementation="trainwright")  # doctest: +SKIP

Causal, sliding-window and padded batches need no mask: padding is taken out and put back around
`tw.flash_attention_varlen`. Any other pattern (packed sequences, chunks, blocks of an image, a static cache that is not
full) becomes the mask that Transformers makes for torch's attention, and that mask the bias.

Source: the interfaces `AttentionInterface` and `AttentionMaskInterface` of huggingface/transformers.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from trainwright.compat.flash_attn.bert_padding import pad_input, unpad_input
from trainwright.errors import value_error
from trainwright.ops.flash_attention import flash_attention
from trainwright.ops.flash_attention_varlen import flash_attention_varlen
from trainwright.ops.scaled_dot_product_attention import mask_as_bias

try:  # here, because the compiler of torch 2.11 cannot follow this import inside a function
    from transformers import masking_utils
except ImportError:  # `register` raises it again
    masking_utils = None

__all__ = ["NAME", "attention_forward", "attention_mask", "register"]

NAME = "trainwright"


def register(name: str = NAME) -> None:
    """Make ``attn_implementation=name`` known to Transformers, version 5. Calling it again does no harm.

    Raises:
        ImportError: Transformers is not installed, or its interface of masks is another one.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    if (
        masking_utils is None
        or "q_offset" not in inspect.signature(masking_utils.sdpa_mask).parameters
    ):
        raise ImportError("trainwright.compat.transformers needs Transformers 5.10 or later")
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)


def attention_mask(
    *, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0, mask_function: Any,
    attention_mask: Tensor | None = None, local_size: int | None = None, allow_is_causal_skip: bool = True,
    config: Any = None, **kwargs: Any,
) -> Tensor | None:  # fmt: skip
    """What `attention_forward` needs to know of a pattern: None (causal, or everything), a (B, Tk) mask of padding, or
    the (B, 1, Tq, Tk) mask."""
    if local_size is None:
        causal = allow_is_causal_skip and mask_function is masking_utils.causal_mask_function
        everything = mask_function is masking_utils.bidirectional_mask_function
    else:
        window = getattr(config, "sliding_window", None)
        chunk = getattr(config, "attention_chunk_size", None)
        causal, everything = allow_is_causal_skip and chunk != local_size == window, False
    at_the_end = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    if everything or (causal and at_the_end):
        if attention_mask is None:
            return None
        padding = attention_mask[:, -kv_length:]
        if padding.shape[1] == kv_length and not torch.compiler.is_compiling():
            kept = padding != 0
            if bool(kept.all()):
                return None
            # With holes inside, a window would count tokens instead of positions.
            if local_size is None or int((kept[:, 1:] != kept[:, :-1]).sum(1).max()) <= 1:
                return kept
    result: Tensor | None = masking_utils.sdpa_mask(
        q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset, mask_function=mask_function,
        attention_mask=attention_mask, local_size=local_size, config=config,
        **kwargs | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
    )  # fmt: skip
    return result


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention function.

    Args:
        module: the attention layer; `is_causal` is taken from it if None here.
        query: (B, H, Tq, D); key (B, G, Tk, D); value (B, G, Tk, Dv).
        attention_mask: as `attention_mask` above makes it, or a 4-D mask of the user's.
        sliding_window: keys that a causal query sees, itself included; other masks bring their own.
        s_aux: (H,) learnable sinks. position_bias: a term of the scores.

    Returns:
        (out (B, Tq, H, Dv), None).
    """
    if kwargs.get("output_attentions"):
        raise value_error(NAME, "output_attentions", "False, the weights are never made", True)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    common: dict[str, Any] = {
        "scale": scaling,
        "softcap": softcap,
        "sinks": s_aux,
        "dropout_p": dropout,
    }
    common["causal"] = causal
    if causal and sliding_window is not None:
        common["window"] = (sliding_window - 1, -1)
    bias = position_bias
    if attention_mask is not None and attention_mask.dim() == 4:  # it says all about who sees whom
        common |= {"causal": False, "window": None}
        bias = mask_as_bias(attention_mask, q.dtype)
        bias = bias if position_bias is None else bias + position_bias
    elif attention_mask is not None and bias is None:
        return _without_padding(q, k, v, attention_mask != 0, common), None
    elif attention_mask is not None:
        assert bias is not None
        bias = bias + mask_as_bias((attention_mask != 0)[:, None, None], q.dtype)
    out = flash_attention(q, k, v, bias=bias, **common)
    assert isinstance(out, Tensor)
    return out, None


def _without_padding(
    q: Tensor, k: Tensor, v: Tensor, kept: Tensor, common: dict[str, Any]
) -> Tensor:
    """Attention where kept (B, Tk) says which keys are tokens; causal queries are the last Tq of those positions, and
    give 0 where they are padding."""
    B, Tq = q.shape[:2]
    k_rows, indices, starts_k, longest_k, _ = unpad_input(k, kept)
    v_rows = v.flatten(0, 1).index_select(0, indices)
    if common["causal"]:
        q_rows, indices, starts_q, longest_q, _ = unpad_input(q, kept[:, kept.shape[1] - Tq :])
    else:
        q_rows, longest_q = q.flatten(0, 1), Tq
        starts_q = torch.arange(B + 1, device=q.device, dtype=torch.int32) * Tq
    out = flash_attention_varlen(
        q_rows, k_rows, v_rows, starts_q, starts_k, max_seqlen_q=longest_q, max_seqlen_k=longest_k, check=False,
        **common,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return pad_input(out, indices, B, Tq) if common["causal"] else out.unflatten(0, (B, Tq))
