"""Pooling and interpolation over the last axes, one for each number of the window or the size.

The layout is PyTorch's: channels come before the pooled axes.

Files, in reading order:

    pooling: Pool windows of a fixed shape: by the largest, the mean, or a norm.
    adaptive: Pool to a given size, by windows that share the axis evenly.
    interpolation: Resize by the nearest element, by lines, or by cubic curves.
"""

from jointcut.aot.derivatives.windows.adaptive import adaptive_avg_pool as adaptive_avg_pool
from jointcut.aot.derivatives.windows.adaptive import adaptive_max_pool as adaptive_max_pool
from jointcut.aot.derivatives.windows.interpolation import interpolate as interpolate
from jointcut.aot.derivatives.windows.pooling import avg_pool as avg_pool
from jointcut.aot.derivatives.windows.pooling import lp_pool as lp_pool
from jointcut.aot.derivatives.windows.pooling import max_pool as max_pool
