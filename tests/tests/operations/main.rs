//! The fused operations on every device that is there, in every type, against their definitions in f64.
//!
//! Shapes and values are random (`PROPTEST_CASES` says how many), beside a few fixed ones. Each run is also made twice, the
//! second time in memory that was full of NaN: the bits must be the same.

mod attention;
mod convolution;
mod group_norm;
mod reference;
mod rig;

use burn::tensor::{DType, Tensor};

use rig::Rig;

/// The tests of a device in a type.
macro_rules! tests {
    ($($name:ident: $device:literal in $dtype:ident;)*) => {$(
        mod $name {
            use super::*;

            #[test]
            fn group_norm_is_its_definition() {
                if let Some(rig) = Rig::open($device, DType::$dtype) {
                    group_norm::check(&rig);
                }
            }

            #[test]
            fn convolution_is_its_definition() {
                if let Some(rig) = Rig::open($device, DType::$dtype) {
                    convolution::check(&rig);
                }
            }

            #[test]
            fn attention_is_its_definition() {
                if let Some(rig) = Rig::open($device, DType::$dtype) {
                    attention::check(&rig);
                }
            }
        }
    )*};
}

tests! {
    cpu_f32: "cpu" in F32;
    cpu_f16: "cpu" in F16;
    cpu_bf16: "cpu" in BF16;
    wgpu_f32: "wgpu" in F32;
    wgpu_f16: "wgpu" in F16;
    cuda_f32: "cuda" in F32;
    cuda_f16: "cuda" in F16;
    cuda_bf16: "cuda" in BF16;
}

/// Guards what every run above relies on.
fn poison_reaches_what_is_allocated_next(name: &str, dtype: DType) {
    let Some(rig) = Rig::open(name, dtype) else { return };
    for elements in [1000, 1 << 20] {
        rig.poison(elements);
        let memory = Tensor::<1>::empty([elements], (&rig.device, rig.dtype)).into_data();
        assert!(memory.iter::<f32>().all(f32::is_nan), "{elements} elements");
    }
}

#[test]
fn wgpu_poison_reaches_what_is_allocated_next() {
    poison_reaches_what_is_allocated_next("wgpu", DType::F32);
}

#[test]
fn cuda_poison_reaches_what_is_allocated_next() {
    poison_reaches_what_is_allocated_next("cuda", DType::BF16);
}
