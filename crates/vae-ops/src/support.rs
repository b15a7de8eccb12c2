//! What a device can run, and why not more.

use std::fmt;

use burn::{
    backend::DispatchDevice,
    tensor::{DType, Device},
};

/// What the fused operations need to know of a device. Plain values, so that plans for any device can be made without it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceProfile {
    /// As the device names itself, or `cpu`.
    pub name: String,
    /// Where its operations run.
    pub runtime: Runtime,
    /// It tracks gradients.
    pub autodiff: bool,
    /// Types that it computes in.
    pub dtypes: Vec<DType>,
}

/// Where a device's operations run.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Runtime {
    /// Burn's pure-Rust CPU backend.
    Cpu,
    /// A GPU that CubeCL compiles for.
    Gpu(GpuProfile),
    /// A backend that the fused operations are not written for.
    Other,
}

/// What a GPU has that kernels are chosen by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuProfile {
    /// Units that run in step, at least and at most.
    pub plane_sizes: (u32, u32),
    /// Units of a cube at most.
    pub max_units: u32,
    /// Bytes of shared memory of a cube.
    pub shared_memory: usize,
    /// Types whose 16x16x16 products it has tensor cores for, accumulating in f32.
    pub tensor_core_dtypes: Vec<DType>,
    /// Multiprocessors, 1 where the device does not tell.
    pub multiprocessors: u32,
    /// It is an NVIDIA sm_90, and its compiler knows TMA and takes inline assembly.
    pub sm_90a: bool,
}

/// What a device's memory ends at. `None` where it does not tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DeviceLimits {
    /// Bytes of its memory.
    pub memory: Option<u64>,
    /// Bytes of one buffer.
    pub buffer: Option<u64>,
    /// Elements of one tensor, where kernels count in 32 bits.
    pub elements: Option<u64>,
}

impl DeviceLimits {
    /// The limits of a device; the CPU has none of its own.
    pub fn of(device: &Device) -> Self {
        match device.clone().inner().as_dispatch() {
            #[cfg(feature = "flex")]
            DispatchDevice::Flex(_) => Self::default(),
            #[cfg(feature = "gpu")]
            DispatchDevice::Cube(device) => {
                let client = device.client();
                let memory = &client.properties().memory;
                Self {
                    memory: memory.max_memory(),
                    buffer: Some(memory.max_page_size),
                    elements: Some(i32::MAX as u64),
                }
            }
            #[allow(unreachable_patterns, reason = "which backends exist is decided by features")]
            _ => Self {
                elements: Some(i32::MAX as u64),
                ..Self::default()
            },
        }
    }
}

/// What convolutions and matrix products run on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConvEngine {
    /// Blocked loops over a matrix product of the CPU.
    Cpu,
    /// Multiply-adds in f32.
    MultiplyAdd,
    /// Tensor cores, accumulating in f32.
    TensorCore,
    /// Warpgroup products of sm_90a, fed by TMA.
    Hopper,
}

/// Shared memory of the tensor-core kernel.
const TENSOR_CORE_SHARED_MEMORY: usize = 48 << 10;
/// Units of every matrix kernel.
const UNITS: u32 = 256;
/// Shared memory of the multiply-add kernel.
const MULTIPLY_ADD_SHARED_MEMORY: usize = 17 << 10;

impl DeviceProfile {
    /// The profile of a device that is there.
    pub fn of(device: &Device) -> Self {
        let dtypes = [DType::F32, DType::F16, DType::BF16];
        let inner = device.clone().inner();
        let runtime = match inner.as_dispatch() {
            #[cfg(feature = "flex")]
            DispatchDevice::Flex(_) => Runtime::Cpu,
            #[cfg(feature = "gpu")]
            DispatchDevice::Cube(device) => Runtime::Gpu(GpuProfile::of(&device.client())),
            #[allow(unreachable_patterns, reason = "which backends exist is decided by features")]
            _ => Runtime::Other,
        };
        Self {
            name: device_name(&inner),
            runtime,
            autodiff: device.is_autodiff(),
            dtypes: dtypes
                .into_iter()
                .filter(|&dtype| device.supports_dtype(dtype))
                .collect(),
        }
    }

    /// Why the fused operations cannot run at all on the device in this type; empty if they can.
    pub fn refusals(&self, dtype: DType) -> Vec<String> {
        let mut reasons = Vec::new();
        if self.autodiff {
            reasons.push(
                "the fused operations have no gradient; move the model and latents to `device.inner()`".to_string(),
            );
        }
        if !self.dtypes.contains(&dtype) {
            reasons.push(format!("{} does not compute in {}", self.name, dtype.name()));
        }
        match &self.runtime {
            Runtime::Cpu => {}
            Runtime::Gpu(gpu) if gpu.max_units < UNITS || gpu.shared_memory < MULTIPLY_ADD_SHARED_MEMORY => {
                reasons.push(format!(
                    "{} runs {} units with {} bytes of shared memory, the kernels need {UNITS} and {MULTIPLY_ADD_SHARED_MEMORY}",
                    self.name, gpu.max_units, gpu.shared_memory
                ));
            }
            Runtime::Gpu(_) => {}
            Runtime::Other => reasons.push(format!("{} has no fused operations", self.name)),
        }
        reasons
    }

    /// What a convolution runs on in this type, and why nothing faster does.
    pub fn conv_engine(&self, dtype: DType, channels_in: usize, channels_out: usize) -> (ConvEngine, Option<String>) {
        match &self.runtime {
            Runtime::Cpu | Runtime::Other => (ConvEngine::Cpu, None),
            Runtime::Gpu(gpu) => gpu.conv_engine(dtype, channels_in, channels_out),
        }
    }

    /// What the matrix products of attention run on in this type, and why nothing faster does.
    pub fn attention_engine(&self, dtype: DType, channels: usize) -> (ConvEngine, Option<String>) {
        match &self.runtime {
            Runtime::Cpu | Runtime::Other => (ConvEngine::Cpu, None),
            Runtime::Gpu(gpu) => gpu.attention_engine(dtype, channels),
        }
    }
}

impl GpuProfile {
    /// What the device of a client has.
    #[cfg(feature = "gpu")]
    pub(crate) fn of(client: &cubecl::client::Client) -> Self {
        use burn::backend::cubecl::dtype_to_storage_type;

        let properties = client.properties();
        let hardware = &properties.hardware;
        let has_tensor_cores = |dtype: &DType| {
            let element = dtype_to_storage_type(*dtype);
            properties.features.matmul.cmma.iter().any(|config| {
                (config.a_type, config.b_type) == (element, element)
                    && config.cd_type == dtype_to_storage_type(DType::F32)
                    && (config.m, config.n, config.k) == (16, 16, 16)
            })
        };
        Self {
            plane_sizes: (hardware.plane_size_min, hardware.plane_size_max),
            max_units: hardware.max_units_per_cube,
            shared_memory: hardware.max_shared_memory_size,
            tensor_core_dtypes: [DType::F16, DType::BF16].into_iter().filter(has_tensor_cores).collect(),
            multiprocessors: hardware.num_streaming_multiprocessors.unwrap_or(1),
            sm_90a: cfg!(feature = "hopper")
                && properties.identity.fingerprint == "ptx_sm90"
                && properties.features.tma.contains(cubecl::ir::features::Tma::Base),
        }
    }

    /// As [`DeviceProfile::conv_engine`].
    pub(crate) fn conv_engine(
        &self,
        dtype: DType,
        channels_in: usize,
        channels_out: usize,
    ) -> (ConvEngine, Option<String>) {
        self.hopper_engine(dtype, || {
            let narrow = channels_out < 8 && channels_in <= 512;
            let fits = channels_in.is_multiple_of(8) && (narrow || channels_out.is_multiple_of(8));
            (!fits).then(|| format!("multiples of 8 channels, not {channels_in} to {channels_out}"))
        })
    }

    /// As [`DeviceProfile::attention_engine`].
    pub(crate) fn attention_engine(&self, dtype: DType, channels: usize) -> (ConvEngine, Option<String>) {
        self.hopper_engine(dtype, || {
            let fits = channels.is_multiple_of(64) && channels <= 512;
            (!fits).then(|| format!("multiples of 64 channels up to 512, not {channels}"))
        })
    }

    /// The sm_90a kernels where the device runs them, and unless `refusal` says what they take.
    fn hopper_engine(&self, dtype: DType, refusal: impl Fn() -> Option<String>) -> (ConvEngine, Option<String>) {
        let (engine, refused) = self.product_engine(dtype);
        if engine != ConvEngine::TensorCore {
            return (engine, refused);
        }
        if !self.sm_90a {
            let reason = "the sm_90a kernels need an NVIDIA sm_90 and a build with `hopper`";
            return (engine, Some(reason.to_string()));
        }
        match refusal() {
            None => (ConvEngine::Hopper, None),
            Some(takes) => (engine, Some(format!("the sm_90a kernels take {takes}"))),
        }
    }

    /// What any matrix product runs on in this type, and why nothing faster does.
    pub(crate) fn product_engine(&self, dtype: DType) -> (ConvEngine, Option<String>) {
        let refusal = if dtype == DType::F32 {
            "tensor cores would round f32".to_string()
        } else if !self.tensor_core_dtypes.contains(&dtype) {
            format!("the device has no tensor cores for {}", dtype.name())
        } else if self.plane_sizes != (32, 32) {
            let (min, max) = self.plane_sizes;
            format!("the tensor-core kernel needs planes of 32, the device's have {min} to {max}")
        } else if self.shared_memory < TENSOR_CORE_SHARED_MEMORY {
            format!(
                "the tensor-core kernel needs {TENSOR_CORE_SHARED_MEMORY} bytes of shared memory, the device has {}",
                self.shared_memory
            )
        } else {
            return (ConvEngine::TensorCore, None);
        };
        (ConvEngine::MultiplyAdd, Some(refusal))
    }
}

impl fmt::Display for ConvEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cpu => "CPU loops",
            Self::MultiplyAdd => "multiply-adds",
            Self::TensorCore => "tensor cores",
            Self::Hopper => "sm_90a kernel",
        })
    }
}

/// Whether a device is one of CubeCL's GPUs, and does not track gradients: what backend extensions of GPUs run on.
pub(crate) fn is_gpu(device: &Device) -> bool {
    #[cfg(feature = "gpu")]
    if let DispatchDevice::Cube(_) = device.as_dispatch() {
        return !device.is_autodiff();
    }
    let _ = device;
    false
}

/// A device as users know it: `cpu`, else Burn's own words for it.
pub fn device_name(device: &Device) -> String {
    let debug = format!("{device:?}");
    let name = debug.trim_start_matches("Device<").trim_end_matches('>');
    if name.starts_with("Flex") {
        "cpu".to_string()
    } else {
        name.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_is_called_cpu() {
        assert_eq!(device_name(&Device::flex()), "cpu");
    }
}
