"""A row has the same bits whatever is computed with it: the proofs of `kernels.proof`, at the sizes of real layers.

The references promise nothing of the kind and are not asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from slipstream import kernels
from slipstream.kernels import dispatch
from slipstream.kernels.attention.proof import of_attention
from slipstream.kernels.choose.proof import of_choose
from slipstream.kernels.gated.proof import of_gated
from slipstream.kernels.gated_delta.proof import of_gated_delta
from slipstream.kernels.gated_norm.proof import of_gated_norm
from slipstream.kernels.matmul.proof import NARROW, of_linear, of_narrow
from slipstream.kernels.mla.proof import of_latent_attention, of_rows
from slipstream.kernels.moe.proof import CLAMPED, LIMITED, of_moe
from slipstream.kernels.norm.proof import of_norm
from slipstream.kernels.norm_rope_write.proof import of_norm_rope_write
from slipstream.kernels.proof.case import WIDTHS, Make
from slipstream.kernels.proof.inputs import Inputs
from slipstream.kernels.proof.judge import other_bits
from slipstream.kernels.short_conv.proof import of_short_conv
from tests.gpu.parity import DTYPES, short, split
from tests.gpu.setting import Finding, Findings, Setting

_EXPERTS = {"d_model": 2048, "d_inner": 768, "n_experts": 128, "top_k": 8}
_of_attention = partial(of_attention, n_past=1000, heads=(16, 4, 128))
LARGE: Mapping[str, Sequence[Make]] = {
    "matmul": (
        partial(of_linear, n_out=1024, n_in=4096),
        *(partial(of_narrow, kind=kind, shape=(1024, 4096)) for kind in NARROW),
        partial(of_linear, n_out=8192, n_in=2048, n_rows=300),
        *(partial(of_narrow, kind=kind, shape=(8192, 2048), n_rows=300) for kind in NARROW),
    ),
    "norm": (partial(of_norm, d=4096),),
    "norm_rope_write": (
        partial(of_norm_rope_write, heads=(32, 8, 128)),
        partial(of_norm_rope_write, heads=(32, 4, 192), d_value=128),
    ),
    "attention": (
        _of_attention,
        partial(_of_attention, window=100),
        partial(_of_attention, coded=True),
        partial(_of_attention, window=100, sunk=True),
        partial(_of_attention, window=30, images=((-700, 9), (10, 69))),
        partial(of_attention, n_past=1000, heads=(16, 2, 192), d_value=128, window=129, sunk=True),
    ),
    "mla": (partial(of_latent_attention, widths=(16, 512, 64)), partial(of_rows, widths=(16, 128, 512, 64))),
    "gated": (partial(of_gated, d=14336),),
    "moe": tuple(partial(of_moe, activation=one, **_EXPERTS) for one in (None, CLAMPED, LIMITED)),
    "gated_norm": (partial(of_gated_norm, n_heads=48),),
    "choose": (partial(of_choose, vocab=151_936),),
    "short_conv": (partial(of_short_conv, n_channels=10_240),),
    "gated_delta": (partial(of_gated_delta, heads=(4, 12, 128)),),
}
SMALL: Mapping[str, Sequence[Make]] = {
    "matmul": (
        partial(of_linear, n_out=48, n_in=96),
        *(partial(of_narrow, kind=kind, shape=(48, 96), group=32) for kind in NARROW),
    ),
    "norm": (partial(of_norm, d=100),),
    "norm_rope_write": (
        partial(of_norm_rope_write, heads=(4, 2, 16)),
        partial(of_norm_rope_write, heads=(4, 2, 24), d_value=16),
    ),
    "attention": (
        partial(of_attention, n_past=130, heads=(4, 2, 16)),
        partial(of_attention, n_past=130, heads=(4, 2, 16), window=100, sunk=True),
        partial(of_attention, n_past=130, heads=(4, 2, 16), coded=True),
        partial(of_attention, n_past=130, heads=(4, 2, 16), window=30, images=((-100, 9), (10, 69))),
        partial(of_attention, n_past=130, heads=(4, 2, 24), d_value=16),
    ),
    "mla": (
        partial(of_latent_attention, n_past=130, widths=(4, 32, 16)),
        partial(of_rows, widths=(3, 12, 32, 16)),
    ),
    "gated": (partial(of_gated, d=50),),
    "moe": tuple(partial(of_moe, activation=one) for one in (None, CLAMPED, LIMITED)),
    "gated_norm": (partial(of_gated_norm, n_heads=3, d=10),),
    "choose": (of_choose,),
    "short_conv": (partial(of_short_conv, n_channels=60),),
    "gated_delta": (partial(of_gated_delta, heads=(1, 2, 16)),),
}


def cases(setting: Setting) -> list[str]:
    """The op folders whose rows are sums, each dtype by itself."""
    return [f"{folder} {short(dtype)}" for folder in LARGE for dtype in DTYPES]


def run(setting: Setting, case: str) -> Findings:
    """One finding per implementation."""
    folder, dtype = split(case)
    kernels.select(setting.device, dtype)
    names = [name for name in dispatch.candidates(folder, setting.device, dtype) if name != "reference"]
    for name in names:
        wrong = _wrong(folder, name, setting, dtype)
        figures = {"widths": ", ".join(map(str, WIDTHS))} if wrong is None else {"why": wrong}
        yield Finding(f"{folder}.{name} {short(dtype)}", ok=wrong is None, figures=figures)
    if not names:
        yield Finding(case, None, {"why": "nothing but the reference runs here"})


def _wrong(folder: str, name: str, setting: Setting, dtype: torch.dtype) -> str | None:
    with kernels.use(name, folder):
        for make in setting.pick(LARGE, SMALL)[folder]:
            found = make(Inputs(setting.device, dtype))
            if (wrong := other_bits(found.cuts(), found.whole())) is not None:
                return wrong
    return None
