//! CUDA C++ of the kernels without a GPU, for tests that compile it.

use std::sync::Arc;

use cubecl::{
    Compiler,
    ir::{
        AddressType, DeviceIdentity, DeviceProperties, FloatKind, HardwareProperties, MemoryDeviceProperties,
        TargetProperties,
        features::{Features, MmaConfig},
    },
    prelude::*,
};
use cubecl_cpp::{
    shared::{CompilationOptions, CppCompiler},
    target::Cuda,
};

/// An H200's, as far as kernels see them.
pub(super) fn device_properties() -> Arc<DeviceProperties> {
    let hardware = HardwareProperties {
        load_width: 128,
        vector_register_count: None,
        plane_size_min: 32,
        plane_size_max: 32,
        max_bindings: 32,
        max_shared_memory_size: 232_448,
        max_cube_count: (u32::MAX, 65_535, 65_535),
        max_units_per_cube: 1024,
        max_cube_dim: (1024, 1024, 64),
        num_streaming_multiprocessors: Some(132),
        num_tensor_cores: Some(4),
        min_tensor_cores_dim: Some(8),
        num_cpu_cores: None,
        last_level_cache_size: None,
        max_vector_size: 16,
        cube_mma_reserved_shared_memory: 0,
    };
    let identity = DeviceIdentity {
        name: "offline".into(),
        fingerprint: "offline".into(),
        physical: None,
    };
    let memory = MemoryDeviceProperties::new(u64::MAX, 256);
    let float = |kind| ElemType::Float(kind);
    let mut features = Features::default();
    for kind in [FloatKind::F16, FloatKind::BF16] {
        features.matmul.cmma.insert(MmaConfig {
            a_type: float(kind),
            b_type: float(kind),
            cd_type: float(FloatKind::F32),
            m: 16,
            n: 16,
            k: 16,
        });
    }
    Arc::new(DeviceProperties::new(
        features,
        memory,
        hardware,
        cubecl::profile::TimingMethod::Device,
        identity,
    ))
}

pub(super) fn settings(units: CubeDim) -> KernelSettings {
    KernelSettings::new(*units, ExecutionMode::Unchecked, AddressType::U32)
}

pub(super) fn target_properties() -> Arc<TargetProperties> {
    Arc::new(TargetProperties::default())
}

/// The kernel's source, which also goes to the folder that `BURN_VAE_EMIT` names.
pub(super) fn emit(name: &str, kernel: &dyn CubeKernel) -> String {
    let mut options = CompilationOptions::default();
    options.supports_features.grid_constants = true;
    options.supports_features.clusters = true;
    options.supports_features.elect_sync = true;
    let definition = define_kernel(kernel).expect("the kernel expands");
    let compiled = CppCompiler::<Cuda>::default()
        .compile(definition, &options)
        .expect("the kernel compiles to CUDA");
    let source = compiled.source.to_string();
    if let Some(folder) = std::env::var_os("BURN_VAE_EMIT") {
        std::fs::write(std::path::Path::new(&folder).join(format!("{name}.cu")), &source).expect("the folder exists");
    }
    source
}

mod tests {
    use crate::gpu::{gemm, group_norm, hopper, pack, softmax};

    #[test]
    fn kernels_of_the_gpu_emit() {
        gemm::emit_all();
        group_norm::emit_all();
        hopper::emit_all();
        pack::emit_all();
        softmax::emit_all();
    }
}
