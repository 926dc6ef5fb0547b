"""Gather and scatter, also to the same place twice, and products at the places of a sparse matrix.

Indices are whole numbers, and have no derivative. An element that is gathered twice gets the sum of both cotangents.
Not here: `as_strided`, since arrays of JAX have no strides; nested tensors, since arrays of JAX have one shape;
`masked_select` and `nonzero`, since their shapes depend on values (`masked_fill` and `where` take their place);
`index_copy` and `put`, which are `index_put`; views, splits and stacks, which `jax.numpy` has and which only move data.

Files, in reading order:

    products: Multiply the elements that come to one place, also zeros.
    scatters: Read and write at indices, and combine the elements that come to one place.
    sparse_products: Products with a sparse matrix, and products at some places alone.
"""

from jointcut.aot.derivatives.indexing.scatters import gather as gather
from jointcut.aot.derivatives.indexing.scatters import index_add as index_add
from jointcut.aot.derivatives.indexing.scatters import index_fill as index_fill
from jointcut.aot.derivatives.indexing.scatters import index_put as index_put
from jointcut.aot.derivatives.indexing.scatters import index_select as index_select
from jointcut.aot.derivatives.indexing.scatters import masked_fill as masked_fill
from jointcut.aot.derivatives.indexing.scatters import scatter as scatter
from jointcut.aot.derivatives.indexing.scatters import scatter_add as scatter_add
from jointcut.aot.derivatives.indexing.scatters import scatter_reduce as scatter_reduce
from jointcut.aot.derivatives.indexing.scatters import take_along_axis as take_along_axis
from jointcut.aot.derivatives.indexing.sparse_products import sampled_addmm as sampled_addmm
from jointcut.aot.derivatives.indexing.sparse_products import sparse_mask as sparse_mask
from jointcut.aot.derivatives.indexing.sparse_products import sparse_mm as sparse_mm
from jointcut.aot.derivatives.indexing.sparse_products import sparse_sparse_mm as sparse_sparse_mm
