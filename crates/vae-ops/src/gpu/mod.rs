//! The fused operations as CubeCL kernels, for every GPU that Burn reaches.

mod attention;
mod backend;
#[cfg(all(test, feature = "hopper"))]
mod emit;
mod gemm;
mod group_norm;
#[cfg(feature = "hopper")]
mod hopper;
mod launch;
mod softmax;
