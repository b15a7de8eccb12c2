//! Kernels for NVIDIA's sm_90a: TMA, mbarriers and wgmma, through CubeCL's CUDA C++ path and inline PTX.

mod attention;
mod conv;
mod narrow;
mod ptx;

pub(super) use attention::HopperAttention;
pub(super) use conv::HopperConv;
pub(super) use narrow::HopperNarrowConv;
pub(super) use ptx::Half;

#[cfg(test)]
pub(super) fn emit_all() {
    attention::emit_all();
    conv::emit_all();
    narrow::emit_all();
}
