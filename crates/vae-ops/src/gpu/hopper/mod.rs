//! Kernels for NVIDIA's sm_90a: TMA, mbarriers and wgmma, through CubeCL's CUDA C++ path and inline PTX.

mod attention;
mod conv;
mod narrow;
mod ptx;

use cubecl::{prelude::*, server::Handle};

pub(super) use attention::HopperAttention;
pub(super) use conv::HopperConv;
pub(super) use narrow::HopperNarrowConv;
pub(super) use ptx::Half;

/// The map of boxes of a buffer, with swizzled rows as wgmma reads them.
///
/// # Safety
/// Strides and shape, in elements, must be those of the buffer.
unsafe fn tensor_map(
    handle: Handle,
    dtype: ElemType,
    tile: &[usize],
    strides: &[usize],
    shape: &[usize],
) -> TensorMapArg<Tiled> {
    let args = TiledArgs {
        tile_size: tile.iter().copied().collect(),
    };
    let (strides, shape) = (strides.iter().copied().collect(), shape.iter().copied().collect());
    // Safety: the caller's.
    let tensor = unsafe { TensorArg::from_raw_parts(handle, strides, shape) };
    TensorMapArg::new(args, tensor, dtype).with_swizzle(TensorMapSwizzle::B128)
}

#[cfg(test)]
pub(super) fn emit_all() {
    attention::emit_all();
    conv::emit_all();
    narrow::emit_all();
}
