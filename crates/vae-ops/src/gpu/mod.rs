//! The fused operations as CubeCL kernels, for every GPU that Burn reaches.

mod attention;
mod backend;
#[cfg(all(test, feature = "hopper"))]
mod emit;
mod gemm;
mod group_norm;
#[cfg(feature = "hopper")]
#[allow(
    clippy::assign_op_pattern,
    clippy::manual_is_multiple_of,
    reason = "CubeCL has no words for what clippy would rather have in kernels"
)]
mod hopper;
mod launch;
mod pack;
mod softmax;
